"""Timing of single calls, with the garbage collector on.

Each call is timed by itself, so that a median, a p99 and the longest are those of calls and not of averages; what the clock
takes (80 ns a reading) is measured and taken off. Below 2 µs that no longer resolves, and small batches are timed instead:
their p99 and longest are those of batches.

A figure is measured in several repeats, and between them the yardstick. What stands is the median of the repeats' medians, the
median of their p99s, and the longest of all.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from time import perf_counter_ns
from typing import Final, NamedTuple

Call = tuple[Callable[..., object], tuple[object, ...]]
"""A function and its arguments."""

BATCH: Final = 32
"""Calls timed together where one takes less than 2 µs: the clock is then below 1 % of it."""

_CLOCK_READINGS: Final = 2_000


class Sample(NamedTuple):
    """One repeat: what its calls took, in the figure's unit."""

    median: float
    p99: float | None
    """None where single calls are not told apart."""

    longest: float | None
    calls: int


class Measurement(NamedTuple):
    """All repeats of one figure."""

    median: float
    p99: float | None
    longest: float | None
    calls: int
    """Of one repeat."""

    repeats: int


def combine(samples: Sequence[Sample]) -> Measurement:
    """Median of medians, median of p99s, longest of all."""
    p99 = [sample.p99 for sample in samples if sample.p99 is not None]
    longest = [sample.longest for sample in samples if sample.longest is not None]
    return Measurement(
        statistics.median(sample.median for sample in samples),
        statistics.median(p99) if p99 else None,
        max(longest) if longest else None,
        samples[0].calls,
        len(samples),
    )


def clock_cost_ns(clock: Callable[[], int] = perf_counter_ns) -> float:
    """What stands between two readings of the clock with nothing between them: median of many."""
    readings = []
    for _ in repeat(None, _CLOCK_READINGS):
        started = clock()
        readings.append(clock() - started)
    return statistics.median(readings)


def time_calls(calls: Iterable[Call], finish: Callable[[object], object] | None = None) -> Sample:
    """Time each call by itself, in µs. ``calls`` may prepare each one as it is asked for it, and ``finish`` gets what each
    returned: neither is timed."""
    clock = clock_cost_ns()
    took: list[int] = []
    for function, arguments in calls:
        started = perf_counter_ns()
        result = function(*arguments)
        took.append(perf_counter_ns() - started)
        if finish is not None:
            finish(result)
    return summarise(took, clock)


def time_batches(function: Callable[[], object], batches: int, calls_per_batch: int = BATCH) -> Sample:
    """Time ``batches`` calls of ``function``, each of which does the operation ``calls_per_batch`` times; in µs for one."""
    clock = clock_cost_ns()
    took: list[int] = []
    for _ in repeat(None, batches):
        started = perf_counter_ns()
        function()
        took.append(perf_counter_ns() - started)
    return summarise(took, clock, calls_per_batch)


def summarise(took_ns: Sequence[int], clock_ns: float, calls_per_reading: int = 1) -> Sample:
    """A sample in µs from readings in ns. Pure."""
    ordered = sorted(took_ns)

    def per_call(reading: float) -> float:
        return (reading - clock_ns) / calls_per_reading / 1000.0

    return Sample(
        per_call(statistics.median(ordered)),
        per_call(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]),
        per_call(ordered[-1]),
        len(ordered) * calls_per_reading,
    )
