"""Takes the figures of ``prefixmesh bench index``, one after another, the yardstick between the repeats of each."""

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter_ns, thread_time_ns
from typing import Final

from prefixmesh.bench.index_asking import Asking
from prefixmesh.bench.index_fleet import BenchFleet, News, cycle_prompts, take_in
from prefixmesh.bench.index_memory import index_bytes_per_token
from prefixmesh.bench.index_pauses import run_mixed
from prefixmesh.bench.index_plan import KINDS, Effort, Task, figure_of, tasks
from prefixmesh.bench.result import Result
from prefixmesh.bench.router_figures import Figure, Report
from prefixmesh.bench.timing import Sample, combine, time_calls
from prefixmesh.bench.yardstick import mean_yardstick, measure_yardstick
from prefixmesh.tokens import count

SHORT_TOKENS: Final = 4_096
LONG_TOKENS: Final = 32_768
SHORT_PROMPTS: Final = 64
LONG_PROMPTS: Final = 16
"""Different prompts that are asked for in turns: a quarter of a million tokens, more than a core's nearest caches hold the names of."""

LONG_CALLS_SHARE: Final = 4
"""Of long prompts, a fourth of the calls."""

FULL_INDEX_SHARE: Final = 0.5
"""For events of a full index: the bound is half of what comes."""


def run_index_bench(
    effort: Effort, only: frozenset[str] = frozenset(), progress: Callable[[str], None] = lambda _: None
) -> Report:
    """Measure everything that ``only`` names (empty for all); ``progress`` is told what comes next. Takes a few minutes."""
    bench = _IndexBench(effort)
    for task in tasks(effort, only):
        figure = figure_of(task.name, task.workers, task.blocks)
        progress(f"{figure.title.strip()} · {figure.at}")
        bench.take(task)
    order = list(KINDS)
    return Report(results=sorted(bench.results, key=lambda one: order.index(one.figure.name)))


class _IndexBench:
    """The results so far, and the fleet in use: one at a time, the greatest takes half a GB."""

    def __init__(self, effort: Effort) -> None:
        self.results: list[Result[Figure]] = []
        self._effort = effort
        self._asking: Asking | None = None

    def take(self, task: Task) -> None:
        """Measure one figure, and those that come with it."""
        match task.name:
            case "decide_4096" | "workers" | "blocks":
                self._take_decisions(task, SHORT_TOKENS, SHORT_PROMPTS, self._effort.calls)
            case "decide_32768":
                self._take_decisions(
                    task, LONG_TOKENS, LONG_PROMPTS, max(1, self._effort.calls // LONG_CALLS_SHARE)
                )
            case "events":
                self._take_events(task)
            case "token_bytes":
                per_token = index_bytes_per_token(task.workers, task.blocks)
                self._add(task, iter([Sample(per_token, None, None, task.blocks)]))
            case "leave":
                self._take_leaves(task)
            case "longest_pause":
                self._take_pauses(task)

    def _asking_for(self, task: Task) -> Asking:
        asking = self._asking
        if asking is None or (asking.fleet.workers, asking.fleet.blocks) != (task.workers, task.blocks):
            self._asking = None
            gc.collect()
            asking = self._asking = Asking(BenchFleet(task.workers, task.blocks))
        return asking

    def _add(self, task: Task, samples: Iterator[Sample], notes: Mapping[str, float] | None = None) -> None:
        yardsticks, taken = [measure_yardstick()], []
        for sample in samples:
            taken.append(sample)
            yardsticks.append(measure_yardstick())
        self.results.append(
            Result(
                figure=figure_of(task.name, task.workers, task.blocks),
                measurement=combine(taken),
                yardstick=mean_yardstick(yardsticks),
                notes={} if notes is None else notes,
            )
        )

    def _take_decisions(self, task: Task, tokens: int, different: int, calls: int) -> None:
        asking = self._asking_for(task)
        prompts = asking.fleet.prompts(tokens, different)
        parts: dict[str, list[float]] = {name: [] for name in ("name", "find", "decide")}

        def samples() -> Iterator[Sample]:
            for _ in range(self._effort.repeats):
                yield time_calls((asking.ask, (prompt,)) for prompt in cycle_prompts(prompts, calls))
                for name, median in _parts(asking, prompts).items():
                    parts[name].append(median)
            notes.update({f"{name}_us": statistics.median(taken) for name, taken in parts.items()})

        notes: dict[str, float] = {}
        self._add(task, samples(), notes)

    def _take_events(self, task: Task) -> None:
        self._add(task, self._event_samples(self._asking_for(task).fleet, 16))
        self._add(task._replace(name="events_1"), self._event_samples(self._asking_for(task).fleet, 1))
        self._asking = None
        gc.collect()
        bound = max(1, round(FULL_INDEX_SHARE * task.blocks))
        full = BenchFleet(task.workers, task.blocks, max_blocks=bound)
        self._add(task._replace(name="events_full"), self._event_samples(full, 16))

    def _event_samples(self, fleet: BenchFleet, run_blocks: int) -> Iterator[Sample]:
        news = News(fleet, run_blocks)
        for _ in range(self._effort.repeats):
            events = news.batch(self._effort.event_blocks)
            started = thread_time_ns()
            blocks = take_in(events)
            yield Sample(blocks * 1e9 / (thread_time_ns() - started), None, None, blocks)

    def _take_leaves(self, task: Task) -> None:
        fleet = self._asking_for(task).fleet
        notes: dict[str, float] = {}

        def samples() -> Iterator[Sample]:
            swept, longest = [], 0.0
            for _ in range(self._effort.leaves):
                view = fleet.add_worker()
                holder = len(fleet.views)
                fleet.views.append(view)
                for _ in range(max(1, self._effort.leaver_blocks // 32)):
                    fleet.hold(holder, fleet.names(32))
                fleet.views.pop()
                left = time_calls([(view.close, ())])
                took, longest_sweep = _sweep_all(fleet)
                swept.append(took)
                longest = max(longest, longest_sweep)
                yield Sample(left.median / 1e3, None, (left.longest or 0.0) / 1e3, 1)
            notes.update(swept_away_ms=statistics.median(swept), longest_sweep_ms=longest)

        self._add(task, samples(), notes)

    def _take_pauses(self, task: Task) -> None:
        asking = self._asking_for(task)
        prompts = asking.fleet.prompts(SHORT_TOKENS, SHORT_PROMPTS)
        notes: dict[str, float] = {}

        def samples() -> Iterator[Sample]:
            meter = run_mixed(
                asking.fleet, asking.ask, prompts, self._effort.pause_steps, self._effort.leaver_blocks
            )
            notes.update(meter.notes())
            yield meter.sample()

        self._add(task, samples(), notes)


def _parts(asking: Asking, prompts: list[bytes]) -> dict[str, float]:
    """Medians in µs of what a decision is made of."""
    named = [asking.name(prompt) for prompt in prompts]
    found = [asking.find(names) for names in named]
    return {
        "name": time_calls((asking.name, (prompt,)) for prompt in prompts).median,
        "find": time_calls((asking.find, (names,)) for names in named).median,
        "decide": time_calls((asking.decide, (matches, count(prompts[0]))) for matches in found).median,
    }


def _sweep_all(fleet: BenchFleet) -> tuple[float, float]:
    """Sweep until there is nothing to do: milliseconds in all, and of the longest go."""
    total = longest = 0
    is_done = False
    while not is_done:
        started = perf_counter_ns()
        is_done = fleet.index.sweep()
        took = perf_counter_ns() - started
        total += took
        longest = max(longest, took)
    return total / 1e6, longest / 1e6
