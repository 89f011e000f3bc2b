"""The plots of a replay's report, as SVG that stands in a page or in a file: what each shows, and in what numbers.

How lines look and how a picture becomes text is told by ``plot_svg``. Every picture says in words, too, what is seen in it.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from prefixmesh.bench.plot_svg import (
    compact,
    duration,
    legend_beside,
    looks,
    plain,
    scale_milliseconds,
    svg,
)
from prefixmesh.sim.replay_figures import ReplayFigures
from prefixmesh.sim.replay_log import ReplayLog

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Column = npt.NDArray[np.float64]

DRAWN_POINTS: Final = 160
"""Of a distribution: as many as can be told apart in a plot of this size."""

MOMENTS: Final = 120
"""At which load is looked up: half a minute apart in a trace of an hour."""

PANELS_BESIDE: Final = 3
"""In a row."""

PANEL_INCHES: Final = 1.75

_SHARES: Final = {1.0: "all", 0.5: "half", 0.1: "1 in 10", 0.01: "1 in 100", 0.001: "1 in 1,000"}
"""Of a distribution's axis. Half of it is the median, and so on."""

_CROWDED: Final = 10.0
"""Times by which one panel's load passes the most of the calmest, from which on panels have an axis in powers."""


def distribution_svg(title: str, unit: str, values: Mapping[str, Column]) -> str:
    """The share of values that are larger, against their size, in powers of ten: the slowest hundredth is a third of the picture."""
    look, most = looks(values), max(map(len, values.values()))
    shares = np.geomspace(1.0, 1.0 / min(most, 1000), DRAWN_POINTS)
    lines = {label: np.quantile(column, 1.0 - shares) for label, column in values.items()}

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for label, line in lines.items():
            axes.plot(line, shares, label=plain(label), **look[label]._asdict())
        axes.set_yscale("log")
        ticks = [share for share in _SHARES if share >= shares[-1]]
        axes.set_yticks(ticks, [_SHARES[share] for share in ticks])
        axes.minorticks_off()
        scale_milliseconds(
            axes, min(line[0] for line in lines.values()), max(line[-1] for line in lines.values())
        )
        axes.set_xlabel(unit)
        axes.set_ylabel("requests that take longer")
        legend_beside(axes)

    told = (
        f"{label}: {', '.join(duration(float(one)) for one in np.quantile(column, (0.5, 0.99)))}"
        for label, column in values.items()
    )
    return svg(title, f"Median and 99 % of each: {'; '.join(told)}", draw)


def sizes_svg(
    title: str, unit: str, figures: Mapping[str, Mapping[int, ReplayFigures]], at: int | None = None
) -> str:
    """The share of prompt tokens that were cached, against a size; ``at`` is the one that the rest of the report is about."""
    look = looks(figures)
    sizes = sorted({size for by_size in figures.values() for size in by_size})

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        if at is not None:
            axes.axvline(at, color="#999999", linewidth=6.0, alpha=0.25)
        for label, by_size in figures.items():
            shares = [100.0 * one.cached_share for one in by_size.values()]
            axes.plot(
                list(by_size), shares, marker="o", markersize=3.5, label=plain(label), **look[label]._asdict()
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [compact(size) for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0.0)
        axes.set_xlabel(unit)
        axes.set_ylabel("% of prompt tokens cached")
        legend_beside(axes)

    told = (
        f"{label}: {', '.join(f'{100.0 * one.cached_share:.1f}' for one in by_size.values())}"
        for label, by_size in figures.items()
    )
    return svg(title, f"% cached at {', '.join(map(compact, sizes))}: {'; '.join(told)}", draw)


def load_svg(title: str, figures: Mapping[str, ReplayFigures]) -> str:
    """Requests under way on the worker with the most of them and on the mean one, until the last came: a panel a run, all to one scale."""
    loads = {label: _under_way(one.log, len(one.prompt_tokens_by_worker)) for label, one in figures.items()}
    most = [float(busiest.max()) for _, busiest, _ in loads.values()]
    rows = -(-len(loads) // PANELS_BESIDE)

    def draw(figure: "Figure") -> None:
        panels = figure.subplots(
            rows, min(len(loads), PANELS_BESIDE), sharex=True, sharey=True, squeeze=False
        ).flatten()
        for axes, (label, (moments, busiest, mean)) in zip(panels, loads.items(), strict=False):
            axes.fill_between(moments, mean, busiest, color="#56b4e9", alpha=0.45, linewidth=0.0)
            axes.plot(moments, busiest, color="#0072b2", linewidth=1.0, label="busiest worker")
            axes.plot(moments, mean, color="#000000", linewidth=1.2, label="mean worker")
            axes.set_title(plain(label), fontsize=10.0)
        _scale_load(panels[0], most)
        for axes in panels[max(0, len(loads) - PANELS_BESIDE) : len(loads)]:
            axes.tick_params(labelbottom=True)
        for axes in panels[len(loads) :]:
            axes.axis("off")
        figure.supxlabel("seconds of simulated time", fontsize=10.0)
        figure.supylabel("requests under way", fontsize=10.0)
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="upper right", ncols=2, frameon=False, fontsize=9.0
        )

    told = (f"{label}: {compact(one)}" for label, one in zip(loads, most, strict=True))
    return svg(title, f"The most on one worker: {'; '.join(told)}", draw, 1.0 + PANEL_INCHES * rows)


def workers_svg(title: str, figures: Mapping[str, ReplayFigures]) -> str:
    """Prompt tokens and work of each worker, from the one with the most down, by the mean: how far each line is from 1 is what is uneven."""
    look = looks(figures)

    def draw(figure: "Figure") -> None:
        left, right = figure.subplots(1, 2, sharex=True, sharey=True)
        for label, one in figures.items():
            _draw_ranks(left, one.prompt_tokens_by_worker, **look[label]._asdict(), label=plain(label))
            _draw_ranks(right, one.work_ms_by_worker, **look[label]._asdict(), label=plain(label))
        left.set_title("prompt tokens", fontsize=10.0)
        right.set_title("work", fontsize=10.0)
        left.set_ylim(bottom=0.0)
        left.set_ylabel("times the mean worker")
        figure.supxlabel("workers, the one with the most first", fontsize=10.0)
        legend_beside(right)

    told = (
        f"{label}: {one.max_over_mean:.2f}, {one.work_max_over_mean:.2f}" for label, one in figures.items()
    )
    return svg(title, f"The most by the mean, of prompt tokens and of work: {'; '.join(told)}", draw)


def _draw_ranks(axes: "Axes", values: Sequence[float], **line: object) -> None:
    of = np.sort(np.asarray(values, np.float64))[::-1]
    mean = of.mean()
    axes.plot(np.arange(1, len(of) + 1), of / mean if mean else of + 1.0, **line)  # type: ignore[arg-type]


def _under_way(log: ReplayLog, workers: int) -> tuple[Column, Column, Column]:
    """Moments, in seconds from the first arrival to the last, and then how many requests the busiest and the mean worker have. O(n log n)."""
    moments = np.linspace(log.arrived_s.min(), log.arrived_s.max(), MOMENTS)
    busiest, all_of_them = np.zeros(MOMENTS), np.zeros(MOMENTS)
    order = np.argsort(log.worker, kind="stable")
    bounds = np.searchsorted(log.worker[order], np.arange(workers + 1))
    for first, last in pairwise(bounds):
        mine = order[first:last]
        began = np.searchsorted(np.sort(log.arrived_s[mine]), moments, "right")
        here = began - np.searchsorted(np.sort(log.ended_s[mine]), moments, "right")
        np.maximum(busiest, here, out=busiest)
        all_of_them += here
    return moments - moments[0], busiest, all_of_them / workers


def _scale_load(axes: "Axes", most: Sequence[float]) -> None:
    """Of all panels, by the most of each."""
    from matplotlib.ticker import FuncFormatter

    if max(most) > _CROWDED * max(1.0, min(most)):
        axes.set_yscale("symlog", linthresh=1.0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    axes.set_ylim(bottom=0.0)
