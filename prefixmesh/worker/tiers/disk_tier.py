"""The third tier: a folder of files behind the host pool, read by one thread and written by another. ``Disk`` for a real disk.

The engine's loop calls every method; the threads touch files and host pages, never the index. What cannot be done at once is dropped and counted:
a prefix that was not written costs a computation later, and nothing else. A disk that takes no more (full, gone, read-only) is written to no more
until the worker starts again; what is on it is served as long as it can be read.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from prefixmesh.cache.base import PageIndices, RadixKey
from prefixmesh.tokens import TOKEN_BYTES
from prefixmesh.worker.tiers.disk_files import SUFFIX
from prefixmesh.worker.tiers.disk_folder import lock_folder, take_stock
from prefixmesh.worker.tiers.disk_index import StoredFile
from prefixmesh.worker.tiers.disk_jobs import DiskCounts, DiskPrefix, ReadDone, WriteDone
from prefixmesh.worker.tiers.disk_runs import DiskIdentity, UnitNames, file_stem, run_of, unit_names
from prefixmesh.worker.tiers.disk_threads import JobThread
from prefixmesh.worker.tiers.disk_work import (
    DiskWork,
    HostPages,
    NewFile,
    Read,
    ReadJob,
    WriteJob,
    Written,
)

logger = logging.getLogger(__name__)

MAX_WAITING_JOBS: Final = 64
"""Of each thread. A read is waited for by somebody, and after so many it would come too late."""

MAX_PENDING_BYTES: Final = 256 * 2**20
"""Waiting to be written: a fraction of a second of a good disk. Their host pages are locked meanwhile."""

PENDING_SHARE: Final = 8
"""And at most one part in so many of the host pool, which must stay free to take other things."""

CLOSE_WAIT_S: Final = 3.0
"""For what is to be written when a worker ends: less than an engine's process is given to end."""

LOCK_WAIT_S: Final = 5.0
"""For the worker's last life to let go of the folder: it may be writing still what waited at its end."""

HEADER_BYTES: Final = 2048
"""More than the header of a file takes; what it takes is known once it is written."""


class DiskTier:
    """``Disk`` over a folder; see the module."""

    def __init__(
        self,
        folder: Path,
        identity: DiskIdentity,
        host: HostPages,
        max_bytes: int,
        on_done: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Takes stock of the folder, which is made if need be. ``on_done`` is called after each outcome, on a thread of the tier; it must not
        block. ConfigError when the folder cannot be used, or another process has it."""
        self.on_done = on_done
        self._folder = folder
        self._identity = identity
        self.layout = identity.layout
        """Of the pages that are read and written."""

        self._work = DiskWork(folder, identity, host, clock)
        self._lock = lock_folder(folder, LOCK_WAIT_S)
        try:
            stock = take_stock(folder, identity, max_bytes)
        except BaseException:
            os.close(self._lock)
            raise
        self._index = stock.files
        logger.info("disk.opened folder=%s found=%s foreign=%d", folder, stock.files, stock.foreign_files)
        self._bad_files = stock.bad_files
        self._written_tokens = self._dropped_tokens = self._failed_writes = 0
        self._max_pending = max(1, min(MAX_PENDING_BYTES, host.storage.nbytes // PENDING_SHARE))
        self._pending_bytes = 0
        self._removals: list[str] = []
        self._used: dict[str, None] = {}
        """Files whose times the next write sets, least recently used first. As many as files at most."""

        self._number = 0
        self._changed = threading.Condition()
        self._done: list[Written | Read] = []
        self._reads: set[int] = set()
        """Without an outcome that was taken."""

        self._cancelled: set[int] = set()
        self._writer = JobThread("kv-disk-writer", self._write, MAX_WAITING_JOBS)
        self._reader = JobThread("kv-disk-reader", self._read, MAX_WAITING_JOBS)

    def __repr__(self) -> str:
        return f"DiskTier({self._folder}, {self._index!r}, {self._pending_bytes} bytes to be written)"

    def units(self, key: RadixKey) -> UnitNames:
        """What ``find`` and ``use`` take of a key. O(tokens)."""
        return unit_names(key, self.layout)

    def find(self, units: UnitNames, from_tokens: int) -> DiskPrefix | None:
        """What continues a key at token ``from_tokens``; None for nothing. O(units)."""
        parts = self._index.find(units, from_tokens)
        return DiskPrefix(units.key, tuple(parts)) if parts else None

    def use(self, units: UnitNames) -> None:
        """Somebody used this prefix: its files go later, also after a restart that comes after the next write. O(units)."""
        for name in self._index.use(units):
            self._used.pop(name, None)
            self._used[name] = None

    def has_room(self) -> bool:
        """Whether ``write`` takes anything now. What a disk that takes no more is given is dropped, and counted. O(1)."""
        return self._pending_bytes < self._max_pending and not self._writer.is_full

    def write(self, key: RadixKey, host_pages: PageIndices) -> int | None:
        """Begin to write what the disk lacks of a key; see ``Disk``. Parents first. O(tokens)."""
        if not self.has_room():
            return None
        units = self.units(key)
        files: list[NewFile] = []
        for first, last in self._index.missing(units):
            if self._work.takes_no_more:
                self._dropped_tokens += (last - first) * self.layout.unit_tokens
            elif (new := self._begin(units, first, last, host_pages)) is not None:
                files.append(new)
            if not self.has_room():
                break
        if not files:
            return None
        self.use(units)
        job = WriteJob(self._next_number(), self._removals, files, list(self._used))
        self._removals, self._used = [], {}
        self._writer.put(job)
        return job.number

    def read(self, prefix: DiskPrefix) -> int | None:
        """Begin to read; None when as many reads as may be are waiting."""
        if self._reader.is_full:
            return None
        number = self._next_number()
        self._reads.add(number)
        self._reader.put(ReadJob(number, prefix))
        return number

    def cancel(self, number: int) -> None:
        """If a read has not begun, nothing is read."""
        with self._changed:
            if number in self._reads:
                self._cancelled.add(number)

    def take_done(self) -> list[ReadDone | WriteDone]:
        """Outcomes since the last call, in the order in which the jobs of each kind ended."""
        with self._changed:
            ended, self._done = self._done, []
            for each in ended:
                self._reads.discard(each.number)
                self._cancelled.discard(each.number)
        outcomes: list[ReadDone | WriteDone] = []
        for each in ended:
            if isinstance(each, Written):
                written = self._account_written(each)
                outcomes.append(WriteDone(each.number, written))
            else:
                self._account_read(each)
                outcomes.append(each.done)
        return outcomes

    def wait_done(self, at_most_s: float) -> None:
        """Block until there is an outcome to take, or for so long."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._done), at_most_s)

    def counts(self) -> DiskCounts:
        """What is there, and what happened since the start. O(1)."""
        return DiskCounts(
            stored_tokens=self._index.stored_tokens,
            stored_bytes=self._index.total_bytes,
            written_tokens=self._written_tokens,
            dropped_tokens=self._dropped_tokens,
            bad_files=self._bad_files,
            failed_writes=self._failed_writes,
        )

    def check_invariants(self) -> None:
        """The index's; O(units)."""
        self._index.check_invariants()

    def close(self) -> None:
        """Write what waits to be written, and let go of the folder. A thread that hangs in the disk keeps it until the process ends."""
        if self._lock < 0:
            return
        self._reader.close(0.0, finish=False)
        writer_ended = self._writer.close(CLOSE_WAIT_S, finish=True)
        if self._reader.close(CLOSE_WAIT_S, finish=False) and writer_ended:
            os.close(self._lock)
            self._lock = -1
        else:
            logger.error("disk.not_ended folder=%s waited_s=%.0f", self._folder, CLOSE_WAIT_S)

    def _begin(self, units: UnitNames, first: int, last: int, host_pages: PageIndices) -> NewFile | None:
        """A run of units on its way to the writer; None when the folder's bound has no room for it, beside what is being written."""
        run = run_of(units, first, last, self.layout)
        start, end = run.start_tokens // self.layout.page_size, run.end_tokens // self.layout.page_size
        size = (end - start) * self.layout.page_bytes + run.end_tokens * TOKEN_BYTES + HEADER_BYTES
        name = file_stem(run, self._identity) + SUFFIX
        file = StoredFile(name, size, units.names[first:last], run.start_tokens, is_written=False)
        gone = self._index.begin(file)
        if gone is None:
            self._dropped_tokens += run.end_tokens - run.start_tokens
            return None
        self._removals += [each.name for each in gone]
        self._pending_bytes += size
        return NewFile(file, run, host_pages[start:end])

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _account_written(self, ended: Written) -> int:
        written = 0
        for file, size_bytes in ended.sizes:
            self._pending_bytes -= file.size_bytes
            if size_bytes is None:
                self._index.remove(file)
                self._failed_writes += 1
                self._dropped_tokens += len(file.names) * self.layout.unit_tokens
            else:
                self._index.finish(file, size_bytes)
                written += len(file.names) * self.layout.unit_tokens
        self._written_tokens += written
        return written

    def _account_read(self, ended: Read) -> None:
        if ended.missing is not None:
            self._index.remove(ended.missing)
        if ended.bad is not None:
            self._bad_files += 1
            self._index.put_away(ended.bad, ended.bad_name)

    # From here on, the threads.

    def _write(self, job: WriteJob) -> None:
        result = Written(job.number, [(new.file, None) for new in job.files])
        try:
            result = self._work.write(job)
        finally:
            self._tell(result)

    def _read(self, job: ReadJob) -> None:
        with self._changed:
            is_cancelled = job.number in self._cancelled
        result = Read(ReadDone(job.number, 0, None, 0.0))
        try:
            if not is_cancelled:
                result = self._work.read(job)
        finally:
            self._tell(result)

    def _tell(self, result: Written | Read) -> None:
        with self._changed:
            self._done.append(result)
            self._changed.notify_all()
        if self.on_done is not None:
            self.on_done()
