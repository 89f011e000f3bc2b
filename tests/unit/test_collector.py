"""The garbage collector between steps: what is walked when, and that the cache leaves it nothing."""

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from prefixmesh import collector, tokens
from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.node import TreeNode
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.collector import NEVER, StepCollector
from prefixmesh.ids import Namespace
from prefixmesh.worker import engine_loop
from prefixmesh.worker.engine_loop import CommandInbox, run_engine_loop
from prefixmesh.worker.messages import Abort, Command, Event, Shutdown

OLDEST = 2


@pytest.fixture
def settings() -> Iterator[tuple[int, int, int]]:
    """The process's own settings, which are put back."""
    thresholds = gc.get_threshold()
    yield thresholds
    gc.set_threshold(*thresholds)
    gc.unfreeze()


class Ring:
    """What only the collector can free."""

    def __init__(self) -> None:
        self.me = self


def rings() -> int:
    return sum(type(one) is Ring for one in gc.get_objects())


def full_collections() -> int:
    return int(gc.get_stats()[OLDEST]["collections"])


def test_full_collections_no_longer_come_by_themselves(settings: tuple[int, int, int]) -> None:
    """The young generations stay as the interpreter has them, and what was alive is walked no more."""
    StepCollector()
    assert gc.get_threshold() == (*settings[:2], NEVER)
    assert gc.get_freeze_count() > 0
    assert gc.isenabled()


def test_a_full_collection_walks_no_more_what_was_there_before_a_server_served(
    settings: tuple[int, int, int],
) -> None:
    """What came after is walked as ever, and what is frozen goes when nobody refers to it any more."""
    old, before = Ring(), rings()
    collector.freeze_what_stays()
    Ring()
    gc.collect()
    assert rings() == 0, "frozen objects are in no generation"
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    assert rings() == before, "the new ring was freed, the old one is there"
    assert old.me is old
    assert gc.get_threshold() == settings


def test_a_steps_garbage_is_freed_after_it(settings: tuple[int, int, int]) -> None:
    """By a walk through the young, not through everything."""
    steps = StepCollector()
    before = full_collections()
    Ring()
    steps.after_step()
    assert rings() == 0
    assert full_collections() == before


def test_an_idle_moment_is_used_once_enough_has_stayed(
    settings: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not before; then it counts anew."""
    monkeypatch.setattr(collector, "WORTH_A_FULL_COLLECTION", 400)
    steps = StepCollector()
    before = full_collections()
    steps.when_idle()
    assert full_collections() == before
    kept: list[Ring] = []
    while steps.stayed < 400:
        kept += [Ring() for _ in range(50)]
        steps.after_step()
    kept.clear()
    assert rings() > 100, "grown old, they are not found among the young"
    steps.when_idle()
    assert full_collections() == before + 1
    assert rings() == 0
    steps.when_idle()
    assert full_collections() == before + 1


def test_an_engine_that_is_never_idle_collects_all_the_same(
    settings: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once very much has stayed: a pause is better than growing for ever."""
    monkeypatch.setattr(collector, "TOO_MANY_WHILE_BUSY", 50)
    steps = StepCollector()
    before = full_collections()
    kept = [Ring() for _ in range(100)]
    steps.after_step()
    assert full_collections() == before + 1
    assert len(kept) == 100
    assert steps.stayed == 0


@pytest.mark.slow
def test_evicted_and_flushed_nodes_are_freed_without_the_collector(settings: tuple[int, int, int]) -> None:
    """The reason why full collections can wait: splits, evictions, cascades and a flush leave no ring of nodes."""
    gc.collect()
    already = _tree_nodes()
    gc.disable()
    try:
        pages = PageAllocator(4096)
        cache = RadixCache(pages, 1)
        empty = _tree_nodes()
        for round_ in range(2):
            for number in range(64):
                ids = [7, number % 3, number % 5, number, number]
                taken = pages.allocate(len(ids))
                assert taken is not None
                cache.insert(RadixKey(Namespace(b"n" * 16), tokens.pack(ids)), np.array(taken), 0.0)
            assert _tree_nodes() > empty + 64
            if round_:
                cache.flush()
            else:
                cache.evict(4096)
            assert cache.node_count == 0
            assert _tree_nodes() == empty
    finally:
        gc.enable()
    del cache
    gc.collect()
    assert _tree_nodes() == already


def _tree_nodes() -> int:
    return sum(type(one) is TreeNode for one in gc.get_objects())


class ThreeSteps:
    """A core that has three steps to make after its first command."""

    def __init__(self) -> None:
        self._left = 0

    @property
    def has_work(self) -> bool:
        return self._left > 0

    def handle(self, command: Command, now: float) -> list[Event]:
        self._left = 3
        return []

    def step(self, now: float) -> list[Event]:
        self._left -= 1
        return []


class Diary:
    """A housekeeper that notes what it is told, and ends the loop when it is idle."""

    def __init__(self, inbox: CommandInbox) -> None:
        self.told: list[str] = []
        self._inbox = inbox

    def after_step(self) -> None:
        self.told.append("step")

    def when_idle(self) -> None:
        self.told.append("idle")
        self._inbox.put(Shutdown())


def test_the_engines_loop_tells_of_every_step_and_of_idle_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps while there is work, and idle only when nothing has come for a while."""
    monkeypatch.setattr(engine_loop, "QUIET_S", 0.01)
    inbox = CommandInbox()
    diary = Diary(inbox)
    inbox.put(Abort(request_id="whatever"))
    run_engine_loop(ThreeSteps(), inbox, lambda _: None, lambda: 0.0, housekeeper=diary)
    assert diary.told == ["step", "step", "step", "idle"]
