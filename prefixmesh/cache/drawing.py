"""A cache's tree as text, for a person who looks at a broken one."""

from typing import Final

from prefixmesh.cache.accounting import PageAccounts
from prefixmesh.cache.namespace import short_digest
from prefixmesh.cache.node import TreeNode, nodes_below

MAX_DRAWN_NODES: Final = 200
"""A drawing is for reading: a message with a tree of 100,000 nodes would only hide what it should show."""


def draw(accounts: PageAccounts) -> str:
    """One line a node, children indented: pages, first page indices, locks, hits, last use. Tokens are never shown."""
    lines = [f"root lock_ref={accounts.root.lock_ref}"]
    for count, (depth, node) in enumerate(nodes_below(accounts.root)):
        if count == MAX_DRAWN_NODES:
            lines.append(f"... and {accounts.node_count - count} more nodes")
            break
        # Every cache's root level is known by the namespace first.
        namespace = f"namespace {short_digest(node.edge)}: " if depth == 1 else ""
        lines.append(f"{'  ' * depth}{namespace}{_describe(node)}")
    cut_off = dict.fromkeys(accounts.detached.values())
    lines.extend(f"detached {_describe(node)}" for node in list(cut_off)[:MAX_DRAWN_NODES])
    return "\n".join(lines)


def _describe(node: TreeNode) -> str:
    first = node.value[:4].tolist()
    more = ", ..." if len(node.value) > len(first) else ""
    pages = f"[{', '.join(map(str, first))}{more}]"
    return (
        f"{len(node.value)} pages {pages} lock_ref={node.lock_ref} receipts={node.receipts} "
        f"hit_count={node.hit_count} last_access_time={node.last_access_time:g}"
    )
