"""A real worker over a fake model: gRPC, service, engine loop, scheduler and cache are the real ones, and a step takes no time.

What it answers is known beforehand (``fake_model.expected_output``), so that a storm of requests can be checked token by token; and
the model asserts that every slot it reads holds what the reading request wrote there or may share.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from prefixmesh import fleet_secret
from prefixmesh.cache.factory import make_prefix_cache
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.config import EngineConfig, WorkerConfig
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.worker.batch_plan import BatchPlan
from prefixmesh.worker.cache_recorder import CacheRecorder
from prefixmesh.worker.engine import EngineCore
from prefixmesh.worker.engine_builder import cache_options
from prefixmesh.worker.in_process_engine import InProcessEngine
from prefixmesh.worker.prefix_desk import PrefixDesk
from prefixmesh.worker.scheduler import Scheduler
from prefixmesh.worker.scheduler_config import SchedulerConfig
from prefixmesh.worker.server import WorkerServer
from tests.support.fake_model import FakeModel, expected_output
from tests.support.scripted_engine import INFO, VOCAB_SIZE
from tests.support.servers import Worker, byte_text, running_worker

if TYPE_CHECKING:
    import torch

DECODE_ROOM = 2
"""Little room to grow is left, so that a small pool preempts."""


class HeldModel(FakeModel):
    """A fake model that waits in its step while it is held, and keeps no plans."""

    def __init__(self, total_pages: int, page_size: int) -> None:
        super().__init__(total_pages, page_size, VOCAB_SIZE)
        self.steps = 0
        self.is_held = False
        """Whether a step waits now."""

        self._is_paced = False
        self._free = threading.Event()
        self._free.set()

    def hold(self) -> None:
        self._free.clear()

    def release(self) -> None:
        self._free.set()

    async def pace(self) -> None:
        """Let one step go at each turn of the caller's event loop, until cancelled: however slow the machine, the engine does not run ahead
        of those who talk to it."""
        self._is_paced = True
        try:
            while True:
                self._free.set()
                await asyncio.sleep(0)
        finally:
            self._is_paced = False
            self._free.set()

    def forward(self, plan: BatchPlan) -> "torch.Tensor":
        self.is_held = not self._free.is_set()
        self._free.wait()
        if self._is_paced:
            self._free.clear()
        self.is_held = False
        self.steps += 1
        logits = super().forward(plan)
        self.plans.clear()
        return logits


class WatchedScheduler(Scheduler):
    """Counts in which phase requests are aborted."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.aborted_in: Counter[str] = Counter()

    def abort(self, request_id: str, now: float) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self.aborted_in[request.phase.value] += 1
        super().abort(request_id, now)


@dataclass(frozen=True, kw_only=True)
class FakeStage:
    """The worker and what is inside it. What is inside may be looked at while the engine is idle."""

    worker: Worker
    engine: InProcessEngine
    core: EngineCore
    scheduler: WatchedScheduler
    model: HeldModel

    def counts(self) -> dict[str, int]:
        """Everything that a request takes while it lives; all 0 when nothing runs."""
        scheduler, kv, server = self.scheduler, self.scheduler.kv, self.worker.server
        return {
            "running": len(scheduler.running),
            "queued": scheduler.queued,
            "requests": len(scheduler._requests),
            "events": len(scheduler._events),
            "locks": kv.receipts_out,
            "double releases": kv.double_releases,
            "protected pages": kv.protected_pages,
            "private pages": kv.total_pages - kv.free_pages - kv.evictable_pages - kv.protected_pages,
            "streams": len(self.engine._streams._queues),
            "calls": len(server._calls),
            "counted calls": server._metrics.calls.in_flight,
        }

    def is_quiet(self) -> bool:
        return not any(self.counts().values())

    @staticmethod
    def expected(prompt: list[int], count: int) -> list[int]:
        return expected_output(prompt, count, VOCAB_SIZE)


def _make_core(settings: EngineConfig, cores: list[EngineCore]) -> EngineCore:
    assert settings.max_total_tokens is not None
    pages = settings.max_total_tokens // settings.page_size
    allocator = PageAllocator(pages)
    recorder = CacheRecorder()
    cache = make_prefix_cache(
        settings.prefix_cache, allocator, settings.page_size, cache_options(settings, recorder)
    )
    scheduler = WatchedScheduler(
        SchedulerConfig(
            max_running_requests=settings.max_running_requests,
            max_queued_requests=settings.max_queued_requests,
            chunked_prefill_size=settings.chunked_prefill_size,
            schedule_policy=settings.schedule_policy,
            context_length=settings.max_total_tokens,
            vocab_size=VOCAB_SIZE,
            decode_room_tokens=DECODE_ROOM,
        ),
        allocator,
        cache,
    )
    info = msgspec.structs.replace(
        INFO,
        context_length=scheduler.token_limit,
        page_size=settings.page_size,
        total_pages=pages,
        max_total_tokens=settings.max_total_tokens,
        max_running_requests=settings.max_running_requests,
        prefix_cache=settings.prefix_cache,
        eos_token_ids=(),
    )
    runner = HeldModel(pages, settings.page_size)
    core = EngineCore(
        info=info, scheduler=scheduler, runner=runner, recorder=recorder, prefixes=PrefixDesk(cache)
    )
    cores.append(core)
    return cores[0]


@asynccontextmanager
async def fake_worker(
    settings: EngineConfig, *, secret: FleetSecret | None = None, **worker_settings: object
) -> AsyncIterator[FakeStage]:
    """Such a worker; ``settings.max_total_tokens`` is its pool. It is let go of at the end, however it was held."""
    cores: list[EngineCore] = []
    engine = InProcessEngine(settings, lambda: _make_core(settings, cores))
    secret = secret or fleet_secret.generate()
    config = WorkerConfig(engine=settings, **worker_settings)  # type: ignore[arg-type]
    server = WorkerServer(config, secret, engine=engine, text=byte_text())
    async with running_worker(server, secret) as worker:
        (core,) = cores
        scheduler, model = core._scheduler, core._runner
        assert isinstance(scheduler, WatchedScheduler)
        assert isinstance(model, HeldModel)
        try:
            yield FakeStage(worker=worker, engine=engine, core=core, scheduler=scheduler, model=model)
        finally:
            model.release()


@dataclass(frozen=True)
class Surroundings:
    """Tasks and threads of this process, to find what a server has left."""

    tasks: frozenset[object] = field(default_factory=lambda: frozenset(_tasks()))
    threads: frozenset[threading.Thread] = field(default_factory=lambda: frozenset(threading.enumerate()))

    def left_over(self) -> list[object]:
        """What is there now and was not when this was made."""
        return [*(_tasks() - self.tasks), *(set(threading.enumerate()) - self.threads)]


def _tasks() -> set[object]:
    return set(asyncio.all_tasks())
