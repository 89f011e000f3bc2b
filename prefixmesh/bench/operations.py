"""The figures of single operations: what each one prepares, and what exactly is timed.

What is timed is the cache's own method, called with arguments that were made before, and nothing else. Prompts of 4,096 tokens
take turns with seven others, and asking is done with bytes of its own, so that no figure is that of memory it has just read.
"""

from collections.abc import Iterator
from functools import partial
from itertools import cycle, islice
from typing import Final

import numpy as np

from prefixmesh.bench.timing import BATCH, Call, Sample, time_batches, time_calls
from prefixmesh.bench.trees import LEAF_TOKENS, NOW, OWNERS, BenchTree, Grove, copies
from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.node import TreeNode
from prefixmesh.errors import InternalError
from prefixmesh.tokens import TOKEN_BYTES

PROMPT_TOKENS: Final = 4_096
PROMPTS: Final = 8
"""Prompts that take turns: with their pages 256 KiB and more, beyond what stays in the fastest cache."""

DEEP_NODES: Final = 20
DEEP_EDGE_TOKENS: Final = 208
"""Of each of the 20 nodes: 4,160 tokens in all, and whole pages of 16."""

FRONT_TOKENS: Final = 4_032
BEHIND_TOKENS: Final = 64
NEW_TOKENS: Final = 1_024
LOCK_DEPTH: Final = 3


def evict_leaf(grove: Grove, repeats: int, calls: int) -> Iterator[Sample]:
    """One leaf of 64 tokens, the least recently used, as often as one is planted: the tree keeps its size. The owners want the
    room in turns."""
    pages = LEAF_TOKENS // grove.page_size
    cache = grove.tree.cache

    def prepared() -> Iterator[Call]:
        for owner in islice(cycle(OWNERS), calls):
            grove.plant()
            yield cache.evict, (pages, owner.name)

    def check(freed: object) -> None:
        if freed != pages:
            raise InternalError(f"evicting {pages} pages freed {freed}")

    for _ in range(repeats):
        yield time_calls(prepared(), check)


def match_prompt(grove: Grove, repeats: int, calls: int) -> Iterator[Sample]:
    """4,096 tokens that are one edge of the tree; the answer holds their pages as one array."""
    prompts = [grove.tokens(PROMPT_TOKENS) for _ in range(PROMPTS)]
    for tokens in prompts:
        grove.tree.put(OWNERS[0], tokens)
    yield from _match(grove.tree, prompts, repeats, calls)


def match_deep(grove: Grove, repeats: int, calls: int) -> Iterator[Sample]:
    """A path of 20 nodes, 208 tokens each, as a conversation leaves it that went on 20 times."""
    prompts = [_grow_path(grove, DEEP_NODES, DEEP_EDGE_TOKENS) for _ in range(PROMPTS // 2)]
    yield from _match(grove.tree, prompts, repeats, calls)


def insert_behind(grove: Grove, repeats: int, calls: int) -> Iterator[Sample]:
    """64 new tokens behind 4,032 that are cached and locked, as a request inserts them that has matched the 4,032."""
    tree, owner = grove.tree, OWNERS[0]
    front = grove.tokens(FRONT_TOKENS)
    tree.put(owner, front)
    match = tree.match(owner, front)
    receipt = tree.cache.lock(match.last_device_node)
    insert = partial(tree.cache.insert, owner=owner.name)

    def prepared() -> Iterator[Call]:
        for _ in range(calls):
            key = RadixKey(owner.namespace, front + grove.tokens(BEHIND_TOKENS))
            fresh = tree.take(BEHIND_TOKENS // grove.page_size, owner)
            yield insert, (key, np.concatenate((match.device_indices, fresh)), NOW)

    for _ in range(repeats):
        yield time_calls(prepared())
    tree.cache.release(receipt)


def insert_new(grove: Grove, repeats: int, calls: int) -> Iterator[Sample]:
    """1,024 tokens of which nothing is cached, with the fingerprints of their 16 blocks."""
    tree, owner = grove.tree, OWNERS[0]
    insert = partial(tree.cache.insert, owner=owner.name)

    def prepared() -> Iterator[Call]:
        for _ in range(calls):
            key = RadixKey(owner.namespace, grove.tokens(NEW_TOKENS))
            yield insert, (key, tree.take(NEW_TOKENS // grove.page_size, owner), NOW)

    for _ in range(repeats):
        yield time_calls(prepared())


def lock_and_release(grove: Grove, repeats: int, calls: int) -> Iterator[Sample]:
    """A node at depth 3, in batches of 32 over 8 such nodes."""
    paths = [_grow_path(grove, LOCK_DEPTH, LEAF_TOKENS) for _ in range(PROMPTS)]
    nodes = [grove.tree.match(OWNERS[0], tokens).last_device_node for tokens in paths]
    batch = partial(_lock_and_release_each, grove.tree, list(islice(cycle(nodes), BATCH)))
    for _ in range(repeats):
        yield time_batches(batch, max(1, calls // BATCH))


def _lock_and_release_each(tree: BenchTree, nodes: list[TreeNode]) -> None:
    lock, release = tree.cache.lock, tree.cache.release
    for node in nodes:
        release(lock(node))


def _match(tree: BenchTree, prompts: list[bytes], repeats: int, calls: int) -> Iterator[Sample]:
    keys = [RadixKey(OWNERS[0].namespace, tokens) for tokens in copies(prompts)]
    for key, tokens in zip(keys, prompts, strict=True):
        if tree.cache.peek(key) * TOKEN_BYTES != len(tokens):
            raise InternalError(f"the bench's prompt is not cached in {tree.cache!r}")
    for _ in range(repeats):
        yield time_calls((tree.cache.match_prefix, (key, NOW)) for key in islice(cycle(keys), calls))


def _grow_path(grove: Grove, nodes: int, edge_tokens: int) -> bytes:
    """A new path, one insert per node; returns its tokens."""
    tokens = b""
    for _ in range(nodes):
        tokens += grove.tokens(edge_tokens)
        grove.tree.put(OWNERS[0], tokens)
    return tokens
