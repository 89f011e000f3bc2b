"""A fleet's worth of blocks for ``prefixmesh bench index``: who holds what, the prompts that are asked for, and the news that come in.

The blocks come as runs of 8 to 56, a conversation's worth. Of the runs four in five have one holder, others two to four, and one in
twenty up to half the fleet but at most 32 workers, drawn anew for each run: so a fleet of 64 has thousands of different sets of holders
and not a handful. Every prompt that is asked for has a beginning that half the fleet holds (at most 32), three quarters that four
workers hold, and all but its last block at one: the walk goes to the end, and every third worker is told apart from the next. One in
four prompts is expected at two workers besides, since requests with it are under way there.

All of it goes through ``WorkerView``, as a worker's stream does.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from prefixmesh.cache.events import Cleared, Event, Removed, Stored
from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Epoch, Fingerprint
from prefixmesh.router.block_index import BlockIndex
from prefixmesh.router.predictions import Predictions
from prefixmesh.router.worker_view import WorkerView
from prefixmesh.tokens import pack

NAMESPACE: Final = b"bench of indices"
EPOCH: Final = Epoch(1)
NOW: Final = 0.0
REPORT_INTERVAL_S: Final = 1.0
VOCABULARY: Final = 50_000
SEED: Final = 20_240_717

RUN_BLOCKS: Final = (8, 56)
MAX_SHARERS: Final = 32
"""Holders of a run at most."""

SPARE_SHARE: Final = 1.25
"""Room in the index, for what comes while figures are taken."""

EXPECTED_EVERY: Final = 4
"""Of the prompts one in so many is expected somewhere."""

Names = tuple[Fingerprint, ...]


class BenchFleet:
    """So many workers, which hold so many different blocks among them. O(blocks), a few µs each."""

    def __init__(self, workers: int, blocks: int, *, max_blocks: int | None = None) -> None:
        self.workers = workers
        self.blocks = blocks
        self.index = BlockIndex(max_blocks or round(SPARE_SHARE * blocks) + 100_000)
        self.predictions = Predictions()
        self.rng = np.random.default_rng(SEED)
        self.views = [self._view() for _ in range(workers)]
        self._fill()

    def prompts(self, tokens: int, count: int) -> list[bytes]:
        """Packed prompts of which the fleet holds as much as the module says."""
        made = []
        for number in range(count):
            packed = pack(self.rng.integers(VOCABULARY, size=tokens))
            names = tuple(block_fingerprints(NAMESPACE, packed))
            half, most = len(names) // 2, len(names) * 3 // 4
            everyone = self.rng.permutation(self.workers)
            for held, holders in ((names[:half], MAX_SHARERS), (names[:most], 4), (names[:-1], 1)):
                for place in everyone[: min(holders, max(1, self.workers // 2))]:
                    self.hold(int(place), held)
            if number % EXPECTED_EVERY == 0:
                for place in everyone[-2:]:
                    self.predictions.expect(self.views[int(place)].slot, names)
            made.append(packed)
        return made

    def hold(self, worker: int, names: Names) -> None:
        """A worker tells that it holds these blocks from now on."""
        self.views[worker].on_event(self.stored(worker, names), NOW)

    def stored(self, worker: int, names: Names, ahead: int = 1) -> Stored:
        """What the worker would tell: the ``ahead``-th event from now."""
        return Stored(EPOCH, self.views[worker].sequence + ahead, Tier.DEVICE, None, names)

    def removed(self, worker: int, names: Names, ahead: int = 1) -> Removed:
        """The same, of blocks that went."""
        return Removed(EPOCH, self.views[worker].sequence + ahead, Tier.DEVICE, names)

    def names(self, count: int) -> Names:
        """Names that nobody has heard of yet, as random as digests."""
        drawn = self.rng.integers(2**64, size=count, dtype=np.uint64)
        return tuple(map(Fingerprint, drawn.tolist()))

    def add_worker(self) -> WorkerView:
        """One more, which holds nothing; it is not among ``views``."""
        return self._view()

    def _view(self) -> WorkerView:
        view = WorkerView(self.index, self.predictions, report_interval_s=REPORT_INTERVAL_S, now=NOW)
        view.on_event(Cleared(EPOCH, 0), NOW)
        return view

    def _fill(self) -> None:
        filled = turn = 0
        while filled < self.blocks:
            names = self.names(min(int(self.rng.integers(*RUN_BLOCKS)), self.blocks - filled))
            filled += len(names)
            self.hold(turn % self.workers, names)
            for worker in self._sharers():
                self.hold(worker, names)
            turn += 1

    def _sharers(self) -> list[int]:
        """Who else holds a run."""
        drawn = self.rng.random()
        if drawn < 0.8:
            return []
        if drawn < 0.95:
            count = int(self.rng.integers(1, 4))
        else:
            count = int(self.rng.integers(1, max(2, min(MAX_SHARERS, self.workers // 2))))
        return [int(worker) for worker in self.rng.integers(self.workers, size=count)]


class News:
    """Events as workers tell them that are full: each run of blocks that comes pushes an older one out."""

    def __init__(self, fleet: BenchFleet, run_blocks: int) -> None:
        self._fleet = fleet
        self._run_blocks = run_blocks
        self._held: list[list[Names]] = [[] for _ in range(fleet.workers)]
        for worker, held in enumerate(self._held):
            names = fleet.names(run_blocks)
            fleet.hold(worker, names)
            held.append(names)

    def batch(self, blocks: int) -> list[tuple[WorkerView, Event]]:
        """Events of so many blocks in all, each with the view it is for; to be taken in, in this order, before the next batch."""
        fleet = self._fleet
        events: list[tuple[WorkerView, Event]] = []
        ahead = [0] * fleet.workers
        for number in range(max(1, blocks // (2 * self._run_blocks))):
            worker = number % fleet.workers
            held, names = self._held[worker], fleet.names(self._run_blocks)
            held.append(names)
            view = fleet.views[worker]
            events.append((view, fleet.stored(worker, names, ahead[worker] + 1)))
            events.append((view, fleet.removed(worker, held.pop(0), ahead[worker] + 2)))
            ahead[worker] += 2
        return events


def take_in(events: list[tuple[WorkerView, Event]]) -> int:
    """Have the views take the events in; how many blocks they were."""
    blocks = 0
    for view, event in events:
        view.on_event(event, NOW)
        blocks += len(event.fingerprints) if not isinstance(event, Cleared) else 0
    return blocks


def cycle_prompts(prompts: list[bytes], calls: int) -> Iterator[bytes]:
    """So many of them, in turns: none is asked for twice in a row."""
    for call in range(calls):
        yield prompts[call % len(prompts)]
