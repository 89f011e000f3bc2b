"""What came of a replay, as figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from prefixmesh.sim.replay_worker import Job, ReplayWorker


class Percentiles(NamedTuple):
    """Of so many values; all 0 of none."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """O(n log n)."""
        return cls(*map(float, np.percentile(values, (50, 90, 99)))) if values else cls(0.0, 0.0, 0.0)


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
    """From one token of an answer to the next, the mean of each answer."""

    max_over_mean: float
    """Of the prompt tokens sent to each worker, cached ones among them."""

    work_max_over_mean: float
    """Of the work of each worker: prefill, load-back, and the arithmetic of decoding."""

    copies: float
    """On how many workers a block is that is on any, at the end, on the mean."""

    lasted_s: float
    """From the first arrival to the last end."""

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

    def as_json(self) -> dict[str, object]:
        """For machines; the names of these fields stay."""
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "cached_share": self.cached_share,
            "device_share": self.device_share,
            "host_share": self.host_share,
            "max_over_mean": self.max_over_mean,
            "work_max_over_mean": self.work_max_over_mean,
            "ttft_ms": self.ttft_ms._asdict(),
            "token_ms": self.token_ms._asdict(),
            "tokens_per_s": self.tokens_per_s,
            "prompt_tokens_per_s": self.prompt_tokens_per_s,
            "copies": self.copies,
            "lasted_s": self.lasted_s,
        }


def figures_of(jobs: Sequence[Job], workers: Sequence[ReplayWorker]) -> ReplayFigures:
    """Of requests that have all ended. O(requests log requests + blocks)."""
    prompt_tokens = sum(job.request.input_length for job in jobs)
    caches = {id(worker.cache): worker.cache for worker in workers}.values()
    names = [cache.names() for cache in caches]
    different = len(set().union(*names))
    return ReplayFigures(
        requests=len(jobs),
        prompt_tokens=prompt_tokens,
        output_tokens=sum(job.request.output_length for job in jobs),
        device_share=sum(job.device_tokens for job in jobs) / prompt_tokens,
        host_share=sum(job.host_tokens for job in jobs) / prompt_tokens,
        ttft_ms=Percentiles.of([1e3 * (job.first_token_at - job.arrived_at) for job in jobs]),
        token_ms=Percentiles.of(
            [
                1e3 * (job.ended_at - job.first_token_at) / (job.request.output_length - 1)
                for job in jobs
                if job.request.output_length > 1
            ]
        ),
        max_over_mean=_max_over_mean([worker.prompt_tokens for worker in workers]),
        work_max_over_mean=_max_over_mean([worker.work_ms for worker in workers]),
        copies=sum(map(len, names)) / different if different else 0.0,
        lasted_s=max(job.ended_at for job in jobs) - min(job.arrived_at for job in jobs),
    )


def _max_over_mean(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return max(values) / mean if mean else 1.0
