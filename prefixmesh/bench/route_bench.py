"""Takes the figures of ``prefixmesh bench route``: a router beside an echo and beside a proxy that does nothing, in the same run.

Both servers of a pair are up all the time and are asked in turns, a repeat each, so that whatever else the machine does hits both. What a
pair differs by is the router's. Processes: this one, which asks; the two servers; a fake worker.
"""

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Final, Self

from prefixmesh.bench.result import Result
from prefixmesh.bench.route_drive import generate_cost, route_cost
from prefixmesh.bench.route_plan import NAMES, Effort, Line, figure_of, line_through
from prefixmesh.bench.route_process import (
    Measured,
    fake_worker,
    measured_echo,
    measured_proxy,
    measured_router,
)
from prefixmesh.bench.route_prompts import (
    chat_messages,
    chats,
    generate_messages,
    packed_prompts,
    route_messages,
)
from prefixmesh.bench.router_figures import Figure, Report
from prefixmesh.bench.timing import Sample, combine, time_calls
from prefixmesh.bench.yardstick import mean_yardstick, measure_yardstick
from prefixmesh.config import DEFAULT_MODEL
from prefixmesh.ids import Namespace
from prefixmesh.model_files.source import resolve_model
from prefixmesh.text.chat_template import load_chat_template
from prefixmesh.text.prompts import PromptBuilder
from prefixmesh.text.tokenizer import load_tokenizer
from prefixmesh.tokens import count

WORKERS: Final = 2
"""A decision has a choice; how it grows with more of them ``bench index`` tells."""

GENERATE_TOKENS: Final = 4_096
CONTEXT_TOKENS: Final = 8_192
NAMESPACE: Final = Namespace(b"bench of routers")


def run_route_bench(
    effort: Effort, only: frozenset[str] = frozenset(), progress: Callable[[str], None] = lambda _: None
) -> Report:
    """Measure everything that ``only`` names (empty for all); ``progress`` is told what comes next. Takes a few minutes."""
    with _Stage(effort) as stage:
        bench = _RouteBench(effort, stage)
        for name in NAMES:
            if not only or name in only:
                figure = figure_of(name)
                progress(f"{figure.title.strip()} · {figure.at}")
                bench.take(name)
        return Report(results=bench.results)


class _Stage:
    """The servers, each started when it is first asked for, all gone at the end."""

    def __init__(self, effort: Effort) -> None:
        self._effort = effort
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @cached_property
    def workers(self) -> tuple[str, ...]:
        """Addresses of fake workers."""
        secret, step_ms = self._folder / "secret", self._effort.worker_step_ms
        started = (fake_worker(f"w{n}", secret, DEFAULT_MODEL, step_ms) for n in range(WORKERS))
        return tuple(self._stack.enter_context(one) for one in started)

    @cached_property
    def router(self) -> Measured:
        """Before all workers."""
        workers = self.workers
        return self._stack.enter_context(measured_router(workers, self._folder / "secret", DEFAULT_MODEL))

    @cached_property
    def proxy(self) -> Measured:
        """Before all workers, as the router is: frames of one step of a worker come together."""
        return self._stack.enter_context(measured_proxy(self.workers))

    @cached_property
    def echo(self) -> Measured:
        """Before nobody."""
        return self._stack.enter_context(measured_echo())


class _RouteBench:
    """The results so far."""

    def __init__(self, effort: Effort, stage: _Stage) -> None:
        self.results: list[Result[Figure]] = []
        self._effort = effort
        self._stage = stage

    def take(self, name: str) -> None:
        """Measure one figure, and those that come with it."""
        match name:
            case "route_100" | "route_4096":
                tokens = int(name.removeprefix("route_"))
                self._take_routes(name, route_messages(packed_prompts(tokens)), self._effort.routes)
            case "route_chat":
                self._take_routes(name, chat_messages(chats()), max(8, self._effort.routes // 4))
            case "generate":
                self._take_answers()
            case "build_chat":
                self._take_chats()

    def _add(self, name: str, samples: Iterator[Sample], notes: dict[str, float] | None = None) -> None:
        yardsticks, taken = [measure_yardstick()], []
        for sample in samples:
            taken.append(sample)
            yardsticks.append(measure_yardstick())
        self.results.append(
            Result(
                figure=figure_of(name),
                measurement=combine(taken),
                yardstick=mean_yardstick(yardsticks),
                notes=notes or {},
            )
        )

    def _take_routes(self, name: str, messages: Iterator[bytes], requests: int) -> None:
        stage, echoes, routes = self._stage, [], []
        for _ in range(self._effort.repeats):
            echoes.append(asyncio.run(route_cost(stage.echo, messages, requests)).cpu_us)
            routes.append(asyncio.run(route_cost(stage.router, messages, requests)).cpu_us)
        notes = {"echo_us": statistics.median(echoes), "route_us": statistics.median(routes)}
        more = [route - echo for echo, route in zip(echoes, routes, strict=True)]
        self._add(name, (Sample(one, None, None, requests) for one in more), notes)

    def _take_answers(self) -> None:
        proxied, routed = [], []
        for _ in range(self._effort.repeats):
            proxied.append(self._line(self._stage.proxy))
            routed.append(self._line(self._stage.router))
        requests = sum(requests for _, requests in self._effort.answers)
        for name, of_line in (
            ("generate", lambda line: line.request_us),
            ("generate_frame", lambda line: line.frame_us),
        ):
            ours, theirs = list(map(of_line, routed)), list(map(of_line, proxied))
            notes = {"proxy_us": statistics.median(theirs), "router_us": statistics.median(ours)}
            more = [one - other for one, other in zip(ours, theirs, strict=True)]
            self._add(name, (Sample(one, None, None, requests) for one in more), notes)

    def _line(self, server: Measured) -> Line:
        """What a server takes, from answers of two lengths."""
        costs = []
        for max_tokens, requests in self._effort.answers:
            messages = generate_messages(packed_prompts(GENERATE_TOKENS), max_tokens)
            costs.append(asyncio.run(generate_cost(server, messages, requests)))
        short, long = costs
        return line_through((short.frames, short.cpu_us), (long.frames, long.cpu_us))

    def _take_chats(self) -> None:
        files = resolve_model(DEFAULT_MODEL)
        tokenizer, template = load_tokenizer(files), load_chat_template(files)

        def builder() -> PromptBuilder:
            return PromptBuilder(tokenizer, template, None, context_length=CONTEXT_TOKENS)

        def known() -> Iterator[Sample]:
            for _ in range(self._effort.repeats):
                asked, building = chats(), builder()
                building.build(next(asked), NAMESPACE)
                prompts = list(islice(asked, self._effort.chats))
                yield _in_ms(time_calls((building.build, (prompt, NAMESPACE)) for prompt in prompts))

        def new() -> Iterator[Sample]:
            for _ in range(self._effort.repeats):
                prompts = list(islice(chats(), max(1, self._effort.chats // 10)))
                yield _in_ms(time_calls((builder().build, (prompt, NAMESPACE)) for prompt in prompts))

        tokens = count(builder().build(next(chats()), NAMESPACE).tokens)
        self._add("build_chat", known(), {"tokens": tokens})
        self._add("build_chat_new", new())


def _in_ms(sample: Sample) -> Sample:
    longest, p99 = sample.longest or 0.0, sample.p99 or 0.0
    return Sample(sample.median / 1e3, p99 / 1e3, longest / 1e3, sample.calls)
