"""Who pays for the pages of one tier, and whose node goes next.

Every node is on the account of one payer (a tenant, an adapter, nobody: a name). Each payer has a line of its evictable nodes,
so that its own can be found without passing anybody else's. A *quota* gives a payer a floor, below which others cannot
evict it, and a ceiling, above which it is the first to give when room is wanted.

Whose first node goes is decided in this order:

1. a payer above its ceiling gives down to it;
2. whoever wants room that would lift it above its ceiling gives its own as far as that goes;
3. of all others that are above their floors, and of the one who wants room, the lowest rank and least recent use.

For 3 the payers stand in a heap by a *lower bound* of their first node's place: ranks and uses only rise, so an outdated entry is
found when it comes up, and corrected. (A split may put the lower half a little before the bound, within the use that both had last:
only a node of the same path and use could stand between.) A payer at or below its floor is not in the heap. So a choice costs the
logarithm of the number of payers, amortised over uses, and no scan of nodes ever; with one payer it costs nothing.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from prefixmesh.cache.eviction import (
    EvictionLine,
    EvictionPolicy,
    LruLine,
    RankedLine,
    make_line,
    rank_under,
)
from prefixmesh.cache.node import NO_CHILDREN, TreeNode
from prefixmesh.errors import ConfigError, InvariantError

NOBODY: Final = ""
"""The payer of what no tenant pays for: public prefixes, and everything where owners are not told."""

_STALE_ENTRIES: Final = 64
"""Superseded entries that may lie in the heap, beside one per payer, before it is cleared of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """What a payer is sure of, and where its share ends, in pages of one tier."""

    floor_pages: int = 0
    """Pages that others cannot evict it below."""
    ceiling_pages: int | None = None
    """Pages that it cannot exceed while anybody wants room; None for no ceiling."""

    def __post_init__(self) -> None:
        if self.floor_pages < 0:
            raise ConfigError(f"floor_pages must not be negative, got {self.floor_pages}")
        if self.ceiling_pages is not None and self.ceiling_pages < self.floor_pages:
            raise ConfigError(
                f"ceiling_pages must be at least floor_pages, got {self.ceiling_pages} below {self.floor_pages}"
            )


_NO_QUOTA: Final = Quota()


_Place = tuple[int, int, int]
"""Where a node stands among all payers': its rank, the operation that used it last, and minus its start. The lower goes first;
of nodes that one operation used the deepest, so a child stands before its parent."""

Rank = tuple[int, int]
"""The same without the start: the lower, the sooner it goes."""

_FRONT: Final[_Place] = (0, 0, 0)
"""A lower bound of every place in an LRU line, where all ranks are 0. (A ranked line tells by itself when its first goes sooner.)"""


Victim = tuple[TreeNode, int]
"""What goes next, and how many of the node's pages may: never more than are wanted, and fewer where a floor or a ceiling ends it."""


class Payer:
    """One account, and the line of its nodes."""

    __slots__ = ("ceiling", "floor", "line", "locked_pages", "name", "pages", "queued", "watched")

    def __init__(self, name: str, line: EvictionLine, quota: Quota) -> None:
        self.name = name
        self.line = line
        self.floor = quota.floor_pages
        self.ceiling = quota.ceiling_pages
        self.watched = quota is not _NO_QUOTA
        """Whether a change of ``pages`` must be told to ``OwnerLines.changed``."""
        self.pages = 0
        """Pages of this tier that it pays for."""
        self.locked_pages = 0
        """Those of them that are locked; kept only where there is a floor."""
        self.queued: _Place | None = None
        """Its valid entry in the heap; None when it is not there."""

    @property
    def sheltered_pages(self) -> int:
        """Evictable pages that the floor keeps from others. O(1)."""
        if not self.floor:
            return 0
        idle = self.pages - self.locked_pages
        return idle - min(idle, max(0, self.pages - self.floor))

    def __repr__(self) -> str:
        ceiling = "" if self.ceiling is None else f", ceiling={self.ceiling}"
        return (
            f"Payer({self.name!r}, pages={self.pages}, in line={len(self.line)}, floor={self.floor}{ceiling})"
        )


class OwnerLines:
    """The payers of one tier and the order among them. Not thread-safe.

    Who pays: ``payer``, ``changed``. Who goes: ``next_victim``. How much: ``sheltered_from``.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        quotas: Mapping[str, Quota],
        size_of: Callable[[TreeNode], int],
        serial_slot: str,
        lock_slot: str,
        inner: str,
    ) -> None:
        """``size_of`` says how many pages of this tier a node has; the others name where it tells which operation used them
        last, how many locks protect them, and whether it has children on this tier."""
        self._policy: EvictionPolicy = policy
        self._quotas = dict(quotas)
        self._size_of = size_of
        self._used_at: Callable[[TreeNode], int] = attrgetter(serial_slot)
        self.is_locked: Callable[[TreeNode], int] = attrgetter(lock_slot)
        """Truthy for a node that a lock protects on this tier."""
        self._is_inner: Callable[[TreeNode], bool] = attrgetter(inner)
        self._ranked = policy != "lru"
        self._payers: dict[str, Payer] = {}
        self._numbers = itertools.count()
        self._heap: list[tuple[_Place, int, Payer]] = []
        self._above_ceiling: dict[Payer, None] = {}
        self._floored: list[Payer] = []
        self.aside: dict[TreeNode, None] = {}
        """Nodes out of line during an eviction, because a child of theirs is still there; see ``next_victim``."""
        self.clear()

    def clear(self) -> None:
        """Start again: nobody has anything. Payers with a quota are known from the start."""
        for payer in self._payers.values():
            payer.line.close()
        self._payers.clear()
        self._heap.clear()
        self._above_ceiling.clear()
        self._floored.clear()
        for name in (NOBODY, *self._quotas):
            self.payer(name)

    def payer(self, name: str) -> Payer:
        """The account of this name, opened when it has none. O(1). It is closed again when its last page is gone."""
        payer = self._payers.get(name)
        if payer is None:
            quota = self._quotas.get(name, _NO_QUOTA)
            line = make_line(self._policy)
            payer = self._payers[name] = Payer(name, line, quota)
            if payer.floor:
                self._floored.append(payer)
            elif isinstance(line, LruLine):
                self._offer(payer, _FRONT)
            if isinstance(line, RankedLine):
                line.lowered = lambda: self._lowered(payer)
        return payer

    def changed(self, payer: Payer) -> None:
        """``payer.pages`` has changed, and it is watched or has become 0. O(1), O(log payers) when it leaves its shelter."""
        if payer.ceiling is not None:
            if payer.pages > payer.ceiling:
                self._above_ceiling[payer] = None
            else:
                self._above_ceiling.pop(payer, None)
        if payer.floor and payer.queued is None and payer.pages > payer.floor:
            place = self._place_of_first(payer) or (None if self._ranked else _FRONT)
            if place is not None:
                self._offer(payer, place)
        if not payer.pages and not payer.watched and payer.name != NOBODY:
            del self._payers[payer.name]
            payer.queued = None
            payer.line.close()

    def sheltered_from(self, name: str) -> int:
        """Evictable pages that floors keep from ``name``. O(payers with a floor)."""
        if not self._floored:
            return 0
        return sum(payer.sheltered_pages for payer in self._floored if payer.name != name)

    def next_victim(
        self, name: str, wanted: int, missing: int, serial: int, newcomer: Rank | None = None
    ) -> Victim | None:
        """Whose node goes next when ``name`` wants ``wanted`` pages, of which ``missing`` have not come yet; None when nothing may.
        See the module for the order. With a ``newcomer``, nothing goes that the policy would keep rather than that.

        A node that comes up but cannot go, because a child of it is still there, stands aside until ``child_left`` finds it a leaf,
        or until ``put_back``, which ends the operation. ``serial`` is the operation's number, higher than that of any use before.
        """
        if len(self._payers) == 1:  # NOBODY alone, as long as owners are not told
            payer = self._payers[NOBODY]
            if not payer.watched:
                node = self._first(payer)
                return None if node is None or self._outranks(payer, node, newcomer) else (node, missing)
        wanting = self._payers.get(name)
        while (victim := self._choose(wanting, wanted, missing, serial)) is not None:
            node = victim[0]
            if newcomer is not None and self._outranks(self._payers[node.payer.name], node, newcomer):
                return None
            if node.children is NO_CHILDREN or not self._is_inner(node):
                return victim
            self._payers[node.payer.name].line.leave(node)
            self.aside[node] = None
        return None

    def child_left(self, parent: TreeNode | None) -> None:
        """A child of ``parent`` has left the tier: if the parent stands aside and is a leaf now, it is back where it stood, before
        all others of its line. To be called for each victim while ``aside`` is not empty. O(1)."""
        if parent in self.aside and parent is not None and not self._is_inner(parent):
            del self.aside[parent]
            payer = self._payers[parent.payer.name]
            payer.line.put_first(parent)
            self._lowered(payer)

    def put_back(self) -> list[TreeNode]:
        """Put what stands aside back in line; returns it, in the order passed over, for the caller to touch one path after
        another: each is in use by a sheltered child. To be called after the last ``next_victim`` of an operation when ``aside`` is
        not empty. O(1) each."""
        aside = list(self.aside)
        self.aside.clear()
        for node in aside:
            self._payers[node.payer.name].line.enter(node)
        return aside

    @property
    def has_quotas(self) -> bool:
        """Whether anybody has a floor or a ceiling."""
        return bool(self._quotas)

    def in_order(self, most: int, *, backwards: bool = False) -> Iterator[TreeNode]:
        """The first ``most`` that stand in line, next to go first, or the last ones, last to go first: as policy and recency say, quotas
        apart, locked ones among them. Changes nothing; nothing may change in line meanwhile. O(payers), and O(log payers) a node."""
        lines: list[Iterator[TreeNode]] = [
            reversed(payer.line) if backwards else iter(payer.line) for payer in self._payers.values()
        ]
        if len(lines) == 1:
            return itertools.islice(lines[0], most)
        merged = heapq.merge(
            *lines, key=lambda node: self._place(self._payers[node.payer.name], node), reverse=backwards
        )
        return itertools.islice(merged, most)

    def rank_of(self, node: TreeNode, used_at: int) -> Rank:
        """What ``next_victim`` compares with a newcomer that comes in ``node``'s name and was used last by operation ``used_at``."""
        return (rank_under(self._policy, node), used_at)

    def _outranks(self, payer: Payer, node: TreeNode, newcomer: Rank | None) -> bool:
        """Whether the policy keeps ``node``, first in ``payer``'s line, rather than the newcomer; never one of a payer above its
        ceiling."""
        if newcomer is None or payer in self._above_ceiling:
            return False
        return self._place(payer, node)[:2] > newcomer

    def _choose(self, wanting: Payer | None, wanted: int, missing: int, serial: int) -> Victim | None:
        if self._above_ceiling:
            for payer in self._above_ceiling:
                node = self._first(payer)
                if node is not None and payer.ceiling is not None:
                    return (node, min(missing, payer.pages - payer.ceiling))
        if wanting is not None and wanting.ceiling is not None:
            excess = wanting.pages + wanted - wanting.ceiling
            node = self._first(wanting) if excess > 0 else None
            if node is not None:
                return (node, min(missing, excess))
        if wanting is not None and wanting.queued is None:  # sheltered from all but itself
            own = self._place_of_first(wanting)
            if own is not None and (self._top(wanting, serial) is None or own < self._heap[0][0]):
                node = self._first(wanting)
                return None if node is None else (node, missing)
        top = self._top(wanting, serial)
        if top is None:
            return None
        payer, node = top
        if payer.floor and payer is not wanting:
            return (node, min(missing, payer.pages - payer.floor))
        return (node, missing)

    def _top(self, wanting: Payer | None, serial: int) -> tuple[Payer, TreeNode] | None:
        """The payer whose first node goes first, and that node, the heap brought up to date; None when no line has any."""
        heap = self._heap
        while heap:
            place, _, payer = heap[0]
            if payer.queued is not place:
                heapq.heappop(heap)  # superseded
                continue
            if payer.floor and payer is not wanting and payer.pages <= payer.floor:
                heapq.heappop(heap)
                payer.queued = None
                continue
            node = self._first(payer)
            true: _Place | None = None
            if node is not None:
                true = self._place(payer, node)
                if true == place:
                    return payer, node
            elif isinstance(payer.line, LruLine):
                # Whoever comes into its line comes by an operation later than this one.
                if place[1] >= serial:
                    return None
                true = (0, serial, 0)
            payer.queued = true
            if true is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (true, next(self._numbers), payer))
        return None

    def _first(self, payer: Payer) -> TreeNode | None:
        """The payer's first node that is not locked; locked ones that came up are taken out of line. O(1), amortised over locks."""
        line = payer.line
        node = line.first()
        while node is not None and self.is_locked(node):
            line.leave(node)
            node = line.first()
        return node

    def _place(self, payer: Payer, node: TreeNode) -> _Place:
        return (payer.line.rank(node) if self._ranked else 0, self._used_at(node), -node.start)

    def _place_of_first(self, payer: Payer) -> _Place | None:
        node = self._first(payer)
        return None if node is None else self._place(payer, node)

    def _lowered(self, payer: Payer) -> None:
        """A line's first has become one that goes sooner."""
        if payer.queued is None and payer.floor and payer.pages <= payer.floor:
            return  # sheltered, and out of the heap; where it still is in it, its entry must not come too late
        place = self._place_of_first(payer)
        if place is not None and (payer.queued is None or place < payer.queued):
            self._offer(payer, place)

    def _offer(self, payer: Payer, place: _Place) -> None:
        if len(self._heap) > 2 * len(self._payers) + _STALE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[2].queued is entry[0]]
            heapq.heapify(self._heap)
        payer.queued = place
        heapq.heappush(self._heap, (place, next(self._numbers), payer))

    def check_invariants(self) -> None:
        """Recompute what a quota keeps count of; raises InvariantError. O(payers + their evictable nodes)."""
        for payer in self._payers.values():
            idle = [node for node in payer.line if not self.is_locked(node)]
            above = payer.ceiling is not None and payer.pages > payer.ceiling
            if payer.floor and payer.pages - payer.locked_pages != sum(map(self._size_of, idle)):
                raise InvariantError(f"{payer!r}: {payer.locked_pages} pages are counted as locked")
            if above != (payer in self._above_ceiling):
                raise InvariantError(f"{payer!r} is {'not ' * above}listed as above its ceiling")
            sheltered = payer.floor and payer.pages <= payer.floor
            if idle and not sheltered and payer.queued is None:
                raise InvariantError(f"{payer!r} has something to give and is not in the heap")
            place = self._place_of_first(payer)
            if place is not None and payer.queued is not None and payer.queued[:2] > place[:2]:
                raise InvariantError(
                    f"{payer!r} stands in the heap at {payer.queued}, after its first at {place}"
                )
        if self.aside:
            raise InvariantError(f"{len(self.aside)} nodes still stand aside")
        entries = {entry[2]: entry[0] for entry in self._heap if entry[2].queued is entry[0]}
        if any(payer.queued is not None and payer not in entries for payer in self._payers.values()):
            raise InvariantError("a payer's entry is not in the heap")

    def pages_of(self, name: str) -> int:
        """Pages of this tier that ``name`` pays for; opens no account. O(1)."""
        payer = self._payers.get(name)
        return 0 if payer is None else payer.pages

    def __iter__(self) -> Iterator[Payer]:
        return iter(self._payers.values())

    def __repr__(self) -> str:
        return f"OwnerLines({len(self._payers)} payers, {len(self._above_ceiling)} above their ceiling)"
