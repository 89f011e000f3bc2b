"""A disk without files, whose reads and writes end when a test says so."""

from prefixmesh.cache.base import PageIndices, RadixKey
from prefixmesh.worker.tiers.disk_index import DiskIndex, StoredFile
from prefixmesh.worker.tiers.disk_jobs import DiskCounts, DiskPrefix, ReadDone, WriteDone
from prefixmesh.worker.tiers.disk_runs import DiskIdentity, KvLayout, UnitNames, file_stem, run_of, unit_names


class FakeDisk:
    """``Disk``. A read's buffer is the list of the tokens at which its pages begin."""

    def __init__(self, layout: KvLayout) -> None:
        self._identity = DiskIdentity(revision="fake", layout=layout)
        self.layout = layout
        self.index = DiskIndex(layout, 2**40)
        self.reads: dict[int, DiskPrefix] = {}
        """Begun and not ended."""

        self.writes: dict[int, RadixKey] = {}
        self.cancelled: list[int] = []
        self.room = True
        self.closed = False
        self._done: list[ReadDone | WriteDone] = []
        self._number = 0

    def keep(self, key: RadixKey) -> None:
        """Have all of a key."""
        units = self.units(key)
        for first, last in self.index.missing(units):
            run = run_of(units, first, last, self.layout)
            stem = file_stem(run, self._identity)
            file = StoredFile(stem, 1, units.names[first:last], run.start_tokens, is_written=False)
            self.index.begin(file)
            self.index.finish(file, 1)

    def finish_read(self, size_tokens: int | None = None, elapsed_s: float = 0.001) -> None:
        """End the oldest read, with so much of it, or all."""
        number = next(iter(self.reads))
        prefix = self.reads.pop(number)
        size_tokens = prefix.size_tokens if size_tokens is None else size_tokens
        starts = range(prefix.start_tokens, prefix.start_tokens + size_tokens, self.layout.page_size)
        self._done.append(ReadDone(number, size_tokens, list(starts), elapsed_s))

    def finish_write(self, size_tokens: int | None = None) -> None:
        number = next(iter(self.writes))
        key = self.writes.pop(number)
        if size_tokens != 0:
            self.keep(key)
        self._done.append(WriteDone(number, 1 if size_tokens is None else size_tokens))

    def units(self, key: RadixKey) -> UnitNames:
        return unit_names(key, self.layout)

    def find(self, units: UnitNames, from_tokens: int) -> DiskPrefix | None:
        parts = self.index.find(units, from_tokens)
        return DiskPrefix(units.key, tuple(parts)) if parts else None

    def use(self, units: UnitNames) -> None:
        self.index.use(units)

    def has_room(self) -> bool:
        return self.room

    def write(self, key: RadixKey, host_pages: PageIndices) -> int | None:
        assert len(host_pages) * self.layout.page_size * 4 == len(key.tokens)
        if not self.index.missing(self.units(key)):
            return None
        self._number += 1
        self.writes[self._number] = key
        return self._number

    def read(self, prefix: DiskPrefix) -> int | None:
        self._number += 1
        self.reads[self._number] = prefix
        return self._number

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def take_done(self) -> list[ReadDone | WriteDone]:
        done, self._done = self._done, []
        return done

    def wait_done(self, at_most_s: float) -> None:
        """Nothing comes while a test waits."""

    def counts(self) -> DiskCounts:
        return DiskCounts(stored_tokens=self.index.stored_tokens)

    def close(self) -> None:
        self.closed = True
