"""The rules that hold for every cache's nodes after every operation, recomputed from nothing.

What is particular to one kind of cache (how edges are named) it checks itself; see ``docs/cache.md`` for what breaks when a
rule does.
"""

from collections.abc import Callable, Iterable

import numpy as np

from prefixmesh.cache.accounting import PageAccounts
from prefixmesh.cache.base import PageIndices
from prefixmesh.cache.drawing import draw
from prefixmesh.cache.node import NO_PAGES, TreeNode, nodes_below
from prefixmesh.errors import InvariantError


class _BrokenRuleError(Exception):
    """A rule does not hold; becomes an InvariantError once the group's name and the state are known."""


def check_accounts(name: str, accounts: PageAccounts, page_bytes: int) -> None:
    """Check the books against the nodes; raises InvariantError with the tree drawn. O(nodes + pages)."""
    nodes = [node for _, node in nodes_below(accounts.root)]
    detached = _detached_nodes(accounts)
    groups: dict[str, Callable[[], None]] = {
        "structure": lambda: _structure(accounts, nodes, page_bytes),
        "arrays": lambda: _arrays([*nodes, *detached]),
        "pages": lambda: _pages(accounts, nodes, detached),
        "locks": lambda: _locks(accounts, nodes, detached),
        "order": lambda: _order(accounts, nodes),
        "counts": lambda: _counts(accounts, nodes, detached),
    }
    for group, check in groups.items():
        try:
            check()
        except _BrokenRuleError as broken:
            raise broken_rule(name, group, str(broken), accounts) from broken
    accounts.allocator.check_invariants()


def broken_rule(name: str, group: str, what: str, accounts: PageAccounts) -> InvariantError:
    """The error for a broken rule: where, what, and the whole state."""
    return InvariantError(
        f"{name}: {group}: {what}\n{summary(accounts)} {accounts.allocator!r}\n{draw(accounts)}"
    )


def summary(accounts: PageAccounts) -> str:
    """The counts in one line."""
    return (
        f"nodes={accounts.node_count}, evictable={accounts.evictable_pages}, protected={accounts.protected_pages}, "
        f"free={accounts.allocator.free_pages}/{accounts.allocator.total_pages}, "
        f"detached={len(accounts.detached)}, double_releases={accounts.double_releases}"
    )


def owned_pages(accounts: PageAccounts) -> PageIndices:
    """Every page that a node owns, detached ones too, in no order. O(pages)."""
    values = [node.value for _, node in nodes_below(accounts.root)]
    values.append(np.fromiter(accounts.detached, dtype=np.int32))
    return np.concatenate([NO_PAGES, *values])


def _detached_nodes(accounts: PageAccounts) -> list[TreeNode]:
    return list(dict.fromkeys(accounts.detached.values()))


def _require(condition: bool, what: str) -> None:  # noqa: FBT001 -- the condition is the point
    if not condition:
        raise _BrokenRuleError(what)


def _structure(accounts: PageAccounts, nodes: Iterable[TreeNode], page_bytes: int) -> None:
    root = accounts.root
    _require(root.parent is None and not len(root.value) and not root.key, "the root holds something")
    for node in nodes:
        _require(len(node.value) > 0, f"{node} holds no page")
        _require(len(node.key) == len(node.value) * page_bytes, f"{node}: {len(node.key)} bytes of key")
    for parent in (root, *nodes):
        for edge, child in parent.children.items():
            _require(
                child.parent is parent and child.edge == edge, f"{child} and its parent {parent} disagree"
            )


def _arrays(nodes: Iterable[TreeNode]) -> None:
    for node in nodes:
        value = node.value
        _require(value.dtype == np.int32 and value.ndim == 1, f"{node}: value is {value.dtype}{value.shape}")
        _require(value.base is None, f"{node}: value keeps a larger array alive")


def _pages(accounts: PageAccounts, nodes: list[TreeNode], detached: list[TreeNode]) -> None:
    owner: dict[int, TreeNode] = {}
    for node in (*nodes, *detached):
        for page in node.value.tolist():
            _require(page not in owner, f"page {page} is owned by {owner.get(page)} and {node}")
            owner[page] = node
    allocator = accounts.allocator
    _require(
        len(owner) <= allocator.total_pages - allocator.free_pages, "nodes own more pages than are allocated"
    )
    free = set(allocator.listing().tolist())
    _require(free.isdisjoint(owner), f"pages {sorted(free & owner.keys())[:8]} are owned and free")


def _locks(accounts: PageAccounts, nodes: list[TreeNode], detached: list[TreeNode]) -> None:
    for node in (accounts.root, *nodes, *detached):
        below = sum(child.lock_ref for child in node.children.values())
        _require(node.receipts >= 0, f"{node} has {node.receipts} receipts")
        _require(
            node.lock_ref == node.receipts + below, f"{node}: {node.receipts} receipts and {below} below"
        )
    for node in detached:
        _require(node.lock_ref > 0, f"{node} was cut off by a flush and nobody reads it")


def _order(accounts: PageAccounts, nodes: list[TreeNode]) -> None:
    line = {node: place for place, node in enumerate(accounts.order)}
    unlocked = {node for node in nodes if not node.lock_ref}
    _require(line.keys() == unlocked, "the eviction order is not the unlocked nodes")
    for node, place in line.items():
        parent = node.parent
        if parent in line:
            _require(place < line[parent], f"{parent} would be evicted before its child {node}")


def _counts(accounts: PageAccounts, nodes: list[TreeNode], detached: list[TreeNode]) -> None:
    evictable = sum(len(node.value) for node in nodes if not node.lock_ref)
    protected = sum(len(node.value) for node in (*nodes, *detached) if node.lock_ref)
    _require(accounts.evictable_pages == evictable, f"{evictable} pages are evictable")
    _require(accounts.protected_pages == protected, f"{protected} pages are protected")
    _require(accounts.node_count == len(nodes), f"there are {len(nodes)} nodes")
    known = {page: node for node in detached for page in node.value.tolist()}
    _require(accounts.detached == known, "the detached pages are not the detached nodes' pages")
