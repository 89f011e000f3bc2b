"""Any order of stores, removals, flushes, snapshots and followers agrees with plain sets after every step.

The alphabet is so small that different blocks often share a name, the log so short that followers often fall off it, and
snapshots are read a block or two at a time while everything changes under them.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefixmesh.cache.events import Event, SnapshotPart
from prefixmesh.cache.snapshot import Snapshot
from prefixmesh.cache.tier import Tier
from prefixmesh.cache.view import CacheView, ViewResult
from prefixmesh.ids import Epoch, Fingerprint
from tests.support.naive_publisher import (
    ALPHABET,
    NaiveBooks,
    Names,
    Sets,
    make_publisher,
    removals_of,
    runs_of,
    sets_of,
    states_of,
    summary_of,
)

LOG_EVENTS = 6
LOG_BLOCKS = 9
MAX_SNAPSHOTS = 3

tiers = st.sampled_from(list(Tier))
names = st.sampled_from(ALPHABET)
chains = st.lists(names, max_size=4).map(tuple)
which = st.integers(0, 20)
"""One of however many there are."""


@dataclass(slots=True)
class Reading:
    """A snapshot that is being read, and what it has to give."""

    snapshot: Snapshot
    sets: Sets
    parts: list[SnapshotPart] = field(default_factory=list)
    void: bool = False
    advanced: bool = True


@dataclass(slots=True)
class Follower:
    """A view that follows as a router would: by events while there are any, by a snapshot of its own when not."""

    view: CacheView = field(default_factory=CacheView)
    snapshot: Snapshot | None = None


class PublisherMachine(RuleBasedStateMachine):
    """The publisher beside bags of names, views that lag behind it, and snapshots that lag behind those."""

    def __init__(self) -> None:
        super().__init__()
        self.publisher = make_publisher(
            log_events=LOG_EVENTS, log_blocks=LOG_BLOCKS, max_snapshots=MAX_SNAPSHOTS + 3
        )
        self.books = NaiveBooks()
        self.flushes = 0
        self.sequence = 0
        self.readings: list[Reading] = []
        self.followers = [Follower() for _ in range(3)]
        self.shadow = CacheView()
        self.shadow.apply(self.publisher.beginning)
        self.history: dict[tuple[Epoch, int], Sets] = {}
        self.remember()

    def remember(self) -> None:
        self.history[self.publisher.epoch, self.sequence] = self.books.sets()

    # --- what the cache tells ---

    @rule(tier=tiers, parent=st.none() | names, chain=chains)
    def store(self, tier: Tier, parent: Fingerprint | None, chain: Names) -> None:
        self.publisher.stored(tier, parent, chain)
        runs = self.books.stored(tier, parent, chain)
        assert runs_of(self.events_of(tier, len(runs), sum(len(run) for _, run in runs))) == runs
        self.remember()

    @rule(tier=tiers, data=st.data())
    def remove(self, tier: Tier, data: st.DataObject) -> None:
        bag = self.books.bag(tier)
        order = data.draw(st.permutations(bag)) if bag else []
        chain = tuple(order[: data.draw(st.integers(0, 4))])
        self.publisher.removed(tier, chain)
        gone = self.books.removed(tier, chain)
        assert removals_of(self.events_of(tier, min(len(gone), 1), len(gone))) == ([gone] if gone else [])
        self.remember()

    @rule(tier=tiers, chain=chains)
    def remove_what_is_not_there(self, tier: Tier, chain: Names) -> None:
        """Some of it may be there: nothing may change."""
        missing = [name for name in ALPHABET if name not in self.books.bags[tier]]
        there = [name for name in dict.fromkeys(chain) if name in self.books.bag(tier)]
        if missing:
            self.publisher.removed(tier, (*there, missing[0]))
            self.publisher.settle()
            assert self.publisher.unknown_removals == 1
            self.publisher.unknown_removals = 0

    def events_of(self, tier: Tier, count: int, blocks: int) -> list[Event]:
        """The events of the latest change, as the shadow view and the log show them; checks their numbers."""
        before, self.sequence = self.sequence, self.sequence + count
        assert self.publisher.sequence == self.sequence
        events = self.publisher.events_since(self.publisher.epoch, before)
        assert events is not None, "the log is long enough for any one change"
        for number, event in enumerate(events, start=before + 1):
            assert (event.epoch, event.sequence) == (self.publisher.epoch, number)
            assert getattr(event, "tier", None) is tier
            assert self.shadow.apply(event) is ViewResult.APPLIED
        return list(events)

    @precondition(lambda self: any(self.books.bags))
    @rule(seldom=st.integers(0, 3))
    def flush(self, seldom: int) -> None:
        if seldom:
            return
        old = self.publisher.epoch
        self.publisher.cleared()
        self.books.cleared()
        self.sequence = 0
        assert self.publisher.epoch != old
        for reading in self.readings:
            reading.void = True
        assert self.publisher.events_since(old, 0) is None
        assert self.shadow.apply(self.publisher.beginning) is ViewResult.APPLIED
        self.remember()

    # --- snapshots ---

    @precondition(lambda self: len(self.readings) < MAX_SNAPSHOTS)
    @rule()
    def open(self) -> None:
        snapshot = self.publisher.open_snapshot()
        sets = self.books.sets()
        assert snapshot.summary == summary_of(self.publisher.epoch, self.sequence, sets)
        self.readings.append(Reading(snapshot, sets))

    @precondition(lambda self: self.readings)
    @rule(which=which, at_most=st.integers(1, 3))
    def read(self, which: int, at_most: int) -> None:
        reading = self.readings[which % len(self.readings)]
        part = reading.snapshot.next_part(at_most)
        assert reading.snapshot.void == reading.void
        if part is None:
            assert reading.void
        else:
            assert not reading.void
            assert len(part.fingerprints) <= at_most
            assert part.fingerprints or part.last
            reading.parts.append(part)
        if part is None or part.last:
            self.readings.remove(reading)
            assert reading.snapshot.next_part(at_most) is None
        if part is not None and part.last:
            self.compare(reading)

    @staticmethod
    def compare(reading: Reading) -> None:
        """The parts are exactly what there was when it was opened, no name twice."""
        for tier in Tier:
            got = [name for part in reading.parts if part.tier == tier for name in part.fingerprints]
            assert sorted(got) == sorted(reading.sets[tier])
        summary = reading.snapshot.summary
        assert states_of(reading.sets) == summary.states
        assert {part[:2] for part in reading.parts} == {summary[:2]}
        assert not reading.snapshot.void

    @precondition(lambda self: self.readings)
    @rule(which=which, properly=st.booleans())
    def abandon(self, which: int, properly: bool) -> None:
        """Close it, or just let it go."""
        reading = self.readings.pop(which % len(self.readings))
        if properly:
            reading.snapshot.close()
            assert reading.snapshot.next_part(1) is None

    # --- followers ---

    @rule(which=which, at_most=st.integers(1, 3), again=st.booleans())
    def follow(self, which: int, at_most: int, again: bool) -> None:
        """A few steps of one follower: some events, or a part of its snapshot."""
        follower = self.followers[which % len(self.followers)]
        view = follower.view
        if follower.snapshot is not None:
            self.load(follower, at_most)
            return
        events = None if view.epoch is None else self.publisher.events_since(view.epoch, view.sequence)
        if events is None:
            assert self.too_far_behind(view)
            follower.snapshot = self.publisher.open_snapshot()
            return
        for event in events[:at_most]:
            assert view.apply(event) is ViewResult.APPLIED
            if again:
                assert view.apply(event) is ViewResult.DUPLICATE
        if len(events) > at_most + 1:
            assert view.apply(events[at_most + 1]) is ViewResult.GAP

    def load(self, follower: Follower, at_most: int) -> None:
        assert follower.snapshot is not None
        part = follower.snapshot.next_part(at_most)
        if part is None:
            assert follower.snapshot.void
            follower.snapshot = None
        elif follower.view.load(part):
            assert follower.view.agrees(follower.snapshot.summary)
            follower.snapshot = None

    def too_far_behind(self, view: CacheView) -> bool:
        """Whether the view may be told that only a snapshot helps: any two events fit into the log, with four blocks at most."""
        return view.epoch != self.publisher.epoch or self.sequence - view.sequence > 2

    # --- after every step ---

    @invariant()
    def the_books_agree(self) -> None:
        self.publisher.check_invariants()
        sets = self.books.sets()
        summary = summary_of(self.publisher.epoch, self.sequence, sets)
        assert self.publisher.summary() == summary
        assert tuple(self.publisher.state(tier) for tier in Tier) == summary.states
        assert sets_of(self.shadow) == sets
        assert self.shadow.agrees(summary)

    @invariant()
    def every_view_is_a_moment_of_the_past(self) -> None:
        for follower in self.followers:
            view = follower.view
            view.check_invariants()
            if view.epoch is not None and (view.epoch, view.sequence) in self.history:
                assert sets_of(view) == self.history[view.epoch, view.sequence]


def run_machine(examples: int, steps: int, *, repeatable: bool) -> None:
    run_state_machine_as_test(
        PublisherMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=repeatable,
            report_multiple_bugs=False,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_order_of_operations_agrees_with_plain_sets() -> None:
    """The same examples each time, so that a change of the code is the only thing that can fail."""
    run_machine(examples=100, steps=50, repeatable=True)


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_orders_of_operations_agree_with_plain_sets() -> None:
    """Many, and others each time."""
    run_machine(examples=2000, steps=50, repeatable=False)
