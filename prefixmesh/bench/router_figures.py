"""What a figure of the router is, what is asked of it, and whether it was met: for ``bench index`` and ``bench route``. Pure."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from prefixmesh.bench.result import Result, yardstick_as_json
from prefixmesh.bench.yardstick import Yardstick, mean_yardstick

Unit = Literal["us", "ms", "bytes", "blocks/s"]
"""Microseconds, milliseconds, bytes, blocks in a second of processor time. Of the last, more is better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One thing that is measured, at one size."""

    name: str
    title: str
    at: str
    """The size, in words."""

    unit: Unit = "us"
    target: float | None = None
    """At most (of blocks per second: at least) so much on the machine of the targets; None for what is only told."""

    judged: Literal["median", "longest"] = "median"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One run of a bench."""

    results: Sequence[Result[Figure]]
    python: str = field(default_factory=platform.python_version)
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

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


def as_json(report: Report) -> dict[str, Any]:
    """What ``--json`` prints: plain values."""
    return {
        "machine": {
            "python": report.python,
            "cores": report.cores,
            "yardsticks": yardstick_as_json(report.yardstick),
        },
        "figures": [_as_dict(result) for result in report.results],
    }


def _as_dict(result: Result[Figure]) -> dict[str, Any]:
    figure = result.figure
    return {"name": figure.name, "title": figure.title.strip(), "at": figure.at, **result.as_json()}
