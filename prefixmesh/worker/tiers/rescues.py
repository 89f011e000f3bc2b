"""What is about to leave the device and is nowhere else is saved to the host first, and whoever wants its pages waits for that. Pure.

While the host has free pages everything gets a copy when it comes (``backups``), and eviction only demotes. Once it is full, a copy of what
the device has would push out what it has not; so nothing is copied then before it has to go::

    admission that must evict ──► what would go ──► saved: its pages are free when the copy is acknowledged; the request is asked again
                                       │
                                       └── has a copy, is not worth one, or cannot be saved: goes at once

Nobody waits for a rescue but whoever could not have begun without eviction, and he a quarter of a second at most. A few pages are kept free
ahead of those who decode, so that they do not wait at all.
"""

from collections.abc import Callable
from typing import Final

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.node import TreeNode, end_of
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.tiers.backups import BackupQueue, missing_tokens
from prefixmesh.worker.tiers.backups_in_flight import LATE_COPY_S, Backup, BackupsInFlight
from prefixmesh.worker.tiers.load_back_rates import LoadBackRates

AHEAD_SHARE: Final = 64
"""One part in so many of the device's pages is given up ahead of those who decode, where that needs a copy first."""

SAVING_SHARE: Final = 2
"""Nothing is saved while backups lock more than one part in so many of the device's pages: the rest must be enough to go on."""

Going = dict[TreeNode, None]
"""The nodes that are next to leave the device, in order."""


class Rescues:
    """What is saved because it is next to go: ``fits``, ``make_room``, ``save_ahead``, ``save``. The keeper copies; this says what."""

    def __init__(
        self,
        cache: RadixCache,
        queue: BackupQueue,
        backups: BackupsInFlight,
        rates: LoadBackRates,
        engine: EngineRates,
        back_up: Callable[[TreeNode, float, Going], None],
        *,
        device_pages: int,
        has_disk: bool,
    ) -> None:
        """``back_up`` begins the copy of a node's path, beside those that are going, if it can."""
        self._cache = cache
        self._queue = queue
        self._backups = backups
        self._rates = rates
        self._engine = engine
        self._back_up = back_up
        self._ahead_pages = max(1, device_pages // AHEAD_SHARE)
        self._most_saving_pages = device_pages // SAVING_SHARE
        self._has_disk = has_disk
        self._pause_until = 0.0
        """After one that failed none begins for a while: what cannot be saved is not tried again and again."""

    def fits(self, node: TreeNode) -> bool:
        """Whether the host has free pages for what it lacks of a path: else a copy would push out what the device has not. With a disk
        behind it, that has what is pushed out. O(depth)."""
        free_tokens = self._cache.host_figures.free * self._cache.page_size
        return self._has_disk or missing_tokens(node) <= free_tokens

    def failed(self, backup: Backup, now: float) -> None:
        """A backup has not come."""
        if backup.gives:
            self._pause_until = now + LATE_COPY_S

    def make_room(self, key: RadixKey, pages: int, now: float) -> bool:
        """So many device pages are to be evicted for ``key``: save what would be lost. Whether to wait, since they come free by that in a
        moment. O(nodes that go), and as ``save`` for those that have no copy."""
        missing = pages - self._backups.pages_given(now)
        if missing > 0 and now >= self._pause_until:
            self._cache.transfers.keep(key)
            self._save_next(missing, now)
        return self._backups.pages_given(now) > 0

    def save_ahead(self, now: float) -> None:
        """As ``make_room``, for the pages that those who decode will want next."""
        free = self._cache.transfers.free_device_pages + self._backups.pages_given(now)
        if free < self._ahead_pages and now >= self._pause_until:
            self._save_next(self._ahead_pages - free, now)

    def save(self, node: TreeNode, now: float, going: Going | None = None) -> None:
        """Back up at once what the host lacks of the path to ``node``, whose device pages are about to be taken, with those ``going``
        beside it, as far as it has room; not where it is computed again as fast. O(depth + pages)."""
        missing = missing_tokens(node)
        if not missing or self._backups.pages > self._most_saving_pages or self._backups.is_late(now):
            return
        if not self._is_worth_saving(end_of(node) - missing, missing):
            self._rates.save_refused(now)
            return
        self._back_up(node, now, {} if going is None else going)

    def _save_next(self, pages: int, now: float) -> None:
        going = dict.fromkeys(self._cache.transfers.next_to_go(pages))
        for node in going:
            if not node.host_pages and not node.lock_ref and self._queue.wants(node):
                self.save(node, now, going)

    def _is_worth_saving(self, start: int, size_tokens: int) -> bool:
        """Whether copying to the host and back takes less than computing again. Rates that nobody has measured are not held against it."""
        compute_ms = self._engine.prefill_ms(start, start + size_tokens)
        copies_ms = self._rates.offload_ms(size_tokens) + self._rates.restore_ms(size_tokens)
        return compute_ms <= 0.0 or copies_ms < compute_ms
