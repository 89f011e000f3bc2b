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

from prefixmesh.cache.events import Cleared, Event, Removed, SnapshotPart, Stored
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
    read_out,
    sets_of,
    states_of,
    summary_of,
)

LOG_EVENTS = 6
LOG_BLOCKS = 9
READINGS = 3
FOLLOWERS = 3

tiers = st.sampled_from(list(Tier))
names = st.sampled_from(ALPHABET)
chains = st.lists(names, max_size=4).map(tuple)
which = st.integers(0, 20)
"""One of however many there are."""
few = st.sampled_from([1, 1, 1, 2, 5])
"""How many blocks a part may have: little, so that snapshots are long under way."""
seldom = st.sampled_from([False] * 4 + [True])
"""For what empties everything: oftener, there would never be much in it to go wrong."""


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
            log_events=LOG_EVENTS, log_blocks=LOG_BLOCKS, max_snapshots=READINGS + FOLLOWERS + 1
        )
        self.books = NaiveBooks()
        self.sequence = 0
        self.kept: list[Event] = []
        self.quiet = False
        self.readings: list[Reading] = []
        self.followers = [Follower() for _ in range(FOLLOWERS)]
        self.shadow = CacheView()
        self.history: dict[tuple[Epoch, int], Sets] = {}
        self.remember()

    def remember(self) -> None:
        self.history[self.publisher.epoch, self.sequence] = self.books.sets()

    def announced(self, event: Event) -> None:
        """An event is expected: number it as the publisher must, and forget what its log may forget."""
        assert event.sequence == self.sequence + 1
        self.sequence += 1
        self.kept.append(event)
        while len(self.kept) > LOG_EVENTS or blocks_of(self.kept) > LOG_BLOCKS:
            self.kept.pop(0)

    def expected_since(self, epoch: Epoch | None, sequence: int) -> list[Event] | None:
        """What the log must answer."""
        missing = self.sequence - sequence
        if epoch != self.publisher.epoch or not 0 <= missing <= len(self.kept):
            return None
        return self.kept[len(self.kept) - missing :]

    # --- what the cache tells; quietly: nobody reads anything before the next step ---

    @rule(tier=tiers, parent=st.none() | names, chain=chains, quiet=st.booleans())
    def store(self, tier: Tier, parent: Fingerprint | None, chain: Names, quiet: bool) -> None:
        self.publisher.stored(tier, parent, chain)
        for before, run in self.books.stored(tier, parent, chain):
            self.announced(Stored(self.publisher.epoch, self.sequence + 1, tier, before, run))
        self.remember()
        self.quiet = quiet

    @rule(tier=tiers, data=st.data(), quiet=st.booleans())
    def remove(self, tier: Tier, data: st.DataObject, quiet: bool) -> None:
        bag = self.books.bag(tier)
        order = data.draw(st.permutations(bag)) if bag else []
        chain = tuple(order[: data.draw(st.integers(0, 4))])
        self.publisher.removed(tier, chain)
        if gone := self.books.removed(tier, chain):
            self.announced(Removed(self.publisher.epoch, self.sequence + 1, tier, gone))
        self.remember()
        self.quiet = quiet

    @rule(tier=tiers, chain=chains)
    def remove_what_is_not_there(self, tier: Tier, chain: Names) -> None:
        """Some of it may be there, and goes; what is not there is counted."""
        missing = [name for name in ALPHABET if not self.books.bags[tier][name]]
        there = [name for name in dict.fromkeys(chain) if self.books.bags[tier][name]]
        if missing:
            self.publisher.removed(tier, (*there, missing[0]))
            if gone := self.books.removed(tier, tuple(there)):
                self.announced(Removed(self.publisher.epoch, self.sequence + 1, tier, gone))
            self.remember()
            self.publisher.catch_up()
            assert self.publisher.unknown_removals == 1
            self.publisher.unknown_removals = 0

    @rule(really=seldom)
    def flush(self, really: bool) -> None:
        if not really:
            return
        old = self.publisher.epoch
        self.publisher.cleared()
        self.books.cleared()
        self.sequence = 0
        self.kept.clear()
        assert self.publisher.epoch != old
        assert self.publisher.events_since(old, 0) is None
        for reading in self.readings:
            reading.void = True
        self.remember()

    # --- snapshots ---

    @precondition(lambda self: len(self.readings) < READINGS)
    @rule()
    def open(self) -> None:
        snapshot = self.publisher.open_snapshot()
        sets = self.books.sets()
        assert snapshot.summary == summary_of(self.publisher.epoch, self.sequence, sets)
        self.readings.append(Reading(snapshot, sets))

    @precondition(lambda self: self.readings)
    @rule(which=which, at_most=few)
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

    @rule(which=which, at_most=few, again=st.booleans())
    def follow(self, which: int, at_most: int, again: bool) -> None:
        """A few steps of one follower: some events, or a part of its snapshot."""
        follower = self.followers[which % FOLLOWERS]
        if follower.snapshot is not None:
            self.load(follower, at_most)
            return
        view = follower.view
        events = None if view.epoch is None else self.publisher.events_since(view.epoch, view.sequence)
        assert events == self.expected_since(view.epoch, view.sequence)
        if events is None:
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

    # --- after every step ---

    @invariant()
    def the_books_agree(self) -> None:
        if self.quiet:
            self.quiet = False
            return
        self.publisher.check_invariants()
        sets = self.books.sets()
        summary = summary_of(self.publisher.epoch, self.sequence, sets)
        assert self.publisher.summary() == summary
        assert tuple(self.publisher.state(tier) for tier in Tier) == summary.states
        self.shadow_follows()
        assert self.shadow.agrees(summary)
        assert sets_of(self.shadow) == sets

    def shadow_follows(self) -> None:
        """A view that is always brought up to date: by events, from the beginning of the epoch, or by a whole snapshot."""
        epoch = self.publisher.epoch
        if self.shadow.epoch != epoch:
            self.shadow.apply(self.publisher.beginning)
        events = self.publisher.events_since(epoch, self.shadow.sequence)
        assert events == self.expected_since(epoch, self.shadow.sequence)
        if events is None:
            snapshot = self.publisher.open_snapshot()
            for part in read_out(snapshot):
                self.shadow.load(part)
            assert not snapshot.void
        for event in events or ():
            assert self.shadow.apply(event) is ViewResult.APPLIED

    @invariant()
    def every_view_is_a_moment_of_the_past(self) -> None:
        for follower in self.followers:
            view = follower.view
            view.check_invariants()
            if view.epoch is not None and (view.epoch, view.sequence) in self.history:
                assert sets_of(view) == self.history[view.epoch, view.sequence]


def blocks_of(events: list[Event]) -> int:
    return sum(len(event.fingerprints) for event in events if not isinstance(event, Cleared))


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


@pytest.mark.slow
def test_any_order_of_operations_agrees_with_plain_sets() -> None:
    """The same examples each time, so that a change of the code is the only thing that can fail."""
    run_machine(examples=100, steps=50, repeatable=True)


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_orders_of_operations_agree_with_plain_sets() -> None:
    """Many, and others each time."""
    run_machine(examples=2000, steps=50, repeatable=False)
