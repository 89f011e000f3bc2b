"""Takes the figures of ``prefixmesh bench cache``, one after another, the yardstick between the repeats of each."""

import gc
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from prefixmesh.bench import operations
from prefixmesh.bench.cache_plan import KINDS, Effort, Task, figure_of, tasks
from prefixmesh.bench.conversations import CHATS, LONG, Talk
from prefixmesh.bench.figures import Figure, Report, ratio_of
from prefixmesh.bench.memory import measure_memory
from prefixmesh.bench.pauses import run_mixed
from prefixmesh.bench.replay import Replay, replay_turns
from prefixmesh.bench.result import Result
from prefixmesh.bench.timing import Sample, combine
from prefixmesh.bench.trees import Grove
from prefixmesh.bench.yardstick import mean_yardstick, measure_yardstick
from prefixmesh.collector import StepCollector

Thresholds = tuple[int, int, int]
Operation = Callable[[Grove, int, int], Iterator[Sample]]
"""``(tree, repeats, calls in each)``."""

_OPERATIONS: Final[Mapping[str, Operation]] = {
    "match_4096": operations.match_prompt,
    "match_depth_20": operations.match_deep,
    "insert_64": operations.insert_behind,
    "insert_1024": operations.insert_new,
    "lock_release": operations.lock_and_release,
    "evict_leaf": operations.evict_leaf,
}


def run_cache_bench(
    effort: Effort, only: frozenset[str] = frozenset(), progress: Callable[[str], None] = lambda _: None
) -> Report:
    """Measure everything that ``only`` names (empty for all); ``progress`` is told what comes next. Takes minutes.

    While it runs, the process's garbage collector is set as an engine sets it.
    """
    with _collecting_as_an_engine() as (collector, default_thresholds):
        bench = _CacheBench(effort, collector, default_thresholds)
        for task in tasks(effort, only):
            figure = figure_of(task, effort)
            progress(f"{figure.title} · page {task.page_size} · {task.size:,} {figure.size_of}")
            bench.take(task)
        return bench.report()


class _CacheBench:
    """The results so far, and the tree in use: one at a time, the greatest take some hundred MB."""

    def __init__(self, effort: Effort, collector: StepCollector, default_thresholds: Thresholds) -> None:
        self._effort = effort
        self._collector = collector
        self._default_thresholds = default_thresholds
        self._grove: Grove | None = None
        self._results: list[Result[Figure]] = []

    def take(self, task: Task) -> None:
        """Measure one figure, and those that come with it."""
        match task.name:
            case "longest_pause":
                self._take_pauses(task)
            case "node_bytes":
                self._take_memory(task)
            case "turns":
                self._take_turns(task)
            case _:
                effort = self._effort
                run = _OPERATIONS[task.name]
                self._add(task, run(self._grove_for(task), effort.repeats, effort.calls_of(task.name)))

    def report(self) -> Report:
        """Everything taken, in the order in which it is told."""
        for page_size in {result.figure.page_size for result in self._results}:
            self._add_ratio(page_size)
        order = list(KINDS)
        self._results.sort(
            key=lambda result: (
                order.index(result.figure.name),
                result.figure.page_size,
                result.figure.size,
            )
        )
        yardstick = mean_yardstick([result.yardstick for result in self._results])
        return Report(
            python=platform.python_version(),
            cores=len(os.sched_getaffinity(0)),
            yardstick=yardstick,
            results=self._results,
        )

    def _grove_for(self, task: Task) -> Grove:
        grove = self._grove
        if grove is None or (grove.page_size, grove.leaves) != (task.page_size, task.size):
            self._drop_grove()
            grove = self._grove = Grove(task.page_size, task.size, self._effort.spare_tokens).plant_all()
        return grove

    def _drop_grove(self) -> None:
        """A whole tree that nobody needs is a ring of parents and children, which only a full collection finds."""
        self._grove = None
        gc.collect()

    def _add(
        self, task: Task, samples: Iterator[Sample], notes: Mapping[str, float] | None = None
    ) -> Result[Figure]:
        yardsticks = [measure_yardstick()]
        taken = []
        for sample in samples:
            taken.append(sample)
            self._collector.after_step()
            yardsticks.append(measure_yardstick())
        result = Result(
            figure=figure_of(task, self._effort),
            measurement=combine(taken),
            yardstick=mean_yardstick(yardsticks),
            notes=notes or {},
        )
        self._results.append(result)
        return result

    def _take_pauses(self, task: Task) -> None:
        self._take_pause(task, self._collector.after_step)
        with _thresholds(self._default_thresholds):
            self._take_pause(task._replace(name="longest_pause_default_gc"), lambda: None)

    def _take_pause(self, task: Task, after_step: Callable[[], None]) -> None:
        grove = self._grove_for(task)
        notes: dict[str, float] = {}

        def samples() -> Iterator[Sample]:
            meter = run_mixed(grove, self._effort.pause_requests, after_step)
            notes.update(meter.notes())
            yield meter.sample()

        self._add(task, samples(), notes)

    def _take_memory(self, task: Task) -> None:
        self._drop_grove()
        memory = measure_memory(task.page_size, task.size)
        notes = {"nodes": memory.nodes, "tokens": memory.tokens}
        counted = Sample(memory.bytes_per_node, None, None, memory.nodes)
        self._add(task, iter([counted]), notes)
        in_all = Sample(memory.bytes_per_token, None, None, memory.nodes)
        self._add(task._replace(name="token_bytes"), iter([in_all]))

    def _take_turns(self, task: Task) -> None:
        self._take_replay(task, CHATS, prompts_first=False)
        self._take_replay(task._replace(name="turns_long"), LONG, prompts_first=True)

    def _take_replay(self, task: Task, talk: Talk, *, prompts_first: bool) -> None:
        self._drop_grove()
        effort = self._effort
        replay = Replay(
            task.page_size,
            effort.pool_tokens,
            effort.open_conversations,
            self._collector.after_step,
            talk=talk,
            prompts_first=prompts_first,
        )
        notes: dict[str, float] = {}

        def samples() -> Iterator[Sample]:
            yield from replay_turns(replay, effort.repeats, effort.turns)
            notes.update(hit_rate=replay.hit_rate, evicted_tokens_per_turn=replay.evicted_tokens_per_turn)

        self._add(task, samples(), notes)

    def _add_ratio(self, page_size: int) -> None:
        same = [
            result
            for result in self._results
            if (result.figure.name, result.figure.page_size) == ("evict_leaf", page_size)
        ]
        if same:
            task = Task("evict_ratio", page_size, max(result.figure.size for result in same))
            self._results.append(ratio_of(figure_of(task, self._effort), same))


@contextmanager
def _collecting_as_an_engine() -> Iterator[tuple[StepCollector, Thresholds]]:
    """Inside, garbage is collected as an engine has it done; also gives the thresholds that were set before."""
    before = gc.get_threshold()
    try:
        yield StepCollector(), before
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextmanager
def _thresholds(thresholds: Thresholds) -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*thresholds)
    try:
        yield
    finally:
        gc.set_threshold(*before)
