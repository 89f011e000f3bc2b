"""What a backup may have of the host: as much as fits, from its front, and nothing that the policy would keep rather than it."""

import pytest

from prefixmesh.cache.owners import Quota
from prefixmesh.cache.transfers import Offload
from tests.support.cache_kit import key_of
from tests.support.tier_kit import Tree


def begin(tree: Tree, *tokens: int) -> Offload | None:
    """A backup of what the device has of these tokens; asking for it is no use of them."""
    node = tree.node(*tokens)
    copy = tree.cache.transfers.begin_offload(node)
    tree.check()
    return copy


def back_up(tree: Tree, *tokens: int) -> int:
    """The same, and its end; returns the pages that were copied."""
    copy = begin(tree, *tokens)
    if copy is None:
        return 0
    tree.cache.transfers.finish_offload(copy)
    tree.check()
    return len(copy.host_pages)


def test_as_much_of_the_front_is_copied_as_fits() -> None:
    """Parents first: what is copied is found again; the edge is split where it ends, and the rest is counted."""
    tree = Tree(host=2)
    tree.put(1, 2, 3)
    assert back_up(tree, 1, 2, 3) == 2
    assert (tree.cache.transfers.left_pages, tree.cache.transfers.without_room) == (1, 0)
    assert tree.evict(3) == 3
    assert tree.found(1, 2, 3) == (0, 2)
    tree.check_at_rest()


def test_no_host_page_means_no_backup_and_a_count() -> None:
    """Nothing is locked for it, and nothing changes."""
    tree = Tree(host=2)
    tree.put(1, 2)
    held = begin(tree, 1, 2)
    tree.put(3, 4, 5)
    assert begin(tree, 3, 4, 5) is None
    assert (tree.cache.transfers.left_pages, tree.cache.transfers.without_room) == (3, 1)
    assert tree.evict(3) == 3
    assert held is not None
    tree.cache.transfers.abort_offload(held)
    tree.check_at_rest()


def test_what_a_copy_in_flight_has_of_it_is_not_copied_again() -> None:
    """The same front is all that fits, and it is on its way."""
    tree = Tree(host=4)
    tree.put(1, 2, 3, 4, 5, 6)
    first = begin(tree, 1, 2, 3, 4, 5, 6)
    assert first is not None
    tree.cache.transfers.abort_offload(first)
    first = begin(tree, 1, 2, 3, 4)
    assert first is not None
    assert begin(tree, 1, 2, 3, 4, 5, 6) is None
    tree.cache.transfers.finish_offload(first)
    tree.check_at_rest()


def test_the_least_recent_copies_make_room_for_new_ones() -> None:
    tree = Tree(host=4)
    for first in (1, 5):
        tree.put(first, 2, 3)
        assert back_up(tree, first, 2, 3) == 3
    tree.evict(30)
    assert (tree.found(1, 2, 3), tree.found(5, 2, 3)) == ((0, 1), (0, 3))


def test_a_backup_takes_nothing_from_what_was_used_since() -> None:
    """It waited for its turn; what it would take the place of has been asked for meanwhile."""
    tree = Tree(host=4)
    tree.put(5, 6, 7, 8)
    assert back_up(tree, 5, 6, 7, 8) == 4
    tree.put(1, 2, 3)
    tree.match(5, 6)
    assert back_up(tree, 1, 2, 3) == 2, "what was used before it, and not what was used after it"
    tree.evict(30)
    assert tree.found(5, 6, 7, 8) == (0, 2)
    tree.check_at_rest()


def test_who_runs_is_in_use_now() -> None:
    """What it has locked counts as used by this very operation, whenever it was matched."""
    tree = Tree(host=3)
    tree.put(1, 2, 3)
    receipt = tree.cache.lock(tree.node(1, 2, 3))
    tree.put(5, 6, 7)
    assert back_up(tree, 5, 6, 7) == 3
    assert back_up(tree, 1, 2, 3) == 3
    tree.cache.release(receipt)
    tree.check_at_rest()


def test_under_lru_a_long_prompt_takes_the_room_of_older_ones() -> None:
    """As it does on the device: recency is all that this policy knows."""
    tree = Tree(host=6)
    for first in (1, 2):
        tree.put(first, 2, 3)
        back_up(tree, first, 2, 3)
        tree.match(first, 2, 3)
    tree.put(*range(10, 16))
    assert back_up(tree, *range(10, 16)) == 6


@pytest.mark.parametrize("policy", ["lfu", "priority"])
def test_a_long_prompt_does_not_sweep_what_ranks_higher(policy: str) -> None:
    """One-off, or of low priority: it gets what is free, and what ranks no higher than itself."""
    tree = Tree(host=8, policy=policy)
    for first in (1, 2):
        tree.put(first, 2, 3)
        back_up(tree, first, 2, 3)
        for _ in range(3):
            tree.cache.match_prefix(key_of((first, 2, 3)), tree.now, 1)
    tree.put(7)
    back_up(tree, 7)
    tree.put(*range(10, 18))
    assert back_up(tree, *range(10, 18)) == 2
    assert tree.cache.transfers.left_pages == 6
    tree.evict(30)
    assert [tree.found(first, 2, 3) for first in (1, 2, 7)] == [(0, 3), (0, 3), (0, 0)]
    tree.check_at_rest()


def test_each_part_of_a_prompt_comes_in_its_own_rank() -> None:
    """A front that everybody uses takes the room that its end, asked for once, would not get."""
    tree = Tree(host=4, policy="lfu")
    tree.put(5, 6, 7, 8)
    back_up(tree, 5, 6, 7, 8)
    tree.match(5, 6, 7, 8)
    tree.put(1, 2, 3, 4)
    for _ in range(3):
        tree.match(1, 2)
    assert back_up(tree, 1, 2, 3, 4) == 2
    tree.evict(30)
    assert (tree.found(1, 2, 3, 4), tree.found(5, 6, 7, 8)) == ((0, 2), (0, 2))


def test_who_is_at_its_ceiling_takes_its_own_room() -> None:
    """Also for the end of a path of several nodes: what it has taken for the front counts."""
    tree = Tree(host=10, host_quotas={"acme": Quota(ceiling_pages=4)})
    tree.put(*range(20, 26))
    back_up(tree, *range(20, 26))
    tree.put(1, 2, 3, 4, owner="acme")
    back_up(tree, 1, 2, 3, 4)
    tree.put(5, 6, 7, 8, owner="acme")
    tree.match(5, 6)
    assert back_up(tree, 5, 6, 7, 8) == 4
    tree.evict(30)
    assert tree.found(*range(20, 26)) == (0, 6)
    assert (tree.found(1, 2, 3, 4), tree.found(5, 6, 7, 8)) == ((0, 0), (0, 4))


def test_who_is_above_its_ceiling_gives_whoever_ranks_higher() -> None:
    """A quota goes before the policy."""
    tree = Tree(host=4, host_quotas={"acme": Quota(ceiling_pages=2)}, policy="lfu")
    tree.put(1, 2, 3, 4, owner="acme")
    back_up(tree, 1, 2, 3, 4)
    for _ in range(3):
        tree.match(1, 2, 3, 4)
    tree.put(7, 8, 9)
    assert back_up(tree, 7, 8, 9) == 2
