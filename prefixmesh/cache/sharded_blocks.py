"""The fingerprints on one tier, so kept that they can be read out in parts, as of one moment, while they go on changing.

It is a multiset: two different blocks may have one fingerprint (64 bits make that rare, not impossible), and the first that goes
must not take the other's name along. Count and digest are those of the *set*, which is what the world is told.

It is cut into shards, for two reasons: no step may take as long as there are blocks, and one great table grows by moving all it
holds. A reader (``ShardReader``) takes the list of shards as it is when it opens; from then on a shard that it has not read yet is
copied before it changes. So opening costs the list, and each shard is copied once at most, however many readers there are.

    shards      [ s0 | s1 | s2 | s3 ]        what the tier holds
    writable    [ .. | .. | s2 | .. ]        which of them may change in place; all are blank after a reader has opened
    reader      [ s0 | s1 ]                  what it has still to read, from its end; a write to s1 puts a copy in both lists above,
                                             a write to s3 only fills in the blank

A shard is a dict, from a fingerprint to its copies, and not a set: the collector passes over a dict of plain numbers, and walks
through a set on every full collection (6 ms for 100,000 blocks, measured).
"""

import weakref
from operator import length_hint

from prefixmesh.errors import InvariantError
from prefixmesh.ids import Fingerprint

SHARD_BITS = 10
"""1,024 shards: 100,000 blocks make shards of 100, copied in 3 to 10 µs; a million, of 1,000 in 30 µs; and opening a reader
copies no more than 1,024 references."""

SHARDS = 1 << SHARD_BITS
SHARD_SHIFT = 64 - SHARD_BITS
"""A fingerprint's shard is its *high* bits: a dict places a number by its low ones, which must differ within a shard."""

Shard = dict[Fingerprint, int]
Fingerprints = tuple[Fingerprint, ...]


class ShardedBlocks:
    """A multiset of fingerprints with count and digest of its different ones.

    Change: ``add``, ``remove``. Read: ``count``, ``digest``, ``open_reader``, ``check_invariants``.
    """

    __slots__ = ("_readers", "_shards", "_writable", "count", "digest")

    def __init__(self) -> None:
        self.count = 0
        """Different fingerprints."""
        self.digest = 0
        """The XOR of the different fingerprints."""
        self._shards: list[Shard] = [{} for _ in range(SHARDS)]
        self._writable: list[Shard | None] = list(self._shards)
        self._readers: list[weakref.ref[ShardReader]] = []

    def add(self, names: Fingerprints) -> tuple[int, ...]:
        """Count a copy of each; returns the positions of those that were there already: nearly always none. O(names)."""
        writable, digest = self._writable, self.digest
        rest = iter(names)
        for name in rest:
            shard = writable[name >> SHARD_SHIFT]
            if shard is None:
                shard = self._own(name >> SHARD_SHIFT)
            if name in shard:
                self.digest = digest
                return self._add_slowly(names, len(names) - 1 - length_hint(rest))
            shard[name] = 1
            digest ^= name
        self.digest = digest
        self.count += len(names)
        return ()

    def remove(self, names: Fingerprints) -> Fingerprints:
        """Take one copy of each away; returns those of which it was the last: nearly always ``names`` itself. O(names).

        Raises InvariantError, with nothing changed, when there is no copy of one.
        """
        writable, digest = self._writable, self.digest
        rest = iter(names)
        for name in rest:
            shard = writable[name >> SHARD_SHIFT]
            if shard is None:
                shard = self._own(name >> SHARD_SHIFT)
            copies = shard.pop(name, 0)
            if copies != 1:
                if copies:
                    shard[name] = copies
                return self._remove_slowly(names, len(names) - 1 - length_hint(rest))
            digest ^= name
        self.digest = digest
        self.count -= len(names)
        return names

    def open_reader(self) -> "ShardReader":
        """Begin to read what there is now, in parts, whatever changes meanwhile. O(shards)."""
        reader = ShardReader(list(self._shards), self.count)
        self._readers = [weakref.ref(one) for one in (*self._alive_readers(), reader) if one.left]
        self._writable = [None] * SHARDS
        return reader

    def check_invariants(self) -> None:
        """Recompute everything from the shards; raises InvariantError. O(blocks)."""
        count = digest = 0
        readers = self._alive_readers()
        for index, shard in enumerate(self._shards):
            count += len(shard)
            for name, copies in shard.items():
                digest ^= name
                if name >> SHARD_SHIFT != index or copies < 1:
                    raise InvariantError(f"{self!r}: {copies} copies of {name:016x} in shard {index}")
            writable = self._writable[index]
            if writable is not None and writable is not shard:
                raise InvariantError(f"{self!r}: shard {index} is written elsewhere than it is read")
            if writable is not None and any(reader.holds(index, shard) for reader in readers):
                raise InvariantError(f"{self!r}: shard {index} may change under a reader")
        if (count, digest) != (self.count, self.digest):
            raise InvariantError(f"{self!r}: the shards have count={count}, digest={digest:016x}")

    def __repr__(self) -> str:
        return f"ShardedBlocks(count={self.count}, digest={self.digest:016x})"

    def _add_slowly(self, names: Fingerprints, done: int) -> tuple[int, ...]:
        """Go on with an ``add`` at the first name that is known, whose ``done`` before were new."""
        known = []
        for position in range(done, len(names)):
            name = names[position]
            shard = self._own(name >> SHARD_SHIFT)
            shard[name] = shard.get(name, 0) + 1
            if shard[name] > 1:
                known.append(position)
            else:
                self.digest ^= name
        self.count += len(names) - len(known)
        return tuple(known)

    def _remove_slowly(self, names: Fingerprints, done: int) -> Fingerprints:
        """Go on with a ``remove`` at a name that has several copies, or none; ``done`` before it have gone already."""
        gone = list(names[:done])
        for position in range(done, len(names)):
            name = names[position]
            shard = self._own(name >> SHARD_SHIFT)
            copies = shard.pop(name, 0)
            if copies > 1:
                shard[name] = copies - 1
            elif copies == 1:
                gone.append(name)
            else:
                self._put_back(names[:position])
                raise InvariantError(f"{self!r}: there is no block {name:016x} to remove")
        self.count -= len(gone)
        for name in gone:
            self.digest ^= name
        return tuple(gone)

    def _put_back(self, names: Fingerprints) -> None:
        for name in names:
            shard = self._own(name >> SHARD_SHIFT)
            shard[name] = shard.get(name, 0) + 1

    def _own(self, index: int) -> Shard:
        """The shard, so that it may change: a copy of it if a reader has still to read what is in it now."""
        shard = self._writable[index]
        if shard is None:
            shard = self._shards[index]
            if any(reader.holds(index, shard) for reader in self._alive_readers()):
                shard = self._shards[index] = shard.copy()
            self._writable[index] = shard
        return shard

    def _alive_readers(self) -> "list[ShardReader]":
        return [reader for known in self._readers if (reader := known()) is not None]


class ShardReader:
    """What one tier held at one moment, not yet read. The blocks hold it weakly: one that is dropped costs nothing more."""

    __slots__ = ("__weakref__", "_loose", "_shards", "left")

    def __init__(self, shards: list[Shard], count: int) -> None:
        self._shards = shards if count else []
        """Still to read, from the end, so that an index is that of ``ShardedBlocks``. None when nothing is left to take."""
        self._loose: list[Fingerprint] = []
        """Read, and not yet taken: less than a shard and a ``take``."""
        self.left = count
        """How many fingerprints are still to be taken."""

    def take(self, at_most: int) -> Fingerprints:
        """The next fingerprints, as many as wanted or as are left. O(at_most + one shard + empty shards)."""
        assert at_most > 0, at_most
        loose = self._loose
        while self._shards and len(loose) < at_most:
            loose.extend(self._shards.pop())
        taken = tuple(loose[-at_most:])
        del loose[-at_most:]
        self.left -= len(taken)
        if not self.left:
            self._shards.clear()
        return taken

    def holds(self, index: int, shard: Shard) -> bool:
        """Whether this very shard has still to be read. O(1)."""
        return index < len(self._shards) and self._shards[index] is shard

    def close(self) -> None:
        """Read no more, and let go of everything. May be called again."""
        self._shards.clear()
        self._loose.clear()
        self.left = 0
