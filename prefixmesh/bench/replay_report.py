"""A replay as one page of HTML that needs nothing else: what was replayed, the figures, and plots. Nothing in it is fetched from anywhere.

All that comes from files and callers is escaped by the template; pictures escape their own texts.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from jinja2 import Environment

from prefixmesh.bench.replay_plots import distribution_svg, load_svg, sizes_svg, workers_svg
from prefixmesh.bench.replay_sweep import Sweep
from prefixmesh.sim.replay_figures import ReplayFigures
from prefixmesh.sim.replay_spec import ReplaySpec


class Plot(NamedTuple):
    """A picture and what it shows."""

    name: str
    """Of a file that it would be, and of its place on the page."""

    caption: str
    svg: str


class Column(NamedTuple):
    """Of the table: its name, under that of those beside it which belong together; empty where it stands alone."""

    name: str
    group: str = ""


class Page(NamedTuple):
    """What is told around the plots. ``rows`` are as long as ``columns``."""

    title: str
    about: Sequence[tuple[str, str]]
    """What was replayed on what: a word, and what is to be said to it."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    legend: str
    command: str
    """By which it is repeated."""


_TEMPLATE: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{{ page.title }}</title>
<style>
:root { --ink: #222; --paper: #fff; --dim: #595959; --line: #ddd; --code: #f3f3f3 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e4e4; --paper: #17181a; --dim: #a8a8a8; --line: #3a3b3d; --code: #26282b } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: var(--ink); background: var(--paper) }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem } dt { color: var(--dim) } dd { margin: 0; overflow-wrap: anywhere }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .45rem; text-align: right; white-space: nowrap } tbody tr { border-top: 1px solid var(--line) }
th { font-weight: 600; vertical-align: bottom } th.group { text-align: center; color: var(--dim); font-weight: 400 }
th[scope=row], th:first-child { text-align: left } tbody tr:first-child th { font-weight: 700 } tbody th { font-weight: 400 }
figure { margin: 2rem 0 } svg { height: auto; min-width: 34rem; max-width: 60rem; width: 100%; background: #fff; border-radius: .3rem }
figcaption, .legend { color: var(--dim); font-size: .9rem; max-width: 60rem }
code { background: var(--code); padding: .1rem .3rem; overflow-wrap: anywhere }
</style>
<h1>{{ page.title }}</h1>
<dl>{% for word, what in page.about %}<dt>{{ word }}</dt><dd>{{ what }}</dd>
{% endfor %}</dl>
<div class="wide" tabindex="0" role="region" aria-label="Figures"><table>
<thead><tr>{% for name, count in groups %}<th class="group" colspan="{{ count }}"{% if name %} scope="colgroup"{% endif %}>{{ name }}</th>{% endfor %}</tr>
<tr>{% for one in page.columns %}<th scope="col">{{ one.name }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in page.rows %}<tr><th scope="row">{{ row[0] }}</th>{% for one in row[1:] %}<td>{{ one }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>
<p class="legend">{{ page.legend }}</p>
{% for plot in plots %}<figure id="{{ plot.name }}"><div class="wide">{{ plot.svg | safe }}</div><figcaption>{{ plot.caption }}</figcaption></figure>
{% endfor %}<p>Again: <code>{{ page.command }}</code></p>
</html>
"""


def report_html(page: Page, plots: Sequence[Plot]) -> str:
    """The whole page."""
    environment = Environment(autoescape=True)
    groups = [(name, len(list(columns))) for name, columns in groupby(page.columns, lambda one: one.group)]
    return environment.from_string(_TEMPLATE).render(page=page, groups=groups, plots=plots)


def plots_of(found: Mapping[str, ReplayFigures], spec: ReplaySpec, sizes: Sweep | None) -> list[Plot]:
    """Every plot there is of such runs. ConfigError where matplotlib is not installed."""
    plots = [_first_token(found)]
    if has_answers := {label: one for label, one in found.items() if one.token_ms.is_known}:
        plots.append(_token_to_token(has_answers))
    if sizes is not None:
        plots += _sizes(spec, sizes)
    return [
        *plots,
        Plot(
            "load",
            "Requests that wait or are computed, on the worker with the most of them at that moment and on the mean of all, until the "
            "last request came. All panels have one scale. What is shaded is what a router could still even out.",
            load_svg("Load over time", found),
        ),
        Plot(
            "shared",
            "Prompt tokens count what was cached as well; work is what was computed: prefill, load-back, decoding. A level line is a load "
            "that is the same for all; where it begins on the left is the table's max by mean.",
            workers_svg("How it was shared among workers", found),
        ),
    ]


def _first_token(found: Mapping[str, ReplayFigures]) -> Plot:
    return Plot(
        "first_token",
        "A line further left is sooner. Where it crosses “half” is the median, “1 in 100” the slowest hundredth.",
        distribution_svg(
            "How long until the first token",
            "from arrival to first token",
            {label: one.log.ttft_ms for label, one in found.items()},
        ),
    )


def _token_to_token(found: Mapping[str, ReplayFigures]) -> Plot:
    return Plot(
        "token_to_token",
        "The mean of each answer that has more than one token.",
        distribution_svg(
            "How long from token to token",
            "from one token of an answer to its next",
            {label: _of_answers(one) for label, one in found.items()},
        ),
    )


def _sizes(spec: ReplaySpec, sizes: Sweep) -> list[Plot]:
    return [
        Plot(
            "by_room",
            f"Everything replayed again with {spec.workers:,} workers of other sizes; the grey line is the size of this page.",
            sizes_svg(
                "Cached share by room", "tokens on each worker", sizes.by_device_tokens, spec.device_tokens
            ),
        ),
        Plot(
            "by_workers",
            f"And with other numbers of workers of {spec.device_tokens:,} tokens each, and the same requests.",
            sizes_svg("Cached share by number of workers", "workers", sizes.by_workers, spec.workers),
        ),
    ]


def _of_answers(figures: ReplayFigures) -> npt.NDArray[np.float64]:
    """Of those that have more than one token."""
    token_ms = figures.log.token_ms
    return token_ms[~np.isnan(token_ms)]
