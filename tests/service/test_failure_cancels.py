"""F12, seen from inside: requests cancelled at random points, by whoever can, leave no task, lock, page, reservation or place behind.

Router and worker are those that serve, over real sockets, in this process; the engine takes a step at a time, so that cancels find it
at every point of an answer.
"""

import asyncio
import random
from collections import Counter

import pytest

from prefixmesh.client import AsyncClient
from prefixmesh.config import EngineConfig
from prefixmesh.errors import CancelledError
from tests.support.failure_cancelling import EARLY_SHARE, cancel_somehow
from tests.support.failure_load import Workload
from tests.support.fake_engine import FakeStage, fake_worker
from tests.support.routed_worker import router_before, scripted_model
from tests.support.router_kit import Router
from tests.support.scripted_engine import INFO
from tests.support.servers import eventually

SETTINGS = EngineConfig(max_total_tokens=4096, max_running_requests=6, chunked_prefill_size=64)
AT_ONCE = 12


async def cancel_all(router: Router, stage: FakeStage, count: int, *, direct: bool) -> int:
    """How many did not end whole."""
    workload = Workload(vocab_size=120, prefixes=3, prefix_tokens=130, tail_tokens=20, max_tokens=20)
    rng, numbers, cancelled = random.Random(4), iter(range(count)), 0
    async with (
        AsyncClient(router.address, direct=direct) as client,
        AsyncClient(stage.worker.bound.address) as at_worker,
    ):

        async def go_on() -> None:
            nonlocal cancelled
            for number in numbers:
                sent = await cancel_somehow(
                    client,
                    lambda _: at_worker,
                    workload.request(number),
                    rng,
                    # A ticket that was never used is given back when it is over, and that is seconds.
                    early_share=0.0 if direct else EARLY_SHARE,
                )
                assert sent.error is None or isinstance(sent.error, CancelledError), sent
                cancelled += not sent.is_whole

        await asyncio.gather(*(go_on() for _ in range(AT_ONCE)))
    return cancelled


def held_by_router(router: Router) -> dict[str, object]:
    """What a request takes of it; nothing when none is there."""
    server, core = router.server, router.server.core
    loads = [entry.load for entry in core.registry]
    held: dict[str, object] = {
        "in flight": router.loads(),
        "work": [round(load.work_ms, 6) for load in loads],
        "predictions": len(core.view.predictions),
        "running": len(server._running),
        "placements": len(core._placements),
    }
    return {name: value for name, value in held.items() if value not in (0, [0] * len(loads))}


def running_tasks() -> Counter[str]:
    """How many run of each kind: gRPC replaces its own by others of their kind."""
    return Counter(getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())


@pytest.mark.parametrize("direct", [False, True], ids=["proxied", "direct"])
@pytest.mark.parametrize(
    "count", [60, pytest.param(1000, marks=[pytest.mark.deep, pytest.mark.slow])], ids=str
)
async def test_cancels_at_random_points_leave_nothing(count: int, direct: bool) -> None:
    """Client, router's Abort and worker's Abort in turns: everything that was taken has been given back, and no task goes on."""
    async with fake_worker(SETTINGS) as stage:
        pacing = asyncio.create_task(stage.model.pace())
        async with router_before(stage.worker, scripted_model(INFO.context_length)) as router:
            await cancel_all(router, stage, AT_ONCE, direct=direct)  # whatever is made once is there now
            await eventually(lambda: stage.is_quiet() and not held_by_router(router))
            before = running_tasks()
            assert await cancel_all(router, stage, count, direct=direct) > count // 3
            await eventually(lambda: stage.is_quiet() and not held_by_router(router))
            await eventually(lambda: not running_tasks() - before)
            stage.core.check_invariants()
        pacing.cancel()
