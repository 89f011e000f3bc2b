"""Traffic over the columns a router decides by, in simulated time: real index, real decisions, workers that are numbers.

A simulated worker computes prompts one after the other at its own rate, brings the adapters it lacks, and then streams its answers side by
side. Its cache has no bound. The router hears of everything at once, and of a worker's rate with its first prompt.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Fingerprint
from prefixmesh.router.block_index import BlockIndex
from prefixmesh.router.cost import Demand, decode_work_ms
from prefixmesh.router.decision import Decision, able_rows, decide
from prefixmesh.router.fleet_columns import FleetColumns
from prefixmesh.router.matched_tokens import SlotRows
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.router.slow_start import SlowStart
from tests.support.column_fleet import COST, Worker, add_row

BLOCK = 64


@dataclass(slots=True)
class SimulatedWorker:
    prefill_ms_per_token: float
    row: int
    slot: int
    resident: OrderedDict[str, None] = field(default_factory=OrderedDict)
    free_at: float = 0.0
    in_flight: int = 0
    waiting_ms: float = 0.0
    decode_work_ms: float = 0.0


class ColumnTraffic:
    """Arrivals come in order of time (milliseconds); what they cause happens as time passes."""

    def __init__(
        self,
        prefill_ms_per_token: Sequence[float],
        *,
        config: PolicyConfig = COST,
        answer_ms: float = 500.0,
        adapters_held: int = 4,
        adapter_load_ms: float = 100.0,
        warm_up_s: float = 0.0,
    ) -> None:
        self.columns, self.slots, self.index = FleetColumns(), SlotRows(), BlockIndex(1_000_000)
        self.slow_start = SlowStart(warm_up_s)
        self.workers: list[SimulatedWorker] = []
        self.taken = Counter[int]()
        self.adapter_loads = self.cached_tokens = 0
        self._config, self._answer_ms = config, answer_ms
        self._adapters_held, self._adapter_load_ms = adapters_held, adapter_load_ms
        self._turn = self._count = 0
        self._coming: list[tuple[float, int, str, SimulatedWorker, float]] = []
        for ms_per_token in prefill_ms_per_token:
            self.join(ms_per_token, now=-1e9)

    def join(self, prefill_ms_per_token: float, now: float) -> int:
        row = add_row(self.columns, f"10.0.0.{len(self.workers)}:1", Worker(linear=0.0, decode_step=0.0))
        worker = SimulatedWorker(prefill_ms_per_token, row, self.index.open_slot())
        self.slots.bind(worker.slot, row)
        self.slow_start.joined(row, now / 1000.0)
        self.workers.append(worker)
        return row

    def arrive(
        self, now: float, prompt_tokens: int, fingerprints: Sequence[Fingerprint] = (), adapter: str = ""
    ) -> Decision:
        self.advance(now)
        matched = self.slots.spread(self.index.find_matches(fingerprints), BLOCK, self.columns.rows)
        demand = Demand(prompt_tokens, prompt_tokens + 64, not_resident=self._without(adapter))
        allowed = self.slow_start.hold_back(able_rows(self.columns, None, demand), now / 1000.0)
        decision = decide(self.columns, allowed, matched, demand, self._config, self._turn)
        assert decision is not None
        self._turn += decision.was_tie
        self.slow_start.taken(decision.row)
        self.taken[decision.row] += 1
        self.cached_tokens += decision.terms.counted_tokens
        self._serve(self.workers[decision.row], decision, now, fingerprints, adapter)
        return decision

    def advance(self, now: float) -> None:
        while self._coming and self._coming[0][0] <= now:
            _, _, kind, worker, work_ms = heapq.heappop(self._coming)
            if kind == "first token":
                worker.waiting_ms = max(0.0, worker.waiting_ms - work_ms)
                self._tell_rates(worker)
            else:
                worker.in_flight -= 1
                worker.decode_work_ms = max(0.0, worker.decode_work_ms - work_ms)
            self._tell_load(worker)

    def _serve(
        self,
        worker: SimulatedWorker,
        decision: Decision,
        now: float,
        fingerprints: Sequence[Fingerprint],
        adapter: str,
    ) -> None:
        expected_ms = decision.terms.prefill_ms + decision.terms.adapter_load_ms
        answer_work_ms = decode_work_ms(self.columns, worker.row, None, 1)
        worker.waiting_ms += expected_ms
        worker.decode_work_ms += answer_work_ms
        worker.in_flight += 1
        self._tell_load(worker)
        share = decision.terms.prefill_ms / float(self.columns.rates.linear[worker.row])
        done = max(now, worker.free_at) + share * worker.prefill_ms_per_token + self._bring(worker, adapter)
        worker.free_at = done
        self.index.stored(worker.slot, Tier.DEVICE, fingerprints)
        self._push(done, "first token", worker, expected_ms)
        self._push(done + self._answer_ms, "end", worker, answer_work_ms)

    def _bring(self, worker: SimulatedWorker, adapter: str) -> float:
        if not adapter:
            return 0.0
        lacks = adapter not in worker.resident
        worker.resident[adapter] = None
        worker.resident.move_to_end(adapter)
        if len(worker.resident) > self._adapters_held:
            worker.resident.popitem(last=False)
        self.adapter_loads += lacks
        return self._adapter_load_ms * lacks

    def _without(self, adapter: str) -> "np.ndarray[tuple[int], np.dtype[np.bool_]] | None":
        return np.array([adapter not in worker.resident for worker in self.workers]) if adapter else None

    def _tell_rates(self, worker: SimulatedWorker) -> None:
        self.columns.set_rates(
            worker.row,
            prefill_ms_per_token=worker.prefill_ms_per_token,
            prefill_ms_per_token2=0.0,
            decode_step_ms=self._answer_ms / 64,
            load_back_ms_per_token=0.0,
            adapter_load_ms=self._adapter_load_ms,
        )

    def _tell_load(self, worker: SimulatedWorker) -> None:
        self.columns.set_load(
            worker.row,
            in_flight=worker.in_flight,
            waiting_prefill_ms=worker.waiting_ms,
            decode_work_ms=worker.decode_work_ms,
        )

    def _push(self, when: float, kind: str, worker: SimulatedWorker, work_ms: float) -> None:
        self._count += 1
        heapq.heappush(self._coming, (when, self._count, kind, worker, work_ms))
