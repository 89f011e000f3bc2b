"""Which prefixes prompts share, and how often they come: a radix tree of prompts by the names of their blocks. Pure.

A node stands for all that end below it, so that its sums are those of the prefix which ends there. Names are chained: two prompts have the
same name at a place if and only if they are equal up to it, so one look tells whether an edge is passed whole, and where two part is found
by halving. A prompt costs a few looks, however long it is.

The tree is bounded. What does not fit any more is not remembered, but what is there is counted on; a review makes room by dropping the ends
that came least, and whatever is really hot comes again (the idea of Space-Saving: Metwally, Agrawal and El Abbadi, 2005).
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from prefixmesh.errors import InvariantError
from prefixmesh.ids import Fingerprint
from prefixmesh.router.heat.origin import Origin
from prefixmesh.tokens import TOKEN_BYTES

MAX_NODES: Final = 2048
"""Of the whole tree. A few dozen prefixes are ever replicated; the rest is for finding them among those that come once."""

ROOM_SHARE: Final = 0.75
"""As full as a review leaves it: what comes until the next is to have room."""

MAX_BLOCKS: Final = 256
"""Leading blocks of a prompt that are looked at: 16,384 tokens of 64 each, and 20 MB of names in a full tree at the very most."""

MAX_STEPS: Final = 16
"""Nodes passed for one prompt: a talk's prompts lie on one path, and each turn adds a node to it."""


class PrefixNode:
    """A prefix that some prompts share, or that one prompt is."""

    __slots__ = (
        "born",
        "children",
        "end",
        "is_wanted",
        "names",
        "origin",
        "parent",
        "requests",
        "tokens",
        "work_ms",
    )

    def __init__(
        self, parent: "PrefixNode | None", names: Sequence[Fingerprint], end: int, origin: Origin, born: float
    ) -> None:
        self.parent = parent
        self.names = names
        """Of the blocks behind the parent's."""

        self.end = end
        """Blocks of the whole prefix."""

        self.origin = origin
        self.born = born
        self.children: dict[Fingerprint, PrefixNode] = {}
        """By the first of their names."""

        self.requests = 0.0
        self.work_ms = 0.0
        """Sums by a ``DecayClock``."""

        self.is_wanted = False
        """Whether its tokens are to be kept from the next prompt that brings them."""

        self.tokens: bytes | None = None
        """Packed."""

    def path(self) -> list[Fingerprint]:
        """Names of all its blocks. O(blocks)."""
        parts, node = [], self
        while node.parent is not None:
            parts.append(node.names)
            node = node.parent
        return [name for part in reversed(parts) for name in part]


class PrefixTree:
    """Prompts by the names of their blocks. Not thread-safe."""

    def __init__(self, block_size: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._root = PrefixNode(None, (), 0, Origin(b""), 0.0)  # type: ignore[arg-type]
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(
        self,
        names: Sequence[Fingerprint],
        tokens: bytes,
        origin: Origin,
        weight: float,
        work_ms: float,
        now: float,
    ) -> None:
        """Count a prompt in at all its prefixes. O(nodes passed + log blocks), and O(blocks) where it is new; ``tokens``, packed, is cut
        where a node on the way wants it."""
        node, depth, most = self._root, 0, min(len(names), MAX_BLOCKS)
        work = weight * work_ms
        for _ in range(MAX_STEPS):
            if depth >= most:
                return
            child = node.children.get(names[depth])
            if child is None:
                if self._size < MAX_NODES:
                    child = self._add_leaf(node, names[depth:most], most, origin, now)
                    child.requests, child.work_ms = weight, work
                return
            if child.end > most or names[child.end - 1] != child.names[-1]:
                if self._size >= MAX_NODES:
                    return
                child = self._split(child, _common(child.names, names[depth:most]))
            child.requests += weight
            child.work_ms += work
            node, depth = child, child.end
            if child.is_wanted:
                child.is_wanted = False
                child.tokens = tokens[: depth * self._block_bytes]

    def nodes(self) -> list[PrefixNode]:
        """All prefixes, each after those that it lies in. O(nodes)."""
        return list(self._walk())

    def scale(self, factor: float) -> None:
        """Multiply all sums. O(nodes)."""
        for node in self._walk():
            node.requests *= factor
            node.work_ms *= factor

    def make_room(self, least: float) -> None:
        """Drop ends whose requests come to less than ``least``, and as many more, those that came least first, as leave room for what comes
        until the next time. O(nodes * log nodes)."""
        keep = int(MAX_NODES * ROOM_SHARE)
        ends = [(node.requests, id(node), node) for node in self._walk() if not node.children]
        heapify(ends)
        while ends and (self._size > keep or ends[0][0] < least):
            _, _, node = heappop(ends)
            parent = node.parent
            assert parent is not None, node
            del parent.children[node.names[0]]
            self._size -= 1
            if not parent.children and parent is not self._root:
                heappush(ends, (parent.requests, id(parent), parent))

    def check_invariants(self) -> None:
        """Recompute everything; raises InvariantError. O(nodes)."""
        nodes = self.nodes()
        if len(nodes) != self._size or self._size > MAX_NODES:
            raise InvariantError(f"{self!r}: it has {len(nodes)} nodes")
        for node in nodes:
            parent = node.parent
            assert parent is not None, node
            if node.end != parent.end + len(node.names) or parent.children.get(node.names[0]) is not node:
                raise InvariantError(f"{self!r}: the prefix of {node.end} blocks does not hang where it ends")
            if node.requests < sum(child.requests for child in node.children.values()) * (1.0 - 1e-9):
                raise InvariantError(
                    f"{self!r}: the prefix of {node.end} blocks came less often than what it begins"
                )

    def __repr__(self) -> str:
        return f"<PrefixTree {self._size} of {MAX_NODES}>"

    def _walk(self) -> Iterator[PrefixNode]:
        todo = list(self._root.children.values())
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children.values())

    def _add_leaf(
        self, parent: PrefixNode, names: Sequence[Fingerprint], end: int, origin: Origin, now: float
    ) -> PrefixNode:
        leaf = parent.children[names[0]] = PrefixNode(parent, names, end, origin, now)
        self._size += 1
        return leaf

    def _split(self, node: PrefixNode, at: int) -> PrefixNode:
        """Put a node for the first ``at`` of an edge's names before it: all that came so far was of both."""
        parent, names = node.parent, node.names
        assert parent is not None, node
        upper = self._add_leaf(parent, names[:at], parent.end + at, node.origin, node.born)
        upper.requests, upper.work_ms = node.requests, node.work_ms
        node.names, node.parent = names[at:], upper
        upper.children[node.names[0]] = node
        return upper


def _common(mine: Sequence[Fingerprint], others: Sequence[Fingerprint]) -> int:
    """How many leading names are the same; the first are, and not all of ``mine``. O(log names), because they are chained."""
    same, differ = 1, min(len(mine), len(others) + 1)
    while differ - same > 1:
        middle = (same + differ) // 2
        if mine[middle - 1] == others[middle - 1]:
            same = middle
        else:
            differ = middle
    return same
