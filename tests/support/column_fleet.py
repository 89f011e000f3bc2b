"""Workers as a decision sees them, and a burst of requests that are all decided before anything else happens."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefixmesh.router.cost import CandidateTerms, Demand, decode_work_ms
from prefixmesh.router.decision import Decision, decide, explain
from prefixmesh.router.fleet_columns import FleetColumns, Mask
from prefixmesh.router.matched_tokens import MatchedTokens
from prefixmesh.router.policy import PolicyConfig

PREFILL_MS, DECODE_MS = 0.5, 30.0
COST = PolicyConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker's row. Its defaults: idle, empty, exact, of the priors' speed, with room for everything."""

    device: int = 0
    """Tokens of the prompt on the device."""

    total: int | None = None
    """On either tier; None: none but the device's."""

    in_flight: int = 0
    waiting_ms: float = 0.0
    decode_work_ms: float = 0.0
    linear: float = PREFILL_MS
    quadratic: float = 0.0
    decode_step: float = DECODE_MS
    load_back: float = 0.0
    adapter_load: float = 0.0
    places: int = 0
    match_unit: int = 1
    context_length: int = 1_000_000
    pool: tuple[int, int, int] | None = None
    """Tokens in all, free, evictable."""

    host: tuple[int, int] | None = None
    """Tokens of its host tier, free and evictable; None without one."""

    trust: float = 1.0
    usable: bool = True


@dataclass(slots=True)
class ColumnFleet:
    """Columns with what the workers hold of one prompt."""

    columns: FleetColumns
    matches: MatchedTokens

    def decide(
        self,
        prompt_tokens: int,
        config: PolicyConfig = COST,
        *,
        turn: int = 0,
        chance: int = 0,
        allowed: Mask | None = None,
        demand: Demand | None = None,
    ) -> Decision | None:
        asked = demand or Demand(prompt_tokens, prompt_tokens)
        return decide(self.columns, allowed, self.matches, asked, config, turn, chance)

    def terms(
        self, prompt_tokens: int, config: PolicyConfig = COST, demand: Demand | None = None
    ) -> list[CandidateTerms]:
        asked = demand or Demand(prompt_tokens, prompt_tokens)
        return list(explain(self.columns, None, self.matches, asked, config))

    def takers(
        self, prompt_tokens: int, config: PolicyConfig = COST, demand: Demand | None = None
    ) -> set[int]:
        """Everyone who is chosen in any turn."""
        decisions = [self.decide(prompt_tokens, config, turn=turn, demand=demand) for turn in range(12)]
        return {decision.row for decision in decisions if decision}


def column_fleet(workers: Sequence[Worker]) -> ColumnFleet:
    columns = FleetColumns()
    for index, worker in enumerate(workers):
        add_row(columns, f"10.0.0.{index}:1", worker)
    device = np.array([float(worker.device) for worker in workers])
    total = np.array([float(worker.device if worker.total is None else worker.total) for worker in workers])
    return ColumnFleet(columns, MatchedTokens(device, device if (total == device).all() else total))


def add_row(columns: FleetColumns, name: str, worker: Worker) -> int:
    row = columns.open_row(name)
    columns.set_facts(
        row,
        match_unit=worker.match_unit,
        places=worker.places,
        context_length=worker.context_length,
        total_tokens=worker.pool[0] if worker.pool else 0,
    )
    columns.set_rates(
        row,
        prefill_ms_per_token=worker.linear,
        prefill_ms_per_token2=worker.quadratic,
        decode_step_ms=worker.decode_step,
        load_back_ms_per_token=worker.load_back,
        adapter_load_ms=worker.adapter_load,
    )
    columns.set_load(
        row,
        in_flight=worker.in_flight,
        waiting_prefill_ms=worker.waiting_ms,
        decode_work_ms=worker.decode_work_ms,
    )
    if worker.pool:
        columns.set_pool(row, free_tokens=worker.pool[1], evictable_tokens=worker.pool[2])
    if worker.host:
        columns.set_host_pool(row, free_tokens=worker.host[0], evictable_tokens=worker.host[1])
    columns.set_trust(row, worker.trust)
    columns.set_usable(row, usable=worker.usable)
    return row


def burst(
    workers: Sequence[Worker],
    *,
    requests: int,
    prefix_tokens: int,
    tail_tokens: int,
    config: PolicyConfig = COST,
    max_tokens: int | None = None,
    block_size: int = 64,
) -> Counter[int]:
    """So many requests at once with one new prefix and a tail each, as the router counts them; who gets how many.

    Each decision leaves its work and the expectation of its prompt's whole blocks, as reservations and predictions do.
    """
    fleet = column_fleet(workers)
    columns, held = fleet.columns, fleet.matches.device
    taken = Counter[int]()
    answers_ms = defaultdict[int, float](float)
    for turn in range(requests):
        decision = fleet.decide(prefix_tokens + tail_tokens, config, turn=turn)
        assert decision is not None
        row, terms = decision.row, decision.terms
        taken[row] += 1
        answers_ms[row] += decode_work_ms(columns, row, max_tokens, 1)
        columns.set_load(
            row,
            in_flight=taken[row],
            waiting_prefill_ms=float(columns.waiting_prefill_ms[row]) + terms.prefill_ms,
            decode_work_ms=answers_ms[row],
        )
        held[row] = max(held[row], prefix_tokens // block_size * block_size)
    return taken
