"""Everything a caller may put into a request, at a worker: none of it gets round what is counted, and none of it is an internal error."""

import logging
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from prefixmesh.config import EngineConfig
from prefixmesh.errors import InvalidRequestError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2 as control_pb
from prefixmesh.requests import MAX_SESSION_BYTES
from prefixmesh.tokens import count, pack
from tests.support.fake_engine import fake_worker
from tests.support.routed_worker import router_before
from tests.support.router_kit import chat_request, token_request
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import (
    Worker,
    eventually,
    failure_of,
    real_worker,
    records_of,
    rest_of,
    scripted_worker,
)
from tests.support.texts import random_texts
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

TENANT: Final = (("x-prefixmesh-tenant", "acme"),)
PROMPT_TOKENS: Final = 40

EVERY_FIELD: Final[dict[str, dict[str, Any]]] = {
    # A value, as unusual as is allowed, for each field of a request but the prompt.
    "request_id": {"request_id": "x" * 256},
    "model": {"model": "tiny"},
    "extra_key": {"extra_key": "\x00 no-cache; tenant=other"},
    "resumed_output": {"resumed_output": pack([5, 6])},
    "branches": {"branches": 3},
    "resumed_branches": {"branches": 3, "resumed_branches": [pack([5]), b"", pack([6, 7])]},
    "priority": {"priority": -100},
    "queue_timeout_ms": {"queue_timeout_ms": 3_600_000},
    "session": {"session": "\x00" * MAX_SESSION_BYTES},
}
EVERY_SAMPLING_FIELD: Final[dict[str, dict[str, Any]]] = {
    "temperature": {"temperature": 100.0},
    "top_k": {"top_k": 1},
    "top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 1.0},
    "max_tokens": {"max_tokens": 0},
    "seed": {"seed": 2**63 - 1},
    "stop": {"stop": ["e", "a"]},
    "stop_token_ids": {"stop_token_ids": list(range(256))},
    "ignore_eos": {"ignore_eos": True},
    "repetition_penalty": {"repetition_penalty": 10.0},
    "frequency_penalty": {"frequency_penalty": -2.0},
    "presence_penalty": {"presence_penalty": 2.0},
    "logit_bias": {"logit_bias": {2: 100.0}},  # the end of the turn, at once
    "min_tokens": {"min_tokens": 4},
    "logprobs": {"logprobs": 20},
    "json_schema": {"json_schema": '{"enum": [1]}'},
    "regex": {"regex": "[0-9]{3}"},
}
ELSEWHERE: Final = {"text", "chat", "tokens", "sampling", "adapter"}
"""The prompt itself, the message of the second table, and what has tests of its own (``test_adapters_worker``)."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
async def worker(model: Path) -> AsyncIterator[Worker]:
    settings = EngineConfig(model=str(model), device="cpu", dtype="float32", max_total_tokens=4000, threads=1)
    async with real_worker(settings) as running:
        yield running


async def state_of(worker: Worker) -> control_pb.DescribeResponse:
    told: control_pb.DescribeResponse = await worker.control.Describe(
        control_pb.DescribeRequest(), metadata=worker.control_metadata()
    )
    return told


async def is_quiet(worker: Worker) -> bool:
    told = await state_of(worker)
    state = told.pool
    return (
        told.running_requests == told.queued_requests == state.protected_pages == 0
        and state.free_pages + state.evictable_pages == state.total_pages
    )


async def test_every_field_of_a_request_is_tried_below() -> None:
    """A field that is added to the wire needs a line in the tables of this file."""
    assert set(EVERY_FIELD) | ELSEWHERE == set(pb.GenerateRequest.DESCRIPTOR.fields_by_name)
    assert set(EVERY_SAMPLING_FIELD) == set(pb.Sampling.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("field", [*EVERY_FIELD, *(f"sampling.{name}" for name in EVERY_SAMPLING_FIELD)])
async def test_no_field_switches_off_what_is_counted(
    worker: Worker, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    """F45: whatever is asked for, the prompt is counted and cached, the end is logged once, and everything held is given back."""
    ids = [5 + n for n in random.Random(field).choices(range(400), k=PROMPT_TOKENS)]
    sampling = pb.Sampling(max_tokens=8)
    sampling.MergeFrom(pb.Sampling(**EVERY_SAMPLING_FIELD.get(field.removeprefix("sampling."), {})))
    request = token_request(ids, sampling=sampling, **EVERY_FIELD.get(field, {}))
    branches = request.branches or 1
    resumed = request.resumed_branches or [request.resumed_output]
    known = branches * PROMPT_TOKENS + sum(map(count, resumed))
    before = (await state_of(worker)).cache
    with caplog.at_level(logging.INFO, logger="prefixmesh"):
        first = await rest_of(worker.inference.Generate(request, metadata=TENANT))
    after = (await state_of(worker)).cache
    assert first[-1].finished.usage.prompt_tokens == PROMPT_TOKENS
    assert after.requests - before.requests == branches
    assert after.prompt_tokens - before.prompt_tokens == known
    assert len(records_of(caplog, "request_ended")) == 1
    again = await rest_of(worker.inference.Generate(request, metadata=TENANT))
    assert again[0].started.cached_tokens.device >= PROMPT_TOKENS - 1
    assert again[-1].finished.usage.prefill_saved.linear == pytest.approx(
        again[0].started.cached_tokens.device / PROMPT_TOKENS
    )
    assert await is_quiet(worker)


@pytest.mark.parametrize("branches", [1, 3])
async def test_no_output_token_computes_the_prompt_and_gives_its_pages_back(
    worker: Worker, branches: int
) -> None:
    """F58: max_tokens 0 is an answer without a token, of each branch; what was computed is found by the next request."""
    ids = list(range(100 * branches, 100 * branches + PROMPT_TOKENS))
    request = token_request(ids, branches=branches, sampling=pb.Sampling(max_tokens=0))
    messages = await rest_of(worker.inference.Generate(request))
    assert not [message for message in messages if message.HasField("delta")]
    assert messages[-1].finished.usage.completion_tokens == 0
    assert messages[-1].finished.reason == pb.FINISH_REASON_LENGTH
    assert await is_quiet(worker)
    again = await worker.generate(token_request(ids, sampling=pb.Sampling(max_tokens=1)))
    assert again.started.cached_tokens.device == PROMPT_TOKENS - 1


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("excess", range(-2, 3))
async def test_prompt_and_answer_at_the_edge_are_served_or_refused(branches: int, excess: int) -> None:
    """F59: with max_tokens of 0, 1, all that is left and one more, the pool being the limit; branches need not fit side by side."""
    limit = 60
    settings = EngineConfig(max_total_tokens=limit, chunked_prefill_size=16)
    async with fake_worker(settings) as stage:
        ids = [7] * (limit + excess)
        for max_tokens in (None, 0, 1, max(0, -excess), max(0, -excess) + 1):
            sampling = pb.Sampling(max_tokens=max_tokens, ignore_eos=True)
            request = token_request(ids, branches=branches, sampling=sampling)
            wanted = 1 if max_tokens is None else max_tokens
            if len(ids) + wanted > limit:
                error = await failure_of(stage.worker, request)
                assert isinstance(error, InvalidRequestError)
                assert error.field in ("tokens.ids", "prompt", "sampling.max_tokens")
                continue
            messages = await rest_of(stage.worker.inference.Generate(request))
            answered = limit - len(ids) if max_tokens is None else max_tokens
            assert messages[-1].finished.usage.completion_tokens == branches * answered
        await eventually(stage.is_quiet)


@pytest.mark.slow
async def test_a_thousand_texts_arrive_whole() -> None:
    """F61: 64 answers to a call, whatever number of bytes comes at a time: joined, each is its text; nothing comes twice."""
    texts = [text for text in random_texts(1100, seed=3) if text and "\ufffd" not in text][:1000]
    engine, rng = ScriptedEngine(), random.Random(4)
    assert len(texts) == 1000
    async with scripted_worker(engine) as worker:
        for start in range(0, len(texts), 64):
            batch = texts[start : start + 64]
            engine.answer_of = lambda command, batch=batch: batch[int(command.request_id.split("/")[1])]  # type: ignore[misc]
            engine.tokens_per_step = rng.choice((1, 2, 3, 5, 8))
            pieces: dict[int, list[str]] = defaultdict(list)
            request = pb.GenerateRequest(text="x", branches=max(2, len(batch)))
            async for message in worker.inference.Generate(request):
                pieces[message.delta.branch].append(message.delta.text)
            assert ["".join(pieces[branch]) for branch in range(len(batch))] == batch
            assert not any("\ufffd" in piece for of_one in pieces.values() for piece in of_one)


@pytest.mark.parametrize("routed", [False, True], ids=["direct", "routed"])
async def test_the_next_turn_after_one_that_was_left_sees_the_last_completed(
    worker: Worker, model: Path, routed: bool
) -> None:
    """F21: the caller closes after the first delta and sends another turn at once: served, with the completed turn's own ids, cached."""
    async with router_before(worker, str(model)) as router:
        inference: Any = (router if routed else worker).inference
        turns = [("user", f"What is the capital of France? {routed}")]
        short, endless = (pb.Sampling(temperature=1, seed=1, max_tokens=n, ignore_eos=True) for n in (9, 900))
        first = await rest_of(inference.Generate(chat_request(*turns, sampling=short)))
        done = first[0].started.prompt_tokens + first[-1].finished.usage.completion_tokens
        turns.append(("assistant", "".join(message.delta.text for message in first)))
        left = inference.Generate(chat_request(*turns, ("user", "And then?"), sampling=endless))
        assert (await left.read()).HasField("started")
        assert (await left.read()).HasField("delta")
        left.cancel()
        again = await rest_of(inference.Generate(chat_request(*turns, ("user", "Why?"), sampling=short)))
        assert again[-1].finished.usage.retokenized_tokens == 0
        assert again[0].started.cached_tokens.device >= done - 1
        await eventually(lambda: is_quiet(worker))
