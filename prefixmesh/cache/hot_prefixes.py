"""Which prefixes of a tree are used most: what another worker should have when this one leaves. Pure; changes nothing.

A node's hits are the matches that went through it, so along a path they only fall. A prefix worth handing over ends where its users part:
at the deepest node that still has a fair share of the hits at its path's top. What lies below is each user's own; what lies above comes along
with it. A few tokens that all prompts begin with are so no prefix of their own where several long ones go on from them, and one of a
conversation's turns is none where the system prompt before it has a hundred times its hits.

Prefixes are ranked by the tokens that they have saved, hits times tokens along their paths.
"""

from collections.abc import Iterable
from itertools import islice
from operator import attrgetter
from typing import Final, NamedTuple

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.node import TreeNode, end_of
from prefixmesh.cache.walk import key_to
from prefixmesh.tokens import TOKEN_BYTES

FAIR_SHARE: Final = 0.1
"""Of the hits at a path's top, what a prefix must have at its end. A system prompt that goes on in ten ways, all used alike, is ten prefixes;
in a hundred, it is one."""

LEAST_HITS: Final = 1
"""What nobody has found is not used, however new it is."""

RECENT_S: Final = 600.0
"""What was not used for so long is not hot any more, however often it was before: hits only rise."""

MAX_LOOKS: Final = 25_000
"""Nodes that are looked at, for which the engine waits some milliseconds. Where there are more, those that were made first: of a full cache,
what is old is still there because it was used."""

MAX_WIDTH: Final = 256
"""Children of one node that are gone on from, the most used ones."""

MAX_PATHS: Final = 2048
"""Nodes that are gone on from in all; where there are more, paths end sooner than they might."""


class HotNode(NamedTuple):
    """A prefix that is used much."""

    node: TreeNode
    """Where it ends."""

    saved_tokens: int
    """Hits times tokens, along its path."""


class HotPrefix(NamedTuple):
    """The same, for those outside the tree."""

    key: RadixKey
    hits: int
    """Matches that went through all of it."""

    owner: str
    """Who pays for its end."""


def hot_prefixes(
    root: TreeNode, page_bytes: int, now: float, *, max_prefixes: int, max_tokens: int
) -> list[HotPrefix]:
    """What ``find_hot`` finds, by their keys. As it, and O(tokens)."""
    found = find_hot(root, now, max_prefixes=max_prefixes, max_tokens=max_tokens)
    return [HotPrefix(key_to(hot.node, page_bytes), hot.node.hit_count, hot.node.payer.name) for hot in found]


def find_hot(root: TreeNode, now: float, *, max_prefixes: int, max_tokens: int) -> list[HotNode]:
    """The prefixes that are used most, none inside another: at most ``max_prefixes``, with ``max_tokens`` in all (each counted whole); the
    first is the one that saved most. O(children of nodes that are used, at most ``MAX_LOOKS``)."""
    found: list[HotNode] = []
    since, looks = now - RECENT_S, MAX_LOOKS
    paths: list[tuple[TreeNode, int, float]] = [(root, 0, LEAST_HITS)]
    gone_on = 0
    while paths:
        node, saved, least = paths.pop()
        used: list[TreeNode] = []
        if node.children and gone_on < MAX_PATHS:
            used = _used(islice(node.children.values(), looks), least, since)
            looks -= min(looks, len(node.children))
            gone_on += 1
        if not used and node is not root:
            found.append(HotNode(node, saved))
        for child in used:
            share = least if node is not root else max(least, child.hit_count * FAIR_SHARE)
            paths.append((child, saved + child.hit_count * (len(child.key) // TOKEN_BYTES), share))
    found.sort(key=lambda hot: hot.saved_tokens, reverse=True)
    return _within(found, max_prefixes, max_tokens)


def _used(children: Iterable[TreeNode], least: float, since: float) -> list[TreeNode]:
    """Those of ``children`` that are used enough, and lately; the most used ones where there are many."""
    used = [child for child in children if child.hit_count >= least and child.last_access_time >= since]
    if len(used) > MAX_WIDTH:
        used.sort(key=attrgetter("hit_count"), reverse=True)
    return used[:MAX_WIDTH]


def _within(ranked: list[HotNode], max_prefixes: int, max_tokens: int) -> list[HotNode]:
    """Those that fit, in their order; one that does not leaves room for smaller ones behind it."""
    taken: list[HotNode] = []
    left = max_tokens
    for hot in ranked:
        if len(taken) >= max_prefixes:
            break
        if end_of(hot.node) <= left:
            left -= end_of(hot.node)
            taken.append(hot)
    return taken
