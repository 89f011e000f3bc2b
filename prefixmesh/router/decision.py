"""Where a request goes: filters, then the cost of every worker that is left, then a policy's pick. Pure.

The same columns, matches, demand, turn and chance give the same decision. ``explain`` shows what ``decide`` weighs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prefixmesh.kv_source import KvSource
from prefixmesh.router.cost import CandidateTerms, Costs, Demand, weigh
from prefixmesh.router.fleet_columns import FleetColumns, Mask
from prefixmesh.router.matched_tokens import MatchedTokens
from prefixmesh.router.policy import PICKS, TIE_SHARE, Choice, PolicyConfig


class Decision(NamedTuple):
    """Where a request goes and what is expected of it there."""

    terms: CandidateTerms
    was_tie: bool
    """Whether the turn decided: the next decision takes the next turn."""

    chain: int = 0
    """Which of the request's chains the worker is expected to keep it under (``RouteRequest.chain``)."""

    sources: tuple[KvSource, ...] = ()
    """Whom the worker is to copy from first, the best first; none where it copies nothing."""

    @property
    def row(self) -> int:
        """The worker's row."""
        return self.terms.row


def decide(
    columns: FleetColumns,
    allowed: Mask | None,
    matches: MatchedTokens,
    demand: Demand,
    config: PolicyConfig,
    turn: int,
    chance: int = 0,
) -> Decision | None:
    """Pick a worker; None when none is usable, allowed and large enough. O(rows).

    Args:
        columns: what is known of the workers.
        allowed: rows that may be taken, where not all may (exclusions, adapters, the caller's constraints).
        matches: what they hold of the prompt (``SlotRows.spread``).
        demand: what the request asks.
        config: policy and weights.
        turn: decides between equals: count it up whenever the decision ``was_tie``, and equals take turns.
        chance: a random 64-bit number, for the policies that draw.
    """
    able = able_rows(columns, allowed, demand)
    count = np.count_nonzero(able)
    if not count:
        return None
    costs = weigh(columns, able if count < len(able) else None, matches, demand, config.spill_weight)
    affinity_ms = 0.0 if demand.home_row is None else _affinity_ms(able, costs, demand, config)
    choice = Choice(columns, able, matches, costs, demand, affinity_ms, turn, chance)
    row, was_tie = PICKS[config.policy](choice)
    return Decision(costs.of(row, matches, affinity_ms if row == demand.home_row else 0.0), was_tie)


def explain(
    columns: FleetColumns, allowed: Mask | None, matches: MatchedTokens, demand: Demand, config: PolicyConfig
) -> Sequence[CandidateTerms]:
    """What every worker would cost that could be taken, in the order of rows. O(rows)."""
    able = able_rows(columns, allowed, demand)
    if not able.any():
        return []
    costs = weigh(columns, able, matches, demand, config.spill_weight)
    affinity_ms = _affinity_ms(able, costs, demand, config)
    return [
        costs.of(row, matches, affinity_ms if row == demand.home_row else 0.0)
        for row in np.flatnonzero(able).tolist()
    ]


def able_rows(columns: FleetColumns, allowed: Mask | None, demand: Demand) -> Mask:
    """Rows that are usable, allowed, and large enough for the request. Not to be changed. O(rows)."""
    able = columns.usable if allowed is None else columns.usable & allowed
    if demand.most_tokens > columns.least_room:
        able = able & (columns.room >= demand.most_tokens)
    return able


def _affinity_ms(able: Mask, costs: Costs, demand: Demand, config: PolicyConfig) -> float:
    """What is taken off the cost of the caller's last worker: never more than what does not tell workers apart anyway."""
    home = demand.home_row
    if home is None or not config.affinity_ms or not able[home]:
        return 0.0
    return min(config.affinity_ms, TIE_SHARE * float(costs.compared.min()))
