"""The host tier as the tree sees it: copies in flight, demotion, and who owns which page at every moment."""

import pytest

from prefixmesh.cache.host_tier import HostFigures
from prefixmesh.cache.owners import Quota
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.errors import DoubleReleaseError, InternalError
from tests.support.cache_kit import as_pages, key_of, take
from tests.support.tier_kit import Tree


def test_a_copy_can_be_read_only_once_it_is_complete() -> None:
    """Rule 5: until then its pages belong to the copy, and both ends are locked."""
    tree = Tree()
    tree.put(1, 2, 3)
    copy = tree.cache.transfers.begin_offload(tree.match(1, 2, 3).last_device_node)
    assert copy is not None
    assert len(copy.host_pages) == len(copy.device_pages) == 3
    assert (tree.host.free_pages, tree.cache.host_pages) == (27, 0)
    assert tree.evict(3) == 0
    tree.cache.transfers.finish_offload(copy)
    assert tree.cache.host_pages == 3
    assert tree.evict(3) == 3
    assert tree.found(1, 2, 3) == (0, 3)
    tree.check_at_rest()


def test_an_aborted_copy_leaves_nothing() -> None:
    """F32: whatever cut it short, the same prefix can be stored again."""
    tree = Tree()
    tree.put(1, 2, 3)
    copy = tree.cache.transfers.begin_offload(tree.match(1, 2, 3).last_device_node)
    assert copy is not None
    tree.cache.transfers.abort_offload(copy)
    tree.check()
    assert tree.host.free_pages == 30
    tree.back_up(1, 2, 3)
    assert tree.evict(3) == 3
    assert tree.found(1, 2, 3) == (0, 3)
    tree.check_at_rest()


def test_a_copy_ends_once() -> None:
    """A second end would free pages that somebody owns by now."""
    tree = Tree()
    tree.put(1, 2)
    copy = tree.cache.transfers.begin_offload(tree.match(1, 2).last_device_node)
    assert copy is not None
    tree.cache.transfers.finish_offload(copy)
    for again in (tree.cache.transfers.finish_offload, tree.cache.transfers.abort_offload):
        with pytest.raises(DoubleReleaseError):
            again(copy)
    tree.check_at_rest()


def test_only_what_is_not_there_is_copied_parents_first() -> None:
    """A longer prompt copies its tail; a prompt whose parent is not there takes the parent along (rule 2)."""
    tree = Tree()
    tree.put(1, 2)
    tree.back_up(1, 2)
    tree.put(1, 2, 3, 4)
    copy = tree.cache.transfers.begin_offload(tree.match(1, 2, 3, 4).last_device_node)
    assert copy is not None
    assert len(copy.host_pages) == 2
    assert tree.cache.transfers.begin_offload(tree.match(1, 2, 3, 4).last_device_node) is None
    tree.cache.transfers.finish_offload(copy)
    assert tree.cache.transfers.begin_offload(tree.match(1, 2, 3, 4).last_device_node) is None
    tree.check_at_rest()


def test_a_leaf_with_a_copy_is_demoted_page_by_page_from_its_end() -> None:
    """Never more than needed: what stays is still on both tiers."""
    tree = Tree()
    tree.put(1, 2, 3, 4, 5)
    tree.back_up(1, 2, 3, 4, 5)
    assert tree.evict(2) == 2
    assert tree.found(1, 2, 3, 4, 5) == (3, 2)
    assert tree.cache.evict_host(1) == 1
    tree.check()
    assert tree.found(1, 2, 3, 4, 5) == (3, 1)
    tree.check_at_rest()


def test_a_restore_brings_the_match_back() -> None:
    tree = Tree()
    tree.demote(1, 2, 3, 4)
    copy = tree.cache.transfers.begin_restore(tree.match(1, 2, 3, 9))
    assert copy is not None
    tree.check()
    assert (len(copy.device_pages), tree.cache.copying_pages) == (3, 3)
    assert tree.cache.evict_host(30) == 1, "its source is locked"
    tree.check()
    tree.cache.transfers.finish_restore(copy)
    tree.check()
    match = tree.match(1, 2, 3, 9)
    assert match.device_indices.tolist() == copy.device_pages.tolist()
    tree.check_at_rest()


@pytest.mark.parametrize(("tokens", "brings"), [(1, 1), (3, 3), (4, 4), (9, 4)])
def test_a_part_of_what_the_host_has_can_be_brought_back(tokens: int, brings: int) -> None:
    """The useful front; the edge is split where it ends, and what lies behind it stays on the host."""
    tree = Tree()
    tree.demote(1, 2, 3, 4)
    copy = tree.cache.transfers.begin_restore(tree.match(1, 2, 3, 4), tokens=tokens)
    assert copy is not None
    tree.check()
    assert tree.cache.host_protected_pages == len(copy.host_pages) == brings
    assert tree.cache.evict_host(30) == 4 - brings, "only what is brought back is locked"
    tree.cache.transfers.finish_restore(copy)
    tree.check()
    match = tree.match(1, 2, 3, 4)
    assert (match.device_indices.tolist(), match.host_hit_length) == (copy.device_pages.tolist(), 0)
    tree.check_at_rest()


def test_a_part_is_counted_from_where_the_device_ends() -> None:
    """Also where the path beyond it is in several nodes; what is short of a page is left where it is."""
    tree = Tree(page_size=2)
    tree.demote(*range(10))
    tree.match(*range(6))
    tree.put(0, 1)
    copies = tree.cache.transfers
    assert copies.begin_restore(tree.match(*range(10)), tokens=0) is None
    assert copies.begin_restore(tree.match(*range(10)), tokens=1) is None
    assert tree.cache.host_protected_pages == 0
    copy = copies.begin_restore(tree.match(*range(10)), tokens=7)
    assert copy is not None
    assert (copy.start, len(copy.device_pages)) == (2, 3)
    copies.finish_restore(copy)
    tree.check()
    assert tree.found(*range(10)) == (8, 2)
    tree.check_at_rest()


def test_a_restore_that_fails_leaves_the_host_as_it_was() -> None:
    """F20: cancelled before it is loaded back, host counts are 0 and the entry is evictable."""
    tree = Tree()
    tree.demote(1, 2, 3)
    copy = tree.cache.transfers.begin_restore(tree.match(1, 2, 3))
    assert copy is not None
    tree.cache.transfers.fail_restore(copy)
    tree.check()
    assert tree.found(1, 2, 3) == (0, 3)
    assert tree.cache.evict_host(3) == 3
    tree.check_at_rest()


def test_a_prefix_inserted_while_it_is_restored_has_one_owner_per_page() -> None:
    """F53: the inserter's pages stay, the copy's are freed, and what only the copy brought is kept."""
    tree = Tree()
    tree.demote(1, 2, 3, 4)
    copy = tree.cache.transfers.begin_restore(tree.match(1, 2, 3, 4))
    assert copy is not None
    mine = tree.put(1, 2)
    tree.cache.transfers.finish_restore(copy)
    tree.check()
    assert tree.match(1, 2, 3, 4).device_indices.tolist() == [*mine, *copy.device_pages.tolist()[2:]]
    assert tree.cache.transfers.duplicate_pages == 2
    tree.check_at_rest()


def test_a_range_is_split_while_it_is_copied_and_both_halves_get_theirs() -> None:
    """Rule 4 for both tiers: locks are on both halves, and the pages go by position."""
    tree = Tree()
    tree.put(1, 2, 3, 4)
    copy = tree.cache.transfers.begin_offload(tree.match(1, 2, 3, 4).last_device_node)
    assert copy is not None
    tree.match(1, 2, 9)
    tree.match(1, 9)
    tree.cache.transfers.finish_offload(copy)
    tree.evict(30)
    match = tree.match(1, 2, 3, 4)
    assert match.host_hit_length == 4
    restore = tree.cache.transfers.begin_restore(match)
    assert restore is not None
    assert restore.host_pages.tolist() == copy.host_pages.tolist()
    tree.match(1, 2, 3, 9)
    tree.cache.transfers.finish_restore(restore)
    tree.check()
    assert tree.match(1, 2, 3, 4).device_indices.tolist() == restore.device_pages.tolist()
    tree.check_at_rest()


@pytest.mark.parametrize("finished", [True, False])
def test_a_flush_under_an_offload_frees_everything_with_its_end(finished: bool) -> None:
    """Rule 10: what a copy reads stays readable until then, and nothing of it enters the new tree."""
    tree = Tree()
    tree.put(1, 2, 3)
    copy = tree.cache.transfers.begin_offload(tree.match(1, 2, 3).last_device_node)
    assert copy is not None
    tree.cache.flush()
    tree.check()
    assert tree.device.free_pages == 27
    (tree.cache.transfers.finish_offload if finished else tree.cache.transfers.abort_offload)(copy)
    tree.check()
    assert tree.found(1, 2, 3) == (0, 0)
    assert (tree.device.free_pages, tree.host.free_pages) == (30, 30)


@pytest.mark.parametrize("finished", [True, False])
def test_a_flush_under_a_restore_frees_everything_with_its_end(finished: bool) -> None:
    tree = Tree()
    tree.demote(1, 2, 3)
    copy = tree.cache.transfers.begin_restore(tree.match(1, 2, 3))
    assert copy is not None
    tree.cache.flush()
    tree.check()
    assert (tree.device.free_pages, tree.host.free_pages) == (27, 27)
    (tree.cache.transfers.finish_restore if finished else tree.cache.transfers.fail_restore)(copy)
    tree.check()
    assert tree.found(1, 2, 3) == (0, 0)
    assert (tree.device.free_pages, tree.host.free_pages) == (30, 30)


def test_an_insert_over_host_nodes_gives_them_device_pages() -> None:
    """A prompt that was computed again, in part of an edge, instead of being brought back."""
    tree = Tree()
    tree.demote(1, 2, 3, 4)
    pages = take(tree.device, 3)
    result = tree.cache.insert(key_of([1, 2, 9]), as_pages(pages.tolist()), 9.0)
    tree.check()
    assert (result.prefix_tokens, result.device_indices.tolist()) == (0, pages.tolist())
    assert (tree.found(1, 2, 3, 4), tree.found(1, 2, 9)) == ((2, 2), (3, 0))
    tree.check_at_rest()


def test_a_pinned_node_is_not_demoted_and_a_restored_one_is_held() -> None:
    """A pin waits for what only the host has."""
    tree = Tree()
    tree.demote(1, 2, 3)
    status = tree.cache.pins.add(key_of([1, 2, 3]), "acme", tree.now)
    assert (status.held_tokens, status.missing_tokens) == (0, 3)
    copy = tree.cache.transfers.begin_restore(tree.match(1, 2, 3))
    assert copy is not None
    tree.cache.transfers.finish_restore(copy)
    tree.check()
    assert (tree.cache.pinned_pages, tree.evict(30)) == (3, 0)
    tree.cache.pins.remove(key_of([1, 2, 3]), "acme", tree.now)
    tree.check_at_rest()


def test_the_hosts_figures_say_where_its_pages_are() -> None:
    """Free, ready to go, kept, and on their way: all there is at every moment, without looking at a node."""
    tree = Tree(host=10, host_quotas={"acme": Quota(floor_pages=2)})
    tree.put(1, 2, 3)
    tree.back_up(1, 2, 3)
    tree.put(5, 6, owner="acme")
    tree.back_up(5, 6)
    tree.put(1, 2, 7, 8)
    copy = tree.cache.transfers.begin_offload(tree.match(1, 2, 7, 8).last_device_node)
    assert copy is not None
    assert tree.cache.host_figures == HostFigures(total=10, free=3, evictable=1, protected=4, copying=2)
    tree.cache.transfers.finish_offload(copy)
    assert tree.cache.host_figures == HostFigures(total=10, free=3, evictable=5, protected=2, copying=0)


def test_a_cache_without_a_host_tier_says_so() -> None:
    cache = RadixCache(PageAllocator(4), 1)
    assert cache.host_figures == HostFigures(0, 0, 0, 0, 0)
    with pytest.raises(InternalError, match="no host tier"):
        _ = cache.transfers
    assert cache.evict_host(3) == 0


def test_two_offloads_that_share_a_prefix_leave_it_behind_both_of_their_ends() -> None:
    """Whichever ends last: the parent must not come up for eviction before its child."""
    tree = Tree()
    tree.put(1, 2, 3, 4)
    first = tree.cache.transfers.begin_offload(tree.match(1, 2, 3, 4).last_device_node)
    tree.put(1, 2, 5, 6)
    second = tree.cache.transfers.begin_offload(tree.match(1, 2, 5, 6).last_device_node)
    assert first is not None
    assert second is not None
    for copy in (second, first):
        tree.cache.transfers.finish_offload(copy)
        tree.check()
    assert tree.cache.transfers.duplicate_pages == 2
    assert tree.cache.evict_host(4) == 4
    tree.check()
    tree.check_at_rest()


def test_a_peek_at_both_tiers_says_what_a_match_would_and_changes_nothing() -> None:
    tree = Tree()
    tree.demote(1, 2, 3, 4)
    tree.put(1, 2)
    for tokens in ((1, 2, 3, 4, 5), (1, 2, 3, 9), (1, 2, 9), (1,), (9,), ()):
        before = tree.cache.render()
        peeked = tree.cache.peek_tiers(key_of(tokens))
        assert tree.cache.render() == before
        assert peeked == tree.found(*tokens)


def test_a_copy_is_ended_as_what_it_is_and_where_it_was_begun() -> None:
    """Else it would be ended with its pages on nobody's account."""
    tree, other = Tree(), Tree()
    tree.put(1, 2)
    copy = tree.cache.transfers.begin_offload(tree.match(1, 2).last_device_node)
    assert copy is not None
    with pytest.raises(InternalError, match="not a Restore"):
        tree.cache.transfers.finish_restore(copy)  # type: ignore[arg-type]
    with pytest.raises(InternalError, match="of this cache"):
        other.cache.transfers.finish_offload(copy)
    tree.check()
    tree.cache.transfers.finish_offload(copy)
    tree.check_at_rest()


def test_a_match_of_an_earlier_step_is_not_restored() -> None:
    """What it found may be gone, on the device by now, or forgotten."""
    tree = Tree()
    tree.demote(1, 2, 3)
    stale = tree.match(1, 2, 3)
    tree.put(1, 2, 3)
    assert tree.cache.transfers.begin_restore(stale) is None
    tree.evict(30)
    stale = tree.match(1, 2, 3)
    tree.cache.evict_host(1)
    assert tree.cache.transfers.begin_restore(stale) is None
    stale = tree.match(1, 2, 3)
    tree.cache.flush()
    assert tree.cache.transfers.begin_restore(stale) is None
    tree.demote(1, 2, 3)
    tree.put(1)
    stale = tree.match(1, 2, 3)
    tree.evict(1)
    assert tree.cache.transfers.begin_restore(stale) is None, "where it was to go on is gone"
    tree.check_at_rest()
