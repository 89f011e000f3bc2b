"""A view of a cache: what it makes of events and snapshot parts that come, are lost, repeated, or of another life."""

import pytest

from prefixmesh.cache.events import CacheSummary, Cleared, Removed, SnapshotPart, Stored, TierState
from prefixmesh.cache.tier import Tier
from prefixmesh.cache.view import CacheView, ViewResult
from prefixmesh.errors import InvariantError
from tests.support.naive_publisher import ALPHABET, EPOCHS, make_publisher, read_out

DEVICE, HOST = Tier.DEVICE, Tier.HOST
A, B, C, D = ALPHABET[:4]
FIRST, SECOND = EPOCHS[:2]


def view_with_two() -> CacheView:
    view = CacheView()
    view.apply(Cleared(FIRST, 0))
    view.apply(Stored(FIRST, 1, DEVICE, None, (A, B)))
    view.apply(Stored(FIRST, 2, HOST, None, (A,)))
    return view


def test_a_new_view_waits_for_a_beginning() -> None:
    view = CacheView()
    assert view.apply(Stored(FIRST, 1, DEVICE, None, (A,))) is ViewResult.OTHER_EPOCH
    assert view.epoch is None
    assert repr(view) == "CacheView(epoch=none, sequence=0, device=0, host=0)"
    assert view.apply(Cleared(FIRST, 0)) is ViewResult.APPLIED
    assert view.apply(Stored(FIRST, 1, DEVICE, None, (A,))) is ViewResult.APPLIED
    assert repr(view) == "CacheView(epoch=0000000000000001, sequence=1, device=1, host=0)"


def test_events_in_order_are_applied() -> None:
    view = view_with_two()
    assert view.blocks(DEVICE) == {A, B}
    assert view.blocks(HOST) == {A}
    assert view.apply(Removed(FIRST, 3, DEVICE, (A,))) is ViewResult.APPLIED
    assert view.blocks(DEVICE) == {B}
    assert view.state(DEVICE) == TierState(1, B)
    assert view.state(HOST) == TierState(1, A)
    assert view.sequence == 3
    view.check_invariants()


@pytest.mark.parametrize(
    ("event", "result"),
    [
        (Stored(FIRST, 2, DEVICE, None, (C,)), ViewResult.DUPLICATE),
        (Removed(FIRST, 1, DEVICE, (A,)), ViewResult.DUPLICATE),
        (Cleared(FIRST, 0), ViewResult.DUPLICATE),
        (Stored(FIRST, 4, DEVICE, None, (C,)), ViewResult.GAP),
        (Removed(FIRST, 9, DEVICE, (A,)), ViewResult.GAP),
        (Stored(SECOND, 3, DEVICE, None, (C,)), ViewResult.OTHER_EPOCH),
        (Removed(SECOND, 1, DEVICE, (A,)), ViewResult.OTHER_EPOCH),
    ],
)
def test_what_does_not_follow_changes_nothing(event: Stored | Removed | Cleared, result: ViewResult) -> None:
    view = view_with_two()
    assert view.apply(event) is result
    assert (view.epoch, view.sequence) == (FIRST, 2)
    assert (view.blocks(DEVICE), view.blocks(HOST)) == ({A, B}, {A})
    assert view.agrees(CacheSummary(FIRST, 2, (TierState(2, A ^ B), TierState(1, A))))


def test_a_new_epoch_empties_the_view() -> None:
    view = view_with_two()
    assert view.apply(Cleared(SECOND, 0)) is ViewResult.APPLIED
    assert view.agrees(CacheSummary(SECOND, 0, (TierState(0, 0), TierState(0, 0))))
    assert not view.blocks(DEVICE) | view.blocks(HOST)
    assert view.apply(Stored(FIRST, 3, DEVICE, None, (C,))) is ViewResult.OTHER_EPOCH


def test_a_snapshot_shows_only_when_it_is_whole() -> None:
    view = view_with_two()
    assert not view.load(SnapshotPart(SECOND, 7, DEVICE, (C,), False))
    assert (view.epoch, view.sequence, view.blocks(DEVICE)) == (FIRST, 2, {A, B})
    assert view.load(SnapshotPart(SECOND, 7, HOST, (D,), True))
    assert (view.epoch, view.sequence) == (SECOND, 7)
    assert (view.blocks(DEVICE), view.blocks(HOST)) == ({C}, {D})
    assert view.agrees(CacheSummary(SECOND, 7, (TierState(1, C), TierState(1, D))))
    assert view.apply(Stored(SECOND, 7, DEVICE, None, (A,))) is ViewResult.DUPLICATE
    assert view.apply(Stored(SECOND, 8, DEVICE, None, (A,))) is ViewResult.APPLIED


def test_a_snapshot_cut_short_leaves_nothing_in_the_next() -> None:
    view = CacheView()
    view.load(SnapshotPart(FIRST, 7, DEVICE, (A,), False))
    assert view.load(SnapshotPart(FIRST, 9, DEVICE, (B,), True))
    assert view.blocks(DEVICE) == {B}
    assert view.load(SnapshotPart(SECOND, 9, DEVICE, (C,), True))
    assert view.blocks(DEVICE) == {C}


def test_a_flush_between_two_parts_does_not_lose_the_first() -> None:
    """The stream may tell of the new epoch while a snapshot of that epoch is on its way."""
    view = view_with_two()
    view.load(SnapshotPart(SECOND, 3, DEVICE, (C,), False))
    assert view.apply(Cleared(SECOND, 0)) is ViewResult.APPLIED
    assert view.load(SnapshotPart(SECOND, 3, DEVICE, (D,), True))
    assert view.blocks(DEVICE) == {C, D}


def test_a_snapshot_that_comes_again_is_the_same_snapshot() -> None:
    """Nothing of what has come after it, and was counted in meanwhile, gets into it."""
    view = CacheView()
    view.load(SnapshotPart(FIRST, 7, DEVICE, (A,), True))
    view.apply(Stored(FIRST, 8, DEVICE, None, (B,)))
    assert view.load(SnapshotPart(FIRST, 7, DEVICE, (A,), True))
    assert (view.sequence, view.blocks(DEVICE)) == (7, {A})


def test_a_lost_event_shows_in_the_digest() -> None:
    """Count and digest are reckoned from the stream, so they prove the stream as well as the sets."""
    view = view_with_two()
    assert not view.agrees(CacheSummary(FIRST, 2, (TierState(2, A ^ C), TierState(1, A))))
    assert not view.agrees(CacheSummary(FIRST, 2, (TierState(2, A ^ B), TierState(2, A))))
    assert not view.agrees(CacheSummary(FIRST, 3, (TierState(2, A ^ B), TierState(1, A))))
    assert not view.agrees(CacheSummary(SECOND, 2, (TierState(2, A ^ B), TierState(1, A))))


def test_the_check_sees_a_stream_that_tells_a_block_twice() -> None:
    """A plain set swallows the second; the count does not."""
    view = view_with_two()
    view.apply(Stored(FIRST, 3, DEVICE, B, (A,)))
    with pytest.raises(InvariantError, match="DEVICE"):
        view.check_invariants()


def test_a_view_follows_a_publisher_over_gaps_and_flushes() -> None:
    """The whole protocol: events while the log reaches, a snapshot when it does not, the beginning after a flush."""
    publisher, view = make_publisher(log_events=2), CacheView()
    publisher.stored(DEVICE, None, (A, B))
    snapshot = publisher.open_snapshot()
    publisher.removed(DEVICE, (A,))
    for part in read_out(snapshot, max_blocks=1):
        view.load(part)
    assert view.agrees(snapshot.summary)
    for event in publisher.events_since(FIRST, view.sequence) or ():
        assert view.apply(event) is ViewResult.APPLIED
    assert view.agrees(publisher.summary())
    publisher.cleared()
    publisher.stored(HOST, None, (C,))
    assert publisher.events_since(FIRST, view.sequence) is None
    assert view.apply(publisher.beginning) is ViewResult.APPLIED
    for event in publisher.events_since(SECOND, 0) or ():
        assert view.apply(event) is ViewResult.APPLIED
    assert view.agrees(publisher.summary())
    assert view.blocks(HOST) == {C}
