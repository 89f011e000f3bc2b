"""Which figures the cache is held to, at which sizes, and what is known of others: the data of ``prefixmesh bench cache``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from prefixmesh.bench.figures import Baseline, Figure, SizeOf, Unit
from prefixmesh.bench.replay import POOL_TOKENS

PAGE_SIZES: Final = (1, 16)


class Kind(NamedTuple):
    """One name of a figure, at whatever page size and size of tree."""

    title: str
    unit: Unit = "us"
    target: float | None = None
    every_size: bool = False
    """Taken at all three sizes of tree, because it must not depend on it, or because others' figures are known there."""

    judged_at: int | None = 1
    """Which of the three sizes the target is for; None for each."""

    size_of: SizeOf = "leaves"

    judged_page: int | None = None
    """Which page size the target is for; None for each."""


KINDS: Final[Mapping[str, Kind]] = {
    "match_4096": Kind("match 4,096 tokens", target=6.0, every_size=True),
    "match_depth_20": Kind("match over 20 nodes of depth", target=15.0),
    "insert_64": Kind("insert 64 new behind 4,032", target=9.0, every_size=True),
    "insert_1024": Kind("insert 1,024 new, with fingerprints", target=25.0),
    "lock_release": Kind("lock and release at depth 3", target=1.5),
    "evict_leaf": Kind("evict one 64-token leaf", target=8.0, every_size=True, judged_at=None),
    "evict_ratio": Kind("  slowest over fastest of these", "x", 2.0, judged_at=None),
    "node_bytes": Kind("bytes a node, arrays left out", "bytes", 700.0),
    "token_bytes": Kind("  bytes a token, arrays and all", "bytes"),
    "turns": Kind(
        "conversation turns per CPU second", "turns/s", 30_000.0, size_of="pool tokens", judged_page=16
    ),
    "turns_long": Kind("  long ones, each inserted twice", "turns/s", size_of="pool tokens"),
    "longest_pause": Kind("longest pause in a mixed run", "ms", 10.0, judged_at=2),
    "longest_pause_default_gc": Kind("  with Python's own gc thresholds", "ms", judged_at=2),
}
"""Every figure, in the order in which they are told."""

TOGETHER: Final[Mapping[str, str]] = {
    "evict_ratio": "evict_leaf",
    "token_bytes": "node_bytes",
    "turns_long": "turns",
    "longest_pause_default_gc": "longest_pause",
}
"""Figures that come out of the measuring of another one."""

NAMES: Final = tuple(name for name in KINDS if name not in TOGETHER)
"""What can be asked for by name."""

_TAKEN_FIRST: Final = ("evict_leaf",)
_TAKEN_LAST: Final = ("longest_pause", "node_bytes", "turns")
"""Within one tree. Evictions are taken while nothing but small leaves is there, the mixed run changes the tree, and bytes and
turns are counted on trees of their own."""

_BASELINES: Final[Mapping[tuple[str, int], Baseline]] = {
    ("match_4096", 1_000): Baseline(8.5, 20.0),
    ("match_4096", 10_000): Baseline(9.2, 22.0),
    ("match_4096", 100_000): Baseline(11.0, 27.0),
    ("insert_64", 1_000): Baseline(18.0, 25.0),
    ("insert_64", 10_000): Baseline(21.0, 29.0),
    ("insert_64", 100_000): Baseline(22.0, 29.0),
    ("evict_leaf", 1_000): Baseline(25.0, 214.0),
    ("evict_leaf", 10_000): Baseline(84.0, 2_085.0),
    ("evict_leaf", 100_000): Baseline(1_619.0, 48_247.0),
    ("match_depth_20", 10_000): Baseline(19.0, 130.0),
    ("turns", POOL_TOKENS): Baseline(12_837.0, 3_496.0),
    ("token_bytes", 10_000): Baseline(26.0, 26.0),
}
"""At page size 1, by figure and size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How large, how many, how often."""

    sizes: tuple[int, int, int] = (1_000, 10_000, 100_000)
    """Leaves of the trees. Most figures are taken at the second, the longest pause at the third."""

    spare_tokens: int = 1_000_000
    """Room in a tree's pool for what is inserted."""

    repeats: int = 7
    calls: int = 400
    """Of one operation in a repeat. Of inserts, which make the tree grow, a quarter of it."""

    lock_calls: int = 6_400
    pause_requests: int = 46_000
    """More than 200,000 calls."""

    pool_tokens: int = POOL_TOKENS
    open_conversations: int = 600
    turns: int = 3_000
    """In a repeat."""

    def calls_of(self, name: str) -> int:
        """Calls of one operation in a repeat."""
        if name == "lock_release":
            return self.lock_calls
        return self.calls // 4 if name.startswith("insert") else self.calls


FULL: Final = Effort()
QUICK: Final = Effort(
    sizes=(100, 200, 400),
    spare_tokens=120_000,
    repeats=2,
    calls=40,
    lock_calls=320,
    pause_requests=400,
    pool_tokens=60_000,
    open_conversations=36,
    turns=240,
)
"""Seconds instead of minutes: shows that the bench works, not how fast anything is."""


class Task(NamedTuple):
    """One figure to take."""

    name: str
    page_size: int
    size: int


def tasks(effort: Effort, only: frozenset[str] = frozenset()) -> list[Task]:
    """What is to be measured, in an order in which no tree is needed twice. ``only`` names some of ``NAMES``; empty for all."""
    wanted = [name for name in NAMES if not only or name in only]
    order = sorted(wanted, key=lambda name: (name not in _TAKEN_FIRST, name in _TAKEN_LAST))
    on_trees = [
        Task(name, page_size, size)
        for page_size in PAGE_SIZES
        for place, size in enumerate(effort.sizes)
        for name in order
        if KINDS[name].size_of == "leaves" and (KINDS[name].every_size or KINDS[name].judged_at == place)
    ]
    replays = [Task(name, page_size, effort.pool_tokens) for name in order for page_size in PAGE_SIZES]
    return on_trees + [task for task in replays if KINDS[task.name].size_of == "pool tokens"]


def figure_of(task: Task, effort: Effort) -> Figure:
    """What the figure is called and held to."""
    name, page_size, size = task
    kind = KINDS[name]
    at_size = kind.size_of != "leaves" or kind.judged_at is None or effort.sizes[kind.judged_at] == size
    judged = at_size and kind.judged_page in (None, page_size)
    return Figure(
        name=name,
        title=kind.title,
        page_size=page_size,
        size=size,
        size_of=kind.size_of,
        unit=kind.unit,
        target=kind.target if judged else None,
        judged="longest" if kind.unit == "ms" else "median",
        baseline=_BASELINES.get((name, size)) if page_size == 1 or kind.judged_page else None,
    )
