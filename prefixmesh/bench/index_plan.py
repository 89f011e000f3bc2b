"""Which figures the router's index and decision are held to, and at which sizes: the data of ``prefixmesh bench index``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from prefixmesh.bench.router_figures import Figure, Unit


class Kind(NamedTuple):
    """One name of a figure, at whatever size."""

    title: str
    unit: Unit = "us"
    target: float | None = None


KINDS: Final[Mapping[str, Kind]] = {
    "decide_4096": Kind("name, find and decide, 4,096 tokens", target=60.0),
    "decide_32768": Kind("name, find and decide, 32,768 tokens", target=250.0),
    "workers": Kind("  4,096 tokens, by workers"),
    "blocks": Kind("  4,096 tokens, by blocks"),
    "events": Kind("events taken in, 16 blocks each", "blocks/s", 800_000.0),
    "events_1": Kind("  of one block each", "blocks/s"),
    "events_full": Kind("  16 blocks each, index full", "blocks/s"),
    "token_bytes": Kind("memory a token held by somebody", "bytes", 6.0),
    "leave": Kind("a worker of 100,000 blocks leaves", "ms", 100.0),
    "longest_pause": Kind("longest pause in a mixed run", "ms", 10.0),
}
"""Every figure, in the order in which they are told."""

TOGETHER: Final[Mapping[str, str]] = {"events_1": "events", "events_full": "events"}
"""Figures that come out of the measuring of another one."""

NAMES: Final = tuple(name for name in KINDS if name not in TOGETHER)
"""What can be asked for by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How large, how many, how often."""

    workers: int = 64
    blocks: int = 1_000_000
    """Held by somebody, in the fleet that the targets are for."""

    by_workers: tuple[int, ...] = (4, 16, 64, 256, 1_024, 4_096)
    by_blocks: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000, 4_000_000)
    repeats: int = 7
    calls: int = 1_000
    """Decisions in a repeat; of the long prompts, a quarter of it."""

    event_blocks: int = 200_000
    """Taken in within a repeat."""

    leaver_blocks: int = 100_000
    leaves: int = 3
    pause_steps: int = 60_000


FULL: Final = Effort()
QUICK: Final = Effort(
    workers=8,
    blocks=2_000,
    by_workers=(4, 8),
    by_blocks=(1_000, 2_000),
    repeats=2,
    calls=20,
    event_blocks=640,
    leaver_blocks=1_000,
    leaves=2,
    pause_steps=400,
)
"""Seconds instead of minutes: shows that the bench works, not how fast anything is."""


class Task(NamedTuple):
    """One figure to take."""

    name: str
    workers: int
    blocks: int


def tasks(effort: Effort, only: frozenset[str] = frozenset()) -> list[Task]:
    """What is to be measured, in an order in which no fleet is needed twice. ``only`` names some of ``NAMES``; empty for all.

    What changes a fleet comes after what only asks it, and what builds its own comes last.
    """
    wanted = [name for name in NAMES if not only or name in only]
    alone = [
        Task(name, effort.workers, effort.blocks) for name in wanted if name not in ("workers", "blocks")
    ]
    by_workers = [Task("workers", count, effort.blocks) for count in effort.by_workers if "workers" in wanted]
    by_blocks = [Task("blocks", effort.workers, count) for count in effort.by_blocks if "blocks" in wanted]
    return alone + by_workers + by_blocks


def figure_of(name: str, workers: int, blocks: int) -> Figure:
    """What the figure is called and held to."""
    kind = KINDS[name]
    return Figure(
        name=name,
        title=kind.title,
        at=f"{workers:,} workers, {_short(blocks)} blocks",
        unit=kind.unit,
        target=kind.target,
        judged="longest" if name == "longest_pause" else "median",
    )


def _short(count: int) -> str:
    """Millions and thousands by their letters."""
    for unit, letter in ((1_000_000, "M"), (1_000, "k")):
        if count >= unit and not count % unit:
            return f"{count // unit}{letter}"
    return f"{count:,}"
