"""A figure that was measured, and whether it is what was asked for: what the benches of the cache, of the router and of the tiers share. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

from prefixmesh.bench.timing import Measurement
from prefixmesh.bench.yardstick import Yardstick

_TIMES: Final = frozenset({"us", "ms"})
_RATES: Final = frozenset({"turns/s", "blocks/s"})
_MORE_IS_BETTER: Final = _RATES | {"share"}

_DIGITS: Final = 4
"""Significant digits in ``--json``: more than any of these measurements is good for."""


class Judged(Protocol):
    """What any bench's figure is: held to something, or only told."""

    @property
    def unit(self) -> str:
        """A time, a rate, a share, or something else."""
        ...

    @property
    def target(self) -> float | None:
        """At most so much (of a rate or a share: at least) on the machine of the targets; None for what is only told."""
        ...

    @property
    def judged(self) -> Literal["median", "longest"]:
        """Which of its measures is held to that."""
        ...


FigureT = TypeVar("FigureT", bound=Judged)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result(Generic[FigureT]):
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
        return self.value >= target if self.figure.unit in _MORE_IS_BETTER else self.value <= target

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
