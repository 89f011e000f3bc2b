"""Which worker takes a request. Pure: the same candidates and the same turn give the same decision.

``cost`` is the product's own policy; ``round_robin`` and ``least_loaded`` stand beside it to be compared with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from prefixmesh.config import DEFAULT_SPILL_WEIGHT, RoutingPolicy
from prefixmesh.router.cost import Candidate, Cost, RequestSize, estimate
from prefixmesh.router.endpoint import Endpoint

TIE_SHARE: Final = 0.1
"""Costs closer than this do not tell workers apart that hold equally much: measured rates wobble by a few percent, and the fastest
of equals would otherwise get every request, busy or not, and do all the evicting. Among such workers the least busy is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """What a decision depends on beside the candidates."""

    policy: RoutingPolicy = "cost"
    spill_weight: float = DEFAULT_SPILL_WEIGHT
    """How much the work that a choice adds for everyone else counts beside the request's own wait."""

    affinity_ms: float = 0.0
    """Milliseconds that the worker of a caller's last request may cost more and still be taken; 0 knows no sessions. At most as many as
    would not tell workers apart anyway, so that it never beats a real difference."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes and what is expected of it there."""

    endpoint: Endpoint
    matched_tokens: int
    cost: Cost
    was_tie: bool
    """Whether the turn decided: the next decision takes the next turn."""


def choose(
    candidates: Sequence[Candidate], size: RequestSize, config: PolicyConfig, turn: int
) -> Decision | None:
    """Pick a worker for a request of ``size``; None when there is no candidate. O(candidates).

    Candidates' rates must be known (``cost.fill_rates``). ``turn`` decides between equals: count it up whenever the
    decision ``was_tie``, and equals take turns.
    """
    if not candidates:
        return None
    costs = [estimate(candidate, size, config.spill_weight) for candidate in candidates]
    equals = _BY_NAME[config.policy](candidates, costs)
    index = equals[turn % len(equals)]
    chosen = candidates[index]
    return Decision(chosen.endpoint, chosen.matched_tokens, costs[index], len(equals) > 1)


def _cheapest(candidates: Sequence[Candidate], costs: Sequence[Cost]) -> list[int]:
    totals = [cost.total_ms for cost in costs]
    best = min(range(len(totals)), key=lambda i: (totals[i], candidates[i].in_flight))
    limit = totals[best] * (1.0 + TIE_SHARE)
    matched = candidates[best].matched_tokens
    near = [
        i
        for i, candidate in enumerate(candidates)
        if totals[i] <= limit and candidate.matched_tokens == matched
    ]
    least = min(candidates[i].in_flight for i in near)
    return [i for i in near if candidates[i].in_flight == least]


def _least_loaded(candidates: Sequence[Candidate], _costs: Sequence[Cost]) -> list[int]:
    least = min((candidate.in_flight, candidate.work_ms) for candidate in candidates)
    return [i for i, candidate in enumerate(candidates) if (candidate.in_flight, candidate.work_ms) == least]


def _everyone(candidates: Sequence[Candidate], _costs: Sequence[Cost]) -> list[int]:
    return list(range(len(candidates)))


_BY_NAME: Final[dict[RoutingPolicy, Callable[[Sequence[Candidate], Sequence[Cost]], list[int]]]] = {
    "cost": _cheapest,
    "round_robin": _everyone,
    "least_loaded": _least_loaded,
}
