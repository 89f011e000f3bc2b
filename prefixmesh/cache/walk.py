"""Following a key into the tree: how far it leads, on the device and then on the host. Changes nothing.

A child is known by its *edge name*: the bytes of its first page, and before them the namespace where one begins, at the root and
at a key's boundary. A key shorter than a page finds no child anywhere, because no name is shorter than a page.
"""

from typing import NamedTuple

import numpy as np

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.node import INDEX_BYTES, TreeNode
from prefixmesh.ids import Namespace
from prefixmesh.tokens import TOKEN_BYTES

Walk = tuple[TreeNode, list[bytes], int, TreeNode | None, int]
"""How far a key leads on the device. A plain tuple, which costs a tenth of a named one where microseconds count:

* the last node whose whole edge the key contains;
* the packed device pages of all that matched, in order: of each node on the way, and of the one below as far as it is shared;
* bytes of the key that matched: whole pages;
* the child in whose edge the key leaves the tree, None when it leaves at the node;
* bytes of that child's edge that the key shares: at least one page, and not all; 0 without the child.
"""


class Step(NamedTuple):
    """A child, on whichever tier, that a key goes on into."""

    child: TreeNode
    shared_bytes: int
    """Bytes of its edge that the key shares: whole pages, at least one."""


def walk_device(root: TreeNode, key: RadixKey, page_bytes: int) -> Walk:
    """Follow ``key`` as far as the device goes. O(depth) look-ups and O(matched) bytes compared."""
    boundary = key.boundary_tokens * TOKEN_BYTES
    if not boundary:
        return _follow(root, key.namespace, key.tokens, 0, page_bytes, [])
    # The public part first, by itself: an edge that goes on beyond the boundary goes on publicly.
    walk = _follow(root, key.namespace, key.tokens[:boundary], 0, page_bytes, [])
    node, pages, position, inside, _ = walk
    if position < boundary or inside is not None:
        return walk
    return _follow(node, key.tail, key.tokens, boundary, page_bytes, pages)


def _follow(
    node: TreeNode,
    namespace: bytes,
    tokens: bytes,
    position: int,
    page_bytes: int,
    pages: list[bytes],
) -> Walk:
    """Follow ``tokens`` from byte ``position`` on, where ``namespace`` begins at ``node``. The hot loop of the cache."""
    child = node.children.get(namespace + tokens[position : position + page_bytes])
    while child is not None:
        held = child.pages
        if not held:
            break
        edge = child.key
        if not tokens.startswith(edge, position):
            shared_pages = _shared_bytes(edge, tokens, position) // page_bytes
            if not shared_pages:
                break  # less than a page is left, and a longer name happened to be equal
            shared = shared_pages * page_bytes
            pages.append(held[: shared_pages * INDEX_BYTES])
            return node, pages, position + shared, child, shared
        node = child
        pages.append(held)
        position += len(edge)
        child = child.children.get(tokens[position : position + page_bytes])
    return node, pages, position, None, 0


def edge_name(key: RadixKey, position: int, page_bytes: int) -> bytes:
    """What a child that continues ``key`` at byte ``position`` is known by."""
    page = key.tokens[position : position + page_bytes]
    if key.boundary_tokens and position == key.boundary_tokens * TOKEN_BYTES:
        return key.tail + page
    return page if position else key.namespace + page


def segment_end(key: RadixKey, position: int) -> int:
    """The byte up to which one edge may carry ``key`` from ``position`` on: the boundary, or the key's end."""
    boundary = key.boundary_tokens * TOKEN_BYTES
    return min(boundary, len(key.tokens)) if position < boundary else len(key.tokens)


def step(node: TreeNode, key: RadixKey, position: int, page_bytes: int) -> Step | None:
    """The child of ``node``, on any tier, into which ``key`` goes on from byte ``position``; None when there is none."""
    end = segment_end(key, position)
    if end - position < page_bytes:
        return None
    child = node.children.get(edge_name(key, position, page_bytes))
    if child is None:
        return None
    shared = _shared_bytes(child.key, key.tokens[:end], position)
    return Step(child, shared // page_bytes * page_bytes)


def key_to(node: TreeNode, page_bytes: int) -> RadixKey:
    """The key that ends where ``node``, which is in a tree, does. O(length)."""
    runs: list[bytes] = []
    begins: list[TreeNode] = []
    at = node
    while at.parent is not None:
        runs.append(at.key)
        if len(at.edge) > page_bytes:  # a namespace stands before the first page
            begins.append(at)
        at = at.parent
    names = [Namespace(first.edge[:-page_bytes]) for first in begins]
    tokens = b"".join(reversed(runs))
    if len(names) == 1:
        return RadixKey(names[0], tokens)
    tail, namespace = names
    return RadixKey(namespace, tokens, begins[0].start, tail)


def _shared_bytes(edge: bytes, tokens: bytes, start: int) -> int:
    """Bytes of ``edge`` that ``tokens[start:]`` begins with, in whole tokens. O(shorter of the two), at C speed."""
    count = min(len(edge), len(tokens) - start) // TOKEN_BYTES
    if count <= 0:
        return 0
    ours = np.frombuffer(edge, dtype=np.uint32, count=count)
    theirs = np.frombuffer(tokens, dtype=np.uint32, count=count, offset=start)
    differs = ours != theirs
    first = int(differs.argmax())
    return (first if differs[first] else count) * TOKEN_BYTES
