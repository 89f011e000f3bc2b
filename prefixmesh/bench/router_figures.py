"""What a figure of the router is, what is asked of it, and whether it was met: for ``bench index`` and ``bench route``. Pure."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from prefixmesh.bench.figures import rounded, yardstick_as_json
from prefixmesh.bench.timing import Measurement
from prefixmesh.bench.yardstick import Yardstick, mean_yardstick

Unit = Literal["us", "ms", "bytes", "blocks/s"]
"""Microseconds, milliseconds, bytes, blocks in a second of processor time. Of the last, more is better."""

_TIMES: Final = frozenset({"us", "ms"})


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
class Result:
    """A figure, measured."""

    figure: Figure
    measurement: Measurement
    yardstick: Yardstick
    """Of the machine around it."""

    notes: Mapping[str, float] = field(default_factory=dict)
    """What else is good to know of this measurement, by name."""

    @property
    def value(self) -> float:
        """What is held to the target."""
        measured = self.measurement
        if self.figure.judged == "longest" and measured.longest is not None:
            return measured.longest
        return measured.median

    @property
    def scaled_target(self) -> float | None:
        """The target for this machine as it was: times grow with its scale, rates shrink, bytes stay."""
        target = self.figure.target
        if target is None or self.figure.unit == "bytes":
            return target
        scale = self.yardstick.scale
        return target * scale if self.figure.unit in _TIMES else target / scale

    @property
    def met(self) -> bool | None:
        """Whether it is what was asked for; None when nothing was."""
        target = self.scaled_target
        if target is None:
            return None
        return self.value >= target if self.figure.unit == "blocks/s" else self.value <= target


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One run of a bench."""

    results: Sequence[Result]
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
    def missed(self) -> list[Result]:
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


def _as_dict(result: Result) -> dict[str, Any]:
    figure, measured = result.figure, result.measurement
    return {
        "name": figure.name,
        "title": figure.title.strip(),
        "at": figure.at,
        "unit": figure.unit,
        "median": rounded(measured.median),
        "p99": rounded(measured.p99),
        "max": rounded(measured.longest),
        "calls": measured.calls,
        "repeats": measured.repeats,
        "judged": figure.judged,
        "target": figure.target,
        "scaled_target": rounded(result.scaled_target),
        "met": result.met,
        "yardsticks": yardstick_as_json(result.yardstick),
        "notes": {name: rounded(value) for name, value in result.notes.items()},
    }
