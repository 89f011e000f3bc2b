"""What the cache has seen: bounded, exact about first blocks, and forgetful about what left longest ago."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.cache.seen_blocks import MAX_NAMESPACES_PER_BLOCK, EvictedMemory, FirstBlocks, SeenBlocks
from prefixmesh.errors import ConfigError, InvariantError
from prefixmesh.ids import Fingerprint, Namespace
from tests.support.cache_kit import NS_A, NS_B


def names(*numbers: int) -> list[Fingerprint]:
    return [Fingerprint(number) for number in numbers]


ONE, TWO, THREE = names(1, 2, 3)


def test_the_latest_generation_is_always_remembered() -> None:
    """And never more than two."""
    memory = EvictedMemory(generation_blocks=3)
    for number in range(20):
        memory.note(names(number))
        assert set(names(*range(max(0, number - 2), number + 1))) <= memory.among(names(*range(20)))
        assert len(memory) < 6
        memory.check_invariants()
    assert 19 in memory
    assert 0 not in memory
    assert repr(memory) == "EvictedMemory(young=2/3, old=3)"


def test_a_whole_eviction_is_remembered_at_once() -> None:
    """However long the node was."""
    memory = EvictedMemory(generation_blocks=3)
    memory.note(names(*range(10)))
    assert memory.among(names(*range(12))) == set(range(10))
    memory.note(())
    memory.clear()
    assert not memory


def test_first_blocks_are_found_by_their_tokens_in_other_namespaces() -> None:
    """The latest first, and no longer than they are held."""
    first = FirstBlocks()
    first.add(b"tokens", ONE, NS_A)
    first.add(b"tokens", TWO, NS_B)
    first.add(b"others", THREE, NS_A)
    assert first.others(b"tokens", NS_A) == [NS_B]
    assert first.others(b"tokens", Namespace(b"c" * 16)) == [NS_B, NS_A]
    first.add(b"tokens", ONE, NS_A)
    assert first.others(b"tokens", Namespace(b"c" * 16)) == [NS_A, NS_B]
    first.remove(TWO)
    first.remove(TWO)
    assert first.others(b"tokens", NS_A) == []
    assert (ONE in first, TWO in first, len(first)) == (True, False, 2)
    assert repr(first) == "FirstBlocks(blocks=2, distinct=2)"
    first.check_invariants({ONE, THREE})


def test_a_first_block_of_many_namespaces_remembers_the_latest() -> None:
    """The one that fell out may still leave the tree, without harm."""
    first = FirstBlocks()
    spaces = [Namespace(bytes([number]) * 16) for number in range(MAX_NAMESPACES_PER_BLOCK + 2)]
    for number, namespace in enumerate(spaces):
        first.add(b"tokens", Fingerprint(number), namespace)
    assert first.others(b"tokens", NS_A) == spaces[:1:-1]
    first.remove(Fingerprint(0))
    assert len(first) == MAX_NAMESPACES_PER_BLOCK
    first.check_invariants(set(names(*range(20))))


def test_a_first_block_that_leaves_is_recognised_by_where_it_begins() -> None:
    """It may end in a later edge than it begins in; blocks further on are never first."""
    seen = SeenBlocks(block_size=4)
    seen.first_stored(NS_A, b"tokens", ONE)
    seen.left(4, [TWO])
    seen.left(0, [])
    seen.left(0, [THREE])
    assert ONE in seen.first_blocks
    seen.left(3, [ONE])
    assert ONE not in seen.first_blocks
    assert seen.evicted.among([ONE, TWO, THREE]) == {ONE, TWO, THREE}
    seen.check_invariants(set())


def test_a_flush_clears_everything() -> None:
    seen = SeenBlocks(block_size=4)
    seen.first_stored(NS_A, b"tokens", ONE)
    seen.left(4, [TWO])
    seen.cleared()
    assert repr(seen) == (
        "SeenBlocks(block_size=4, EvictedMemory(young=0/65536, old=0), FirstBlocks(blocks=0, distinct=0))"
    )
    seen.left(4, [TWO])
    assert TWO in seen.evicted


def test_a_first_block_that_the_cache_does_not_hold_is_a_broken_invariant() -> None:
    """Whoever forgets to tell that a block has left is found out."""
    seen = SeenBlocks(block_size=4)
    seen.first_stored(NS_A, b"tokens", ONE)
    seen.check_invariants({ONE})
    with pytest.raises(InvariantError, match="held"):
        seen.check_invariants({TWO})
    seen.first_blocks._neutral.clear()
    with pytest.raises(InvariantError, match="tables"):
        seen.check_invariants({ONE})


@pytest.mark.parametrize("make", [lambda: SeenBlocks(0), lambda: EvictedMemory(0)])
def test_empty_sizes_are_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError):
        make()


blocks = st.tuples(st.sampled_from([b"x", b"y"]), st.integers(0, 11))


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), blocks), max_size=60))
def test_first_blocks_agree_with_a_list(steps: list[tuple[bool, tuple[bytes, int]]]) -> None:
    """In any order of storing, storing again and leaving; the model is the list of what is held, the latest last."""
    first = FirstBlocks()
    model: dict[bytes, list[int]] = {b"x": [], b"y": []}
    for stores, (tokens, number) in steps:
        fingerprint = Fingerprint(number + 100 * (tokens == b"y"))
        listed = model[tokens]
        if number in listed:
            listed.remove(number)
        if stores:
            first.add(tokens, fingerprint, Namespace(bytes([number]) * 16))
            model[tokens] = [*listed, number][-MAX_NAMESPACES_PER_BLOCK:]
        else:
            first.remove(fingerprint)
        for packed, expected in model.items():
            found = first.others(packed, NS_A)
            assert [namespace[0] for namespace in found] == expected[::-1]
        first.check_invariants({fp + extra for fp in range(12) for extra in (0, 100)})  # type: ignore[misc]
