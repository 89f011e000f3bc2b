"""What a figure of the engine is, on what it is scaled to another machine, and whether it was met. Pure.

Beside each figure stands the same with caching off, taken in turns with it, and what the machine could do at that time: its
*ceiling*. A target was set on a machine with a ceiling of its own, and is scaled by the ratio of the two.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from prefixmesh.bench.result import rounded, yardstick_as_json
from prefixmesh.bench.yardstick import Yardstick, mean_yardstick

Unit = Literal["s", "ms", "tokens/s", "requests"]
"""Of the last two, more is better."""

Bound = Literal["products", "reads", "interpreter"]
"""What a figure's time goes into: matrix products, reading the weights, Python."""

PRODUCT_REFERENCE: Final = 411e9
"""Operations per second of the bfloat16 product on the machine of the targets, a multiplication and an addition counted as two."""

READ_REFERENCE: Final = 50e9
"""Bytes per second of the read there. Derived, since the target came without it: on a machine whose cores do 205 GFLOP/s each, two of
them reach 52 to 58 GB/s over pieces of it in the moments that others leave them, one alone 22."""


class Ceiling(NamedTuple):
    """What the machine did around a measurement."""

    product_flops_per_s: float
    read_bytes_per_s: float
    yardstick: Yardstick

    def slowness(self, bound: Bound) -> float:
        """How much slower than the machine of the targets: 2.0 takes twice as long."""
        match bound:
            case "products":
                return PRODUCT_REFERENCE / self.product_flops_per_s
            case "reads":
                return READ_REFERENCE / self.read_bytes_per_s
            case "interpreter":
                return self.yardstick.scale


def mean_ceiling(measured: Sequence[Ceiling]) -> Ceiling:
    """Of those taken before, between and after."""
    return Ceiling(
        statistics.fmean(one.product_flops_per_s for one in measured),
        statistics.fmean(one.read_bytes_per_s for one in measured),
        mean_yardstick([one.yardstick for one in measured]),
    )


class Others(NamedTuple):
    """What others take for the same, measured on a machine of the kind of the targets, in bfloat16. For scale only."""

    vllm_cpu: tuple[float, float] | None = None
    """Least and greatest."""

    vllm_cpu_cache_off: float | None = None
    transformers: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One thing that is measured."""

    name: str
    title: str
    unit: Unit
    target: float | None = None
    """At most (of what is better more: at least) so much on the machine of the targets; None for what is only told."""

    bound: Bound | None = None
    """By what the target is scaled; None leaves it."""

    others: Others = field(default_factory=Others)

    @property
    def more_is_better(self) -> bool:
        """Whether the target is a least."""
        return self.unit in ("tokens/s", "requests")


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A figure, measured."""

    figure: Figure
    values: Sequence[float]
    """One for each repeat."""

    values_cache_off: Sequence[float]
    """The same with ``--prefix-cache off``; empty where that means nothing."""

    ceiling: Ceiling
    reached: float | None = None
    """The share of the ceiling that the median reached, where the figure has one."""

    notes: Mapping[str, float] = field(default_factory=dict)
    """What else is good to know of this measurement, by name."""

    @property
    def value(self) -> float:
        """What is held to the target."""
        return statistics.median(self.values)

    @property
    def value_cache_off(self) -> float | None:
        """The median with caching off; None where it was not taken."""
        return statistics.median(self.values_cache_off) if self.values_cache_off else None

    @property
    def scaled_target(self) -> float | None:
        """The target for this machine as it was: times grow with its slowness, rates shrink, counts stay."""
        figure = self.figure
        if figure.target is None or figure.bound is None:
            return figure.target
        slowness = self.ceiling.slowness(figure.bound)
        return figure.target / slowness if figure.more_is_better else figure.target * slowness

    @property
    def met(self) -> bool | None:
        """Whether it is what was asked for; None when nothing was."""
        target = self.scaled_target
        if target is None:
            return None
        return self.value >= target if self.figure.more_is_better else self.value <= target


@dataclass(frozen=True, kw_only=True, slots=True)
class SavingsPoint:
    """First-token times of a prompt of which a part is cached, and the shares of its arithmetic that are left."""

    prompt_tokens: int
    cached_tokens: int
    values: Sequence[float]
    """Seconds, one for each repeat."""

    linear_left: float
    attention_left: float
    total_left: float

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What was measured, with what, on what."""

    model: str
    dtype: str
    threads: int
    cores: int
    versions: Mapping[str, str]
    sizes: Mapping[str, int]
    settings: Mapping[str, Any]
    """Of the engine, as ``config.describe`` tells them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One run of the bench."""

    setup: Setup
    ceiling: Ceiling
    """Mean of those around the figures."""

    results: Sequence[Result]
    savings: Sequence[SavingsPoint] = ()

    @property
    def missed(self) -> list[Result]:
        """Figures that are not what was asked for."""
        return [result for result in self.results if result.met is False]


def as_json(report: Report) -> dict[str, Any]:
    """What ``--json`` prints: plain values."""
    setup = report.setup
    return {
        "model": setup.model,
        "dtype": setup.dtype,
        "machine": {
            "cores": setup.cores,
            "threads": setup.threads,
            "versions": dict(setup.versions),
            "ceiling": _ceiling(report.ceiling),
            "ceiling_of_targets": {
                "product_gflops_per_s": PRODUCT_REFERENCE / 1e9,
                "read_gb_per_s": READ_REFERENCE / 1e9,
                "yardstick_scale": 1.0,
            },
        },
        "in_process": True,
        "sizes": dict(setup.sizes),
        "engine": dict(setup.settings),
        "figures": [_result(result) for result in report.results],
        "savings": [_point(point, report.savings[0]) for point in report.savings],
    }


def _result(result: Result) -> dict[str, Any]:
    figure = result.figure
    return {
        "name": figure.name,
        "title": figure.title.strip(),
        "unit": figure.unit,
        "median": rounded(result.value),
        "values": [rounded(value) for value in result.values],
        "repeats": len(result.values),
        "cache_off": {
            "median": rounded(result.value_cache_off),
            "values": [rounded(value) for value in result.values_cache_off],
        },
        "target": figure.target,
        "scaled_by": figure.bound,
        "scaled_target": rounded(result.scaled_target),
        "met": result.met,
        "ceiling": _ceiling(result.ceiling),
        "share_of_ceiling": rounded(result.reached),
        "others": figure.others._asdict(),
        "notes": {name: rounded(value) for name, value in result.notes.items()},
    }


def _point(point: SavingsPoint, whole: SavingsPoint) -> dict[str, Any]:
    return {
        "prompt_tokens": point.prompt_tokens,
        "cached_tokens": point.cached_tokens,
        "median_s": rounded(point.value),
        "values_s": [rounded(value) for value in point.values],
        "time_left": rounded(point.value / whole.value),
        "linear_left": rounded(point.linear_left),
        "attention_left": rounded(point.attention_left),
        "total_left": rounded(point.total_left),
    }


def _ceiling(ceiling: Ceiling) -> dict[str, Any]:
    return {
        "product_gflops_per_s": rounded(ceiling.product_flops_per_s / 1e9),
        "read_gb_per_s": rounded(ceiling.read_bytes_per_s / 1e9),
        "yardsticks": yardstick_as_json(ceiling.yardstick),
    }
