"""What warming prefixes came to, as Prometheus knows it: how the calls ended, and where their tokens came from."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from prefixmesh.worker.call_metrics import outcome_of

OUTCOMES: Final = (
    "warmed",
    "cancelled",
    "deadline_exceeded",
    "invalid_request",
    "not_found",
    "overloaded",
    "over_budget",
    "unavailable",
    "internal",
)
"""How a call may end: well, with its caller's leaving or deadline, or with an error's reason. What this worker does not do is refused before."""


class WarmedTokens(NamedTuple):
    """Where the tokens came from that one call has made warm."""

    found: int
    copied: int
    computed: int


class WarmMetrics(Collector):
    """Counts of one worker; the front's event loop owns them."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._tokens = WarmedTokens(0, 0, 0)

    def warmed(self, tokens: WarmedTokens) -> None:
        """A call has ended well."""
        self._calls["warmed"] += 1
        self._tokens = WarmedTokens(*(sum(both) for both in zip(self._tokens, tokens, strict=True)))

    def failed(self, error: BaseException) -> None:
        """A call has ended in ``error``."""
        outcome = "cancelled" if isinstance(error, asyncio.CancelledError) else outcome_of(error)
        self._calls[outcome if outcome in OUTCOMES else "internal"] += 1

    def collect(self) -> Iterator[Metric]:
        """Every family, in the order of ``docs/metrics.md``."""
        calls = CounterMetricFamily("prefixmesh_warms", "Warm calls, by how they ended.", labels=["outcome"])
        for outcome in OUTCOMES:
            calls.add_metric([outcome], self._calls[outcome])
        yield calls
        tokens = CounterMetricFamily(
            "prefixmesh_warmed_tokens", "Tokens made warm, by where they came from.", labels=["source"]
        )
        for source, number in self._tokens._asdict().items():
            tokens.add_metric([source], number)
        yield tokens
