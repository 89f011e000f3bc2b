"""What came of a replay, as figures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from prefixmesh.sim.replay_log import ReplayLog
from prefixmesh.sim.replay_pins import NO_PINS, PinPlan
from prefixmesh.sim.replay_worker import ReplayWorker


class Percentiles(NamedTuple):
    """Of so many values; all NaN of none."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float] | npt.NDArray[np.float64]) -> Self:
        """O(n log n)."""
        return cls(*map(float, np.percentile(values, (50, 90, 99)))) if len(values) else cls(*3 * (math.nan,))

    @property
    def is_known(self) -> bool:
        """Whether there were any values."""
        return not math.isnan(self.p50)

    def as_json(self) -> dict[str, float | None]:
        """For machines: JSON has no NaN."""
        return {name: value if self.is_known else None for name, value in self._asdict().items()}


class Objective(NamedTuple):
    """How soon is soon enough; infinite is no matter when."""

    ttft_ms: float = float("inf")
    """To the first token, at most."""

    token_ms: float = float("inf")
    """From token to token on the mean of an answer, at most."""


NO_OBJECTIVE: Final = Objective()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayFigures:
    """One policy on one workload."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    device_share: float
    """Of all prompt tokens, those found on the device."""

    host_share: float
    """Those brought back from the host."""

    ttft_ms: Percentiles
    """From a request's arrival to its first token."""

    token_ms: Percentiles
    """From one token of an answer to the next, the mean of each answer; not known where no answer has two."""

    goodput_share: float
    """Of all requests, those that met the objective; 1 where there is none."""

    max_over_mean: float
    """Of ``prompt_tokens_by_worker``."""

    work_max_over_mean: float
    """Of ``work_ms_by_worker``."""

    prompt_tokens_by_worker: tuple[int, ...]
    """Sent to each, by its place, cached ones among them."""

    work_ms_by_worker: tuple[float, ...]
    """Of each: prefill, load-back, and the arithmetic of decoding."""

    copies: float
    """On how many workers a block is that is on any, at the end, on the mean."""

    pin_replicas: int
    pin_replicas_wanted: int
    """Of prefixes that stay cached: those that found room on a worker, and all that the workload wants."""

    adapter_wait_share: float
    """Of all requests, those that came when their LoRA adapter was not in memory, and waited for it."""

    lasted_s: float
    """From the first arrival to the last end."""

    log_digest: str
    """Of what became of every request: the same for the same seed, on every machine."""

    decision_us: Percentiles | None = field(compare=False)
    """CPU time of this machine for a decision of the router's core, which differs from run to run; None of rules that are not ours."""

    log: ReplayLog = field(compare=False, repr=False)

    @property
    def cached_share(self) -> float:
        """Of all prompt tokens, on either tier."""
        return self.device_share + self.host_share

    @property
    def prompt_tokens_per_s(self) -> float:
        """Of the whole fleet."""
        return self.prompt_tokens / self.lasted_s if self.lasted_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers, of the whole fleet."""
        return self.output_tokens / self.lasted_s if self.lasted_s else 0.0

    @property
    def goodput_per_s(self) -> float:
        """Requests that met the objective, of the whole fleet."""
        return self.goodput_share * self.requests / self.lasted_s if self.lasted_s else 0.0

    def as_json(self) -> dict[str, object]:
        """For machines; the names of these fields stay."""
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached_share": self.cached_share,
            "device_share": self.device_share,
            "host_share": self.host_share,
            "max_over_mean": self.max_over_mean,
            "work_max_over_mean": self.work_max_over_mean,
            "prompt_tokens_by_worker": list(self.prompt_tokens_by_worker),
            "work_ms_by_worker": list(self.work_ms_by_worker),
            "ttft_ms": self.ttft_ms.as_json(),
            "token_ms": self.token_ms.as_json(),
            "tokens_per_s": self.tokens_per_s,
            "prompt_tokens_per_s": self.prompt_tokens_per_s,
            "goodput_share": self.goodput_share,
            "goodput_per_s": self.goodput_per_s,
            "copies": self.copies,
            "pin_replicas": self.pin_replicas,
            "pin_replicas_wanted": self.pin_replicas_wanted,
            "adapter_wait_share": self.adapter_wait_share,
            "lasted_s": self.lasted_s,
            "decision_us": None if self.decision_us is None else self.decision_us.as_json(),
            "log_digest": self.log_digest,
        }


def figures_of(
    log: ReplayLog,
    workers: Sequence[ReplayWorker],
    objective: Objective,
    decisions_s: Sequence[float] | None,
    pins: PinPlan = NO_PINS,
) -> ReplayFigures:
    """Of requests that have all ended. O(requests log requests + blocks)."""
    prompt_tokens, ttft_ms, token_ms = int(log.prompt_tokens.sum()), log.ttft_ms, log.token_ms
    has_tokens = ~np.isnan(token_ms)
    sent = tuple(worker.prompt_tokens for worker in workers)
    work = tuple(worker.work_ms for worker in workers)
    is_good = _within(ttft_ms, objective.ttft_ms) & (~has_tokens | _within(token_ms, objective.token_ms))
    return ReplayFigures(
        requests=len(log),
        prompt_tokens=prompt_tokens,
        output_tokens=int(log.output_tokens.sum()),
        device_share=int(log.device_tokens.sum()) / prompt_tokens,
        host_share=int(log.host_tokens.sum()) / prompt_tokens,
        ttft_ms=Percentiles.of(ttft_ms),
        token_ms=Percentiles.of(token_ms[has_tokens]),
        goodput_share=float(is_good.mean()),
        max_over_mean=_max_over_mean(sent),
        work_max_over_mean=_max_over_mean(work),
        prompt_tokens_by_worker=sent,
        work_ms_by_worker=work,
        copies=_copies(workers),
        pin_replicas=pins.held,
        pin_replicas_wanted=pins.wanted,
        adapter_wait_share=sum(one.adapters.waited for one in workers if one.adapters is not None) / len(log),
        lasted_s=float(log.ended_s.max() - log.arrived_s.min()),
        log_digest=log.digest(),
        decision_us=None if decisions_s is None else Percentiles.of(1e6 * np.asarray(decisions_s)),
        log=log,
    )


def _within(values_ms: npt.NDArray[np.float64], most_ms: float) -> npt.NDArray[np.bool_]:
    """To the millionth of a millisecond: differences of times have a last bit that nobody waits for."""
    return np.round(values_ms, 6) <= most_ms


def _copies(workers: Sequence[ReplayWorker]) -> float:
    caches = {id(worker.cache): worker.cache for worker in workers}.values()
    names = [cache.names() for cache in caches]
    different = len(set().union(*names))
    return sum(map(len, names)) / different if different else 0.0


def _max_over_mean(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return max(values) / mean if mean else 1.0
