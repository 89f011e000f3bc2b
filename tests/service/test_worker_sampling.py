"""Sampling's rules through the wire, on a worker with a real (tiny) model and the library's own client."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

from prefixmesh.client.calls import GenerateOptions, build_generate
from prefixmesh.config import EngineConfig
from prefixmesh.errors import InvalidRequestError
from prefixmesh.proto.v1 import inference_pb2 as pb
from tests.support.servers import Answer, Worker, failure_of, real_worker
from tests.support.tiny_model import VOCAB_SIZE, make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT: Final = "Once upon a time there was a prefix that every prompt had in common."
GREEDY: Final[GenerateOptions] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
async def worker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    settings = EngineConfig(
        model=str(make_tiny_model(tmp_path_factory.mktemp("tiny"))),
        device="cpu",
        dtype="float32",
        max_total_tokens=6000,
        threads=1,
    )
    async with real_worker(settings) as running:
        yield running


def ask(**options: Any) -> pb.GenerateRequest:
    chosen: Any = GREEDY | options
    return build_generate(PROMPT, **chosen)


async def answer(worker: Worker, **options: Any) -> Answer:
    return await worker.generate(ask(**options))


async def test_penalties_reach_the_logits(worker: Worker) -> None:
    plain = (await answer(worker)).token_ids
    for penalty in (
        {"repetition_penalty": 5.0},
        {"frequency_penalty": -2.0, "logit_bias": {plain[1]: 2.0}},
        {"presence_penalty": -2.0, "logit_bias": {plain[1]: 2.0}},
    ):
        assert (await answer(worker, **penalty)).token_ids != plain


async def test_a_biased_token_comes_or_does_not(worker: Worker) -> None:
    plain = (await answer(worker)).token_ids
    assert plain[0] not in (await answer(worker, logit_bias={plain[0]: -100})).token_ids
    assert (await answer(worker, logit_bias={77: 100})).token_ids == [77] * 12


async def test_no_stop_of_any_kind_counts_before_min_tokens(worker: Worker) -> None:
    """Stop ids do not come, stop strings are not looked for in what comes."""
    plain = await answer(worker)
    stopped = await answer(worker, stop=[plain.text[0]])
    assert (stopped.text, stopped.finished.reason) == ("", pb.FINISH_REASON_STOP)
    assert (await answer(worker, stop=[plain.text[0]], min_tokens=12)).text == plain.text
    held = await answer(worker, stop_token_ids=[plain.token_ids[0]], min_tokens=5)
    assert plain.token_ids[0] not in held.token_ids[:5]
    assert len(held.token_ids) >= 5


@pytest.mark.parametrize("with_stop", [False, True])
async def test_a_stream_cut_anywhere_goes_on_where_it_was(worker: Worker, with_stop: bool) -> None:
    """Ids and text of both parts, joined, are those of the whole: also half characters and half stop strings that were held back."""
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5}
    if with_stop:
        text = (await answer(worker, **options)).text
        options["stop"] = ["never to be found", text[len(text) // 2 :][:3]]
    whole = await answer(worker, **options)
    ids = whole.token_ids
    for cut in range(len(ids) + 1):
        sent = "".join(delta.text for delta in whole.deltas if delta.position < cut and delta.token_ids)
        rest = await answer(worker, **options, resumed_output=ids[:cut])
        assert rest.token_ids == ids[cut:]
        assert sent + rest.text == whole.text
        usage = rest.finished.usage
        assert (usage.resumed_tokens, usage.completion_tokens) == (cut, len(ids) - cut)
        assert rest.finished.reason == whole.finished.reason
        assert rest.started.cached_tokens.device <= rest.started.prompt_tokens


async def test_an_answer_is_json_that_its_schema_allows(worker: Worker) -> None:
    """Whatever the seed; also where the model's end is to be ignored, since the grammar knows the end."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "sizes": {"type": "array", "items": {"enum": ["S", "M"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "sizes"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},  # noise knows no end of spaces
    }
    for seed in range(5):
        got = await answer(worker, json_schema=schema, temperature=1.0, seed=seed, max_tokens=100)
        assert got.finished.reason == pb.FINISH_REASON_STOP
        value = json.loads(got.text)
        assert list(value) == ["name", "sizes"]
        assert len(value["name"]) <= 5
        assert 1 <= len(value["sizes"]) <= 3
        assert set(value["sizes"]) <= {"S", "M"}


async def test_an_answer_matches_its_regular_expression(worker: Worker) -> None:
    """The whole of it; it ends by itself, and a resumed one goes on in the middle."""
    pattern = "(yes|no), [0-9]{2,4} times"
    whole = await answer(worker, regex=pattern, temperature=1.0, seed=1)
    assert re.fullmatch(pattern, whole.text)
    assert whole.finished.reason == pb.FINISH_REASON_STOP
    rest = await answer(worker, regex=pattern, temperature=1.0, seed=1, resumed_output=whole.token_ids[:3])
    assert rest.token_ids == whole.token_ids[3:]


async def test_logprobs_come_with_their_tokens(worker: Worker) -> None:
    """0 tells the chosen tokens' alone; what a stop string cuts off is not told."""
    plain = await answer(worker, logprobs=20)
    for delta in plain.deltas:
        assert len(delta.logprobs) == len(delta.token_ids) // 4
        for one in delta.logprobs:
            assert len(one.top_ids) // 4 == len(one.top_logprobs) == 20
            assert one.logprob == one.top_logprobs[0]
    alone = [one for delta in (await answer(worker, logprobs=0)).deltas for one in delta.logprobs]
    assert [len(one.top_ids) for one in alone] == [0] * 12
    assert not any(delta.logprobs for delta in (await answer(worker)).deltas)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "sampling.logit_bias"),
        ({"min_tokens": 5000, "max_tokens": None}, "sampling.min_tokens"),
        ({"resumed_output": [1] * 13}, "resumed_output"),
        ({"regex": "[a"}, "sampling.regex"),
        ({"json_schema": {"type": "bogus"}}, "sampling.json_schema"),
        ({"regex": "[0-9]+", "resumed_output": [250]}, "resumed_output"),
        ({"resumed_output": [VOCAB_SIZE]}, "resumed_output"),
    ],
)
async def test_what_only_the_model_can_refuse_is_named_too(
    worker: Worker, options: dict[str, Any], field: str
) -> None:
    """The vocabulary and the context are not known to the caller's side."""
    error = await failure_of(worker, ask(**options))
    assert isinstance(error, InvalidRequestError)
    assert error.field == field
