"""The disk behind the host: what is written there, what is fetched from there, and what became of both. Pure.

It stands between the disk, which knows files, and the keeper, which knows copies: it takes the disk's outcomes, and has the keeper copy what was read
to the device. Without a disk there is no desk.
"""

from collections.abc import Callable
from typing import Any

from prefixmesh.cache.base import InsertResult
from prefixmesh.cache.node import TreeNode
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.cache.transfers import Fetch
from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.tiers.disk_fetches import DiskFetches
from prefixmesh.worker.tiers.disk_jobs import Disk, DiskCounts, ReadDone, WriteDone
from prefixmesh.worker.tiers.disk_writes import DiskWrites
from prefixmesh.worker.tiers.load_back_rates import LoadBackRates


class DiskDesk:
    """See the module. One loop owns it."""

    def __init__(
        self,
        cache: RadixCache,
        disk: Disk,
        engine: EngineRates,
        load_backs: LoadBackRates,
        copy: Callable[[Fetch, Any, float], None],
        *,
        device_pages: int,
        page_bytes: int,
    ) -> None:
        """``copy`` begins to copy a buffer to a fetch's pages, now; ``copied`` is told of its end."""
        self._cache = cache
        self._disk = disk
        self._copy = copy
        self.writes = DiskWrites(cache.transfers, disk)
        self.fetches = DiskFetches(
            cache, disk, engine, load_backs, device_pages=device_pages, page_bytes=page_bytes
        )
        self._outcomes: list[ReadDone | WriteDone] = []
        """Taken from the disk, and not yet seen to."""

    @property
    def is_busy(self) -> bool:
        """Whether the disk has anything to do still."""
        return self.fetches.is_reading or self.writes.is_writing

    def backed_up(self, node: TreeNode) -> None:
        """The host has the whole path to ``node``: it goes on to the disk, at the next ``collect``. O(1)."""
        self.writes.backed_up(node)

    def has_work(self) -> bool:
        """Whether ``collect`` has anything to do: asked where no request is left to be served."""
        if not self._outcomes and self.is_busy:
            self._outcomes = self._disk.take_done()
        return bool(self._outcomes) or self.writes.may_go_on

    def collect(self, now: float) -> None:
        """See to all that was read and written, and begin more. O(depth + pages) for each."""
        outcomes, self._outcomes = self._outcomes, []
        for outcome in (*outcomes, *self._disk.take_done()):
            if isinstance(outcome, WriteDone):
                self.writes.done(outcome)
            elif (began := self.fetches.was_read(outcome, now)) is not None:
                self._copy(began.copy, began.buffer, now)
        self.fetches.expire(now)
        self.fetches.pump()
        self.writes.pump()

    def copied(self, copy: Fetch, error: str, now: float) -> InsertResult | None:
        """A copy of what was read has ended; where its KV is now, None when it is nowhere."""
        result = None
        if error:
            self._cache.transfers.fail_fetch(copy)
        else:
            result = self._cache.transfers.finish_fetch(copy, now)
        if result is None:
            self.fetches.copy_failed(copy)
        else:
            self.fetches.copied(copy)
        return result

    def wait(self, at_most_s: float) -> None:
        """Block until the disk has an outcome, or for so long."""
        if not self._outcomes:
            self._disk.wait_done(at_most_s)

    def flushed(self) -> None:
        """The cache is empty. What is on the disk stays: it is as true as it was."""
        self.writes.flushed()

    def counts(self) -> DiskCounts:
        """The disk's, and what was fetched from it. O(1)."""
        counts = self._disk.counts()
        return counts._replace(
            dropped_tokens=counts.dropped_tokens + self.writes.dropped_tokens,
            fetched_tokens=self.fetches.fetched_tokens,
            recomputed_tokens=self.fetches.recomputed_tokens,
        )

    def close(self) -> None:
        """Write what waits to be written, within a bound of time, and let go of the folder."""
        while self.writes.may_go_on:
            self.writes.pump()
        self._disk.close()
