"""The replay's cache of blocks: what is found, what goes, and what is told of it."""

from random import Random

from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Fingerprint
from prefixmesh.sim.replay_cache import BlockCache


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
