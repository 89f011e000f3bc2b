"""``check_invariants`` finds each kind of damage, and says where."""

from collections.abc import Callable

import pytest

from prefixmesh.cache.hash_cache import HashCache
from prefixmesh.cache.node import INDEX_BYTES, TreeNode, nodes_below
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.errors import InvariantError
from tests.support.cache_kit import insert_prompt, key_of


def a_small_tree() -> RadixCache:
    """`1 2 3`, then `4 5` and `6 7` below it; the first leaf is locked."""
    allocator = PageAllocator(20)
    cache = RadixCache(allocator, 1)
    insert_prompt(cache, allocator, [1, 2, 3, 4, 5])
    insert_prompt(cache, allocator, [1, 2, 3, 6, 7])
    cache.lock(cache.match_prefix(key_of([1, 2, 3, 4, 5]), 1.0).last_device_node)
    cache.check_invariants()
    return cache


def parts(cache: RadixCache) -> tuple[TreeNode, TreeNode, TreeNode]:
    parent, locked, unlocked = (node for _, node in nodes_below(cache._accounts.root))
    return parent, locked, unlocked


def forget_the_parent(cache: RadixCache) -> None:
    parts(cache)[2].parent = cache._accounts.root


def misname_an_edge(cache: RadixCache) -> None:
    parent, _, unlocked = parts(cache)
    parent.children[b"xxxx"] = parent.children.pop(unlocked.edge)
    unlocked.edge = b"xxxx"


def lose_a_page(cache: RadixCache) -> None:
    node = parts(cache)[2]
    node.pages = node.pages[:INDEX_BYTES]


def empty_a_node(cache: RadixCache) -> None:
    node = parts(cache)[2]
    node.key, node.pages = b"", b""


def keep_a_larger_array_alive(cache: RadixCache) -> None:
    node = parts(cache)[2]
    node.pages = memoryview(bytes(400))[: 2 * INDEX_BYTES]  # type: ignore[assignment]


def own_a_page_twice(cache: RadixCache) -> None:
    _, locked, unlocked = parts(cache)
    unlocked.pages = locked.pages


def own_a_free_page(cache: RadixCache) -> None:
    cache._accounts.allocator.free(parts(cache)[2].value)


def drop_a_lock(cache: RadixCache) -> None:
    parts(cache)[0].lock_ref = 0


def invent_a_lock(cache: RadixCache) -> None:
    parts(cache)[2].lock_ref = 1


def put_a_stranger_in_line(cache: RadixCache) -> None:
    payer = cache._accounts.lines.payer("")
    payer.line.enter(TreeNode(None, b"", b"", b"", 0.0, payer))


def take_a_node_out_of_line(cache: RadixCache) -> None:
    cache._accounts.lines.payer("").line.leave(parts(cache)[2])


def miscount_evictable(cache: RadixCache) -> None:
    cache._accounts.cached_pages += 1


def miscount_protected(cache: RadixCache) -> None:
    cache._accounts.protected_pages += 1


def miscount_nodes(cache: RadixCache) -> None:
    cache._accounts.node_count += 1


@pytest.mark.parametrize(
    ("damage", "group"),
    [
        (forget_the_parent, "structure"),
        (misname_an_edge, "edges"),
        (lose_a_page, "structure"),
        (empty_a_node, "structure"),
        (keep_a_larger_array_alive, "arrays"),
        (own_a_page_twice, "pages"),
        (own_a_free_page, "pages"),
        (drop_a_lock, "locks"),
        (invent_a_lock, "locks"),
        (put_a_stranger_in_line, "order"),
        (take_a_node_out_of_line, "order"),
        (miscount_evictable, "counts"),
        (miscount_protected, "counts"),
        (miscount_nodes, "counts"),
    ],
)
def test_each_damage_is_found_and_the_state_printed(damage: Callable[[RadixCache], None], group: str) -> None:
    """The message names the group, and carries the counts and the drawing."""
    cache = a_small_tree()
    damage(cache)
    with pytest.raises(InvariantError, match=f"RadixCache: {group}: ") as error:
        cache.check_invariants()
    assert "root lock_ref=1" in str(error.value)
    assert "protected=" in str(error.value)


def test_a_child_behind_its_parent_in_line_is_found() -> None:
    """The one property that lets eviction take the first in line without looking."""
    allocator = PageAllocator(20)
    cache = RadixCache(allocator, 1)
    insert_prompt(cache, allocator, [1, 2])
    leaf = insert_prompt(cache, allocator, [1, 2, 3]).last_device_node
    assert isinstance(leaf, TreeNode)
    leaf.payer.line.put_last(leaf)
    with pytest.raises(InvariantError, match=r"order: .* before its child"):
        cache.check_invariants()


def test_a_node_cut_off_by_a_flush_and_locked_by_nobody_is_found() -> None:
    """It could never be freed."""
    cache = a_small_tree()
    cache.flush()
    for node in cache._accounts.detached.values():
        node.lock_ref = node.receipts = 0
    with pytest.raises(InvariantError, match=r"locks: .*nobody reads it"):
        cache.check_invariants()


def test_a_hash_table_that_lost_a_block_or_holds_a_short_one_is_found() -> None:
    """The hash cache's own two rules: the table is the chains, and a block is 16 tokens."""
    allocator = PageAllocator(20)
    cache = HashCache(allocator, 8)
    insert_prompt(cache, allocator, range(32))
    (first, block) = cache._blocks.values()
    block.key, block.pages = block.key[:32], block.pages[:INDEX_BYTES]
    cache._accounts.cached_pages -= 1
    block.payer.pages -= 1
    with pytest.raises(InvariantError, match="HashCache: blocks: "):
        cache.check_invariants()
    cache._blocks = {first.edge: first}
    with pytest.raises(InvariantError, match="HashCache: table: "):
        cache.check_invariants()
