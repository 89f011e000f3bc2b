"""What a figure of the tiers is, and how their bench is told: for ``prefixmesh bench tiers``. Pure.

What is held to a target is a share or a ratio of two things measured in turns on one machine, so no target is scaled.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prefixmesh.bench.engine_figures import Setup
from prefixmesh.bench.result import Result, yardstick_as_json
from prefixmesh.bench.timing import Measurement
from prefixmesh.bench.yardstick import Yardstick, mean_yardstick

Unit = Literal["share", "x", "s", "ms", "GB/s", "tokens/s", "tokens", "bytes"]
"""Of a share more is better, of what else has a target less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One thing that is measured."""

    name: str
    title: str
    unit: Unit
    target: float | None = None
    """At most (of a share: at least) so much; None for what is only told."""

    judged: Literal["median", "longest"] = "median"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One run of the bench."""

    setup: Setup
    results: Sequence[Result[Figure]]

    @property
    def yardstick(self) -> Yardstick:
        """Mean of those beside the figures."""
        return mean_yardstick([result.yardstick for result in self.results])

    @property
    def judged(self) -> int:
        """How many figures were held to a target."""
        return sum(result.met is not None for result in self.results)

    @property
    def missed(self) -> list[Result[Figure]]:
        """Figures that are not what was asked for."""
        return [result for result in self.results if result.met is False]


def measured(values: Sequence[float], calls: int = 1) -> Measurement:
    """One value for each repeat, of ``calls`` calls: their median, and the greatest."""
    return Measurement(statistics.median(values), None, max(values), calls, len(values))


def as_json(report: Report, *, in_process: bool = True) -> dict[str, Any]:
    """What ``--json`` prints: plain values. ``in_process`` says whether neither gRPC nor a socket is in any figure."""
    setup = report.setup
    return {
        "model": setup.model,
        "dtype": setup.dtype,
        "machine": {
            "cores": setup.cores,
            "threads": setup.threads,
            "versions": dict(setup.versions),
            "yardsticks": yardstick_as_json(report.yardstick),
        },
        "in_process": in_process,
        "sizes": dict(setup.sizes),
        "engine": dict(setup.settings),
        "figures": [_as_dict(result) for result in report.results],
    }


def _as_dict(result: Result[Figure]) -> dict[str, Any]:
    figure = result.figure
    return {"name": figure.name, "title": figure.title.strip(), **result.as_json()}
