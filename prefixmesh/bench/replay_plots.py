"""The plots of a replay's report, as SVG that stands in a page: by matplotlib, which comes with ``prefixmesh[report]``.

Equal figures give equal text: no dates, and names inside a picture that are made from its own title.
"""

import io
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from prefixmesh.errors import ConfigError
from prefixmesh.sim.replay_figures import ReplayFigures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES: Final = (7.0, 3.6)
DRAWN_POINTS: Final = 200
"""Of a distribution: as many as can be told apart in a plot of this size."""

WINDOWS: Final = 60
"""Of time: a minute each in a trace of an hour."""

_STYLE: Final[Mapping[str, Any]] = {
    "svg.fonttype": "none",
    "font.size": 9.0,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
}
_NO_METADATA: Final = {"Date": None, "Creator": None, "Format": None, "Type": None}


def require_matplotlib() -> None:
    """Raises ConfigError, saying how to install it, where it is not."""
    try:
        import matplotlib.figure  # noqa: F401  asked for, not used
    except ImportError as error:
        raise ConfigError("report: plots need matplotlib: pip install 'prefixmesh[report]'") from error


def distribution_svg(title: str, unit: str, values: Mapping[str, npt.NDArray[np.float64]]) -> str:
    """The share of values that are larger, against their size, both in powers of ten: the slowest hundredth is a tenth of the picture."""

    def draw(axes: "Axes") -> None:
        for label, column in values.items():
            shares = np.geomspace(1.0, 1e-3, DRAWN_POINTS)
            axes.plot(np.quantile(column, 1.0 - shares), shares, label=_plain(label))
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(unit)
        axes.set_ylabel("share of requests that take longer")

    return _svg(title, draw)


def sizes_svg(title: str, unit: str, figures: Mapping[str, Mapping[int, ReplayFigures]]) -> str:
    """The share of prompt tokens that were cached, against a size."""

    def draw(axes: "Axes") -> None:
        for label, by_size in figures.items():
            shares = [100.0 * one.cached_share for one in by_size.values()]
            axes.plot(list(by_size), shares, marker="o", markersize=3.0, label=_plain(label))
        axes.set_xscale("log", base=2)
        ticks = sorted({size for by_size in figures.values() for size in by_size})
        axes.set_xticks(ticks, [f"{size:,}" for size in ticks])
        axes.set_ylim(bottom=0.0)
        axes.set_xlabel(unit)
        axes.set_ylabel("% of prompt tokens cached")

    return _svg(title, draw)


def load_svg(title: str, figures: ReplayFigures, workers: int) -> str:
    """Prompt tokens that arrived for the workers, a window of time each: the mean worker, and the range of all."""
    log = figures.log
    arrived = log.arrived_s - log.arrived_s.min()
    edges = np.linspace(0.0, max(float(arrived.max()), 1e-3), WINDOWS + 1)
    tokens, *_ = np.histogram2d(
        arrived,
        log.worker,
        bins=(edges, np.arange(workers + 1)),
        weights=log.prompt_tokens.astype(np.float64),
    )
    per_s = tokens / np.diff(edges)[:, None]

    def draw(axes: "Axes") -> None:
        middles = (edges[:-1] + edges[1:]) / 2.0
        axes.fill_between(middles, per_s.min(axis=1), per_s.max(axis=1), alpha=0.25, label="least to most")
        axes.plot(middles, per_s.mean(axis=1), label="mean worker")
        axes.set_ylim(bottom=0.0)
        axes.set_xlabel("seconds of simulated time")
        axes.set_ylabel("prompt tokens a second, by arrival")

    return _svg(title, draw)


def _svg(title: str, draw: "Callable[[Axes], None]") -> str:
    require_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {**_STYLE, "svg.hashsalt": title}
    with mpl.rc_context(style):
        figure = Figure(figsize=SIZE_INCHES)
        axes = figure.subplots()
        draw(axes)
        axes.set_title(_plain(title))
        axes.legend(fontsize=8.0)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=_NO_METADATA, bbox_inches="tight")
    drawn = text.getvalue()
    # Without what only a file of its own begins with.
    return drawn[drawn.index("<svg") :]


def _plain(text: str) -> str:
    """Without what matplotlib reads as mathematics."""
    return text.replace("$", r"\$")
