"""A replay as one page of HTML that needs nothing else: what was replayed, the figures, and plots. Nothing in it is fetched from anywhere.

All that comes from files and callers is escaped by the template; pictures escape their own texts.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from jinja2 import Environment

from prefixmesh.bench.replay_plots import distribution_svg, load_svg, sizes_svg
from prefixmesh.bench.replay_sweep import Sweep
from prefixmesh.sim.replay_figures import ReplayFigures


class Plot(NamedTuple):
    """A picture and what it shows."""

    caption: str
    svg: str


class Page(NamedTuple):
    """What is told around the plots. ``rows`` are as long as ``columns``."""

    title: str
    about: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: str
    command: str
    """By which it is repeated."""


_TEMPLATE: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{{ page.title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
div.table { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
figure { margin: 2rem 0 } svg { max-width: 100%; height: auto } figcaption, .legend { color: #555; font-size: .9rem }
code { background: #f3f3f3; padding: .1rem .3rem }
</style>
<h1>{{ page.title }}</h1>
<p>{{ page.about }}</p>
<div class="table"><table>
<tr>{% for one in page.columns %}<th>{{ one }}</th>{% endfor %}</tr>
{% for row in page.rows %}<tr>{% for one in row %}<td>{{ one }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
<p class="legend">{{ page.legend }}</p>
{% for plot in plots %}<figure>{{ plot.svg | safe }}<figcaption>{{ plot.caption }}</figcaption></figure>
{% endfor %}<p>Again: <code>{{ page.command }}</code></p>
</html>
"""


def report_html(page: Page, plots: Sequence[Plot]) -> str:
    """The whole page."""
    environment = Environment(autoescape=True)
    return environment.from_string(_TEMPLATE).render(page=page, plots=plots)


def plots_of(found: Mapping[str, ReplayFigures], workers: int, sizes: Sweep | None) -> list[Plot]:
    """Every plot there is of such runs. ConfigError where matplotlib is not installed."""
    has_answers = {label: one for label, one in found.items() if one.token_ms.p50}
    plots = [
        Plot(
            "A line further left is sooner. Where it ends on the right is who waited longest of a thousand.",
            distribution_svg(
                "First token",
                "milliseconds to the first token",
                {label: one.log.ttft_ms for label, one in found.items()},
            ),
        )
    ]
    if has_answers:
        plots.append(
            Plot(
                "The mean of each answer.",
                distribution_svg(
                    "Token to token",
                    "milliseconds from token to token",
                    {label: _of_answers(one) for label, one in has_answers.items()},
                ),
            )
        )
    if sizes is not None:
        plots.append(
            Plot(
                "What more room would bring: every policy with workers of other sizes.",
                sizes_svg("Cached share by room", "tokens on each worker's device", sizes.by_device_tokens),
            )
        )
        plots.append(
            Plot(
                "What becomes of it when the fleet grows: every policy with other numbers of workers of the same size.",
                sizes_svg("Cached share by workers", "workers", sizes.by_workers),
            )
        )
    plots += [
        Plot("How evenly work was sent, over time.", load_svg(f"Load over time: {label}", one, workers))
        for label, one in found.items()
    ]
    return plots


def _of_answers(figures: ReplayFigures) -> npt.NDArray[np.float64]:
    """Of those that have more than one token."""
    token_ms = figures.log.token_ms
    return token_ms[~np.isnan(token_ms)]
