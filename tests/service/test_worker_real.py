"""A worker with a real engine: what leaves the front leaves the engine too, and the cache is really hit."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prefixmesh.config import EngineConfig
from prefixmesh.errors import CancelledError, InvalidRequestError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2 as control_pb
from tests.support.servers import Worker, eventually, failure_of, real_worker, rest_of
from tests.support.tiny_model import make_tiny_model

PROMPT = "Once upon a time there was a prefix that every prompt had in common. " * 4
GREEDY = pb.Sampling(temperature=0, max_tokens=8, ignore_eos=True)
ENDLESS = pb.Sampling(temperature=0, max_tokens=2000, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def worker(model: Path) -> AsyncIterator[Worker]:
    settings = EngineConfig(
        model=str(model),
        device="cpu",
        dtype="float32",
        max_total_tokens=6000,
        max_running_requests=4,
        threads=1,
    )
    async with real_worker(settings) as running:
        yield running


async def pool(worker: Worker) -> control_pb.DescribeResponse:
    told: control_pb.DescribeResponse = await worker.control.Describe(
        control_pb.DescribeRequest(), metadata=worker.control_metadata()
    )
    return told


async def is_quiet(worker: Worker) -> bool:
    told = await pool(worker)
    state = told.pool
    return (
        told.running_requests == told.queued_requests == state.protected_pages == 0
        and state.free_pages + state.evictable_pages == state.total_pages
    )


def request(text: str, sampling: pb.Sampling = GREEDY, **fields: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, sampling=sampling, **fields)  # type: ignore[arg-type]


async def test_warm_answers_are_the_cold_ones_and_tenants_are_apart(worker: Worker) -> None:
    """The same tenant hits at least 95 %, another nothing, and all get the same tokens (F44, F48)."""
    acme, bolt = ((("x-prefixmesh-tenant", name),) for name in ("acme", "bolt"))
    cold = await worker.generate(request(PROMPT), acme)
    warm = await worker.generate(request(PROMPT), acme)
    other = await worker.generate(request(PROMPT), bolt)
    assert (cold.started.cached_tokens.device, other.started.cached_tokens.device) == (0, 0)
    assert warm.started.cached_tokens.device == warm.started.prompt_tokens - 1
    assert cold.token_ids == warm.token_ids == other.token_ids
    assert cold.finished.usage.completion_tokens == len(cold.token_ids) == 8


async def test_a_chat_finds_its_last_turn_in_the_cache(worker: Worker) -> None:
    """Each turn finds prompt and answer of the one before, less the last token: the history's text gives the very ids."""
    messages = [pb.ChatMessage(role="user", content="What is the capital of France?")]
    before = 0
    for turn in range(4):
        answer = await worker.generate(
            pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages), sampling=GREEDY)
        )
        assert answer.started.cached_tokens.device >= before - 1
        assert answer.finished.usage.retokenized_tokens == 0
        before = answer.started.prompt_tokens + len(answer.token_ids)
        messages.append(pb.ChatMessage(role="assistant", content=answer.text))
        messages.append(pb.ChatMessage(role="user", content=f"And number {turn}?"))


@pytest.mark.parametrize("after", ["nothing", "started", "tokens"])
@pytest.mark.parametrize("way", ["cancel", "deadline"])
async def test_a_caller_that_leaves_takes_its_work_along(worker: Worker, way: str, after: str) -> None:
    """Whenever a caller leaves, the engine stops and every page is free or cached again (F17, F18, F22)."""
    call = worker.inference.Generate(request(PROMPT, ENDLESS), timeout=0.3 if way == "deadline" else None)
    for _ in range({"nothing": 0, "started": 1, "tokens": 4}[after]):
        await call.read()
    if way == "cancel":
        call.cancel()
    else:
        assert (await call.code()).name == "DEADLINE_EXCEEDED"
    await eventually(lambda: is_quiet(worker), timeout_s=2.0)
    assert (await worker.generate(request(PROMPT))).finished.usage.completion_tokens == 8


async def test_the_next_turn_after_a_cancelled_one_sees_the_last_completed(worker: Worker) -> None:
    """A caller that closes after the first delta and goes on at once finds its last whole turn (F21)."""
    first = await worker.generate(request(PROMPT))
    done = first.started.prompt_tokens
    call = worker.inference.Generate(request(PROMPT + " More.", ENDLESS))
    await call.read()
    await call.read()
    call.cancel()
    again = await worker.generate(request(PROMPT + " And more."))
    assert again.started.cached_tokens.device >= done - 2
    await eventually(lambda: is_quiet(worker))


async def test_many_cancelled_at_random_points_leave_nothing(worker: Worker) -> None:
    """After a storm of cancels all counts are back (F12, first form)."""

    async def one(number: int) -> None:
        call = worker.inference.Generate(request(f"{number} {PROMPT}", ENDLESS))
        for _ in range(number % 5):
            await call.read()
        call.cancel()

    await asyncio.gather(*(one(number) for number in range(40)))
    await eventually(lambda: is_quiet(worker))


async def test_an_abort_in_flight_ends_the_stream(worker: Worker) -> None:
    """Abort by the server's id: CANCELLED, pages back, twice is once (F18)."""
    call = worker.inference.Generate(request(PROMPT, ENDLESS))
    request_id = (await call.read()).started.request_id
    for _ in range(2):
        await worker.inference.Abort(pb.AbortRequest(request_id=request_id))
    with pytest.raises(CancelledError):
        await rest_of(call)
    await eventually(lambda: is_quiet(worker))


async def test_a_request_larger_than_the_context_is_refused_and_the_next_served(worker: Worker) -> None:
    """Around the model's limit nothing is an internal error (F40, F59)."""
    (model_told,) = (await worker.inference.ListModels(pb.ListModelsRequest())).models
    limit = model_told.context_length
    prompt = (await worker.inference.Tokenize(pb.TokenizeRequest(text="Hello"))).ids
    ids = prompt[:4] * (limit - 2)
    for max_tokens, fits in ((1, True), (2, True), (3, False)):
        ask = pb.GenerateRequest(
            tokens=pb.TokenPrompt(ids=ids), sampling=pb.Sampling(max_tokens=max_tokens, ignore_eos=True)
        )
        if fits:
            assert (await worker.generate(ask)).finished.usage.completion_tokens == max_tokens
        else:
            error = await failure_of(worker, ask)
            assert isinstance(error, InvalidRequestError)
            assert error.field == "sampling.max_tokens"
