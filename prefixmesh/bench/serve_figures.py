"""What came of a workload on a running cluster, as figures: those of a replay, by the same names, where they can be measured. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from prefixmesh.client.answer import CachedTokens
from prefixmesh.sim.replay_figures import Objective, Percentiles

_MS_PER_S: Final = 1e3


class Served(NamedTuple):
    """A request that is over. Seconds are of one clock."""

    number: int
    arrived_s: float
    """When it was due, so that a client that comes late does not hide a wait."""

    ended_s: float
    problem: str = ""
    """Kind of the error that it ended in; empty where it has its answer, and what follows is of it."""

    worker: str = ""
    policy: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached: CachedTokens = CachedTokens()
    first_s: float | None = None
    interruptions: int = 0

    @property
    def ttft_ms(self) -> float | None:
        """From when it was due to its first token; None without any."""
        return None if self.first_s is None else _MS_PER_S * (self.first_s - self.arrived_s)

    @property
    def token_ms(self) -> float | None:
        """From one token of the answer to the next, on the mean; None of fewer than two."""
        if self.first_s is None or self.output_tokens < 2:
            return None
        return _MS_PER_S * (self.ended_s - self.first_s) / (self.output_tokens - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeFigures:
    """One run. Shares are of the prompt tokens of those that were answered."""

    requests: int
    """Sent, whatever became of them."""

    errors: Mapping[str, int]
    """By kind, how many ended so."""

    policy: str
    """The router's; empty where none told."""

    workers: int
    """That answered."""

    prompt_tokens: int
    output_tokens: int
    device_share: float
    host_share: float
    disk_share: float
    peer_share: float
    ttft_ms: Percentiles
    token_ms: Percentiles
    goodput_share: float
    """Of all that were sent; errors met no objective."""

    max_over_mean: float
    """Of ``prompt_tokens_by_worker``."""

    prompt_tokens_by_worker: tuple[int, ...]
    """That each answered for, by their names in order; then a 0 for each that was said to be there and answered nothing."""

    lasted_s: float
    interruptions: int

    @property
    def cached_share(self) -> float:
        """On whatever tier."""
        return self.device_share + self.host_share + self.disk_share + self.peer_share

    def as_json(self) -> dict[str, object]:
        """For machines, by the names of a replay; None is what a client cannot see."""
        seconds = self.lasted_s or float("inf")
        return {
            "requests": self.requests,
            "errors": dict(self.errors),
            "workers": self.workers,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached_share": self.cached_share,
            "device_share": self.device_share,
            "host_share": self.host_share,
            "disk_share": self.disk_share,
            "peer_share": self.peer_share,
            "max_over_mean": self.max_over_mean,
            "work_max_over_mean": None,
            "prompt_tokens_by_worker": list(self.prompt_tokens_by_worker),
            "work_ms_by_worker": None,
            "ttft_ms": self.ttft_ms.as_json(),
            "token_ms": self.token_ms.as_json(),
            "tokens_per_s": self.output_tokens / seconds,
            "prompt_tokens_per_s": self.prompt_tokens / seconds,
            "goodput_share": self.goodput_share,
            "goodput_per_s": self.goodput_share * self.requests / seconds,
            "copies": None,
            "adapter_wait_share": None,
            "pin_replicas": None,
            "pin_replicas_wanted": None,
            "lasted_s": self.lasted_s,
            "interruptions": self.interruptions,
            "decision_us": None,
            "log_digest": None,
        }


def figures_of(served: Sequence[Served], objective: Objective, workers: int = 0) -> ServeFigures:
    """Of requests that are over, in any order; ``workers`` is how many there are at least. O(n log n)."""
    well = [one for one in served if not one.problem]
    by_worker = Counter[str]()
    for one in well:
        by_worker[one.worker] += one.prompt_tokens
    prompt_tokens = by_worker.total()
    shares = {
        tier: sum(getattr(one.cached, tier) for one in well) / prompt_tokens if prompt_tokens else 0.0
        for tier in ("device", "host", "disk", "peer")
    }
    sent = (*(by_worker[name] for name in sorted(by_worker)), *(workers - len(by_worker)) * (0,))
    good = sum(_is_good(one, objective) for one in well)
    return ServeFigures(
        requests=len(served),
        errors=dict(Counter(one.problem for one in served if one.problem).most_common()),
        policy=next((one.policy for one in well if one.policy), ""),
        workers=len(by_worker),
        prompt_tokens=prompt_tokens,
        output_tokens=sum(one.output_tokens for one in well),
        **{f"{tier}_share": share for tier, share in shares.items()},
        ttft_ms=Percentiles.of([one.ttft_ms for one in well if one.ttft_ms is not None]),
        token_ms=Percentiles.of([one.token_ms for one in well if one.token_ms is not None]),
        goodput_share=good / len(served) if served else 0.0,
        max_over_mean=max(sent) * len(sent) / prompt_tokens if prompt_tokens else 1.0,
        prompt_tokens_by_worker=sent,
        lasted_s=max(one.ended_s for one in served) - min(one.arrived_s for one in served) if served else 0.0,
        interruptions=sum(one.interruptions for one in well),
    )


def _is_good(one: Served, objective: Objective) -> bool:
    return (one.ttft_ms or 0.0) <= objective.ttft_ms and (one.token_ms or 0.0) <= objective.token_ms
