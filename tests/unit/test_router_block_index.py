"""The router's index: its bound, its order of leaving, and what a closed slot leaves behind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Fingerprint
from prefixmesh.router import block_index
from prefixmesh.router.block_index import STRETCH, BlockIndex, Fall, Matches
from prefixmesh.router.holder_sets import NOBODY, HolderSets


def names(start: int, count: int) -> list[Fingerprint]:
    """Names that are spread over the shards as digests are."""
    return [Fingerprint(number * 0x9E3779B97F4A7C15 % 2**64) for number in range(start, start + count)]


def test_beyond_the_bound_blocks_go_in_the_order_in_which_they_came() -> None:
    index = BlockIndex(max_blocks=100)
    slot = index.open_slot()
    for start in range(0, 1000, 10):
        index.stored(slot, Tier.DEVICE, names(start, 10))
        while not index.sweep():
            pass
    assert (len(index), index.dropped) == (100, 900)
    assert index.held(slot, Tier.DEVICE) == set(names(900, 100))


def test_what_is_remembered_to_have_been_asked_for_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound it begins anew: what was asked for long ago has no chance left, what was asked for last has."""
    monkeypatch.setattr(block_index, "MAX_TOUCHED", 15)
    index = BlockIndex(max_blocks=100)
    slot = index.open_slot()
    index.stored(slot, Tier.DEVICE, names(0, 100))
    index.touch(names(0, 20))
    index.touch(names(30, 2))
    index.stored(slot, Tier.DEVICE, names(200, 50))
    while not index.sweep():
        pass
    assert index.held(slot, Tier.DEVICE) == set(names(30, 2) + names(52, 48) + names(200, 50))


def test_prompts_shorter_than_a_block_leave_nothing() -> None:
    """They have no names, so that no number of names would ever bound them."""
    index = BlockIndex(max_blocks=100)
    for _ in range(3):
        index.touch([])
    assert not index._asked


def test_a_full_index_that_looks_at_few_blocks_at_a_time_keeps_the_order_too() -> None:
    index = BlockIndex(max_blocks=2000)
    slot = index.open_slot()
    for start in range(0, 5000, 10):
        index.stored(slot, Tier.DEVICE, names(start, 10))
    assert index.held(slot, Tier.DEVICE) == set(names(3000, 2000))


def test_looking_for_the_blocks_of_a_leaver_takes_nobodys_second_chance() -> None:
    index = BlockIndex(max_blocks=100)
    stays, leaves = index.open_slot(), index.open_slot()
    index.stored(stays, Tier.DEVICE, names(0, 10))
    index.touch(names(0, 10))
    index.stored(leaves, Tier.DEVICE, names(10, 80))
    index.close_slot(leaves)
    while not index.sweep():
        pass
    index.stored(stays, Tier.DEVICE, names(200, 95))
    while not index.sweep():
        pass
    assert set(names(0, 10)) <= index.held(stays, Tier.DEVICE)


def test_what_was_asked_for_gets_a_second_chance_and_no_third() -> None:
    index = BlockIndex(max_blocks=100)
    slot = index.open_slot()
    index.stored(slot, Tier.DEVICE, names(0, 10))
    index.touch(names(0, 10))
    index.stored(slot, Tier.DEVICE, names(10, 100))
    while not index.sweep():
        pass
    assert set(names(0, 10)) <= index.held(slot, Tier.DEVICE)
    index.stored(slot, Tier.DEVICE, names(200, 100))
    while not index.sweep():
        pass
    assert not set(names(0, 10)) & index.held(slot, Tier.DEVICE)


def test_stored_alone_keeps_the_bound_within_one_event() -> None:
    index = BlockIndex(max_blocks=1000)
    slot = index.open_slot()
    for start in range(0, 20_000, 64):
        index.stored(slot, Tier.DEVICE, names(start, 64))
        assert len(index) <= 1000 + 64
    index.check_invariants()


def test_one_long_event_keeps_the_bound_too() -> None:
    index = BlockIndex(max_blocks=1000)
    slot = index.open_slot()
    for start in range(0, 100_000, 2000):
        index.stored(slot, Tier.DEVICE, names(start, 2000))
        assert len(index) <= 1000 + 2000


def test_equal_sets_of_a_closed_slot_may_empty_in_any_order() -> None:
    index = BlockIndex(max_blocks=1000)
    first, second = index.open_slot(), index.open_slot()
    index.stored(first, Tier.DEVICE, names(0, 2))
    index.stored(second, Tier.DEVICE, names(1, 1))
    index.close_slot(second)
    for name in names(0, 2):
        index.removed(first, Tier.DEVICE, [name])
        index.check_invariants()
    assert len(index) == 0


def test_blocks_that_come_and_go_leave_no_trail() -> None:
    index = BlockIndex(max_blocks=10_000)
    slot = index.open_slot()
    for _ in range(2000):
        index.stored(slot, Tier.DEVICE, names(0, 16))
        index.removed(slot, Tier.DEVICE, names(0, 16))
    assert len(index._order) == 16
    for start in range(0, 200_000, 100):
        index.stored(slot, Tier.DEVICE, names(start, 100))
        index.removed(slot, Tier.DEVICE, names(start, 100))
    assert len(index) == 0
    assert len(index._order) < 2000, "the order of coming is tidied as it goes"


def test_a_closed_slot_is_forgotten_at_once_and_its_blocks_are_swept() -> None:
    index = BlockIndex(max_blocks=10_000)
    first, second = index.open_slot(), index.open_slot()
    index.stored(first, Tier.DEVICE, names(0, 600))
    index.stored(second, Tier.DEVICE, names(0, 100))
    index.close_slot(first)
    assert index.find_matches(names(0, 600)) == Matches([Fall(1 << second, 100)], [Fall(1 << second, 100)])
    while not index.sweep():
        pass
    assert len(index) == 100
    index.check_invariants()
    assert index.open_slot() == first, "its number is free again"
    assert index.held(first, Tier.DEVICE) == set()


def test_a_host_block_behind_a_device_match_counts_in_all_only() -> None:
    index = BlockIndex(max_blocks=100)
    slot = index.open_slot()
    index.stored(slot, Tier.DEVICE, names(0, 3))
    index.stored(slot, Tier.HOST, names(0, 5))
    assert index.find_matches(names(0, 8)) == Matches([Fall(1, 3)], [Fall(1, 5)])
    index.removed(slot, Tier.DEVICE, names(0, 3))
    assert index.find_matches(names(0, 8)) == Matches([], [Fall(1, 5)])


def test_a_match_is_always_a_true_prefix() -> None:
    index = BlockIndex(max_blocks=100)
    slot = index.open_slot()
    index.stored(slot, Tier.DEVICE, names(1, 5))
    assert index.find_matches(names(0, 6)) == Matches([], [])
    assert index.find_matches([]) == Matches([], [])


def test_an_expected_block_counts_as_held_and_joins_what_is_held_already() -> None:
    index = BlockIndex(max_blocks=100)
    holder, expected = index.open_slot(), index.open_slot()
    index.stored(holder, Tier.DEVICE, names(0, 4))
    index.stored(expected, Tier.DEVICE, names(0, 2))
    masks = dict.fromkeys(names(0, 6), 1 << expected)
    assert index.find_matches(names(0, 8), masks).device == [Fall(1 << holder, 4), Fall(1 << expected, 6)]


def test_freed_numbers_of_sets_come_back_and_mean_what_they_are_given_for() -> None:
    sets = HolderSets()
    for round_ in range(5000):
        slot = round_ % 4000
        number = sets.with_holder(NOBODY, slot, Tier.DEVICE)
        sets.move(NOBODY, number, 1)
        assert sets.device[number] == 1 << slot
        again = sets.without_holder(number, slot, Tier.DEVICE)
        sets.move(number, again, 1)
        assert again == NOBODY
    assert len(sets) == 0
    assert len(sets.device) < 3000
    sets.check_invariants()


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    blocks=st.integers(0, 5 * STRETCH),
    device=st.lists(st.integers(0, 5 * STRETCH), min_size=1, max_size=5),
    behind=st.lists(st.integers(0, 2 * STRETCH), min_size=5, max_size=5),
    expected=st.lists(st.integers(0, 5 * STRETCH), min_size=5, max_size=5),
)
def test_a_walk_in_stretches_finds_what_looking_up_every_block_would(
    blocks: int, device: list[int], behind: list[int], expected: list[int]
) -> None:
    """Workers that hold so many leading blocks on the device, so many more on the host, and are to hold so many soon."""
    index = BlockIndex(max_blocks=1000)
    chain = names(0, 7 * STRETCH)
    masks: dict[Fingerprint, int] = {}
    on_device, in_all = {}, {}
    for held, further, soon in zip(device, behind, expected, strict=False):
        slot = index.open_slot()
        index.stored(slot, Tier.DEVICE, chain[:held])
        index.stored(slot, Tier.HOST, chain[: held + further])
        for name in chain[:soon]:
            masks[name] = masks.get(name, 0) | 1 << slot
        on_device[slot] = min(blocks, max(held, soon))
        in_all[slot] = min(blocks, max(held + further, soon))
    found = index.find_matches(chain[:blocks], masks)
    assert by_slot(found.device) == {slot: count for slot, count in on_device.items() if count}
    assert by_slot(found.total) == {slot: count for slot, count in in_all.items() if count}


@pytest.mark.parametrize("gone", range(1, STRETCH - 1))
def test_what_went_from_the_middle_for_want_of_room_is_still_known_from_what_is_behind_it(gone: int) -> None:
    """Its holders hold the block behind it, and no cache holds that without it."""
    index = BlockIndex(max_blocks=1000)
    slot = index.open_slot()
    chain = names(0, 2 * STRETCH)
    index.stored(slot, Tier.DEVICE, chain)
    index.removed(slot, Tier.DEVICE, [chain[STRETCH + gone - 1]])
    assert index.find_matches(chain).device == [Fall(1 << slot, 2 * STRETCH)]


def by_slot(falls: list[Fall]) -> dict[int, int]:
    """Blocks by slot."""
    slots = [(slot, fall) for fall in falls for slot in range(fall.slots.bit_length())]
    return {slot: fall.blocks for slot, fall in slots if fall.slots >> slot & 1}
