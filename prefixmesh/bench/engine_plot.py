"""Draws what a cached prefix saves, as an SVG: measured first-token times over the curves of the arithmetic that is left. Pure.

Plain text made here rather than by a plotting library: one picture with two axes is not worth a dependency.
"""

from collections.abc import Callable, Sequence
from typing import Final

from prefixmesh.bench.engine_figures import SavingsPoint

WIDTH: Final = 640
HEIGHT: Final = 400
LEFT: Final = 64
TOP: Final = 24
PLOT_WIDTH: Final = 544
PLOT_HEIGHT: Final = 312
STEPS: Final = 50
"""Straight pieces of a curve."""

TICKS: Final = (0.0, 0.25, 0.5, 0.75, 1.0)

_STYLE: Final = """<style>
text { font: 12px sans-serif; fill: #333 } .axis { stroke: #999; fill: none } .grid { stroke: #e5e5e5 }
.linear { stroke: #7a9cc6; fill: none; stroke-dasharray: 6 4 } .attention { stroke: #c68a7a; fill: none; stroke-dasharray: 2 3 }
.total { stroke: #222; fill: none; stroke-width: 1.6 } .measured { fill: #d2372c }
</style>"""


def savings_svg(points: Sequence[SavingsPoint]) -> str:
    """A picture of ``points``, the first of which has nothing cached."""
    weight = _linear_weight(points)
    size = points[0].prompt_tokens
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
        _STYLE,
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_axes(f"share of a {size:,}-token prompt that is cached"),
        _curve("linear", lambda share: 1.0 - share),
        _curve("attention", lambda share: 1.0 - share**2),
        _curve("total", lambda share: 1.0 - weight * share - (1.0 - weight) * share**2),
        *_legend(),
    ]
    for point in points:
        x, y = _at(point.cached_tokens / size, point.value / points[0].value)
        parts.append(f'<circle class="measured" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
        anchor = "start" if point.cached_tokens == 0 else "end"
        shift = 8 if point.cached_tokens == 0 else -8
        parts.append(
            f'<text x="{x + shift:.1f}" y="{y + 14:.1f}" text-anchor="{anchor}">{point.value:.2f} s</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _linear_weight(points: Sequence[SavingsPoint]) -> float:
    """Of the whole prompt's arithmetic, the linear part: what is left is ``1 - w s - (1 - w) s^2`` with a share ``s`` cached."""
    for point in points:
        share = 1.0 - point.linear_left
        if 0.0 < share < 1.0:
            return (1.0 - point.total_left - share**2) / (share - share**2)
    return 1.0


def _at(share: float, left: float) -> tuple[float, float]:
    return LEFT + share * PLOT_WIDTH, TOP + (1.0 - min(left, 1.0)) * PLOT_HEIGHT


def _curve(name: str, left: Callable[[float], float]) -> str:
    places = (_at(step / STEPS, left(step / STEPS)) for step in range(STEPS + 1))
    return f'<polyline class="{name}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'


def _axes(label: str) -> list[str]:
    bottom, right = TOP + PLOT_HEIGHT, LEFT + PLOT_WIDTH
    parts = []
    for tick in TICKS:
        x, y = _at(tick, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.0%}</text>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:.0%}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    parts.append(
        f'<text x="{LEFT + PLOT_WIDTH / 2:.0f}" y="{bottom + 40}" text-anchor="middle">{label}</text>'
    )
    return parts


def _legend() -> list[str]:
    entries = (
        ("total", "all arithmetic left"),
        ("linear", "linear part left"),
        ("attention", "attention left"),
    )
    parts = []
    for row, (name, text) in enumerate(entries):
        y = TOP + PLOT_HEIGHT - 76 + 18 * row
        parts.append(f'<line class="{name}" x1="{LEFT + 16}" x2="{LEFT + 48}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT + 56}" y="{y + 4}">{text}</text>')
    y = TOP + PLOT_HEIGHT - 76 + 18 * len(entries)
    parts.append(f'<circle class="measured" cx="{LEFT + 32}" cy="{y}" r="4"/>')
    parts.append(f'<text x="{LEFT + 56}" y="{y + 4}">first token, of the time with nothing cached</text>')
    return parts
