"""The longest pause of a router's index: the longest single call in a mixed run, collections included.

A step is one decision or one event. Every so often a worker leaves with all it holds and one joins with a snapshot, the rest of the
leaver is swept away between the steps, as a router does. The garbage collector runs as the interpreter has it run by default; the
collector's own time counts wherever it falls. What counts is processor time: when another process takes the core away, that is no pause
of the index's (``bench.pauses``).
"""

from collections.abc import Callable
from typing import Final

from prefixmesh.bench.index_fleet import EPOCH, NOW, BenchFleet, News
from prefixmesh.bench.pauses import PauseMeter
from prefixmesh.cache.events import SnapshotPart
from prefixmesh.cache.tier import Tier
from prefixmesh.router.worker_view import WorkerView

EVENTS_PER_DECISION: Final = 4
"""Of 16 blocks each: a decision's prompt brings some 64 blocks, and pushes as many out."""

CHANGE_EVERY: Final = 5_000
"""Steps after which a worker leaves and another comes."""

PART_BLOCKS: Final = 1_024
"""Blocks in a part of a snapshot, as workers send it."""


def run_mixed(
    fleet: BenchFleet, ask: Callable[[bytes], object], prompts: list[bytes], steps: int, snapshot_blocks: int
) -> PauseMeter:
    """So many steps, each timed by itself."""
    meter = PauseMeter()
    news = News(fleet, 16)
    joined: WorkerView | None = None
    pending = iter(news.batch(0))
    with meter.watching_collections():
        for step in range(steps):
            if step % CHANGE_EVERY == 0:
                if joined is not None:
                    meter.call(joined.close)
                joined = _join(fleet, meter, snapshot_blocks)
            if step % (EVENTS_PER_DECISION + 1) == 0:
                meter.call(ask, prompts[step % len(prompts)])
            else:
                told = next(pending, None)
                if told is None:
                    pending = iter(news.batch(2 * 16 * fleet.workers))
                    told = next(pending)
                meter.call(told[0].on_event, told[1], NOW)
            if fleet.index.needs_sweep:
                meter.call(fleet.index.sweep)
    return meter


def _join(fleet: BenchFleet, meter: PauseMeter, blocks: int) -> WorkerView:
    view = fleet.add_worker()
    for start in range(0, blocks, PART_BLOCKS):
        names = fleet.names(min(PART_BLOCKS, blocks - start))
        part = SnapshotPart(EPOCH, 0, Tier.DEVICE, names, start + PART_BLOCKS >= blocks)
        meter.call(view.on_part, part, NOW)
    return view
