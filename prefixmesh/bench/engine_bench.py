"""Takes the figures of ``prefixmesh bench engine``, one after another, with the cache and without it in turns.

Everything goes through ``EngineCore`` in this process, as its own process drives it (step, frame, garbage between steps), so that
neither gRPC nor a socket is in a figure. Prompts are random ids, new ones in every repeat; nothing is measured twice of them.
"""

import dataclasses
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import msgspec
import numpy as np

from prefixmesh.bench.engine_drive import GREEDY, EngineDrive, Served, greedy
from prefixmesh.bench.engine_figures import (
    Ceiling,
    Report,
    Result,
    SavingsPoint,
    Setup,
    mean_ceiling,
)
from prefixmesh.bench.engine_plan import LOOP_SAMPLING, PARTS, SHARES_CACHED, Effort, figure_of, parts
from prefixmesh.errors import InternalError
from prefixmesh.worker.messages import EngineSampling
from prefixmesh.worker.prefill_savings import PrefillShape, prefill_savings

MS_PER_S: Final = 1_000.0

FIRST_ID: Final = 1_000
LAST_ID: Final = 40_000
"""Ids of prompts: plain words of the default model's vocabulary, where it is as large."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Engines:
    """The engine with its defaults, the same with caching off, and what is known of their model."""

    cached: EngineDrive
    uncached: EngineDrive
    step_bytes: int
    """Weights that one step must read: all layers and the output head."""

    threads: int
    versions: Mapping[str, str]
    settings: Mapping[str, Any]

    @property
    def shape(self) -> PrefillShape:
        """What a token of a prompt costs the model."""
        return self.cached.core.info.prefill_shape


def run_engine_bench(
    effort: Effort,
    engines: Engines,
    measure_ceiling: Callable[[], Ceiling],
    only: frozenset[str] = frozenset(),
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Measure every part that ``only`` names (empty for all but the savings); ``progress`` is told what comes next. Takes minutes."""
    bench = _EngineBench(effort, engines, measure_ceiling)
    for part in parts(only):
        progress(", ".join(figure_of(name, effort).title.strip() for name in PARTS[part]) or part)
        bench.take(part)
    return bench.report()


@dataclass(slots=True)
class _Taken:
    """The values of one figure so far."""

    values: list[float] = field(default_factory=list)
    values_cache_off: list[float] = field(default_factory=list)
    notes: dict[str, float] = field(default_factory=dict)


class _EngineBench:
    """The results so far. Each part leaves both engines empty."""

    def __init__(self, effort: Effort, engines: Engines, measure_ceiling: Callable[[], Ceiling]) -> None:
        self._effort = effort
        self._engines = engines
        self._measure_ceiling = measure_ceiling
        self._rng = np.random.default_rng(0)
        vocab_size = engines.cached.core.info.vocab_size
        self._ids = (FIRST_ID, LAST_ID) if vocab_size >= LAST_ID else (0, vocab_size)
        self._results: list[Result] = []
        self._savings: list[SavingsPoint] = []
        self._ceilings: list[Ceiling] = []

    def take(self, part: str) -> None:
        """Measure one part."""
        match part:
            case "first_token":
                self._take_first_token()
            case "decode":
                self._take_decode()
            case "burst":
                self._take_burst()
            case "loop":
                self._take_loop()
            case "in_flight":
                self._take_in_flight()
            case "savings":
                self._take_savings()

    def report(self) -> Report:
        """Everything taken."""
        engines, info = self._engines, self._engines.cached.core.info
        return Report(
            setup=Setup(
                model=info.model,
                dtype=info.dtype,
                threads=engines.threads,
                cores=len(os.sched_getaffinity(0)),
                versions={"python": platform.python_version(), **engines.versions},
                sizes=dataclasses.asdict(self._effort),
                settings=engines.settings,
            ),
            ceiling=mean_ceiling(self._ceilings),
            results=self._results,
            savings=self._savings,
        )

    def _take_first_token(self) -> None:
        effort, shape = self._effort, self._engines.shape
        cold, warm = _Taken(), _Taken()
        ceilings = _Ceilings(self._measure_ceiling)
        for turn in range(effort.first_token_repeats):
            prompt = self._prompt(effort.prompt_tokens)
            other = prompt[: effort.shared_tokens] + self._prompt(effort.prompt_tokens - effort.shared_tokens)
            for drive in self._in_turns(turn):
                drive.clear()
                first, second = drive.answer(prompt, GREEDY), drive.answer(other, GREEDY)
                self._values(cold, drive).append(first.first_token_s)
                self._values(warm, drive).append(second.first_token_s)
                if drive is self._engines.cached:
                    _check_cached([first, second], [0, effort.shared_tokens])
            ceilings.measure()
        whole, shared = shape.flops(effort.prompt_tokens), shape.flops(effort.shared_tokens)
        for name, taken, flops in (("cold", cold, whole), ("warm", warm, whole - shared)):
            speed = flops / statistics.median(taken.values)
            taken.notes["gflops_per_s"] = speed / 1e9
            self._add(name, taken, ceilings, speed / ceilings.mean().product_flops_per_s)

    def _take_decode(self) -> None:
        effort = self._effort
        taken, ceilings = _Taken(), _Ceilings(self._measure_ceiling)
        sampling = greedy(effort.decode_tokens)
        for turn in range(effort.decode_repeats):
            prompt = self._prompt(effort.decode_prompt_tokens)
            for drive in self._in_turns(turn):
                drive.clear()
                self._values(taken, drive).append(drive.answer(prompt, sampling).tokens_per_s)
            ceilings.measure()
        speed = statistics.median(taken.values) * self._engines.step_bytes
        taken.notes["gb_per_s"] = speed / 1e9
        self._add("decode", taken, ceilings, speed / ceilings.mean().read_bytes_per_s)

    def _take_burst(self) -> None:
        effort = self._effort
        taken, ceilings = _Taken(), _Ceilings(self._measure_ceiling)
        own = effort.prompt_tokens - effort.shared_tokens
        for turn in range(effort.burst_repeats):
            shared = self._prompt(effort.shared_tokens)
            prompts = [shared + self._prompt(own) for _ in range(effort.burst_requests)]
            for drive in self._in_turns(turn):
                if drive is self._engines.uncached and turn >= effort.burst_repeats_cache_off:
                    continue
                drive.clear()
                served = [drive.submit(prompt, greedy(effort.burst_tokens)) for prompt in prompts]
                self._values(taken, drive).append(drive.finish())
                _check_finished(served)
                if drive is self._engines.cached:
                    found = sum(one.cached_tokens for one in served)
                    taken.notes["cached_share"] = found / sum(map(len, prompts))
            ceilings.measure()
        self._add("burst", taken, ceilings)

    def _take_loop(self) -> None:
        effort = self._effort
        ceilings = _Ceilings(self._measure_ceiling)
        taken = {name: _Taken() for name in LOOP_SAMPLING}
        forwards: list[float] = []
        for _ in range(effort.loop_repeats):
            shared = self._prompt(effort.loop_prompt_tokens)
            for name, options in LOOP_SAMPLING.items():
                sampling = msgspec.structs.replace(
                    GREEDY, max_tokens=effort.loop_steps + effort.loop_batch, **options
                )
                costs = list(islice(self._decode_steps(shared, sampling), effort.loop_steps))
                taken[name].values.append(statistics.median(cost for cost, _ in costs))
                forwards += [forward for _, forward in costs]
                ceilings.measure()
        for name, one in taken.items():
            one.notes["forward_ms"] = statistics.median(forwards)
            self._add(name, one, ceilings)

    def _decode_steps(self, shared: list[int], sampling: EngineSampling) -> Iterator[tuple[float, float]]:
        """Loop and model, in ms, of each step in which the whole batch decodes; each request samples by a seed of its own."""
        drive, batch = self._engines.cached, self._effort.loop_batch
        drive.clear()
        drive.answer(shared, msgspec.structs.replace(sampling, max_tokens=1))
        served = [
            drive.submit(shared + self._prompt(1), msgspec.structs.replace(sampling, seed=seed))
            for seed in range(batch)
        ]
        while not all(one.generated for one in served):
            drive.step()
        while True:
            cost = drive.step()
            yield cost.loop_s * MS_PER_S, cost.forward_s * MS_PER_S

    def _take_in_flight(self) -> None:
        effort, drive = self._effort, self._engines.cached
        taken, ceilings = _Taken(), _Ceilings(self._measure_ceiling)
        drive.clear()
        sampling = greedy(effort.flight_tokens)
        served = [
            drive.submit(self._prompt(effort.flight_prompt_tokens), sampling)
            for _ in range(effort.flight_requests)
        ]
        taken.notes["accepted"] = sum(not one.ended for one in served)
        taken.notes["wall_s"] = drive.finish()
        taken.values.append(float(sum(one.ended == "length" for one in served)))
        ceilings.measure()
        self._add("in_flight", taken, ceilings)

    def _take_savings(self) -> None:
        effort, drive = self._effort, self._engines.cached
        size = effort.savings_prompt_tokens
        ceilings = _Ceilings(self._measure_ceiling)
        took: dict[int, list[float]] = {min(size - 1, round(size * share)): [] for share in SHARES_CACHED}
        for _ in range(effort.savings_repeats):
            for hit, values in took.items():
                prompt = self._prompt(size)
                drive.clear()
                if hit:
                    drive.answer(prompt[:hit], msgspec.structs.replace(GREEDY, max_tokens=0))
                served = drive.answer(prompt, GREEDY)
                _check_cached([served], [hit])
                values.append(served.first_token_s)
            ceilings.measure()
        for hit, values in took.items():
            saved = prefill_savings(size, hit, self._engines.shape)
            left = [1.0 - share for share in saved]
            self._savings.append(
                SavingsPoint(
                    prompt_tokens=size,
                    cached_tokens=hit,
                    values=values,
                    linear_left=left[0],
                    attention_left=left[1],
                    total_left=left[2],
                )
            )
        self._ceilings.append(ceilings.mean())
        drive.clear()

    def _add(self, name: str, taken: _Taken, ceilings: "_Ceilings", reached: float | None = None) -> None:
        ceiling = ceilings.mean()
        self._ceilings.append(ceiling)
        for drive in (self._engines.cached, self._engines.uncached):
            drive.clear()
        self._results.append(
            Result(
                figure=figure_of(name, self._effort),
                values=taken.values,
                values_cache_off=taken.values_cache_off,
                ceiling=ceiling,
                reached=reached,
                notes=taken.notes,
            )
        )

    def _prompt(self, size: int) -> list[int]:
        ids: list[int] = self._rng.integers(*self._ids, size=size).tolist()
        return ids

    def _in_turns(self, turn: int) -> tuple[EngineDrive, ...]:
        """Both engines; who was first is second in the next turn."""
        both = (self._engines.cached, self._engines.uncached)
        return both[::-1] if turn % 2 else both

    def _values(self, taken: _Taken, drive: EngineDrive) -> list[float]:
        return taken.values if drive is self._engines.cached else taken.values_cache_off


class _Ceilings:
    """What the machine could do before, between and after the repeats of one part."""

    def __init__(self, measure: Callable[[], Ceiling]) -> None:
        self._measure = measure
        self._measured = [measure()]

    def measure(self) -> None:
        """Measure again."""
        self._measured.append(self._measure())

    def mean(self) -> Ceiling:
        """Of all."""
        return mean_ceiling(self._measured)


def _check_cached(served: Sequence[Served], expected: Sequence[int]) -> None:
    """A figure of a cache that did not hit would be a figure of something else."""
    found = [one.cached_tokens for one in served]
    if any(got < least for got, least in zip(found, expected, strict=True)):
        raise InternalError(f"the bench found {found} tokens cached, not {list(expected)}")


def _check_finished(served: Sequence[Served]) -> None:
    ends = {one.ended for one in served}
    if ends != {"length"}:
        raise InternalError(f"requests of the bench ended as {sorted(ends)}")
