"""Many callers of one worker at once, and what is left when they are gone: nothing.

Everything but the model is real. Which request leaves when is drawn from a seed; what the engine does in between is up to the
machine, so each run meets other moments.
"""

import asyncio
import dataclasses
import gc
import logging
import random
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import psutil
import pytest

from prefixmesh.config import EngineConfig
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.tokens import pack, unpack
from tests.support.fake_engine import FakeStage, Surroundings, fake_worker
from tests.support.routed_worker import router_before, scripted_model
from tests.support.servers import eventually

CROWDED = EngineConfig(max_total_tokens=160, max_running_requests=6, chunked_prefill_size=12)
"""A pool for some three of the requests below: they wait, go in chunks, and are preempted."""

both_ways = pytest.mark.parametrize("routed", [False, True], ids=["direct", "routed"])
AT_ONCE = 40
WAYS = ("finish", "cancel", "cancel", "abort", "deadline", "at once")


@dataclass(frozen=True)
class Ask:
    """One request and how its caller will leave."""

    prompt: list[int]
    max_tokens: int
    branches: int
    way: str
    reads: int
    deadline_s: float


def draw(rng: random.Random) -> Ask:
    family = rng.randrange(4)
    shared = [family * 10 + i for i in range(rng.choice((0, 8, 24)))]
    tail = [rng.randrange(100, 200) for _ in range(rng.randrange(1, 60))]
    return Ask(
        prompt=shared + tail,
        max_tokens=rng.randrange(1, 40),
        branches=rng.choice((1, 1, 1, 3)),
        way=rng.choice(WAYS),
        reads=rng.randrange(12),
        deadline_s=rng.choice((0.005, 0.02, 0.08)),
    )


async def play(stage: FakeStage, ask: Ask) -> str:
    """Send it and leave as it says; the status' name. An answer that came to its end must be the right one."""
    request = pb.GenerateRequest(
        tokens=pb.TokenPrompt(ids=pack(ask.prompt)),
        sampling=pb.Sampling(temperature=0, max_tokens=ask.max_tokens, ignore_eos=True),
        branches=ask.branches,
    )
    deadline_s = ask.deadline_s if ask.way == "deadline" else 60.0
    call = stage.worker.inference.Generate(request, timeout=deadline_s)
    answers: dict[int, list[int]] = {}
    try:
        if ask.way == "at once":
            await asyncio.sleep(0)
            call.cancel()
        await _read(stage, call, ask, answers)
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass
    code: str = (await call.code()).name
    if code == "OK":
        whole = stage.expected(ask.prompt, ask.max_tokens)
        assert answers == dict.fromkeys(range(ask.branches), whole)
    return code


async def _read(stage: FakeStage, call: Any, ask: Ask, answers: dict[int, list[int]]) -> None:
    reads = 0
    while (message := await call.read()) is not grpc.aio.EOF:
        reads += 1
        if message.HasField("delta"):
            answers.setdefault(message.delta.branch, []).extend(unpack(message.delta.token_ids).tolist())
        if message.HasField("started") and ask.way == "abort":
            await stage.worker.inference.Abort(pb.AbortRequest(request_id=message.started.request_id))
        if ask.way == "cancel" and reads > ask.reads:
            call.cancel()


async def storm(stage: FakeStage, rng: random.Random, count: int) -> Counter[str]:
    """So many requests, ``AT_ONCE`` at a time; their statuses."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(ask: Ask) -> str:
        async with places:
            return await play(stage, ask)

    return Counter(await asyncio.gather(*(one(draw(rng)) for _ in range(count))))


@asynccontextmanager
async def stage_for(settings: EngineConfig, *, routed: bool) -> AsyncIterator[FakeStage]:
    """A worker whose callers come to it directly, or through a router that has settled everything when they are gone."""
    async with fake_worker(settings) as stage:
        if not routed:
            yield stage
            return
        assert settings.max_total_tokens is not None
        async with router_before(stage.worker, scripted_model(settings.max_total_tokens)) as router:
            yield dataclasses.replace(stage, worker=dataclasses.replace(stage.worker, channel=router.channel))
            await eventually(lambda: router.loads() == [0])


async def check_cancels(
    count: int, caplog: pytest.LogCaptureFixture, *, routed: bool = False
) -> Counter[str]:
    """F12; returns in which phases the engine's requests were aborted."""
    async with fake_worker(CROWDED) as stage:
        await tiny_request(stage, [1])  # what the libraries keep from then on is theirs
    around = Surroundings()
    with caplog.at_level(logging.WARNING, logger="prefixmesh"):
        async with stage_for(CROWDED, routed=routed) as stage:
            pacing = asyncio.create_task(stage.model.pace())
            statuses = await storm(stage, random.Random(12), count)
            pacing.cancel()
            await asyncio.wait({pacing})
            await eventually(stage.is_quiet)
            stage.core.check_invariants()
            await stage.engine.flush()
            assert stage.scheduler.kv.free_pages == stage.scheduler.kv.total_pages
            outcomes = stage.worker.server._metrics.calls.outcomes
            assert outcomes["internal"] == outcomes["unavailable"] == 0
    # A router says at once of some deadlines that they cannot be met.
    assert set(statuses) - {"RESOURCE_EXHAUSTED" if routed else ""} == {
        "OK",
        "CANCELLED",
        "DEADLINE_EXCEEDED",
    }
    assert outcomes["length"] >= statuses["OK"] > 0
    assert not caplog.records
    await eventually(lambda: not around.left_over())
    return stage.scheduler.aborted_in


@pytest.mark.slow
@both_ways
async def test_requests_cancelled_at_random_points_leave_nothing(
    caplog: pytest.LogCaptureFixture, routed: bool
) -> None:
    """F12 scaled down: by cancel, Abort and deadline, one answer or three; counts, locks, pages, tasks and threads are back."""
    assert len(await check_cancels(200, caplog, routed=routed)) >= 2


@pytest.mark.deep
async def test_thousands_of_requests_cancelled_at_random_points_leave_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """F12, and every phase has been met."""
    phases = await check_cancels(3000, caplog)
    assert set(phases) == {"waiting", "prefilling", "decoding", "preempted"}


async def tiny_request(stage: FakeStage, prompt: list[int], max_tokens: int = 2) -> None:
    """Sends it and checks the answer."""
    request = pb.GenerateRequest(
        tokens=pb.TokenPrompt(ids=pack(prompt)),
        sampling=pb.Sampling(temperature=0, max_tokens=max_tokens, ignore_eos=True),
    )
    answer = await stage.worker.generate(request, timeout_s=60.0)
    assert answer.token_ids == stage.expected(prompt, max_tokens)


@pytest.mark.slow
@both_ways
async def test_512_requests_at_once_are_accepted_and_all_finish(routed: bool) -> None:
    """With the limits that worker and router have by default, over one connection: none is refused, none is lost, each is right."""
    async with stage_for(EngineConfig(max_total_tokens=8192), routed=routed) as stage:
        stage.model.hold()
        asked = [asyncio.create_task(tiny_request(stage, [n % 200, n // 200, 7], 3)) for n in range(512)]
        await eventually(lambda: len(stage.worker.server._calls) == 512)
        stage.model.release()
        await asyncio.gather(*asked)
        await eventually(stage.is_quiet)
        assert stage.worker.server._metrics.calls.outcomes["length"] == 512


async def steps_for_a_batch(stage: FakeStage, first: int) -> int:
    """Steps that three cold requests take which arrive together."""
    stage.model.hold()
    before = stage.model.steps
    asked = [asyncio.create_task(tiny_request(stage, [first + n] * 10, 12)) for n in range(3)]
    await eventually(lambda: len(stage.worker.server._calls) == 3 and stage.model.is_held)
    stage.model.release()
    await asyncio.gather(*asked)
    return stage.model.steps - before


async def test_a_worker_is_as_fast_after_pressure_as_before() -> None:
    """F40, counted in steps: what does not fit the pool together makes some give way, and nothing of that stays."""
    async with fake_worker(CROWDED) as stage:
        await tiny_request(stage, [0])
        before = await steps_for_a_batch(stage, 10)
        heavy = [tiny_request(stage, [100 + n] * 30, 60) for n in range(6)]
        await asyncio.gather(*heavy)
        assert stage.scheduler.preemptions > 0, "the test must press to mean anything"
        after = await steps_for_a_batch(stage, 20)
        assert after <= before / 0.8


@dataclass(frozen=True)
class Holdings:
    """What a process holds."""

    blocks: int
    objects: int
    tasks: int
    threads: int
    descriptors: int
    resident_mb: float

    @classmethod
    def now(cls) -> "Holdings":
        gc.collect()
        process = psutil.Process()
        return cls(
            blocks=sys.getallocatedblocks(),
            objects=len(gc.get_objects()),
            tasks=len(asyncio.all_tasks()),
            threads=threading.active_count(),
            descriptors=process.num_fds(),
            resident_mb=process.memory_info().rss / 2**20,
        )


async def check_flat(warm_up: int, count: int) -> tuple[Holdings, Holdings]:
    """F35: what is held after ``warm_up`` requests and after ``count`` more; one object kept for each would show."""
    rng = random.Random(35)
    settings = EngineConfig(max_total_tokens=400, max_running_requests=8)
    async with fake_worker(settings) as stage:

        async def serve(number: int) -> None:
            for _ in range(number // 16):
                await tiny_request(stage, [rng.randrange(200) for _ in range(rng.randrange(1, 9))])

        await asyncio.gather(*(serve(warm_up) for _ in range(16)))
        before = Holdings.now()
        await asyncio.gather(*(serve(count) for _ in range(16)))
        await eventually(stage.is_quiet)
        after = Holdings.now()
    for name in ("tasks", "threads", "descriptors"):
        assert getattr(after, name) <= getattr(before, name), name
    assert after.blocks - before.blocks < count / 2
    assert after.objects - before.objects < count / 4
    return before, after


@pytest.mark.slow
async def test_what_a_worker_holds_is_flat() -> None:
    """F35 scaled down: memory, threads, tasks and descriptors after 400 tiny requests and after 1,600 more."""
    await check_flat(400, 1600)


@pytest.mark.deep
async def test_what_a_worker_holds_is_flat_for_long() -> None:
    """F35: 100,000 requests, and the process has not grown by more than a few megabytes."""
    before, after = await check_flat(5000, 100_000)
    assert after.blocks - before.blocks < 5000
    assert after.resident_mb - before.resident_mb < 16
