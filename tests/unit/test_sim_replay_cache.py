"""The replay's cache of blocks: what is found, what goes, and what is told of it."""

from random import Random

from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Fingerprint
from prefixmesh.sim.replay_cache import BlockCache, Change, unit_blocks


def prompt(*names: int) -> list[Fingerprint]:
    return [Fingerprint(name) for name in names]


def test_leading_blocks_are_found_and_nothing_beyond_the_first_that_lacks() -> None:
    cache = BlockCache(10)
    cache.use(prompt(1, 2, 3))
    assert cache.held(prompt(1, 2, 9, 3)) == (2, 2)
    assert cache.held(prompt(9, 1, 2)) == (0, 0)
    assert cache.held([]) == (0, 0)


def test_ends_go_before_beginnings_and_old_before_new() -> None:
    cache = BlockCache(5)
    cache.use(prompt(1, 2, 3))
    cache.use(prompt(1, 7))
    (change,) = cache.use(prompt(8, 9))
    assert (change.came, change.went) == (prompt(8, 9), prompt(3))
    assert cache.held(prompt(1, 2, 3)) == (2, 2)


def test_beginning_that_is_used_again_is_still_the_last_of_its_prompt_to_go() -> None:
    cache = BlockCache(3)
    cache.use(prompt(1, 2, 3))
    cache.use(prompt(1, 2, 3))
    (change,) = cache.use(prompt(8))
    assert change.went == prompt(3)
    assert cache.held(prompt(1, 2, 3)) == (2, 2)


def test_what_is_used_again_is_new_again_and_tells_nothing() -> None:
    cache = BlockCache(3)
    cache.use(prompt(1))
    cache.use(prompt(2))
    assert cache.use(prompt(1)) == []
    cache.use(prompt(3, 4))
    assert cache.held(prompt(1)) == (1, 1)
    assert cache.held(prompt(2)) == (0, 0)


def test_prompt_longer_than_the_cache_leaves_its_beginning() -> None:
    cache = BlockCache(2)
    (change,) = cache.use(prompt(1, 2, 3))
    assert change.came == prompt(1, 2)
    assert cache.held(prompt(1, 2, 3)) == (2, 2)


def test_host_keeps_what_the_device_gave_up() -> None:
    cache = BlockCache(2, 6)
    cache.use(prompt(1, 2))
    cache.use(prompt(3, 4))
    assert cache.held(prompt(1, 2)) == (0, 2)
    assert cache.held(prompt(3, 4, 5)) == (2, 2)
    cache.use(prompt(1))
    assert cache.held(prompt(1, 2)) == (1, 2)
    cache.use(prompt(5, 6, 7))
    assert cache.held(prompt(1, 2)) == (0, 1)


def test_block_that_is_coming_counts_as_on_the_device() -> None:
    cache = BlockCache(4, 8)
    cache.use(prompt(1, 2, 3))
    assert cache.held(prompt(1, 2, 5, 6), {Fingerprint(5)}) == (3, 3)


def test_events_and_sums_are_those_of_the_blocks_that_are_there() -> None:
    """Whatever is used, replaying what was told gives the tiers' blocks, chains are told whole, and beginnings outlive their ends."""
    rng = Random(0)
    cache, told = BlockCache(12, 30), {Tier.DEVICE: set[int](), Tier.HOST: set[int]()}
    for _ in range(500):
        path = prompt(*(rng.randrange(3) + 10 * depth + 1000 for depth in range(rng.randrange(1, 9))))
        chained = prompt(*(hash((depth, *path[:depth])) & 0xFFFF_FFFF for depth in range(1, len(path) + 1)))
        for change in cache.use(chained):
            there = told[change.tier]
            assert change.parent is None or change.parent in there
            assert list(change.came) == chained[len(chained) - len(change.came) :]
            assert not there.intersection(change.came)
            there.update(change.came)
            assert there.issuperset(change.went)
            there.difference_update(change.went)
        for tier, there in told.items():
            state = cache.state(tier)
            digest = 0
            for name in there:
                digest ^= name
            assert (state.count, state.digest) == (len(there), digest)
        assert set(cache.names()) == told[Tier.DEVICE] <= told[Tier.HOST]
        assert len(cache) <= 12
        assert len(told[Tier.HOST]) <= 30
        assert cache.held(chained).device == len(chained)


def test_what_runs_takes_room_and_does_not_go() -> None:
    cache = BlockCache(6)
    cache.use(prompt(1, 2, 3, 4))
    assert cache.begin(prompt(1, 2), 3) is not None
    assert (cache.used_blocks, cache.free_blocks) == (5, 0)
    assert cache.held(prompt(1, 2, 3, 4)) == (3, 3)
    assert cache.begin(prompt(3), 1) is None, "what it holds would be in the way of what it needs"
    assert cache.begin((), 2) is None
    assert (cache.used_blocks, cache.free_blocks) == (5, 0)


def test_computed_blocks_are_shared_at_once_and_may_go_when_nobody_uses_them() -> None:
    cache = BlockCache(6)
    assert cache.begin((), 4) == []
    assert cache.begin((), 2) == []
    locked, (change,) = cache.leave(prompt(1, 2, 3), 0)
    assert (locked, change.came, cache.used_blocks) == (3, prompt(1, 2, 3), 6)
    assert cache.leave(prompt(1, 2), 0) == (2, [])
    assert (cache.used_blocks, cache.free_blocks) == (4, 2), "computed side by side, there once"
    cache.end(prompt(1, 2), 0)
    assert cache.used_blocks == 4
    cache.end(prompt(1, 2, 3), 1)
    assert (cache.used_blocks, cache.free_blocks, len(cache)) == (0, 3, 3)
    assert cache.begin((), 4) is not None
    assert cache.held(prompt(1, 2, 3)) == (2, 2), "an end goes first"


def test_hash_shares_whole_units_and_off_nothing() -> None:
    table, none = BlockCache(20, kind="hash", unit=4), BlockCache(20, kind="off")
    for cache in (table, none):
        assert cache.begin((), 8) == []
        locked, _ = cache.leave(prompt(*range(7)), 0)
        assert cache.used_blocks == 8
        cache.end(prompt(*range(locked)), 8 - locked)
        assert cache.used_blocks == 0
    assert table.held(prompt(*range(9))) == (4, 4)
    assert table.held(prompt(*range(3))) == (0, 0)
    assert (none.held(prompt(*range(9))), len(none)) == ((0, 0), 0)
    assert table.held(prompt(*range(9)), prompt(4, 5, 6, 7)) == (8, 8)


def test_unit_is_that_of_the_table_where_a_workloads_blocks_are_smaller() -> None:
    assert [unit_blocks("hash", size) for size in (1, 4, 16, 64, 512)] == [16, 4, 1, 1, 1]
    assert unit_blocks("radix", 4) == unit_blocks("off", 4) == 1


def test_larger_blocks_of_routers_are_told_of_by_their_last() -> None:
    """Whatever runs and ends, what was told makes the state, and every chain follows one that is there."""
    rng = Random(1)
    cache, there = BlockCache(60, told_every=3), set[int]()
    running: list[tuple[list[Fingerprint], int]] = []

    def hear(changes: list[Change]) -> None:
        for change in changes:
            assert change.parent is None or change.parent in there
            there.update(change.came)
            assert there.issuperset(change.went)
            there.difference_update(change.went)

    for _ in range(600):
        if running and rng.random() < 0.5:
            names, private = running.pop(rng.randrange(len(running)))
            cache.end(names, private)
        root, depth = rng.randrange(6), rng.randrange(1, 14)
        names = prompt(
            *(1 + 100 * root + place + 1000 * (place > 4) * rng.randrange(2) for place in range(depth))
        )
        chain = prompt(*(hash((0, *names[:end])) & 0xFFFF_FFFF for end in range(1, depth + 1)))
        held = chain[: cache.held(chain).device]
        begun = cache.begin(held, depth + 2 - len(held))
        if begun is not None:
            hear(begun)
            locked, changes = cache.leave(chain, len(held))
            hear(changes)
            running.append((chain, depth + 2 - locked))
        digest = 0
        for name in there:
            digest ^= name
        state = cache.state(Tier.DEVICE)
        assert (state.count, state.digest) == (len(there), digest)
        assert there <= set(cache.names())
        assert cache.free_blocks >= 0
        assert cache.held(chain).device == depth or begun is None
    assert there
