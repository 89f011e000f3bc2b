"""What a router does for a prompt, in one call and in its parts, before a fleet of ``index_fleet``.

The workers' loads, rates and room are drawn: some busy, some with a full cache that would have to evict, all measured. So every term of
the cost is computed, but for those of adapters and of the host tier, which the fleet does not have.
"""

from typing import Final

from prefixmesh.bench.index_fleet import NAMESPACE, BenchFleet
from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE, block_fingerprints
from prefixmesh.ids import Fingerprint
from prefixmesh.router.block_index import Matches
from prefixmesh.router.cost import Demand
from prefixmesh.router.decision import Decision, decide
from prefixmesh.router.fleet_columns import FleetColumns
from prefixmesh.router.matched_tokens import SlotRows
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.tokens import count

ANSWER_TOKENS: Final = 256
CONTEXT_TOKENS: Final = 131_072
POOL_TOKENS: Final = 1_000_000
PLACES: Final = 64


class Asking:
    """Names a prompt, finds who holds it, decides."""

    def __init__(self, fleet: BenchFleet) -> None:
        self.fleet = fleet
        self._columns = FleetColumns()
        self._slots = SlotRows()
        self._config = PolicyConfig()
        self._turn = 0
        for view in fleet.views:
            row = self._columns.open_row(f"10.0.0.1:{view.slot}")
            self._slots.bind(view.slot, row)
            self._tell(row)

    def ask(self, prompt: bytes) -> Decision:
        """All three."""
        return self.decide(self.find(self.name(prompt)), count(prompt))

    def name(self, prompt: bytes) -> list[Fingerprint]:
        """Fingerprints of the prompt's blocks."""
        return block_fingerprints(NAMESPACE, prompt)

    def find(self, names: list[Fingerprint]) -> Matches:
        """Who holds how much of it, expected or told."""
        return self.fleet.index.find_matches(names, self.fleet.predictions.masks)

    def decide(self, matches: Matches, prompt_tokens: int) -> Decision:
        """Where it goes."""
        columns = self._columns
        matched = self._slots.spread(matches, DEFAULT_BLOCK_SIZE, columns.rows)
        demand = Demand(prompt_tokens, prompt_tokens + ANSWER_TOKENS)
        decision = decide(columns, None, matched, demand, self._config, self._turn)
        assert decision is not None, "every worker is usable"
        self._turn += decision.was_tie
        return decision

    def _tell(self, row: int) -> None:
        columns, rng = self._columns, self.fleet.rng
        columns.set_facts(
            row, match_unit=16, places=PLACES, context_length=CONTEXT_TOKENS, total_tokens=POOL_TOKENS
        )
        columns.set_rates(
            row,
            prefill_ms_per_token=float(rng.uniform(0.05, 0.06)),
            prefill_ms_per_token2=1e-7,
            decode_step_ms=float(rng.uniform(20.0, 25.0)),
            load_back_ms_per_token=0.01,
            adapter_load_ms=80.0,
        )
        columns.set_load(
            row,
            in_flight=int(rng.integers(PLACES)),
            waiting_prefill_ms=float(rng.uniform(0.0, 300.0)),
            decode_work_ms=float(rng.uniform(0.0, 300.0)),
        )
        columns.set_pool(row, free_tokens=int(rng.integers(20_000)), evictable_tokens=POOL_TOKENS // 2)
        columns.set_trust(row, 1.0)
        columns.set_usable(row, usable=True)
