"""The router's prefix tree: who is believed to hold which blocks.

One structure that is at once a prefix tree per worker. A node is a block, named by its fingerprint; because fingerprints are
chained, a name stands for the whole prefix that ends there, and a look-up is one dictionary access. A block's holders are a bit
set (one bit per worker), so that walking a prompt costs the same for one worker and for sixty-four.

It holds fingerprints, never prompts, and what it says is belief: a wrong one costs a detour, never a wrong answer.

Two rules make it a tree and keep it one:

- a holder of a block holds the block's ancestors, so a match is always a true prefix;
- a block is recorded after its descendants (deepest first), so the least recently used block is always a leaf.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from prefixmesh.errors import InvariantError
from prefixmesh.ids import Fingerprint
from prefixmesh.router.endpoint import Endpoint


class _Block:
    """One node. ``children`` is None, the only child, or a set of several: most blocks have one, and a set costs 200 bytes."""

    __slots__ = ("children", "fingerprint", "holders", "parent")

    def __init__(self, fingerprint: Fingerprint, parent: "_Block | None") -> None:
        self.fingerprint = fingerprint
        self.parent = parent
        self.holders = 0
        self.children: _Block | set[_Block] | None = None


class PrefixTree:
    """Which workers hold which blocks, as far as this router knows. Not thread-safe: one loop owns it.

    Ask: ``find_matches``, ``count_blocks``, ``len``. Change: ``record``, ``forget``, ``remove_worker``.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        # Least recently used first; every block stands before its ancestors.
        self._blocks: OrderedDict[Fingerprint, _Block] = OrderedDict()
        self._bits: dict[Endpoint, int] = {}
        self._workers: dict[int, Endpoint] = {}
        self._held: dict[Endpoint, set[_Block]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __repr__(self) -> str:
        held = ", ".join(f"{worker}: {len(blocks)}" for worker, blocks in sorted(self._held.items()))
        return f"PrefixTree({len(self._blocks)}/{self._max_blocks} blocks | {held or 'no holders'})"

    def find_matches(self, fingerprints: Sequence[Fingerprint]) -> dict[Endpoint, int]:
        """How many leading blocks each worker holds; a worker that holds none is left out.

        Changes nothing. O(matched blocks + holders), whatever the number of workers.
        """
        matches: dict[Endpoint, int] = {}
        alive = -1  # every worker
        for depth, fingerprint in enumerate(fingerprints):
            block = self._blocks.get(fingerprint)
            holders = 0 if block is None else block.holders & alive
            if depth and holders != alive:
                for worker in self._names(alive & ~holders):
                    matches[worker] = depth
            alive = holders
            if not alive:
                return matches
        if fingerprints:
            for worker in self._names(alive):
                matches[worker] = len(fingerprints)
        return matches

    def count_blocks(self, worker: Endpoint) -> int:
        """Blocks that ``worker`` is believed to hold; O(1)."""
        return len(self._held.get(worker, ()))

    def record(self, fingerprints: Sequence[Fingerprint], worker: Endpoint) -> int:
        """Believe that ``worker`` holds (or is about to hold) these blocks, a prefix from its first block on.

        Touches them, and makes room by dropping the least recently used blocks of the whole tree. A prefix longer than the whole
        bound is cut to it. Returns how many of the leading blocks the worker was believed to hold before. O(blocks given).
        """
        bit = self._bit_of(worker)
        held = self._held[worker]
        path: list[_Block] = []
        known = 0
        parent: _Block | None = None
        for fingerprint in fingerprints[: self._max_blocks]:
            block = self._blocks.get(fingerprint)
            if block is None:
                block = self._blocks[fingerprint] = _Block(fingerprint, parent)
                if parent is not None:
                    _add_child(parent, block)
            elif block.parent is not parent:
                break  # two prefixes of one name: the first keeps it, and the other ends here
            if block.holders & bit:
                known += 1
            else:
                block.holders |= bit
                held.add(block)
            path.append(block)
            parent = block
        for block in reversed(path):
            self._blocks.move_to_end(block.fingerprint)
        while len(self._blocks) > self._max_blocks:
            self._delete(next(iter(self._blocks.values())))
        return known

    def forget(self, fingerprints: Sequence[Fingerprint], keep: int, worker: Endpoint) -> int:
        """Stop believing that ``worker`` holds this prefix beyond its first ``keep`` blocks, or anything that continues it there.

        Returns how many blocks were dropped. O(blocks dropped).
        """
        bit = 1 << self._bits[worker] if worker in self._bits else 0
        first = self._blocks.get(fingerprints[keep]) if keep < len(fingerprints) else None
        if first is None or not first.holders & bit:
            return 0
        dropped: list[_Block] = []
        below = [first]
        while below:
            block = below.pop()
            if block.holders & bit:
                dropped.append(block)
                below.extend(_children(block))
        for block in dropped:
            self._held[worker].discard(block)
            block.holders &= ~bit
            if not block.holders:
                self._delete(block)
        return len(dropped)

    def remove_worker(self, worker: Endpoint) -> None:
        """Forget everything about ``worker``; O(blocks it holds). An unknown worker is no error."""
        number = self._bits.pop(worker, None)
        if number is None:
            return
        del self._workers[number]
        for block in self._held.pop(worker):
            block.holders &= ~(1 << number)
            if not block.holders:
                self._delete(block)

    def check_invariants(self) -> None:
        """Recompute everything from nothing; raises InvariantError with the state. O(size)."""
        place = {block: index for index, block in enumerate(self._blocks.values())}
        held: dict[Endpoint, set[_Block]] = {worker: set() for worker in self._bits}
        children: dict[_Block, set[_Block]] = {}
        for fingerprint, block in self._blocks.items():
            self._expect(block.fingerprint == fingerprint, "a block is filed under its own name")
            self._expect(block.holders != 0, "nothing is kept for what nobody holds")
            for worker in self._names(block.holders):
                held[worker].add(block)
            if block.parent is not None:
                self._expect(block.parent in place, "a block's parent is in the tree")
                self._expect(block.holders & ~block.parent.holders == 0, "a holder holds the ancestors")
                self._expect(place[block] < place[block.parent], "a block leaves before its parent")
                children.setdefault(block.parent, set()).add(block)
        for block in place:
            self._expect(set(_children(block)) == children.get(block, set()), "children know their parent")
        self._expect(held == self._held, "every worker's blocks are counted")
        self._expect(len(self._blocks) <= self._max_blocks, "the tree keeps its bound")
        self._expect(
            {number: worker for worker, number in self._bits.items()} == self._workers, "bits are unique"
        )

    def _expect(self, holds: bool, rule: str) -> None:  # noqa: FBT001  (an assertion reads best without a keyword)
        if not holds:
            raise InvariantError(f"broken: {rule}; {self!r}")

    def _bit_of(self, worker: Endpoint) -> int:
        number = self._bits.get(worker)
        if number is None:
            # The lowest free number: bits of removed workers are used again, so that the sets stay small.
            number = next(free for free in range(len(self._workers) + 1) if free not in self._workers)
            self._bits[worker] = number
            self._workers[number] = worker
            self._held[worker] = set()
        return 1 << number

    def _names(self, holders: int) -> Iterator[Endpoint]:
        while holders:
            lowest = holders & -holders
            yield self._workers[lowest.bit_length() - 1]
            holders ^= lowest

    def _delete(self, block: _Block) -> None:
        del self._blocks[block.fingerprint]
        for worker in self._names(block.holders):
            self._held[worker].discard(block)
        if block.parent is not None:
            _remove_child(block.parent, block)
        block.parent = block.children = None  # no cycles for the collector to find


def _children(block: _Block) -> Iterable[_Block]:
    match block.children:
        case None:
            return ()
        case _Block() as only:
            return (only,)
        case several:
            return several


def _add_child(parent: _Block, child: _Block) -> None:
    match parent.children:
        case None:
            parent.children = child
        case _Block() as only:
            parent.children = {only, child}
        case several:
            several.add(child)


def _remove_child(parent: _Block, child: _Block) -> None:
    if parent.children is child:
        parent.children = None
    elif isinstance(parent.children, set):
        parent.children.discard(child)
