"""The disk tier as the engine's core sees it: what is looked up, asked for, and what became of it. Pure.

Files are read and written by threads; the core asks, goes on, and takes outcomes between steps. A job has exactly one outcome. Nothing here
waits for the disk but ``wait_done``.
"""

from typing import Any, NamedTuple, Protocol

from prefixmesh.cache.base import PageIndices, RadixKey
from prefixmesh.worker.tiers.disk_index import FilePart
from prefixmesh.worker.tiers.disk_runs import UnitNames


class DiskPrefix(NamedTuple):
    """What the disk has of a key from some token on."""

    key: RadixKey
    parts: tuple[FilePart, ...]
    """Without a gap; at least one."""

    @property
    def start_tokens(self) -> int:
        """Where it begins."""
        return self.parts[0].start_tokens

    @property
    def end_tokens(self) -> int:
        """Where it ends."""
        return self.parts[-1].end_tokens

    @property
    def size_tokens(self) -> int:
        """How much it is."""
        return self.end_tokens - self.start_tokens

    def cut(self, end_tokens: int) -> "DiskPrefix | None":
        """What lies before ``end_tokens`` (whole pages); None for nothing."""
        kept = [
            part._replace(end_tokens=min(part.end_tokens, end_tokens))
            for part in self.parts
            if part.start_tokens < end_tokens
        ]
        return DiskPrefix(self.key, tuple(kept)) if kept else None


class ReadDone(NamedTuple):
    """How a read ended."""

    number: int
    size_tokens: int
    """From the prefix's start on, what came as it should: all that was asked for, less, or nothing."""

    buffer: Any
    """A tensor of pages as the host pool lays them out, [pages, *page]: those of ``size_tokens`` first. None where nothing came."""

    elapsed_s: float
    """Of the reading itself, without the wait for its turn."""


class WriteDone(NamedTuple):
    """A write has ended, well or not: its host pages are read no more."""

    number: int
    size_tokens: int
    """Written. Part of the key may not have had its turn yet: if this is not 0, ask again."""


class DiskCounts(NamedTuple):
    """What is there, and what happened since the start."""

    stored_tokens: int = 0
    stored_bytes: int = 0
    """Of all files in the folder's bound, also those that this worker cannot serve."""

    written_tokens: int = 0
    dropped_tokens: int = 0
    """Not written: the folder's bound has no room for it, or the disk takes no more."""

    bad_files: int = 0
    """Put away: short, changed, malformed, of another prefix than their names say."""

    failed_writes: int = 0
    fetched_tokens: int = 0
    """Read, and brought to the device."""

    recomputed_tokens: int = 0
    """There, and computed all the same: a read or a copy failed or took too long, or there was no page for it."""


class Disk(Protocol):
    """The third tier. One loop calls it."""

    def units(self, key: RadixKey) -> UnitNames:
        """What ``find`` and ``use`` take of a key. O(tokens)."""
        ...

    def find(self, units: UnitNames, from_tokens: int) -> DiskPrefix | None:
        """What continues a key at token ``from_tokens`` (whole pages); None for nothing. O(units), and no file is opened."""
        ...

    def use(self, units: UnitNames) -> None:
        """Somebody used this prefix, on whichever tier: its files go later. O(units)."""
        ...

    def has_room(self) -> bool:
        """Whether ``write`` takes anything now; where it does not, it will after a ``WriteDone``."""
        ...

    def write(self, key: RadixKey, host_pages: PageIndices) -> int | None:
        """Begin to write what the disk lacks of a key, or the beginning of that, as much as may wait. Its host pages stay as they are until
        ``WriteDone``. The job's number; None when there is nothing to write, or no room. O(tokens)."""
        ...

    def read(self, prefix: DiskPrefix) -> int | None:
        """Begin to read; the job's number, None when as many reads as may be are waiting."""
        ...

    def cancel(self, number: int) -> None:
        """Nobody wants a read any more: if it has not begun, nothing is read. Its outcome comes all the same."""
        ...

    def take_done(self) -> list[ReadDone | WriteDone]:
        """Outcomes since the last call."""
        ...

    def wait_done(self, at_most_s: float) -> None:
        """Block until there is an outcome to take, or for so long."""
        ...

    def counts(self) -> DiskCounts:
        """O(1)."""
        ...

    def close(self) -> None:
        """Write what waits to be written, within a bound of time, and let go of the folder."""
        ...
