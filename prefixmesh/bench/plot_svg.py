"""SVG text of a plot, by matplotlib, which comes with ``prefixmesh[report]``: how lines look, how numbers on axes are written, what is left out.

Equal figures give equal text, with the same matplotlib: no dates, names inside that are made from the title, two decimals of a point. What
is drawn is told by ``replay_plots``.
"""

import io
import re
from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from prefixmesh.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES: Final = (7.6, 3.7)

COLOURS: Final = ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which people with any colour vision tell apart; without their yellow, which is hardly seen on white."""

DASHES: Final = ("-", (0, (6, 2)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
"""As many as share no factor with ``COLOURS``: no two of the first 28 lines look alike, and none is told by its colour alone."""

FIRST_WIDTH: Final = 2.2
"""The first line is what a replay is about; others are this much thinner."""

OTHER_WIDTH: Final = 1.4

LOG_FROM: Final = 5.0
"""Times by which the largest value passes the least, from which on an axis is in powers: below, it is easier read as it is."""

_FINE_LOG: Final = 100.0
"""Times, below which powers of ten alone would leave an axis with a number or two."""

_STYLE: Final[Mapping[str, Any]] = {
    "svg.fonttype": "none",
    "font.size": 10.0,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
}
_NO_METADATA: Final = {"Date": None, "Creator": None, "Format": None, "Type": None}
_DECIMALS: Final = re.compile(r"(\.\d\d)\d+")
_NAMES: Final = re.compile(r' id="([A-Za-z0-9_.]+)"')
_BLANKS: Final = re.compile(r"(?<=>)\s*\n\s*(?=<)|(?<=[ML\d])\s*\n\s*")


class Look(NamedTuple):
    """How one line is drawn."""

    color: str
    linestyle: Any
    linewidth: float
    zorder: float
    """Dashes over what is whole: of two equal lines both are seen."""


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """Of lines in their order: the same in every plot of a page."""
    return {
        label: Look(
            COLOURS[place % len(COLOURS)],
            DASHES[place % len(DASHES)],
            OTHER_WIDTH if place else FIRST_WIDTH,
            2.0 + place % len(DASHES) / len(DASHES),
        )
        for place, label in enumerate(labels)
    }


def require_matplotlib() -> None:
    """Raises ConfigError, saying how to install it, where it is not."""
    try:
        import matplotlib.figure  # noqa: F401  asked for, not used
    except ImportError as error:
        raise ConfigError("report: plots need matplotlib: pip install 'prefixmesh[report]'") from error


def svg(title: str, told: str, draw: "Callable[[Figure], None]", height: float = SIZE_INCHES[1]) -> str:
    """A picture ``height`` inches high; ``told`` is for who cannot see it. Raises ConfigError where matplotlib is not installed."""
    require_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {**_STYLE, "svg.hashsalt": title}
    with mpl.rc_context(style):
        figure = Figure(figsize=(SIZE_INCHES[0], height), layout="constrained")
        draw(figure)
        figure.suptitle(plain(title), x=0.01, ha="left", fontsize=12.0)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=_NO_METADATA)
    return _without_what_is_not_used(text.getvalue(), f"{title}. {told}")


def plain(text: str) -> str:
    """Without what matplotlib reads as mathematics."""
    return text.replace("$", r"\$")


def scale_milliseconds(axes: "Axes", least: float, most: float) -> None:
    """The x axis of values from ``least`` to ``most`` milliseconds: as they are or in powers, its numbers as durations."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    if least > 0.0 and most > LOG_FROM * least:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if most > _FINE_LOG * least else (1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))


def duration(milliseconds: float) -> str:
    """Short, in the unit that suits it: ``0.5 ms``, ``20 ms``, ``1.5 s``, ``8,055 s``."""
    return f"{milliseconds:.4g} ms" if milliseconds < 1e3 else f"{float(f'{milliseconds / 1e3:.4g}'):,g} s"


def compact(count: float) -> str:
    """Three digits of it: ``950``, ``107k``, ``1.71M``."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def legend_beside(axes: "Axes") -> None:
    """Where no line runs."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9.0, handlelength=3.2)


def _without_what_is_not_used(drawn: str, told: str) -> str:
    """What only a file of its own begins with, names that nothing refers to, which would stand on the page twice, and hundredths of a point."""
    text = drawn[drawn.index("<svg") :]
    text = _NAMES.sub(lambda name: name[0] if f"#{name[1]}" in text else "", text)
    text = _BLANKS.sub(" ", _DECIMALS.sub(r"\1", text))
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(told)}" ', 1)
