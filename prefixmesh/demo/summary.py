"""From the demo's requests to the figures it shows and writes. Pure."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prefixmesh.demo.pinned import Pinned

COLD_BELOW: Final = 0.5
"""A request is cold when less than this share of its prompt was cached, else warm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One answered request."""

    number: int
    tenant: str
    user: str
    turn: int
    worker: str
    prompt_tokens: int
    cached_tokens: int
    possible_tokens: int
    """What an ideal cache would have served (``prefixmesh.demo.oracle``)."""

    leaked_tokens: int
    """Cached tokens that the tenant itself had never sent."""

    first_token_ms: float
    prefill_ms: float
    """Time the worker computed the prompt, without waiting."""

    @property
    def is_cold(self) -> bool:
        """Whether most of the prompt had to be computed."""
        return self.cached_tokens < COLD_BELOW * self.prompt_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One pass over the workload."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    possible_tokens: int
    cross_tenant_cached_tokens: int
    ttft_cold_ms: float | None
    """Median time to the first token of cold requests; None when there was none."""

    ttft_warm_ms: float | None
    prefill_ms: float
    requests_per_worker: Mapping[str, int]
    wall_s: float

    @property
    def cached_share(self) -> float:
        """Share of all prompt tokens that came from a cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def cached_share_possible(self) -> float:
        """The same for the ideal cache."""
        return self.possible_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def summarise(rows: Sequence[Row], wall_s: float) -> Summary:
    """The figures of one pass."""
    return Summary(
        requests=len(rows),
        prompt_tokens=sum(row.prompt_tokens for row in rows),
        cached_tokens=sum(row.cached_tokens for row in rows),
        possible_tokens=sum(row.possible_tokens for row in rows),
        cross_tenant_cached_tokens=sum(row.leaked_tokens for row in rows),
        ttft_cold_ms=_median([row.first_token_ms for row in rows if row.is_cold]),
        ttft_warm_ms=_median([row.first_token_ms for row in rows if not row.is_cold]),
        prefill_ms=sum(row.prefill_ms for row in rows),
        requests_per_worker=dict(sorted(Counter(row.worker for row in rows).items())),
        wall_s=wall_s,
    )


def as_json(cache_on: Summary, cache_off: Summary, pinned: Pinned) -> dict[str, Any]:
    """What ``--json`` writes: the pass with caching, what was pinned after it, and the pass without under ``cache_off``."""
    return {**_figures(cache_on), "pinned": pinned.as_json(), "cache_off": _figures(cache_off)}


def find_problems(cache_on: Summary, cache_off: Summary, expected_requests: int) -> list[str]:
    """Why the demo did not work, one line each; empty when it did."""
    problems = []
    for name, summary in (("on", cache_on), ("off", cache_off)):
        if summary.requests != expected_requests:
            problems.append(
                f"with caching {name}, {summary.requests} of {expected_requests} requests were answered"
            )
        if summary.cross_tenant_cached_tokens:
            problems.append(
                f"with caching {name}, {summary.cross_tenant_cached_tokens} cached tokens came from another tenant"
            )
    if cache_on.possible_tokens and not cache_on.cached_tokens:
        problems.append(f"of {cache_on.possible_tokens} tokens that could come from the cache, none did")
    if cache_off.cached_tokens:
        problems.append(f"with caching off, {cache_off.cached_tokens} tokens came from a cache")
    return problems


def compare(cache_on: Summary, cache_off: Summary) -> list[tuple[str, str, str]]:
    """Lines ``(figure, with caching, without)`` for people; times to the first token are medians."""
    both = (cache_on, cache_off)
    computed = [summary.prompt_tokens - summary.cached_tokens for summary in both]
    saved = 1 - computed[0] / computed[1] if computed[1] else 0.0

    def line(figure: str, values: Sequence[str]) -> tuple[str, str, str]:
        return figure, values[0], values[1]

    return [
        line("requests answered", [f"{s.requests}" for s in both]),
        line("prompt tokens", [f"{s.prompt_tokens:,}" for s in both]),
        line("  from cache", [f"{s.cached_share:.1%}" for s in both]),
        line("  most possible", [f"{s.cached_share_possible:.1%}" for s in both]),
        line("prefill computed", [f"{computed[0]:,} ({saved:.1%} saved)", f"{computed[1]:,}"]),
        line("prefill time", [f"{s.prefill_ms / 1000:.1f} s" for s in both]),
        line("first token, cold", [_ms(s.ttft_cold_ms) for s in both]),
        line("first token, warm", [_ms(s.ttft_warm_ms) for s in both]),
        line("requests per worker", [_per_worker(s) for s in both]),
        line("from another tenant", [f"{s.cross_tenant_cached_tokens}" for s in both]),
        line("whole run", [f"{s.wall_s:.1f} s" for s in both]),
    ]


def _figures(summary: Summary) -> dict[str, Any]:
    return {
        "requests": summary.requests,
        "prompt_tokens": summary.prompt_tokens,
        "cached_tokens": summary.cached_tokens,
        "cached_share": round(summary.cached_share, 4),
        "cached_share_possible": round(summary.cached_share_possible, 4),
        "ttft_cold_ms": _rounded(summary.ttft_cold_ms),
        "ttft_warm_ms": _rounded(summary.ttft_warm_ms),
        "prefill_ms": round(summary.prefill_ms, 1),
        "requests_per_worker": dict(summary.requests_per_worker),
        "cross_tenant_cached_tokens": summary.cross_tenant_cached_tokens,
        "wall_s": round(summary.wall_s, 2),
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} ms"


def _per_worker(summary: Summary) -> str:
    return ", ".join(f"{count}" for count in summary.requests_per_worker.values())
