"""What a figure of the cache is, what is asked of it, and how its bench is told: for ``bench cache``. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from prefixmesh.bench.result import Result, yardstick_as_json
from prefixmesh.bench.timing import Measurement
from prefixmesh.bench.yardstick import Yardstick

Unit = Literal["us", "ms", "bytes", "turns/s", "x"]
"""Microseconds, milliseconds, bytes, turns per CPU second, times as much."""

SizeOf = Literal["leaves", "pool tokens"]
"""A tree of N leaves has N / 4 nodes more."""


class Baseline(NamedTuple):
    """What others take for the same, measured on a machine of the kind the targets were set on. For scale only."""

    compiled: float
    """The best known implementation that is compiled."""

    python: float
    """The best in Python."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One thing that is measured, at one page size and one size of tree."""

    name: str
    title: str
    page_size: int
    size: int
    size_of: SizeOf = "leaves"
    """Of what ``size`` is the number."""

    unit: Unit = "us"
    target: float | None = None
    """At most (of turns: at least) so much on the machine of the targets; None for what is only told."""

    judged: Literal["median", "longest"] = "median"
    baseline: Baseline | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One run of the bench."""

    python: str
    cores: int
    yardstick: Yardstick
    """Mean of those beside the figures."""

    results: Sequence[Result[Figure]]

    @property
    def missed(self) -> list[Result[Figure]]:
        """Figures that are not what was asked for."""
        return [result for result in self.results if result.met is False]


def ratio_of(figure: Figure, results: Sequence[Result[Figure]]) -> Result[Figure]:
    """How far apart the medians of ``results`` are, each on its machine's scale: the greatest over the least."""
    scaled = [result.measurement.median / result.yardstick.scale for result in results]
    yardstick = results[-1].yardstick
    return Result(
        figure=figure,
        measurement=Measurement(
            max(scaled) / min(scaled), None, None, len(results), results[0].measurement.repeats
        ),
        yardstick=yardstick,
    )


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
    return {
        "name": figure.name,
        "title": figure.title,
        "page_size": figure.page_size,
        "size": figure.size,
        "size_of": figure.size_of,
        **result.as_json(),
        "baseline": figure.baseline and figure.baseline._asdict(),
    }
