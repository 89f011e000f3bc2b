"""One tier's multiset by itself: what it returns, and what a reader of it sees while it changes."""

import pytest

from prefixmesh.cache.sharded_blocks import ShardedBlocks
from prefixmesh.errors import InvariantError
from tests.support.naive_publisher import ALPHABET, Names

A, B, C, D, E, F = ALPHABET[:6]


def test_adding_tells_where_in_the_chain_the_known_ones_stand() -> None:
    blocks = ShardedBlocks()
    assert blocks.add((A, B)) == ()
    assert blocks.add((C, A, D, B, E, E)) == (1, 3, 5)
    assert blocks.add(()) == ()
    assert (blocks.count, blocks.digest) == (5, A ^ B ^ C ^ D ^ E)


def test_removing_tells_which_names_are_gone() -> None:
    blocks = ShardedBlocks()
    blocks.add((A, B, C, B))
    assert blocks.remove((A, B)) == (A,)
    assert blocks.remove((B, C)) == (B, C)
    assert blocks.remove(()) == ()
    assert (blocks.count, blocks.digest) == (0, 0)


@pytest.mark.parametrize("chain", [(F,), (A, F), (A, A), (B, B, B), (B, A, B, C, F)])
def test_what_is_not_there_is_refused_as_a_whole(chain: Names) -> None:
    blocks = ShardedBlocks()
    blocks.add((A, B, C, B))
    with pytest.raises(InvariantError, match="there is no block"):
        blocks.remove(chain)
    blocks.check_invariants()
    assert (blocks.count, blocks.digest) == (3, A ^ B ^ C)
    assert blocks.remove((A, B, B, C)) == (A, B, C)


def test_a_reader_that_has_read_all_reads_nothing_that_came_later() -> None:
    """Not even in a shard that was empty when it opened, and that it did not come to."""
    blocks = ShardedBlocks()
    blocks.add((F,))
    reader = blocks.open_reader()
    assert reader.take(1) == (F,)
    blocks.open_reader()
    blocks.add((A, B, C))
    assert reader.left == 0
    assert reader.take(5) == ()


def test_a_reader_takes_as_many_as_wanted_across_shards() -> None:
    blocks = ShardedBlocks()
    blocks.add((A, B, C, D, E, F))
    reader = blocks.open_reader()
    taken = [reader.take(4), reader.take(4)]
    assert [len(names) for names in taken] == [4, 2]
    assert sorted(taken[0] + taken[1]) == sorted([A, B, C, D, E, F])


def test_a_closed_reader_has_nothing_left() -> None:
    blocks = ShardedBlocks()
    blocks.add((A, B, C))
    reader = blocks.open_reader()
    reader.take(1)
    reader.close()
    assert (reader.left, reader.take(1)) == (0, ())
    reader.close()


def test_it_shows_its_count_and_digest() -> None:
    blocks = ShardedBlocks()
    blocks.add((A, B))
    assert repr(blocks) == "ShardedBlocks(count=2, digest=0000000000000003)"
