"""Answers that another worker goes on with equal those that nobody disturbed, wherever they break off: with a real (tiny) model and a fake one."""

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from prefixmesh.config import EngineConfig
from prefixmesh.errors import InvalidRequestError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.tokens import pack, unpack
from tests.support.fake_engine import fake_worker
from tests.support.resuming import assert_same, interrupted_everywhere, said
from tests.support.routed_worker import router_before, scripted_model
from tests.support.router_kit import token_request
from tests.support.scripted_engine import VOCAB_SIZE, ScriptedEngine
from tests.support.servers import Worker, eventually, failure_of, real_worker, rest_of, scripted_worker
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT: Final = "Once upon a time there was an answer that was cut in two."
SAMPLED: Final[dict[str, Any]] = {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True}
PENALTIES: Final[dict[str, Any]] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.7,
    "presence_penalty": 0.4,
    "logit_bias": {7: 1.5},
}
ANSWERS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0, "max_tokens": 16, "ignore_eos": True},
    "sampled": SAMPLED | {"seed": 11},
    "sampled, and the server draws the seed": SAMPLED,
    "with penalties and logprobs": SAMPLED | PENALTIES | {"seed": 12, "logprobs": 3},
    "with a grammar": SAMPLED | {"seed": 13, "regex": "(ab|c[0-9]{2}){2,4}d"},
    "with JSON": SAMPLED | {"seed": 14, "json_schema": '{"enum": ["one", "two", 33333]}'},
}


@pytest.fixture(scope="module")
async def worker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    model: Path = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    settings = EngineConfig(model=str(model), device="cpu", dtype="float32", max_total_tokens=4000, threads=1)
    async with real_worker(settings) as running:
        yield running


async def check(worker: Worker, request: pb.GenerateRequest, step: int = 1) -> None:
    """Every interruption tells the same as none, and counts the same."""
    cuts = 0
    async for cut, told, whole in interrupted_everywhere(worker.inference, request, step):
        assert_same(told, whole)
        usage, undisturbed = told[-1].finished.usage, whole[-1].finished.usage
        assert usage.interruptions == (cut > 1)
        assert usage.prompt_tokens == undisturbed.prompt_tokens
        assert usage.cached_tokens == told[0].started.cached_tokens
        cuts += 1
    assert cuts >= 2


def request(branches: int, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=PROMPT, branches=branches, sampling=pb.Sampling(**sampling))


@pytest.mark.parametrize("kind", ANSWERS)
async def test_one_answer_goes_on_as_if_nothing_had_happened(worker: Worker, kind: str) -> None:
    """Cut in some places: the same ids, text, probabilities and end."""
    await check(worker, request(1, **ANSWERS[kind]), step=4)


@pytest.mark.slow
@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("kind", ANSWERS)
async def test_answers_go_on_after_every_message_as_if_nothing_had_happened(
    worker: Worker, kind: str, branches: int
) -> None:
    """Wherever one or three stand, ended ones among them."""
    await check(worker, request(branches, **ANSWERS[kind]), step=1)


@pytest.mark.parametrize("branches", [1, pytest.param(3, marks=pytest.mark.slow)])
async def test_stop_strings_and_held_back_text_are_found_across_the_cut(
    worker: Worker, branches: int
) -> None:
    """A stop string half of which came before, and text that is told only at the end: none of it twice, none of it lost."""
    options = SAMPLED | {"seed": 21, "max_tokens": 24}
    text = said(await rest_of(worker.inference.Generate(request(branches, **options))))[branches - 1].text
    stop, almost = text[len(text) // 2 :][:4], text[-3:] + "~"
    for stops in ([stop], [almost], [stop, almost]):
        await check(worker, request(branches, stop=stops, **options), step=4)


async def test_an_answer_that_was_whole_ends_at_once(worker: Worker) -> None:
    """By a limit, a stop id, a stop string or its grammar; nothing is drawn beyond it."""
    options = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    messages = await rest_of(worker.inference.Generate(request(1, **options)))
    whole = said(messages)[0]
    ways: list[tuple[dict[str, Any], int]] = [
        ({}, pb.FINISH_REASON_LENGTH),
        ({"max_tokens": 30, "stop_token_ids": [whole.ids[-1]]}, pb.FINISH_REASON_STOP),
        ({"max_tokens": 30, "stop": [whole.text[-2:]]}, pb.FINISH_REASON_STOP),
    ]
    for more, reason in ways:
        again = request(2, **(options | more))
        again.resumed_branches.extend([pack(whole.ids)] * 2)
        told = said(await rest_of(worker.inference.Generate(again)))
        assert [(one.ids, one.text, one.reason, one.tokens) for one in told.values()] == [
            ((), "", reason, 0)
        ] * 2


async def test_each_branch_draws_on_with_its_own_seed_and_place(worker: Worker) -> None:
    """What is given to the wrong branch goes on otherwise: the test above could not pass by chance."""
    asked = request(2, seed=31, **SAMPLED)
    whole = said(await rest_of(worker.inference.Generate(asked)))
    asked.resumed_branches.extend(pack(whole[branch].ids[:4]) for branch in (1, 0))
    swapped = await rest_of(worker.inference.Generate(asked))
    ids: dict[int, list[int]] = {0: [], 1: []}
    for message in swapped:
        ids[message.delta.branch] += unpack(message.delta.token_ids).tolist()
    assert all(tuple(ids[branch]) != whole[branch].ids[4:] for branch in (0, 1))


async def test_a_fake_model_goes_on_at_every_token() -> None:
    """What it answers is known: 20 tokens of three branches, cut anywhere, with a pool that preempts."""
    prompt = [5] * 30
    async with fake_worker(EngineConfig(max_total_tokens=120, chunked_prefill_size=16)) as stage:
        asked = token_request(prompt, branches=3, sampling=pb.Sampling(max_tokens=20, temperature=0))
        await check(stage.worker, asked, step=7)
        told = said(await rest_of(stage.worker.inference.Generate(asked)))
        assert [list(one.ids) for one in told.values()] == [stage.expected(prompt, 20)] * 3
        await eventually(stage.is_quiet)


@pytest.mark.parametrize(
    ("resumed", "field", "problem"),
    [
        ([b"1234"], "resumed_branches", "must be none, or as many as branches, 3; got 1"),
        ([b""] * 65, "resumed_branches", "at most 64 allowed, got 65"),
        ([b"", b"12345", b""], "resumed_branches[1]", "must be packed .* got 5 bytes"),
        ([b"", b"", pack([1] * 13)], "resumed_branches[2]", "at most max_tokens, 12, allowed, got 13"),
        ([pack([VOCAB_SIZE]), b"", b""], "resumed_branches[0]", "below the vocabulary's size"),
    ],
)
async def test_what_cannot_be_resumed_is_refused_by_name(
    resumed: list[bytes], field: str, problem: str
) -> None:
    """At the worker and through a router; the next request is served."""
    asked = request(3, max_tokens=12)
    asked.resumed_branches.extend(resumed)
    async with fake_worker(EngineConfig(max_total_tokens=400)) as stage:
        error = await failure_of(stage.worker, asked)
        assert isinstance(error, InvalidRequestError)
        assert error.field == field
        with pytest.raises(InvalidRequestError, match=problem):
            raise error
        assert len(said(await rest_of(stage.worker.inference.Generate(request(3, max_tokens=2))))) == 3


async def test_a_router_passes_on_what_each_branch_goes_on_from() -> None:
    """As it came, to the worker that it chooses; both forms at once are refused there already."""
    engine = ScriptedEngine()
    async with (
        scripted_worker(engine) as worker,
        router_before(worker, scripted_model()) as router,
    ):
        asked = request(2, max_tokens=12)
        asked.resumed_branches.extend([pack([72]), b""])
        told = await rest_of(router.inference.Generate(asked))
        assert [command.resumed for command in engine.submitted] == [pack([72]), b""]
        assert told[-1].finished.usage.resumed_tokens == 1
        asked.branches, asked.resumed_output = 1, b"1234"
        del asked.resumed_branches[1:]
        with pytest.raises(InvalidRequestError, match="cannot be given together with resumed_output"):
            await rest_of(router.inference.Generate(asked))


@pytest.mark.parametrize(
    ("resumed", "asked_ms", "limits_s"),
    [
        ([b"", b""], 0, [0.0, math.inf]),
        ([b"", pack([72])], 0, [math.inf, math.inf]),
        ([b"", pack([72])], 1500, [1.5, math.inf]),
        ([pack([72])], 0, [math.inf]),
    ],
)
async def test_what_goes_on_waits_as_long_as_it_takes(
    resumed: list[bytes], asked_ms: int, limits_s: list[float]
) -> None:
    """It was admitted once: the worker's own limit (0 in the engine's terms) is not for it, only one that its caller asks for."""
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        asked = request(len(resumed), max_tokens=12)
        asked.queue_timeout_ms = asked_ms
        asked.resumed_branches.extend(resumed)
        await rest_of(worker.inference.Generate(asked))
    assert [command.queue_timeout_s for command in engine.submitted] == limits_s
