"""What a radix tree holds, read page by page from its nodes: to compare all of it with a naive model."""

from collections.abc import Iterator
from typing import NamedTuple

from prefixmesh.cache.base import PageIndices
from prefixmesh.cache.namespace import NAMESPACE_BYTES
from prefixmesh.cache.node import TreeNode, nodes_below
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.cache.tier import Tier
from prefixmesh.tokens import TOKEN_BYTES, unpack
from tests.support.naive_tiers import Prefix, Space


class Place(NamedTuple):
    """Where a page's worth of tokens is in the tree."""

    node: TreeNode
    nth: int
    """Which page of the node's edge."""

    def page(self, tier: Tier) -> int | None:
        """The page that holds its KV on a tier; None when none does."""
        value = pages_on(self.node, tier)
        return int(value[self.nth]) if len(value) else None


def pages_on(node: TreeNode, tier: Tier) -> PageIndices:
    """A node's pages on a tier; none when it is not there."""
    return node.value if tier is Tier.DEVICE else node.host_value


def read_tree(cache: RadixCache) -> dict[Prefix, Place]:
    """Every page of the tree by the whole prefix that it ends. O(nodes x length)."""
    return {prefix: place for node, prefixes in nodes_of(cache) for prefix, place in _places(node, prefixes)}


def nodes_of(cache: RadixCache) -> Iterator[tuple[TreeNode, list[Prefix]]]:
    """Every node with the prefixes that end at its pages, parents first."""
    root = cache._accounts.root
    page_bytes = cache.page_size * TOKEN_BYTES
    ends: dict[TreeNode, Prefix] = {}
    for _, node in nodes_below(root):
        assert node.parent is not None
        space: Space
        space, tokens = ends.get(node.parent, ((b"", b"", 0), ()))
        if len(node.edge) > page_bytes:  # a namespace begins here
            begun = node.edge[:NAMESPACE_BYTES]
            space = (begun, b"", 0) if node.parent is root else (space[0], begun, len(tokens))
        whole = (*tokens, *unpack(node.key).tolist())
        ends[node] = (space, whole)
        pages = len(node.key) // page_bytes
        yield (
            node,
            [(space, whole[: len(tokens) + (index + 1) * cache.page_size]) for index in range(pages)],
        )


def _places(node: TreeNode, prefixes: list[Prefix]) -> Iterator[tuple[Prefix, Place]]:
    for index, prefix in enumerate(prefixes):
        yield prefix, Place(node, index)
