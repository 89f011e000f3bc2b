"""A cache's tree as text, for a person who looks at a broken one."""

from collections.abc import Iterable
from itertools import islice
from typing import Final

from prefixmesh.cache.accounting import PageAccounts
from prefixmesh.cache.base import PageIndices
from prefixmesh.cache.copies import Copy
from prefixmesh.cache.namespace import NAMESPACE_BYTES, short_digest
from prefixmesh.cache.node import TreeNode, nodes_below
from prefixmesh.cache.tier import Tier
from prefixmesh.tokens import TOKEN_BYTES

MAX_DRAWN_NODES: Final = 200
"""A drawing is for reading: a message with a tree of 100,000 nodes would only hide what it should show."""

_SHOWN_PAGES: Final = 4


def draw(accounts: PageAccounts, in_flight: Iterable[Copy] = ()) -> str:
    """One line a node, children indented: length, pages per tier, locks, pins, use, payer; then one a copy in flight. Tokens are never
    shown."""
    lines = [f"root lock_ref={accounts.root.lock_ref}"]
    for count, (depth, node) in enumerate(nodes_below(accounts.root)):
        if count == MAX_DRAWN_NODES:
            lines.append(f"... and {accounts.node_count - count} more nodes")
            break
        lines.append(f"{'  ' * depth}{_namespace_of(node, depth)}{_describe(node)}")
    cut_off = dict.fromkeys(accounts.detached.values())
    lines.extend(f"detached {_describe(node)}" for node in list(cut_off)[:MAX_DRAWN_NODES])
    lines.extend(map(_describe_copy, islice(in_flight, MAX_DRAWN_NODES)))
    return "\n".join(lines)


def _describe_copy(copy: Copy) -> str:
    """What it copies, from which token on, and which pages are its own."""
    parts = [f"{type(copy).__name__.lower()} from token {copy.start}"]
    for tier in Tier:
        pages, own = copy.pages_on(tier), len(copy.owned_on(tier))
        if len(pages):
            parts.append(f"{tier.name.lower()} {_pages(pages)} {'own' if own else 'locked'}")
    return " ".join(parts)


def _namespace_of(node: TreeNode, depth: int) -> str:
    """Which namespace begins at this edge: at the root always one, below it the tail of a public prefix."""
    name = node.edge[:NAMESPACE_BYTES]
    parent = node.parent
    inherited = node.key.startswith(name) or (parent is not None and parent.edge.startswith(name))
    begins = depth == 1 or not inherited
    return f"namespace {short_digest(node.edge)}: " if begins else ""


def _describe(node: TreeNode) -> str:
    parts = [f"{len(node.key) // TOKEN_BYTES} tokens"]
    if node.on_device:
        parts.append(f"device {_pages(node.value)} lock_ref={node.lock_ref} receipts={node.receipts}")
    if node.on_host:
        parts.append(f"host {_pages(node.host_value)} host_ref_counter={node.host_ref_counter}")
    if node.pin_ref:
        parts.append(f"pins={node.pin_ref}")
    if node.host_pin_ref:
        parts.append(f"host_pins={node.host_pin_ref}")
    if node.payer.name:
        parts.append(f"payer={node.payer.name}")
    if node.priority:
        parts.append(f"priority={node.priority}")
    parts.append(f"hit_count={node.hit_count} last_access_time={node.last_access_time:g}")
    return " ".join(parts)


def _pages(pages: PageIndices) -> str:
    first = ", ".join(map(str, pages[:_SHOWN_PAGES].tolist()))
    return f"[{first}{', ...' if len(pages) > _SHOWN_PAGES else ''}]"
