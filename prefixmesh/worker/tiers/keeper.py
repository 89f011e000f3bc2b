"""The keeper of the host tier: decides what is copied between device and host, and tells the tree how each copy ended. Pure.

It stands between three: the *tree* (``cache.transfers``) knows what both tiers hold and locks both ends of a copy; the *mover* copies
bytes and knows no tree; the *scheduler* says what was inserted, found and wanted. Every copy that it begins is one job of the mover, in
flight until ``collect`` takes its outcome; nothing here waits but ``wait``.

::

    KvManager.commit ── inserted(node) ─► queue ─► begin_offload ─► mover ─► collect: finish_offload | abort_offload
    KvManager.admit ─── begin_load(match) ───────► begin_restore ─► mover ─► collect: finish_restore | fail_restore
    DiskDesk ────────── what was read ───────────► begin_fetch ───► mover ─► collect: finish_fetch | fail_fetch

What writes when follows SGLang's HiCache (write-through, write-through-selective, layer-wise loading); that a load-back is weighed
against the prefill's curve, and that everything in flight is bounded in pages and in time, is ours.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from prefixmesh.cache.base import MatchResult, RadixKey
from prefixmesh.cache.node import TreeNode
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.cache.tier import Tier
from prefixmesh.cache.transfers import Copy, Fetch, Offload, Restore
from prefixmesh.config import HostWritePolicy
from prefixmesh.errors import InvariantError
from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.engine_stats import TierCounts
from prefixmesh.worker.tiers.backups import MAX_QUEUED_BACKUPS, BackupQueue, missing_tokens
from prefixmesh.worker.tiers.backups_in_flight import LATE_COPY_S, Backup, BackupsInFlight
from prefixmesh.worker.tiers.copies import CANCELLED, CopyJob, CopyKind, Mover, Outcome
from prefixmesh.worker.tiers.disk_desk import DiskDesk
from prefixmesh.worker.tiers.disk_jobs import Disk, DiskCounts
from prefixmesh.worker.tiers.load_back_rates import LoadBackRates
from prefixmesh.worker.tiers.load_backs import MAX_STALL_MS, Load, is_worth_loading, queued_ms
from prefixmesh.worker.tiers.rescues import Going, Rescues

COPYING_SHARE: Final = 8
"""Backups in flight lock at most one part in so many of the device's pages, so that copies never leave too little to evict; and a single
one may always be under way, however long its path."""

MAX_COPYING_BYTES: Final = 64 << 20
"""Of backups in flight: enough to keep any link busy from step to step, and little enough that what is asked for meanwhile (a load-back,
a page that a copy locks) does not wait long."""

MAX_LOOKS: Final = 32
"""Queued nodes that are looked at after one step."""

STEP_WAIT_S: Final = 0.5
"""A step waits so long at most, in all, for KV that is still coming: then it is void, and computed without it (no step over 1 s)."""

STUCK_COPY_S: Final = 10.0
"""A copy that has not ended after so long is not counted on any more: whoever finds no room because of it is told so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeeperConfig:
    """The keeper's bounds and policy."""

    device_pages: int
    write_policy: HostWritePolicy = "write_through"
    load_back_ms_per_token: float = 0.0
    """As measured before there was any traffic; 0 is not measured."""

    max_queued_backups: int = MAX_QUEUED_BACKUPS


class Keeper:
    """See the module. Not thread-safe: the engine's loop owns it.

    * told what happens: ``inserted``, ``matched``, ``computed``, ``flushed``
    * load-backs: ``peek``, ``begin_load``, then ``start`` or ``undo``; ``leave``; ``may_begin``, ``expect``
    * backups: ``pump``; ``rescues``; outcomes: ``has_work``, ``collect``, ``wait``
    * look at: ``is_copying``, ``pages_coming``, ``may_free_pages``, ``counts``, ``check_invariants``
    """

    def __init__(
        self,
        cache: RadixCache,
        mover: Mover,
        engine: EngineRates,
        config: KeeperConfig,
        disk: Disk | None = None,
    ) -> None:
        """``engine`` are the rates that load-backs are weighed against. ``cache`` must have a host tier. ``disk`` is what stands behind it."""
        self._cache = cache
        # What a pin wants on the host: no policy keeps it from there.
        self._awaits = cache.pins_on(Tier.HOST).awaits
        self._mover = mover
        self._engine = engine
        self._config = config
        self._queue = BackupQueue(config.write_policy, config.max_queued_backups)
        self.rates = LoadBackRates(
            token_bytes=mover.page_bytes / cache.page_size, ms_per_token=config.load_back_ms_per_token
        )
        self.disk: DiskDesk | None = None
        """What goes to the disk, and comes from there; None without one."""

        if disk is not None:
            self.disk = DiskDesk(
                cache,
                disk,
                engine,
                self.rates,
                self._fetch,
                device_pages=config.device_pages,
                page_bytes=mover.page_bytes,
            )
        self._max_copying_pages = max(
            1, min(config.device_pages // COPYING_SHARE, MAX_COPYING_BYTES // max(1, mover.page_bytes))
        )
        self._numbers = count(1)
        self.backups = BackupsInFlight()
        self.rescues = Rescues(
            cache,
            self._queue,
            self.backups,
            self.rates,
            engine,
            self._back_up,
            device_pages=config.device_pages,
            has_disk=disk is not None,
        )
        self._loads: dict[int, Load] = {}
        self._fetches: dict[int, tuple[Fetch, float]] = {}
        """What is copied from a buffer to the device, and since when."""
        self._outcomes: list[Outcome] = []
        """Taken from the mover, and not yet told to the tree."""
        self._ended: list[Load] = []
        """Loads that have ended, or that a flush has made useless, since the last ``collect``."""
        self.ended_copies = 0
        """Since the start, well or not."""

        self._is_expecting = False
        self._backed_up_tokens = self._dropped_tokens = self._loaded_back_tokens = 0
        self._recomputed_tokens = self._failed_copies = 0

    @property
    def is_copying(self) -> bool:
        """Whether any job is in flight, or a file is being read or written."""
        return self._is_moving or (self.disk is not None and self.disk.is_busy)

    @property
    def copying_pages(self) -> int:
        """Device pages that load-backs and fetches in flight own. O(1)."""
        return self._cache.copying_pages

    @property
    def evicted_pages(self) -> int:
        """Device pages that were given up for load-backs and fetches. O(1)."""
        return self._cache.transfers.evicted_pages

    def inserted(self, node: TreeNode) -> None:
        """The KV on the path to ``node`` is complete on the device. O(depth)."""
        if (is_wanted := self._awaits(node)) or self.rescues.fits(node):
            self._queue.inserted(node, is_wanted=is_wanted)

    def matched(self, match: MatchResult) -> None:
        """Somebody was admitted with ``match``. O(depth)."""
        if not match.last_device_node.host_pages and self.rescues.fits(match.last_device_node):
            self._queue.matched(match.last_device_node)

    def computed(self, size_tokens: int) -> None:
        """So many tokens that a lower tier has are computed all the same."""
        self._recomputed_tokens += size_tokens

    def flushed(self) -> None:
        """The cache is empty: nothing is backed up any more, and what is loading serves nobody."""
        self._queue.clear()
        for load in self._loads.values():
            if load.is_waited_for:
                load.error = "the cache was flushed"
                self._ended.append(load)
                self.leave(load)
        if self.disk is not None:
            self.disk.flushed()

    def peek(self, key: RadixKey) -> int:
        """Tokens of ``key`` that an admission would not have to compute: those on the device, and those of the host if loading them
        takes less. Changes nothing; as ``PrefixCache.peek``."""
        found = self._cache.peek_tiers(key)
        worth = is_worth_loading(self.rates, self._engine, found.device, found.host, 0.0)
        return found.device + found.host if worth else found.device

    def begin_load(self, match: MatchResult, owner: str, now: float) -> Load | None:
        """Take device pages for what only the host has of ``match``, in the step that matched; None when there is nothing, when computing
        it takes less, when no page can be had, or while a copy is stuck. Nothing is copied before ``start``. O(depth + pages + copies)."""
        host_tokens = match.host_hit_length
        if not host_tokens or self._is_stuck(now):
            return None
        before_ms = queued_ms(self._loads.values(), now)
        if not is_worth_loading(self.rates, self._engine, match.matched_tokens, host_tokens, before_ms):
            self.rates.refused()
            return None
        copy = self._cache.transfers.begin_restore(match, owner)
        if copy is None:
            return None
        size_tokens = len(copy.device_pages) * self._cache.page_size
        expected_ms = before_ms + self.rates.restore_ms(size_tokens)
        return Load(next(self._numbers), copy, size_tokens, now, expected_ms)

    def start(self, load: Load) -> None:
        """Its request is admitted: copy."""
        self._loads[load.number] = load
        self._move(load.number, "restore", load.copy)

    def undo(self, load: Load) -> None:
        """Its request is not admitted after all: the pages are free again."""
        self._cache.transfers.fail_restore(load.copy)

    def leave(self, load: Load) -> None:
        """Its request waits for it no longer. What has begun goes on, and ends as cached KV; what has not is not begun."""
        load.is_waited_for = False
        self._mover.cancel(load.number)

    def may_begin(self, load: Load, compute_ms: float, now: float) -> bool:
        """Whether a step that computes for ``compute_ms`` may begin on it: its first layer is there, and the others will come about as
        fast as they are read. One that is late is read when it has ended: a step that waited for it would hold up all who are in it."""
        if load.is_late(now) or load.left_ms(now) > compute_ms + MAX_STALL_MS:
            return False
        return self._mover.layers_done(load.number) >= 1

    def expect(self, loads: Iterable[Load]) -> None:
        """The next step reads what these bring, and no step before it what others bring."""
        numbers = [load.number for load in loads]
        if numbers or self._is_expecting:
            self._mover.expect(numbers, STEP_WAIT_S)
            self._is_expecting = bool(numbers)

    def pump(self, now: float) -> None:
        """See to what the disk has done, and begin what backups fit beside those in flight. To be called once what ``collect`` returned is
        held: what was read takes pages. O(path) for each of at most ``MAX_LOOKS`` nodes, and what ``DiskDesk.collect`` says."""
        if self.disk is not None:
            self.disk.collect(now)
        for _ in range(min(len(self._queue), MAX_LOOKS)):
            if self.backups.pages >= self._max_copying_pages:
                return
            node = self._queue.take()
            if node is None:
                return
            if self.backups.covers(node):
                self._queue.put_back(node)  # until what stands above it has come
            elif self._awaits(node) or self.rescues.fits(node):
                self._back_up(node, now)
        self.rescues.save_ahead(now)

    def has_work(self) -> bool:
        """Whether ``collect`` or ``pump`` has anything to do: asked where no request is left to be served."""
        if not self._outcomes and self._is_moving:
            self._outcomes = self._mover.take_done()
        if self.disk is not None and self.disk.has_work():
            return True
        return bool(self._outcomes or self._ended or (len(self._queue) and not len(self.backups)))

    def collect(self, now: float) -> list[Load]:
        """Tell the tree of every copy that has ended; returns the loads among them that somebody waits for, and those that a flush has
        made useless. Evicts nothing: what has come is there until it is held. O(depth + pages) for each."""
        outcomes, self._outcomes = self._outcomes, []
        for outcome in (*outcomes, *self._mover.take_done()):
            self._end(outcome, now)
        ended, self._ended = self._ended, []
        return ended

    def wait(self, at_most_s: float) -> None:
        """Block until a copy has ended, or for so long; where none is in flight, until the disk has done something."""
        if self.disk is not None and not self._is_moving:
            self.disk.wait(at_most_s)
        elif not self._outcomes:
            self._mover.wait_done(at_most_s)

    def may_free_pages(self, now: float) -> bool:
        """Whether a copy is in flight whose end may give pages back, of those that are not stuck. O(copies)."""
        jobs: list[Backup | Load] = [*self.backups, *self._loads.values()]
        began = [job.began_at for job in jobs] + [began_at for _, began_at in self._fetches.values()]
        return any(now - began_at < STUCK_COPY_S for began_at in began)

    def pages_coming(self, now: float) -> int:
        """Device pages that could be had in a moment, once those copies in flight have ended that are not late: what nothing but a backup
        locks, and what is fetched for somebody who does not run yet. O(copies * depth)."""
        fetches = [fetch for fetch, began_at in self._fetches.values() if now - began_at < LATE_COPY_S]
        return self.backups.pages_coming(now) + sum(len(fetch.device_pages) for fetch in fetches)

    def counts(self) -> TierCounts:
        """What moved since the start, and what the host holds. O(copies)."""
        host = self._cache.host_figures
        disk = DiskCounts() if self.disk is None else self.disk.counts()
        return TierCounts(
            host_total_pages=host.total,
            host_free_pages=host.free,
            host_evictable_pages=host.evictable,
            host_protected_pages=host.protected,
            backed_up_tokens=self._backed_up_tokens,
            dropped_tokens=self._dropped_tokens + self._queue.dropped_tokens,
            loaded_back_tokens=self._loaded_back_tokens,
            fetched_tokens=disk.fetched_tokens,
            recomputed_tokens=self._recomputed_tokens + disk.recomputed_tokens,
            failed_copies=self._failed_copies,
            copies_in_flight=len(self.backups) + len(self._loads) + len(self._fetches),
            disk_tokens=disk.stored_tokens,
            disk_bytes=disk.stored_bytes,
            disk_written_tokens=disk.written_tokens,
            disk_dropped_tokens=disk.dropped_tokens,
            disk_bad_files=disk.bad_files,
        )

    def close(self) -> None:
        """End the disk, which reads the host's pages, then the mover."""
        if self.disk is not None:
            self.disk.close()
        self._mover.close()

    def check_invariants(self) -> None:
        """The tree and the keeper know of the same copies; raises InvariantError. O(copies)."""
        mine: set[Copy] = {backup.copy for backup in self.backups}
        mine |= {load.copy for load in self._loads.values()}
        mine |= {fetch for fetch, _ in self._fetches.values()}
        if not mine <= set(self._cache.transfers.in_flight):
            raise InvariantError(f"Keeper: a copy in flight has ended in the tree: {self!r}")
        self.backups.check_invariants()
        if self.disk is not None:
            self.disk.fetches.check_invariants()

    @property
    def _is_moving(self) -> bool:
        return bool(len(self.backups) or self._loads or self._fetches)

    def _is_stuck(self, now: float) -> bool:
        """Whether what is asked of the mover now would wait behind what nobody waits for any more."""
        late = any(now >= load.wait_until for load in self._loads.values())
        return late or self.backups.is_late(now, STUCK_COPY_S)

    def _fetch(self, copy: Fetch, buffer: Any, now: float) -> None:
        """Copy what came from elsewhere to the device."""
        number = next(self._numbers)
        self._fetches[number] = (copy, now)
        self._mover.start(CopyJob(number=number, kind="fetch", device_pages=copy.device_pages, buffer=buffer))

    def _move(self, number: int, kind: CopyKind, copy: Offload | Restore) -> None:
        device, host = copy.device_pages, copy.host_pages
        self._mover.start(CopyJob(number=number, kind=kind, device_pages=device, host_pages=host))

    def _back_up(self, node: TreeNode, now: float, going: Going | None = None) -> None:
        missing = missing_tokens(node) if node.pages else 0
        transfers = self._cache.transfers
        copy = transfers.begin_offload(node) if going is None else transfers.begin_rescue(node, going)
        if copy is None or copy.node is None:
            self._dropped_tokens += missing
            return
        backup = Backup(next(self._numbers), copy.node, copy, now, transfers.gives(copy))
        # The host may have room for the front of it alone.
        self._dropped_tokens += missing - backup.pages * self._cache.page_size
        self.backups.add(backup)
        self._move(backup.number, "offload", copy)

    def _end(self, outcome: Outcome, now: float) -> None:
        self.ended_copies += 1
        if outcome.error and outcome.error != CANCELLED:
            self._failed_copies += 1
        backup = self.backups.pop(outcome.number)
        if backup is not None:
            self._end_backup(backup, outcome, now)
        elif (load := self._loads.pop(outcome.number, None)) is not None:
            self._end_load(load, outcome)
        elif (fetch := self._fetches.pop(outcome.number, None)) is not None and self.disk is not None:
            result = self.disk.copied(fetch[0], outcome.error, now)
            if result is not None:
                self.inserted(result.last_device_node)

    def _end_backup(self, backup: Backup, outcome: Outcome, now: float) -> None:
        if outcome.error:
            self.rescues.failed(backup, now)
            self._cache.transfers.abort_offload(backup.copy)
            return
        self._cache.transfers.finish_offload(backup.copy)
        size_tokens = backup.pages * self._cache.page_size
        self._backed_up_tokens += size_tokens
        self.rates.offloaded(size_tokens, outcome.elapsed_s)
        if backup.node.host_pages and self.disk is not None:
            self.disk.backed_up(backup.node)

    def _end_load(self, load: Load, outcome: Outcome) -> None:
        load.has_ended, load.elapsed_s = True, outcome.elapsed_s
        if outcome.error:
            self._cache.transfers.fail_restore(load.copy)
        else:
            self._cache.transfers.finish_restore(load.copy)
            self._loaded_back_tokens += load.size_tokens
            self.rates.restored(load.size_tokens, outcome.elapsed_s)
        if load.is_waited_for:
            load.error = outcome.error
            self._ended.append(load)

    def __repr__(self) -> str:
        return (
            f"<Keeper {len(self._queue)} queued | {len(self.backups)} backups, {len(self._loads)} load-backs in flight | "
            f"{self._backed_up_tokens} tokens backed up, {self._loaded_back_tokens} loaded back>"
        )
