"""F17 with a real model: a caller leaves in any state, directly and through a router, and the engine is rid of the request
within two steps.

The engine makes a step only when the test allows one, so "within two steps" is counted and not timed.
"""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from prefixmesh import fleet_secret
from prefixmesh.config import EngineConfig, WorkerConfig
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import inference_pb2_grpc
from prefixmesh.router.server import RouterServer
from prefixmesh.router_config import RouterConfig
from prefixmesh.rpc.channel import open_channel
from prefixmesh.worker.engine import EngineCore
from prefixmesh.worker.engine_builder import build_engine
from prefixmesh.worker.in_process_engine import InProcessEngine
from prefixmesh.worker.messages import Abort, Command, EngineCommand, EngineInfo, Event, Stats, Submit
from prefixmesh.worker.server import WorkerServer
from tests.support.router_kit import token_request
from tests.support.servers import eventually, rest_of, running_worker
from tests.support.tiny_model import make_tiny_model

MOST_STEPS = 2
CHUNK = 32
POOL = 128
CHUNKED = token_request([5] * (3 * CHUNK - 6), sampling=pb.Sampling(max_tokens=8, ignore_eos=True))
"""A prompt of three chunks."""


def growing(token: int) -> pb.GenerateRequest:
    """Two of these fit the pool at first, and not to their end."""
    return token_request([token] * 20, sampling=pb.Sampling(temperature=0, max_tokens=70, ignore_eos=True))


class SteppedCore:
    """An engine's core that waits before each step until it may make it."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.steps = 0
        self.waiting = False
        self._allowed = threading.Semaphore(0)
        self._freely = False

    @property
    def info(self) -> EngineInfo:
        return self.core.info

    @property
    def has_work(self) -> bool:
        return self.core.has_work

    def handle(self, command: EngineCommand, now: float) -> list[Event]:
        return self.core.handle(command, now)

    def step(self, now: float) -> list[Event]:
        if not self._freely:
            self.waiting = True
            self._allowed.acquire()
            self.waiting = False
        self.steps += 1
        return self.core.step(now)

    def allow(self, steps: int) -> None:
        for _ in range(steps):
            self._allowed.release()

    def run_freely(self) -> None:
        self._freely = True
        self._allowed.release()

    def running(self) -> set[str]:
        return {request.request_id for request in self.core._scheduler.running}


class WatchedEngine(InProcessEngine):
    """Counts what is on its way to the engine."""

    submits = aborts = 0

    def _send(self, command: Command) -> None:
        super()._send(command)
        self.submits += isinstance(command, Submit)
        self.aborts += isinstance(command, Abort)


@dataclass(frozen=True, kw_only=True)
class Stage:
    core: SteppedCore
    engine: WatchedEngine
    channel: grpc.aio.Channel
    """To the worker, or to a router before it."""

    def call(self, request: pb.GenerateRequest) -> Any:
        stub: Any = inference_pb2_grpc.InferenceStub
        return stub(self.channel).Generate(request)

    async def make_steps(self, count: int) -> None:
        """Exactly so many; then the engine waits before the next one."""
        done = self.core.steps + count
        self.core.allow(count)
        await eventually(lambda: self.core.steps == done and self.core.waiting)

    async def arrived(self, requests: int) -> None:
        """So many requests have been sent to the engine, which waits before a step."""
        await eventually(lambda: self.engine.submits == requests and self.core.waiting)

    async def leave(self, call: Any) -> None:
        """The caller is gone, and the engine's inbox says so."""
        aborts = self.engine.aborts
        call.cancel()
        await eventually(lambda: self.engine.aborts == aborts + 1)

    async def after_two_steps(self) -> Stats:
        """The engine's state when it has made at most two more steps."""
        before = self.core.steps
        self.core.allow(MOST_STEPS)
        stats = await self.engine.stats()
        assert self.core.steps <= before + MOST_STEPS
        return stats


@asynccontextmanager
async def stage(folder: Path, *, routed: bool) -> AsyncIterator[Stage]:
    model = str(make_tiny_model(folder / "tiny"))
    settings = EngineConfig(
        model=model,
        device="cpu",
        dtype="float32",
        threads=1,
        max_total_tokens=POOL,
        max_running_requests=2,
        chunked_prefill_size=CHUNK,
    )
    cores: list[SteppedCore] = []

    def make_core() -> Any:
        cores.append(SteppedCore(build_engine(settings)))
        return cores[0]

    engine = WatchedEngine(settings, make_core)
    secret = fleet_secret.generate()
    server = WorkerServer(WorkerConfig(engine=settings), secret, engine=engine)
    async with running_worker(server, secret) as worker:
        try:
            if not routed:
                yield Stage(core=cores[0], engine=engine, channel=worker.channel)
                return
            router = RouterServer(RouterConfig(workers=(worker.bound.address,), model=model), secret)
            bound = await router.start()
            try:
                await eventually(lambda: len(router.core.registry.ready) == 1)
                async with open_channel(bound.address) as channel:
                    yield Stage(core=cores[0], engine=engine, channel=channel)
                await eventually(lambda: [entry.load.in_flight for entry in router.core.registry] == [0])
            finally:
                await router.stop(0.0)
        finally:
            cores[0].run_freely()


def is_idle(stats: Stats) -> bool:
    pages_back = stats.free_pages + stats.evictable_pages == stats.total_pages
    return stats.running == stats.queued == stats.protected_pages == 0 and pages_back


ways = pytest.mark.parametrize("routed", [False, True], ids=["direct", "routed"])


@ways
@pytest.mark.parametrize("steps", [0, 1, 5], ids=["accepted", "chunk-1-of-3", "decoding"])
async def test_leaving_alone_frees_everything_within_two_steps(
    tmp_path: Path, routed: bool, steps: int
) -> None:
    """Before its first step, after the first of three chunks, and while it decodes."""
    async with stage(tmp_path, routed=routed) as s:
        call = s.call(CHUNKED)
        await s.arrived(1)
        await s.make_steps(steps)
        await s.leave(call)
        assert is_idle(await s.after_two_steps())
        computed = s.core.core.stats()
        assert computed.cache.prompt_tokens == 90, (
            "the one request was admitted once, in the step that had begun"
        )


@ways
async def test_leaving_the_queue_computes_nothing_and_disturbs_nobody(tmp_path: Path, routed: bool) -> None:
    """Two run, the third waits: when it leaves it was never admitted (F18), and the two are answered."""
    async with stage(tmp_path, routed=routed) as s:
        calls = [s.call(growing(token)) for token in (5, 6)]
        await s.arrived(2)
        await s.make_steps(3)
        waiting = s.call(growing(7))
        await s.arrived(3)
        await s.make_steps(1)
        assert s.core.core.stats().queued == 1
        await s.leave(waiting)
        stats = await s.after_two_steps()
        assert (stats.running, stats.queued, stats.cache.prompt_tokens) == (2, 0, 40)
        s.core.run_freely()
        for call in calls:
            last = (await rest_of(call))[-1]
            assert last.finished.usage.completion_tokens == 70
        assert is_idle(await s.engine.stats())


@ways
async def test_leaving_while_preempted_frees_everything(tmp_path: Path, routed: bool) -> None:
    """The pool is too small for two long answers, so one is preempted; its caller leaves, and the other is answered."""
    async with stage(tmp_path, routed=routed) as s:
        calls = [s.call(growing(token)) for token in (5, 6)]
        await s.arrived(2)
        await s.make_steps(3)
        ids = [(await call.read()).started.request_id for call in calls]
        while s.core.core.stats().queued == 0:
            await s.make_steps(1)
        (kept,) = s.core.running()
        index = ids.index(kept)
        await s.leave(calls[1 - index])
        stats = await s.after_two_steps()
        assert (stats.running, stats.queued) == (1, 0)
        s.core.run_freely()
        last = (await rest_of(calls[index]))[-1]
        assert last.finished.usage.completion_tokens == 70
        assert is_idle(await s.engine.stats())
