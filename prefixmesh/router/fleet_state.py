"""What a router knows of its workers, kept together: who they are, what they hold, how busy they are. Pure.

News comes in by whoever hears it, and is written where a decision will read it: one row of ``FleetColumns`` a worker. What a request of
this router's is about is not known here, but for its reservation.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from prefixmesh.ids import Epoch, Fingerprint, Incarnation
from prefixmesh.router.cost import decode_work_ms
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.fleet_columns import FleetColumns, Mask
from prefixmesh.router.fleet_view import FleetView
from prefixmesh.router.load import LoadReport
from prefixmesh.router.matched_tokens import MatchedTokens, best_of
from prefixmesh.router.old_rates import OldRates
from prefixmesh.router.placement import PublicChain
from prefixmesh.router.registry import WorkerRegistry
from prefixmesh.router.worker_entry import WorkerEntry
from prefixmesh.router.worker_identity import Expected, WorkerFacts
from prefixmesh.worker_report import PagePool, WorkerReport


class Opening(NamedTuple):
    """How a stream is to begin."""

    resume_from: tuple[Epoch, int] | None
    """Where it goes on; None: with a snapshot."""

    incarnation: Incarnation
    """The life of the worker that it is about."""


class FleetState:
    """Registry, views and columns of all workers. Not thread-safe: one loop owns it."""

    def __init__(self, expected: Expected, max_blocks: int) -> None:
        self._columns = FleetColumns()
        self.block_size = expected.block_size
        # Workers whose load the columns do not tell yet.
        self._untold: set[WorkerEntry] = set()
        self.registry = WorkerRegistry(expected)
        self.view = FleetView(max_blocks, self._columns)
        self._by_row: dict[int, WorkerEntry] = {}
        self.old_rates = OldRates()
        self._changed = self.registry.follow()

    def __repr__(self) -> str:
        return f"{self.registry!r}, {self.view!r}"

    @property
    def columns(self) -> FleetColumns:
        """All that decisions read. O(1) for each worker whose load has changed since the last reading."""
        while self._untold:
            self._tell_load(self._untold.pop())
        return self._columns

    def at_row(self, row: int) -> WorkerEntry:
        """The worker of a row."""
        return self._by_row[row]

    def add(self, endpoint: Endpoint, now: float) -> bool:
        """Know a worker; False when it was known already. Raises OverloadedError when there are too many."""
        if self.registry.get(endpoint) is not None:
            return False
        row = self._columns.open_row(endpoint)
        self.registry.add(endpoint)
        entry = self._by_row[row] = self._entry(endpoint)
        entry.row = row
        self.view.add(endpoint, row, now)
        return True

    def remove(self, endpoint: Endpoint) -> bool:
        """Forget a worker and what it held; False when it was not known. O(different sets of holders)."""
        entry = self.registry.get(endpoint)
        if entry is None:
            return False
        self.registry.remove(endpoint)
        self.view.remove(endpoint)
        self._columns.close_row(entry.row)
        self.old_rates.forget(entry.row)
        del self._by_row[entry.row]
        self.tell_ready()
        return True

    def described(self, endpoint: Endpoint, facts: WorkerFacts, now: float) -> bool:
        """Take over what a worker told; True when it is a new life, of which nothing is believed yet."""
        is_new_life = self.registry.described(endpoint, facts)
        entry = self.registry.get(endpoint)
        if entry is None:
            return False
        if is_new_life:
            self.view.new_life(endpoint, now)
            self.load_changed(entry)
            self._columns.forget_pool(entry.row)
            self.old_rates.forget(entry.row)
            self._columns.copies.set_rate(entry.row, 0.0)
        self._columns.copies.set_layout(entry.row, facts.kv_layout)
        self._columns.set_facts(
            entry.row,
            match_unit=facts.match_unit,
            places=facts.max_running_requests,
            context_length=facts.context_length,
            total_tokens=facts.total_tokens,
        )
        self._tell_host_pool(entry, facts.host_pool)
        if entry.report is None:
            rates = facts.rates
            self._columns.set_rates(
                entry.row,
                prefill_ms_per_token=rates.linear_ms_per_token,
                prefill_ms_per_token2=rates.prefill_ms_per_token2,
                decode_step_ms=rates.decode_step_ms,
                load_back_ms_per_token=rates.load_back_ms_per_token,
                adapter_load_ms=rates.adapter_load_ms,
            )
        self.tell_ready()
        return is_new_life

    def opened(
        self, endpoint: Endpoint, report_interval_s: float, now: float, *, tells: bool = True
    ) -> Opening:
        """A stream of a worker's news is about to begin; ``tells`` is whether it is of the cache, too."""
        entry = self.registry.get(endpoint)
        if entry is None:
            return Opening(None, Incarnation(0))
        entry.awaits_first_report = True
        entry.load.on_opened()
        self.load_changed(entry)
        place = self.view.opened(endpoint, report_interval_s, now, tells=tells)
        return Opening(place, entry.load.incarnation)

    def on_report(self, entry: WorkerEntry, report: WorkerReport, now: float) -> None:
        """Take over a worker's own word on its load, its rates and its pool. O(ids + own reservations of it)."""
        row, columns = entry.row, self._columns
        entry.report = report
        columns.set_rates(
            row,
            prefill_ms_per_token=report.prefill_ms_per_token,
            prefill_ms_per_token2=report.prefill_ms_per_token2,
            decode_step_ms=report.decode_step_ms,
            load_back_ms_per_token=report.load_back_ms_per_token,
            adapter_load_ms=report.adapter_load_ms,
        )
        self.old_rates.told(row, report.rated_prefills, now)
        columns.copies.set_rate(row, report.copy_ms_per_token)
        columns.set_answers(row, tokens=report.answer_tokens, token_interval_ms=report.token_interval_ms)
        pool = report.device_pool
        if pool.total_pages and entry.facts is not None:
            page_size = entry.facts.page_size
            columns.set_pool(
                row,
                free_tokens=pool.free_pages * page_size,
                evictable_tokens=pool.evictable_pages * page_size,
            )
            self._tell_host_pool(entry, report.host_pool)
        rates = columns.rates
        entry.load.on_report(
            LoadReport(
                answers=report.running_requests + report.queued_requests,
                own_requests=report.own_requests,
                prefill_ms=report.uncached_tokens * rates.linear.item(row)
                + report.uncached_squares * rates.quadratic.item(row),
                decode_ms_each=decode_work_ms(columns, row, None, 1),
                accepted=report.accepted,
                prefilled=report.prefilled,
                ended=report.ended,
            )
        )
        self.load_changed(entry)
        if self.registry.draining_changed(entry.endpoint, draining=report.draining):
            self.tell_ready()

    def set_leaving(self, endpoint: Endpoint, *, leaving: bool) -> None:
        """A worker is to hand over what it holds before it drains: it gets nothing new, and can be copied from; or not any more."""
        if self.registry.leaving_changed(endpoint, leaving=leaving):
            self.tell_ready()

    def review(self, now: float) -> None:
        """See who has become silent, and believe nothing of what they said of others; let old rates fade. Call it a few times a second.
        O(workers), and O(workers * log workers) where rates are old."""
        self.view.review(now)
        for endpoint, followed in self.view:
            entry = self._entry(endpoint)
            if entry.report is not None and followed.view.is_silent(now):
                self.forget_report(entry)
        self.old_rates.review(self.columns, now)

    def forget_report(self, entry: WorkerEntry) -> None:
        """What a worker said of its load is too old. O(own reservations of it)."""
        entry.report = None
        entry.load.forget_report()
        self.load_changed(entry)

    def load_changed(self, entry: WorkerEntry) -> None:
        """A worker's load is another: the next decision reads it. A request changes it four times or more from its decision to its end."""
        self._untold.add(entry)

    def tell_ready(self) -> None:
        """Write who may be sent requests where decisions read it. O(workers that have changed)."""
        for entry in self._changed.take():
            self._columns.set_usable(entry.row, usable=entry.ready)
            self._columns.copies.set_gives(entry.row, gives=entry.gives)

    def matched(
        self, fingerprints: Sequence[Fingerprint], public: Sequence[PublicChain] = ()
    ) -> MatchedTokens:
        """What each worker is believed to hold of a prompt whose blocks are so named, or so behind public prefixes. O(blocks walked + rows)
        for each chain."""
        plain = self._matched(fingerprints)
        return best_of(plain, [self._matched(chain.fingerprints) for chain in public]) if public else plain

    def rows_with_adapter(self, name: str, digest: str) -> Mask:
        """Rows of ready workers that have this content under this name. O(workers)."""
        rows = np.zeros(self._columns.rows, dtype=np.bool_)
        rows[[entry.row for entry in self.registry.ready if entry.has_adapter(name, digest)]] = True
        return rows

    def rows_without_resident(self, digest: str) -> Mask:
        """Rows that would have to load the adapter of this content first. O(workers)."""
        rows = np.zeros(self._columns.rows, dtype=np.bool_)
        rows[[entry.row for entry in self.registry.ready if not entry.has_resident(digest)]] = True
        return rows

    def without(self, allowed: Mask | None, endpoints: Collection[Endpoint]) -> Mask | None:
        """``allowed`` (None: all) but for some workers. O(workers) when there are any."""
        rows = [entry.row for endpoint in endpoints if (entry := self.registry.get(endpoint)) is not None]
        if not rows:
            return allowed
        left = np.ones(self._columns.rows, dtype=np.bool_) if allowed is None else allowed
        left[rows] = False
        return left

    def check_invariants(self) -> None:
        """Recompute everything; raises InvariantError."""
        self.view.check_invariants()
        for entry in self.registry:
            entry.load.check_invariants()

    def _matched(self, fingerprints: Sequence[Fingerprint]) -> MatchedTokens:
        matches = self.view.find_matches(fingerprints)
        return self.view.slot_rows.spread(matches, self.block_size, self._columns.rows)

    def _tell_host_pool(self, entry: WorkerEntry, pool: PagePool | None) -> None:
        if pool is None or entry.facts is None:
            self._columns.forget_host_pool(entry.row)
            return
        page_size = entry.facts.page_size
        self._columns.set_host_pool(
            entry.row,
            free_tokens=pool.free_pages * page_size,
            evictable_tokens=pool.evictable_pages * page_size,
        )

    def _tell_load(self, entry: WorkerEntry) -> None:
        if self._by_row.get(entry.row) is entry:  # else it was removed
            total = entry.load.total
            self._columns.set_load(
                entry.row,
                in_flight=total.in_flight,
                waiting_prefill_ms=total.prefill_ms,
                decode_work_ms=total.decode_ms,
            )

    def _entry(self, endpoint: Endpoint) -> WorkerEntry:
        entry = self.registry.get(endpoint)
        assert entry is not None, endpoint
        return entry
