"""A KV pool without KV: every slot remembers what was written into it, and whoever reads it is checked.

A slot holds the namespace, the position and the token that were computed into it, and a digest of *all* tokens up to there, so
that equal tokens behind different prefixes, or in different namespaces, are told apart. Pages are poisoned the moment they
return to the allocator (``CanaryAllocator``) and must be poisoned still when they are given out again. A page has one writer
from its first write until it enters the cache; after that anybody may read it and nobody may write to it. A slot is written at
most once between two frees.

There is one pool per tier. A copy between two of them reads every source slot, and until it has ended nobody may read the
destination or free either end.

All checks are numpy over whole steps, so that a million reads cost milliseconds.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from prefixmesh.cache.base import PageIndices, RadixKey
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.tokens import unpack

U64Array = npt.NDArray[np.uint64]
Slots = npt.NDArray[Any]
"""Integers of any width: ``page * page_size + offset``."""

FREE: Final = -1
"""Owner of a page that lies in the allocator, poisoned."""
CACHED: Final = -2
"""Owner of a page that a cache's tree holds: all may read, none may write."""
UNCLAIMED: Final = -3
"""Owner of a page that was given out and not written yet: its first writer becomes its owner."""
IN_FLIGHT: Final = -4
"""Owner of a page that a copy is being written to: none may read, write or free it."""
NOBODY: Final = -5
"""A reader who owns no page: it may read what is cached and nothing else."""

_UNWRITTEN: Final = -1
_POISONED: Final = -2
"""In a slot's place of a position."""

_NAMES: Final = {
    FREE: "free",
    CACHED: "cached",
    UNCLAIMED: "claimed by nobody",
    IN_FLIGHT: "a copy's in flight",
}


class CanaryError(AssertionError):
    """A slot was read, written, freed or given out that should not have been; says what was expected and what was found."""


class Rows(NamedTuple):
    """What some slots hold or should hold, one entry each."""

    namespaces: U64Array
    positions: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.uint32]
    digests: U64Array
    """Of the namespace and of every token from position 0 to this one: equal digests mean that all else is equal too."""


class Chain:
    """A sequence's tokens and, for each, the digest of all up to it. From ``boundary`` on they live in another namespace."""

    __slots__ = ("boundary", "digests", "length", "namespace", "tail", "tokens")

    def __init__(
        self,
        namespace: bytes,
        tokens: npt.NDArray[np.uint32],
        *,
        capacity: int = 0,
        boundary: int = 0,
        tail: bytes = b"",
    ) -> None:
        self.namespace, self.boundary, self.tail = seed_of(namespace), boundary, seed_of(tail)
        self.length = len(tokens)
        self.tokens = np.zeros(max(capacity, self.length), dtype=np.uint32)
        self.tokens[: self.length] = tokens
        self.digests = np.zeros(len(self.tokens), dtype=np.uint64)
        sums = np.cumsum(mix(np.arange(self.length), self.tokens[: self.length]), dtype=np.uint64)
        self.digests[: self.length] = sums + self.namespaces(0, self.length)

    @classmethod
    def of_key(cls, key: RadixKey) -> "Chain":
        """What the slots of a key's tokens should hold."""
        return cls(
            key.namespace,
            unpack(key.tokens),
            boundary=getattr(key, "boundary_tokens", 0),
            tail=getattr(key, "tail", b""),
        )

    def append(self, token: int, digest: np.uint64) -> None:
        """One more token, with the digest that ``mix`` gave. O(1)."""
        self.tokens[self.length] = token
        self.digests[self.length] = digest
        self.length += 1

    def namespaces(self, start: int, end: int) -> U64Array:
        """Of each position's namespace, the seed."""
        seeds = np.full(end - start, self.tail if self.boundary else self.namespace, dtype=np.uint64)
        if self.boundary > start:
            seeds[: self.boundary - start] = self.namespace
        return seeds

    def rows(self, start: int, end: int) -> Rows:
        """What the slots of ``tokens[start:end]`` should hold."""
        return Rows(
            self.namespaces(start, end),
            np.arange(start, end),
            self.tokens[start:end],
            self.digests[start:end],
        )


class CanaryPool:
    """One tier's slots. Every check raises CanaryError; ``reads``, ``writes`` and ``copied`` count slots, ``freed_pages``
    what came back to the allocator."""

    def __init__(self, total_pages: int, page_size: int, name: str = "device") -> None:
        self.name = name
        self.total_pages = total_pages
        self.page_size = page_size
        slots = total_pages * page_size
        self.namespaces = np.zeros(slots, dtype=np.uint64)
        self.positions = np.full(slots, _POISONED, dtype=np.int64)
        self.tokens = np.zeros(slots, dtype=np.uint32)
        self.digests = np.zeros(slots, dtype=np.uint64)
        self.owners = np.full(total_pages, FREE, dtype=np.int64)
        self.generations = np.zeros(total_pages, dtype=np.int64)
        """How often each page was given out: a page that comes back to the same reader as another one shows here."""
        self.copies_from = np.zeros(total_pages, dtype=np.int64)
        """Copies in flight that read the page."""
        self.reads = self.writes = self.copied = self.freed_pages = 0

    # Who owns what.

    def give_out(self, pages: PageIndices) -> None:
        """Pages leave the allocator; they must have been poisoned there."""
        self._check_pages(pages, self.owners[pages] == FREE, "is given out", "free")
        slots = self.slots(pages)
        self._check_slots(slots, self.positions[slots] == _POISONED, "is given out", "poisoned")
        self.owners[pages] = UNCLAIMED
        self.generations[pages] += 1
        self.positions[slots] = _UNWRITTEN

    def poison(self, pages: PageIndices) -> None:
        """Pages return to the allocator; no copy may be using them."""
        owners = self.owners[pages]
        self._check_pages(pages, owners != FREE, "is freed", "somebody's")
        self._check_pages(pages, owners != IN_FLIGHT, "is freed", "no copy's destination")
        self._check_pages(pages, self.copies_from[pages] == 0, "is freed", "no copy's source")
        slots = self.slots(pages)
        self.owners[pages] = FREE
        self.positions[slots] = _POISONED
        self.digests[slots] = 0
        self.freed_pages += len(pages)

    def publish(self, pages: PageIndices) -> None:
        """Pages belong to the cache now."""
        owners = self.owners[pages]
        self._check_pages(pages, (owners >= 0) | (owners == CACHED), "is cached", "written")
        self.owners[pages] = CACHED

    @property
    def free_pages(self) -> int:
        """Pages that lie poisoned in the allocator."""
        return int(np.count_nonzero(self.owners == FREE))

    # What attention does.

    def write(self, slots: Slots, rows: Rows, writers: Slots | int) -> None:
        """Compute KV: ``slots[i]`` holds ``rows[i]`` from now on, written by ``writers[i]``."""
        pages = slots // self.page_size
        owners = self.owners[pages]
        mine = (owners == UNCLAIMED) | (owners == writers)
        self._check_slots(slots, mine, "is written", "its writer's own", writers)
        self._check_slots(slots, self.positions[slots] == _UNWRITTEN, "is written", "unwritten")
        self.owners[pages] = writers
        self.namespaces[slots], self.positions[slots], self.tokens[slots], self.digests[slots] = rows
        # Where two of one call mean the same page or slot, the last one won, and the first finds another one's mark.
        self._check_slots(slots, self.owners[pages] == writers, "is written", "one writer's", writers)
        self._check_slots(slots, self.digests[slots] == rows.digests, "is written", "written once")
        self.writes += len(slots)

    def read(self, slots: Slots, rows: Rows, readers: Slots | int = NOBODY) -> None:
        """Read KV: ``slots[i]`` must hold ``rows[i]``, in a page that is cached or ``readers[i]``'s own."""
        self.expect(slots, rows, readers)
        owners = self.owners[slots // self.page_size]
        mine = (owners == CACHED) | (owners == readers)
        self._check_slots(slots, mine, "is read", "cached or its reader's own", readers)
        self.reads += len(slots)

    def expect(self, slots: Slots, rows: Rows, readers: Slots | int = NOBODY) -> None:
        """``slots[i]`` must hold ``rows[i]``, whoever owns it."""
        if not np.array_equal(self.digests[slots], rows.digests):
            raise self._misread(slots, rows, readers)

    def read_pages(self, pages: PageIndices, chain: Chain, reader: int = NOBODY, start: int = 0) -> None:
        """Read whole pages, which must hold ``chain`` from position ``start`` on."""
        slots = self.slots(pages)
        if start + len(slots) > chain.length:
            raise CanaryError(
                f"{len(pages)} pages from position {start} on for a chain of {chain.length} tokens"
            )
        self.read(slots, chain.rows(start, start + len(slots)), reader)

    def slots(self, pages: PageIndices) -> Slots:
        """All slots of ``pages``, in token order."""
        if self.page_size == 1:
            return pages
        return (pages[:, None].astype(np.int64) * self.page_size + np.arange(self.page_size)).ravel()

    def describe(self, slot: int) -> str:
        """What a slot holds and whose it is, for people."""
        page, offset = divmod(slot, self.page_size)
        owner = int(self.owners[page])
        position = int(self.positions[slot])
        if position == _POISONED:
            held = "poison"
        elif position == _UNWRITTEN:
            held = "nothing yet"
        else:
            held = _row(self.namespaces[slot], position, self.tokens[slot], self.digests[slot])
        return (
            f"{self.name} page {page} offset {offset} (generation {int(self.generations[page])}, "
            f"{_NAMES.get(owner, f'the private page of {owner}')}) holds {held}"
        )

    def _check_pages(
        self, pages: PageIndices, right: npt.NDArray[np.bool_], what: str, expected: str
    ) -> None:
        if not right.all():
            page = int(pages[int(np.argmin(right))])
            raise CanaryError(
                f"a page {what} that should be {expected}: {self.describe(page * self.page_size)}"
            )

    def _check_slots(
        self,
        slots: Slots,
        right: npt.NDArray[np.bool_],
        what: str,
        expected: str,
        who: Slots | int = NOBODY,
    ) -> None:
        if not right.all():
            first = int(np.argmin(right))
            raise CanaryError(
                f"a slot {what}{_by(who, first)} that should be {expected}: {self.describe(int(slots[first]))}"
            )

    def _misread(self, slots: Slots, rows: Rows, readers: Slots | int) -> CanaryError:
        first = int(np.argmin(self.digests[slots] == rows.digests))
        expected = _row(*(column[first] for column in rows))
        return CanaryError(
            f"a read{_by(readers, first)} expected {expected}; {self.describe(int(slots[first]))}"
        )


class CanaryCopy:
    """A copy in flight. Begun, it guards both ends; it ends exactly once, by ``finish`` or ``cancel``, *before* whoever owns the
    pages is told, because only then is the destination readable, or free to go."""

    def __init__(
        self, source: CanaryPool, source_pages: PageIndices, target: CanaryPool, target_pages: PageIndices
    ) -> None:
        if len(source_pages) != len(target_pages):
            raise CanaryError(f"a copy of {len(source_pages)} pages into {len(target_pages)}")
        source._check_pages(source_pages, source.owners[source_pages] == CACHED, "is copied from", "cached")
        target._check_pages(
            target_pages, target.owners[target_pages] == UNCLAIMED, "is copied to", "claimed by nobody"
        )
        self._source, self._source_slots = source, source.slots(source_pages)
        self._target, self._target_slots = target, target.slots(target_pages)
        self._source_pages, self._target_pages = source_pages.copy(), target_pages.copy()
        self._digests = source.digests[self._source_slots]
        self.in_flight = True
        np.add.at(source.copies_from, source_pages, 1)
        target.owners[target_pages] = IN_FLIGHT

    def finish(self) -> None:
        """The copy has run: the target holds what the source holds *now*, which must be what it held at the beginning."""
        source, target, read, written = self._source, self._target, self._source_slots, self._target_slots
        self._end()
        source._check_slots(
            read, source.digests[read] == self._digests, "is copied", "the same from begin to end"
        )
        for name in ("namespaces", "positions", "tokens", "digests"):
            getattr(target, name)[written] = getattr(source, name)[read]
        target.owners[self._target_pages] = CACHED
        target.copied += len(written)

    def cancel(self) -> None:
        """The copy will not be finished; what it may have written is worth nothing."""
        self._end()
        self._target.owners[self._target_pages] = UNCLAIMED

    def _end(self) -> None:
        if not self.in_flight:
            raise CanaryError("a copy ends twice")
        self.in_flight = False
        np.add.at(self._source.copies_from, self._source_pages, -1)


def copy(
    source: CanaryPool, source_pages: PageIndices, target: CanaryPool, target_pages: PageIndices
) -> None:
    """A copy that begins and ends at once."""
    CanaryCopy(source, source_pages, target, target_pages).finish()


class CanaryAllocator(PageAllocator):
    """The allocator of a canary pool: poisons what comes back, and checks the poison when it gives pages out."""

    def __init__(self, pool: CanaryPool) -> None:
        super().__init__(pool.total_pages)
        self.pool = pool

    def allocate(self, n: int) -> PageIndices | None:
        """Take pages; they are unwritten."""
        pages = super().allocate(n)
        if pages is not None:
            self.pool.give_out(pages)
        return pages

    def free(self, pages: PageIndices) -> None:
        """Give pages back; they are poison."""
        self.pool.poison(pages)  # first: it says more about a page that is freed wrongly
        super().free(pages)


def mix(positions: npt.NDArray[Any], tokens: npt.NDArray[Any]) -> U64Array:
    """What a token at a position adds to the digests of all that follow it (splitmix64's finaliser). A digest is a sum, so that
    it can be computed for a whole prompt at once, and depends on order because each summand depends on its position."""
    value = (positions.astype(np.uint64) << np.uint64(32)) + tokens.astype(np.uint64)
    value = (value + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def seed_of(namespace: bytes) -> np.uint64:
    """A namespace as one number, with which its digests begin."""
    return np.uint64(xxhash.xxh3_64_intdigest(namespace))


def _by(who: Slots | int, index: int) -> str:
    one = who if isinstance(who, int) else int(who[index])
    return "" if one == NOBODY else f" by {one}"


def _row(namespace: Any, position: Any, token: Any, digest: Any) -> str:
    return (
        f"token {int(token)} at position {int(position)} of namespace {int(namespace):016x} "
        f"behind the prefix {int(digest):016x}"
    )
