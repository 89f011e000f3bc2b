"""The publisher's rules one by one: what is announced and what not, numbers, epochs, digests, snapshots, bounds."""

import gc
from collections import Counter
from collections.abc import Callable

import pytest

from prefixmesh.cache.events import Cleared, Removed, SnapshotPart, Stored, TierState
from prefixmesh.cache.publisher import BACKLOG, BACKLOG_BLOCKS, MAX_SNAPSHOTS, CachePublisher
from prefixmesh.cache.sharded_blocks import SHARD_SHIFT, SHARDS
from prefixmesh.cache.snapshot import Snapshot
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import InvariantError, OverloadedError
from prefixmesh.ids import Epoch, Fingerprint
from tests.support.naive_publisher import ALPHABET, EPOCHS, Names, make_publisher, read_out

DEVICE, HOST = Tier.DEVICE, Tier.HOST
A, B, C, D, E, F = ALPHABET[:6]
FIRST, SECOND = EPOCHS[:2]


def publisher_with(*device: Fingerprint, host: Names = ()) -> CachePublisher:
    publisher = make_publisher()
    publisher.stored(DEVICE, None, device)
    publisher.stored(HOST, None, host)
    return publisher


def content(parts: list[SnapshotPart], tier: Tier) -> list[Fingerprint]:
    return sorted(name for part in parts if part.tier == tier for name in part.fingerprints)


def spread(count: int, first: int = 0) -> Names:
    """Names all over the shards, several in each when there are more than shards."""
    return tuple(
        Fingerprint(((number % SHARDS) << SHARD_SHIFT) + number) for number in range(first, first + count)
    )


# --- numbers and epochs ---


def test_the_first_life_begins_like_a_flush() -> None:
    """Sequence 0 of an epoch of its own, nothing on any tier."""
    publisher = make_publisher()
    assert (publisher.epoch, publisher.sequence) == (FIRST, 0)
    assert publisher.beginning == Cleared(FIRST, 0)
    assert publisher.events_since(FIRST, 0) == []
    assert publisher.summary() == (FIRST, 0, (TierState(0, 0), TierState(0, 0)))


def test_events_are_numbered_one_by_one_from_one() -> None:
    publisher = make_publisher()
    publisher.stored(DEVICE, None, (A, B))
    publisher.stored(HOST, B, [C])
    publisher.removed(DEVICE, [B, A])
    assert publisher.sequence == 3
    assert publisher.events_since(FIRST, 0) == [
        Stored(FIRST, 1, DEVICE, None, (A, B)),
        Stored(FIRST, 2, HOST, B, (C,)),
        Removed(FIRST, 3, DEVICE, (B, A)),
    ]
    assert publisher.events_since(FIRST, 2) == [Removed(FIRST, 3, DEVICE, (B, A))]


def test_a_flush_begins_a_new_epoch_at_nought() -> None:
    publisher = publisher_with(A, B, host=(C,))
    publisher.cleared()
    assert publisher.beginning == Cleared(SECOND, 0)
    assert publisher.summary() == (SECOND, 0, (TierState(0, 0), TierState(0, 0)))
    assert publisher.events_since(FIRST, 2) is None
    publisher.stored(DEVICE, None, (A,))
    assert publisher.events_since(SECOND, 0) == [Stored(SECOND, 1, DEVICE, None, (A,))]
    publisher.check_invariants()


def test_every_life_draws_its_own_epoch() -> None:
    """Chance is an argument: one draw for each life."""
    publisher = make_publisher()
    seen = [publisher.epoch]
    for _ in range(5):
        publisher.cleared()
        seen.append(publisher.epoch)
    assert tuple(seen) == EPOCHS[:6]


def test_nothing_told_is_nothing_announced() -> None:
    publisher = make_publisher()
    publisher.stored(DEVICE, A, ())
    publisher.removed(DEVICE, [])
    assert publisher.sequence == 0


def test_what_was_told_is_kept_though_the_teller_changes_it() -> None:
    """A sequence of the caller's that goes on changing does not change the past."""
    publisher = make_publisher()
    names = [A, B]
    publisher.stored(DEVICE, None, names)
    names.clear()
    assert publisher.events_since(FIRST, 0) == [Stored(FIRST, 1, DEVICE, None, (A, B))]


# --- counts, digests, tiers ---


def test_count_and_digest_are_those_of_the_names_on_the_tier() -> None:
    publisher = publisher_with(A, B, C, host=(A, D))
    assert publisher.state(DEVICE) == TierState(3, A ^ B ^ C)
    assert publisher.state(HOST) == TierState(2, A ^ D)
    publisher.removed(DEVICE, (A, C))
    assert publisher.state(DEVICE) == TierState(1, B)
    assert publisher.state(HOST) == TierState(2, A ^ D)
    publisher.removed(HOST, (D, A))
    assert publisher.summary().states == (TierState(1, B), TierState(0, 0))


# --- one name for two blocks ---


def test_a_name_that_is_there_already_is_not_announced_again() -> None:
    publisher = publisher_with(A, B)
    before = publisher.summary()
    publisher.stored(DEVICE, None, (A, B))
    assert publisher.summary() == before


def test_a_name_goes_with_the_last_block_that_has_it() -> None:
    """Otherwise the other block's name would be gone from every view, though the block is there."""
    publisher = publisher_with(A, B)
    publisher.stored(DEVICE, C, (A,))
    publisher.removed(DEVICE, (A,))
    assert publisher.state(DEVICE) == TierState(2, A ^ B)
    assert publisher.sequence == 1
    publisher.removed(DEVICE, (A, B))
    assert publisher.events_since(FIRST, 1) == [Removed(FIRST, 2, DEVICE, (A, B))]
    publisher.check_invariants()


@pytest.mark.parametrize("together", [False, True])
def test_any_number_of_blocks_may_have_one_name(together: bool) -> None:
    """Told one by one or in one chain, the name goes with the last of them."""
    publisher = make_publisher()
    for chain in [(A,) * 5] if together else [(A,)] * 5:
        publisher.stored(DEVICE, None, chain)
    for _ in range(4):
        publisher.removed(DEVICE, (A,))
        assert publisher.summary() == (FIRST, 1, (TierState(1, A), TierState(0, 0)))
    publisher.removed(DEVICE, (A,))
    assert publisher.summary() == (FIRST, 2, (TierState(0, 0), TierState(0, 0)))


def test_a_removal_announces_only_the_names_that_are_gone() -> None:
    publisher = publisher_with(A, B, C)
    publisher.stored(DEVICE, None, (B,))
    publisher.removed(DEVICE, (A, B, C))
    assert publisher.events_since(FIRST, 1) == [Removed(FIRST, 2, DEVICE, (A, C))]
    assert publisher.state(DEVICE) == TierState(1, B)


@pytest.mark.parametrize(
    ("present", "chain", "runs"),
    [
        ((A,), (A, B, C), [(A, (B, C))]),
        ((C,), (A, B, C), [(F, (A, B))]),
        ((B,), (A, B, C), [(F, (A,)), (B, (C,))]),
        ((A, B), (A, B, C), [(B, (C,))]),
        ((A, C, E), (A, B, C, D, E), [(A, (B,)), (C, (D,))]),
        ((), (A, B, A, C), [(F, (A, B)), (A, (C,))]),
        ((), (A, A), [(F, (A,))]),
        ((A, B), (B, A), []),
    ],
)
def test_a_chain_around_a_known_name_becomes_the_chains_beside_it(
    present: Names, chain: Names, runs: list[tuple[Fingerprint, Names]]
) -> None:
    """Each event is still a chain, and names the block before it."""
    publisher = publisher_with(*present)
    start = publisher.sequence
    publisher.stored(DEVICE, F, chain)
    assert publisher.events_since(FIRST, start) == [
        Stored(FIRST, start + number, DEVICE, parent, names) for number, (parent, names) in enumerate(runs, 1)
    ]
    publisher.check_invariants()
    publisher.removed(DEVICE, chain)
    publisher.removed(DEVICE, present)
    assert publisher.state(DEVICE) == TierState(0, 0)


def test_equal_names_on_two_tiers_are_two_matters() -> None:
    publisher = publisher_with(A, host=(A,))
    assert publisher.sequence == 2
    publisher.removed(DEVICE, (A,))
    assert publisher.summary().states == (TierState(0, 0), TierState(1, A))


@pytest.mark.parametrize("chain", [(F,), (A, F), (F, A), (A, B, A, F), (A, A, A), (B, C, C)])
def test_a_block_that_was_never_told_cannot_be_removed(chain: Names) -> None:
    """The cache's mistake is counted; what it told rightly beside it has gone, and the other tier is as it was."""
    publisher = publisher_with(A, B, C, host=(F,))
    publisher.stored(DEVICE, None, (A,))
    left = Counter({A: 2, B: 1, C: 1}) - Counter(chain)
    publisher.removed(DEVICE, chain)
    assert publisher.state(DEVICE).count == len(left)
    assert publisher.state(Tier.HOST) == TierState(1, F)
    assert publisher.unknown_removals == 1
    with pytest.raises(InvariantError, match="never told"):
        publisher.check_invariants()
    publisher.removed(DEVICE, tuple(left.elements()))
    assert publisher.state(DEVICE) == TierState(0, 0)


def test_what_was_told_is_in_the_books_whenever_they_are_read() -> None:
    """The calls of the cache only note; however many, no more than the bound is ever outstanding."""
    publisher = make_publisher()
    for number in range(3 * BACKLOG // 2):
        publisher.stored(DEVICE, None, (Fingerprint(number),))
        assert len(publisher._backlog) < BACKLOG
    assert publisher.state(DEVICE).count == publisher.sequence == 3 * BACKLOG // 2
    assert not publisher._backlog


def test_long_chains_do_not_wait_in_their_hundreds() -> None:
    """The bound is of blocks too, or one call would do what was put off for hundreds of long prompts."""
    publisher = make_publisher()
    for prompt in range(8):
        publisher.stored(DEVICE, None, tuple(map(Fingerprint, range(prompt * 1000, prompt * 1000 + 1000))))
        assert sum(len(names) for _, _, names in publisher._backlog) < BACKLOG_BLOCKS
    assert publisher.state(DEVICE).count == 8000


# --- the log's bounds ---


def test_a_reader_too_far_behind_is_sent_to_a_snapshot() -> None:
    publisher = make_publisher(log_events=2)
    for name in (A, B, C):
        publisher.stored(DEVICE, None, (name,))
    assert publisher.events_since(FIRST, 0) is None
    assert publisher.events_since(FIRST, 1) is not None
    assert publisher.events_since(FIRST, 4) is None
    assert publisher.events_since(SECOND, 0) is None


def test_the_log_is_bounded_by_blocks_too() -> None:
    publisher = make_publisher(log_blocks=3)
    publisher.stored(DEVICE, None, (A, B))
    publisher.stored(DEVICE, B, (C, D))
    assert publisher.events_since(FIRST, 0) is None
    assert publisher.events_since(FIRST, 1) == [Stored(FIRST, 2, DEVICE, B, (C, D))]


def test_the_log_without_bounds_given_is_bounded() -> None:
    publisher = CachePublisher(lambda: FIRST)
    for _ in range(10_000):
        publisher.stored(DEVICE, None, (A,))
        publisher.removed(DEVICE, (A,))
    assert publisher.events_since(FIRST, 0) is None
    publisher.check_invariants()


# --- snapshots ---


def test_the_parts_together_are_every_tier() -> None:
    publisher = publisher_with(A, B, C, host=(A, D))
    snapshot = publisher.open_snapshot()
    assert snapshot.summary == publisher.summary()
    parts = read_out(snapshot)
    assert content(parts, DEVICE) == sorted([A, B, C])
    assert content(parts, HOST) == sorted([A, D])
    assert [len(part.fingerprints) for part in parts] == [2, 1, 2]
    assert [part.last for part in parts] == [False, False, True]
    assert {part[:2] for part in parts} == {(FIRST, 2)}
    assert not snapshot.void
    assert snapshot.closed


def test_an_empty_cache_has_one_part_which_is_the_last() -> None:
    publisher = make_publisher()
    snapshot = publisher.open_snapshot()
    assert read_out(snapshot) == [SnapshotPart(FIRST, 0, DEVICE, (), True)]


def test_a_name_of_two_blocks_is_once_in_a_snapshot() -> None:
    publisher = publisher_with(A, B)
    publisher.stored(DEVICE, None, (A,))
    assert content(read_out(publisher.open_snapshot()), DEVICE) == sorted([A, B])


@pytest.mark.parametrize("max_blocks", [1, 2, 3, 1000])
@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_a_snapshot_is_of_the_moment_it_was_opened_whatever_happens(max_blocks: int, taken: int) -> None:
    """Stores, removals and a second copy, in shards that were read and in shards that were not."""
    publisher = publisher_with(A, B, C, E, host=(B, F))
    snapshot = publisher.open_snapshot()
    parts = [part for _ in range(taken) if (part := snapshot.next_part(max_blocks)) is not None]
    publisher.removed(DEVICE, (A, E))
    publisher.stored(DEVICE, None, (D, F, A))
    publisher.stored(DEVICE, None, (C,))
    publisher.removed(HOST, (B, F))
    publisher.stored(HOST, None, (A, C))
    publisher.check_invariants()
    parts += read_out(snapshot, max_blocks)
    assert content(parts, DEVICE) == sorted([A, B, C, E])
    assert content(parts, HOST) == sorted([B, F])
    assert publisher.summary().states == (TierState(5, A ^ B ^ C ^ D ^ F), TierState(2, A ^ C))


def test_what_fails_to_be_removed_does_not_show_in_a_snapshot() -> None:
    """The put-back after a refused removal changes a shard of its own too."""
    publisher = publisher_with(A, B)
    publisher.stored(DEVICE, None, (A,))
    snapshot = publisher.open_snapshot()
    publisher.removed(DEVICE, (B, A, F))
    publisher.catch_up()
    assert publisher.unknown_removals == 1
    assert content(read_out(snapshot), DEVICE) == sorted([A, B])


def test_several_snapshots_are_each_of_their_own_moment() -> None:
    publisher = make_publisher()
    snapshots = []
    for name in (A, B, C):
        snapshots.append(publisher.open_snapshot())
        publisher.stored(DEVICE, None, (name,))
    publisher.check_invariants()
    parts: list[list[SnapshotPart]] = [[], [], []]
    for _ in range(3):
        for mine, snapshot in zip(parts, snapshots, strict=True):
            mine.extend(part for part in [snapshot.next_part(1)] if part is not None)
            publisher.stored(DEVICE, None, (D,))
            publisher.catch_up()
            publisher.removed(DEVICE, (D,))
            publisher.catch_up()
    assert [content(mine, DEVICE) for mine in parts] == [[], [A], [A, B]]


def test_a_later_snapshot_that_ends_takes_no_protection_from_an_earlier_one() -> None:
    """Each holds what it has still to read, whoever else has opened and closed since."""
    publisher = publisher_with(A, C, F)
    first, second = publisher.open_snapshot(), publisher.open_snapshot()
    second.close()
    publisher.stored(DEVICE, None, (B, D, E))
    publisher.catch_up()
    assert content(read_out(first), DEVICE) == sorted([A, C, F])


def test_two_snapshots_of_an_empty_cache_stay_empty() -> None:
    """What has nothing to read holds no shard, and so must never look into one."""
    publisher = make_publisher()
    first, second = publisher.open_snapshot(), publisher.open_snapshot()
    publisher.stored(DEVICE, None, (A,))
    publisher.catch_up()
    assert [part.fingerprints for part in read_out(first)] == [()]
    assert [part.fingerprints for part in read_out(second)] == [()]


def test_a_snapshot_of_many_shards_is_exact_while_all_of_them_change() -> None:
    publisher = make_publisher()
    before = spread(3 * SHARDS)
    publisher.stored(DEVICE, None, before)
    snapshot = publisher.open_snapshot()
    parts = []
    step = 64
    for start in range(0, len(before), step):
        part = snapshot.next_part(step)
        assert part is not None
        parts.append(part)
        publisher.removed(DEVICE, before[start : start + step])
        publisher.stored(DEVICE, None, spread(step, first=len(before) + start))
        publisher.catch_up()
    assert content(parts, DEVICE) == sorted(before)
    assert parts[-1].last
    assert publisher.state(DEVICE).count == len(before)
    publisher.check_invariants()


def test_a_flush_makes_open_snapshots_void() -> None:
    """What they had still to tell is of a life that is over; their readers open another."""
    publisher = publisher_with(A, B, C)
    half, fresh, done = publisher.open_snapshot(), publisher.open_snapshot(), publisher.open_snapshot()
    half.next_part(1)
    read_out(done)
    publisher.cleared()
    assert half.void
    assert fresh.void
    assert half.next_part(1) is None
    assert fresh.next_part(1) is None
    assert not done.void
    publisher.stored(DEVICE, None, (D,))
    assert content(read_out(publisher.open_snapshot()), DEVICE) == [D]


def test_a_part_has_at_least_one_block() -> None:
    snapshot = publisher_with(A).open_snapshot()
    with pytest.raises(AssertionError):
        snapshot.next_part(0)


# --- what snapshots cost, and for how long ---


def close_it(snapshots: list[Snapshot]) -> None:
    snapshots[0].close()
    snapshots[0].close()


def read_it(snapshots: list[Snapshot]) -> None:
    read_out(snapshots[0])


def drop_it(snapshots: list[Snapshot]) -> None:
    snapshots.clear()


@pytest.mark.parametrize("end", [close_it, read_it, drop_it])
def test_nothing_is_copied_for_a_snapshot_that_has_ended(end: Callable[[list[Snapshot]], None]) -> None:
    """Closed, read to its end, or simply let go of: the shards are the cache's own again."""
    publisher = publisher_with(A, B, E)
    shards = publisher._blocks[DEVICE]._shards
    snapshots = [publisher.open_snapshot()]
    own = shards[0]
    end(snapshots)
    publisher.stored(DEVICE, None, (Fingerprint(77),))
    publisher.catch_up()
    assert shards[0] is own
    assert "snapshots=0" in repr(publisher)


def test_a_shard_is_copied_once_and_only_while_it_is_still_to_be_read() -> None:
    publisher = publisher_with(A, E)
    shards = publisher._blocks[DEVICE]._shards
    snapshot = publisher.open_snapshot()
    first, last = shards[0], shards[E >> SHARD_SHIFT]
    assert snapshot.next_part(1) is not None, "it reads from the last shard on"
    publisher.stored(DEVICE, None, (Fingerprint(E + 1), B))
    publisher.catch_up()
    assert shards[E >> SHARD_SHIFT] is last, "read already: changed in place"
    assert shards[0] is not first, "still to be read: a copy"
    copied = shards[0]
    publisher.stored(DEVICE, None, (Fingerprint(77),))
    publisher.catch_up()
    assert shards[0] is copied, "a copy already"
    assert content(read_out(snapshot), DEVICE) == [A]


def test_one_snapshot_too_many_is_refused() -> None:
    publisher = publisher_with(A, B)
    snapshots = [publisher.open_snapshot() for _ in range(3)]
    with pytest.raises(OverloadedError, match="3 snapshots"):
        publisher.open_snapshot()
    assert [snapshot.void for snapshot in snapshots] == [False] * 3
    snapshots[1].close()
    publisher.open_snapshot()
    publisher.check_invariants()


def test_an_abandoned_snapshot_makes_room_at_the_next_attempt() -> None:
    """The refusal is the notice: the oldest that has not been read from since then is void."""
    publisher = publisher_with(A, B, C)
    snapshots = [publisher.open_snapshot() for _ in range(3)]
    with pytest.raises(OverloadedError):
        publisher.open_snapshot()
    snapshots[0].next_part(1)
    newcomer = publisher.open_snapshot()
    assert [snapshot.void for snapshot in snapshots] == [False, True, False]
    assert snapshots[1].next_part(1) is None
    assert content(read_out(newcomer), DEVICE) == sorted([A, B, C])


def test_readers_that_go_on_reading_are_never_pushed_out() -> None:
    publisher = publisher_with(*spread(100))
    snapshots = [publisher.open_snapshot() for _ in range(3)]
    for _ in range(20):
        with pytest.raises(OverloadedError):
            publisher.open_snapshot()
        for snapshot in snapshots:
            snapshot.next_part(1)
    assert not any(snapshot.void for snapshot in snapshots)


def test_there_is_a_bound_when_none_is_given() -> None:
    publisher = CachePublisher(lambda: FIRST)
    snapshots = [publisher.open_snapshot() for _ in range(MAX_SNAPSHOTS)]
    with pytest.raises(OverloadedError):
        publisher.open_snapshot()
    assert len(snapshots) == MAX_SNAPSHOTS


def test_the_books_are_no_work_for_the_garbage_collector() -> None:
    """A full collection walks through every set there is; it passes over dicts of plain numbers, copies of them included."""
    publisher = publisher_with(A, B, C)
    snapshot = publisher.open_snapshot()
    publisher.stored(DEVICE, None, (D, Fingerprint(77)))
    publisher.catch_up()
    gc.collect()
    gc.collect()
    assert not any(gc.is_tracked(shard) for shard in publisher._blocks[DEVICE]._shards)
    assert not any(gc.is_tracked(record) for record in publisher._log._records)
    snapshot.close()


# --- showing and checking ---


def test_it_shows_itself_in_one_line() -> None:
    publisher = publisher_with(A, B, C, host=(D,))
    snapshot = publisher.open_snapshot()
    assert repr(publisher) == (
        "CachePublisher(epoch=0000000000000001, sequence=2, device=3, host=1, log=2, snapshots=1)"
    )
    assert repr(snapshot) == "Snapshot(open, epoch=0000000000000001, sequence=2, left: device=3, host=1)"
    snapshot.next_part(2)
    assert repr(snapshot) == "Snapshot(open, epoch=0000000000000001, sequence=2, left: device=1, host=1)"
    publisher.cleared()
    assert repr(snapshot) == "Snapshot(void, epoch=0000000000000001, sequence=2, left: device=0, host=0)"
    closed = publisher.open_snapshot()
    closed.close()
    assert repr(closed) == f"Snapshot(closed, epoch={SECOND:016x}, sequence=0, left: device=0, host=0)"


def break_count(publisher: CachePublisher) -> None:
    publisher._blocks[DEVICE].count += 1


def break_digest(publisher: CachePublisher) -> None:
    publisher._blocks[DEVICE].digest ^= 1


def break_copies(publisher: CachePublisher) -> None:
    publisher._blocks[DEVICE]._shards[0][A] = 0


def break_shard(publisher: CachePublisher) -> None:
    shards = publisher._blocks[DEVICE]._shards
    shards[5][A] = shards[0].pop(A)


def break_writable(publisher: CachePublisher) -> None:
    publisher._blocks[DEVICE]._writable[0] = {}


def break_copy_on_write(publisher: CachePublisher) -> None:
    blocks = publisher._blocks[DEVICE]
    blocks._writable[0] = blocks._shards[0]


def break_log(publisher: CachePublisher) -> None:
    publisher._log._blocks += 1


def break_bound(publisher: CachePublisher) -> None:
    publisher._max_snapshots = 0


@pytest.mark.parametrize(
    "break_it",
    [
        break_count,
        break_digest,
        break_copies,
        break_shard,
        break_writable,
        break_copy_on_write,
        break_log,
        break_bound,
    ],
)
def test_the_check_sees_what_is_wrong(break_it: Callable[[CachePublisher], None]) -> None:
    """Each rule of the books, broken by hand; the error shows the state."""
    publisher = publisher_with(A, B, E, host=(A,))
    snapshot = publisher.open_snapshot()
    publisher.check_invariants()
    break_it(publisher)
    with pytest.raises(InvariantError, match=r"count=|sequence="):
        publisher.check_invariants()
    snapshot.close()


def test_an_epoch_may_be_any_64_bit_number() -> None:
    publisher = CachePublisher(lambda: Epoch(2**64 - 1))
    publisher.stored(DEVICE, None, (Fingerprint(2**64 - 1), Fingerprint(0)))
    assert publisher.state(DEVICE) == TierState(2, 2**64 - 1)
    assert repr(publisher).startswith("CachePublisher(epoch=ffffffffffffffff, ")
