"""What the demo saw of its pinned policies, and what it says of them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """A customer's first question, asked of one worker itself."""

    worker: str
    prompt_tokens: int
    cached_tokens: int
    first_token_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedPolicy:
    """A policy after its pin had time to reach all workers."""

    tenant: str
    tokens: int
    wanted: int
    held: int
    why: str
    """Why some lack it; empty when none does."""

    visits: tuple[Visit, ...]
    """Of every worker, after that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pinned:
    """All policies."""

    policies: tuple[PinnedPolicy, ...]
    seconds: float
    """From the first wish until all were held."""

    def headline(self) -> str:
        """``pinned: 2 of 2 workers hold each policy``; where they do not all, each policy's own."""
        counts = dict.fromkeys((one.held, one.wanted) for one in self.policies)
        if len(counts) == 1:
            ((held, wanted),) = counts
            said = f"{held} of {wanted} workers hold each policy"
        else:
            said = ", ".join(f"{one.held} of {one.wanted} hold {one.tenant}'s" for one in self.policies)
        return f"pinned: {said} · {self.seconds:.1f} s after they were asked to"

    def problems(self) -> list[str]:
        """Why pinning did not work, one line each; empty when it did."""
        found = []
        for policy in self.policies:
            if not policy.held == policy.wanted > 0:
                found.append(
                    f"{policy.held} of {policy.wanted} workers hold {policy.tenant}'s policy: {policy.why}"
                )
            found += [
                f"{visit.worker} had {visit.cached_tokens} of {policy.tenant}'s {policy.tokens} pinned tokens"
                for visit in policy.visits
                if visit.cached_tokens < policy.tokens
            ]
        return found

    def as_json(self) -> list[dict[str, Any]]:
        """What ``--json`` writes of each policy."""
        return [
            {
                "tenant": policy.tenant,
                "tokens": policy.tokens,
                "wanted": policy.wanted,
                "held": policy.held,
                "first_questions": [
                    {
                        "worker": visit.worker,
                        "prompt_tokens": visit.prompt_tokens,
                        "cached_tokens": visit.cached_tokens,
                        "first_token_ms": round(visit.first_token_ms, 1),
                    }
                    for visit in policy.visits
                ],
            }
            for policy in self.policies
        ]


def rows_of(pinned: Pinned) -> Sequence[tuple[str, Visit]]:
    """Every visit with its tenant, tenant by tenant."""
    return [(policy.tenant, visit) for policy in pinned.policies for visit in policy.visits]
