"""Which figures a router is held to, and at which sizes: the data of ``prefixmesh bench route``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from prefixmesh.bench.router_figures import Figure, Unit


class Kind(NamedTuple):
    """One name of a figure."""

    title: str
    at: str
    unit: Unit = "us"
    target: float | None = None


KINDS: Final[Mapping[str, Kind]] = {
    "route_100": Kind("Route, more than an echo", "100 tokens, packed", target=120.0),
    "route_4096": Kind("Route, more than an echo", "4,096 tokens, packed", target=120.0),
    "generate": Kind("Generate, more than a no-op proxy", "4,096 tokens, packed", target=150.0),
    "generate_frame": Kind("  and for each frame", "4,096 tokens, packed", target=10.0),
    "build_chat": Kind("a chat of which 3,600 tokens are known", "4,000 tokens of text", "ms", 1.5),
    "build_chat_new": Kind("  of which none are", "4,000 tokens of text", "ms"),
    "route_chat": Kind("  Route with it, more than an echo", "4,000 tokens of text"),
}
"""Every figure, in the order in which they are told."""

TOGETHER: Final[Mapping[str, str]] = {
    "generate_frame": "generate",
    "build_chat_new": "build_chat",
}
"""Figures that come out of the measuring of another one."""

NAMES: Final = tuple(name for name in KINDS if name not in TOGETHER)
"""What can be asked for by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How many, how often."""

    repeats: int = 7
    routes: int = 2_000
    """In a repeat, and as many echoes."""

    answers: tuple[tuple[int, int], ...] = ((8, 200), (136, 60))
    """Tokens of an answer, and how many of those in a repeat: what a request takes and what a frame takes come out of two lengths."""

    chats: int = 60
    worker_step_ms: float = 1.0
    """Of the fake worker: a frame a token, and no faster than it can send them."""


FULL: Final = Effort()
QUICK: Final = Effort(repeats=2, routes=24, answers=((4, 16), (12, 16)), chats=4)
"""Seconds instead of minutes: shows that the bench works, not how fast anything is."""


def figure_of(name: str) -> Figure:
    """What the figure is called and held to."""
    kind = KINDS[name]
    return Figure(name=name, title=kind.title, at=kind.at, unit=kind.unit, target=kind.target)


class Line(NamedTuple):
    """What a server takes for a request: so much, and so much again for each frame of its answer."""

    request_us: float
    frame_us: float


def line_through(short: tuple[float, float], long: tuple[float, float]) -> Line:
    """The line through two points of (frames, µs). Pure."""
    frame_us = (long[1] - short[1]) / (long[0] - short[0])
    return Line(short[1] - frame_us * short[0], frame_us)
