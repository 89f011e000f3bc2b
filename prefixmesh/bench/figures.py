"""What a figure is, what is asked of it, and whether it was met: of the cache's bench, and what all benches share. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, NamedTuple, Protocol, TypeVar

from prefixmesh.bench.timing import Measurement
from prefixmesh.bench.yardstick import Yardstick

Unit = Literal["us", "ms", "bytes", "turns/s", "x"]
"""Microseconds, milliseconds, bytes, turns per CPU second, times as much."""

SizeOf = Literal["leaves", "pool tokens"]
"""A tree of N leaves has N / 4 nodes more."""

_TIMES: Final = frozenset({"us", "ms"})
_RATES: Final = frozenset({"turns/s", "blocks/s"})
"""Of these more is better."""

_DIGITS: Final = 4
"""Significant digits in ``--json``: more than any of these measurements is good for."""


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


class Judged(Protocol):
    """What any bench's figure is: held to something, or only told."""

    @property
    def unit(self) -> str:
        """A time, a rate, or neither."""
        ...

    @property
    def target(self) -> float | None:
        """At most so much (of a rate: at least) on the machine of the targets; None for what is only told."""
        ...

    @property
    def judged(self) -> Literal["median", "longest"]:
        """Which of its measures is held to that."""
        ...


FigureT = TypeVar("FigureT", bound=Judged)


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken(Generic[FigureT]):
    """A figure, measured."""

    figure: FigureT
    measurement: Measurement
    yardstick: Yardstick
    """Of the machine around it."""

    notes: Mapping[str, float] = field(default_factory=dict)
    """What else is good to know of this measurement, by name."""

    @property
    def value(self) -> float:
        """What is held to the target."""
        measured = self.measurement
        if self.figure.judged == "median" or measured.longest is None:
            return measured.median
        return measured.longest

    @property
    def scaled_target(self) -> float | None:
        """The target for this machine as it was: times grow with its scale, rates shrink, what is neither stays."""
        target, unit = self.figure.target, self.figure.unit
        if target is None:
            return None
        if unit in _TIMES:
            return target * self.yardstick.scale
        return target / self.yardstick.scale if unit in _RATES else target

    @property
    def met(self) -> bool | None:
        """Whether it is what was asked for; None when nothing was."""
        target = self.scaled_target
        if target is None:
            return None
        return self.value >= target if self.figure.unit in _RATES else self.value <= target

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` prints of it beside the figure's own names: plain values."""
        measured = self.measurement
        return {
            "unit": self.figure.unit,
            "median": rounded(measured.median),
            "p99": rounded(measured.p99),
            "max": rounded(measured.longest),
            "calls": measured.calls,
            "repeats": measured.repeats,
            "judged": self.figure.judged,
            "target": self.figure.target,
            "scaled_target": rounded(self.scaled_target),
            "met": self.met,
            "yardsticks": yardstick_as_json(self.yardstick),
            "notes": {name: rounded(value) for name, value in self.notes.items()},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Result(Taken[Figure]):
    """A figure of the cache, measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One run of the bench."""

    python: str
    cores: int
    yardstick: Yardstick
    """Mean of those beside the figures."""

    results: Sequence[Result]

    @property
    def missed(self) -> list[Result]:
        """Figures that are not what was asked for."""
        return [result for result in self.results if result.met is False]


def ratio_of(figure: Figure, results: Sequence[Result]) -> Result:
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


def _as_dict(result: Result) -> dict[str, Any]:
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


def yardstick_as_json(yardstick: Yardstick) -> dict[str, float | None]:
    """Both measures and the scale they make."""
    return {
        "compare_ns": rounded(yardstick.compare_ns),
        "call_ns": rounded(yardstick.call_ns),
        "scale": rounded(yardstick.scale),
    }


def rounded(value: float | None) -> float | None:
    """To the digits that ``--json`` tells."""
    if value is None or value == 0.0:
        return value
    return round(value, _DIGITS - 1 - math.floor(math.log10(abs(value))))
