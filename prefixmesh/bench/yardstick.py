"""What this machine takes for two things that any implementation is made of, so that its figures can be held to a target that
was set on another.

One is memory (comparing tokens), one is the interpreter (calling a method). The scale is the geometric mean of both ratios. It
is measured around everything that is timed, because machines drift: another process, a warmer core, a busier neighbour. As
with ``timeit``, the loop around the call is in the figure (8 ns of it).
"""

import math
import statistics
from collections.abc import Sequence
from itertools import repeat
from time import perf_counter_ns
from typing import Final, NamedTuple

COMPARE_REFERENCE_NS: Final = 220.0
"""Comparing two equal 12 KiB ``bytes`` objects on the machine of the targets."""

CALL_REFERENCE_NS: Final = 26.0
"""An empty method call on the machine of the targets."""

_COMPARED_BYTES: Final = 12 * 1024
_LOOPS: Final = 250
"""Calls in one reading: 50 µs, long against the clock and short against what interrupts."""

_READINGS: Final = 48
"""Readings of which the median counts; with both measures about 3 ms."""

_PAIRS: Final = 8
"""Pairs of objects that are compared in turn: how two of them are aligned to each other makes a third of the time, and one
pair would have the scale depend on where it happened to be put."""


class Yardstick(NamedTuple):
    """What the machine took, in ns."""

    compare_ns: float
    call_ns: float

    @property
    def scale(self) -> float:
        """How much slower than the machine of the targets: 2.0 takes twice as long."""
        return math.sqrt((self.compare_ns / COMPARE_REFERENCE_NS) * (self.call_ns / CALL_REFERENCE_NS))


class _Empty:
    def method(self) -> None: ...


def measure_yardstick() -> Yardstick:
    """Measure now; some 3 ms."""
    pairs = _equal_pairs()
    called = _Empty()
    compare, call = [], []
    for reading in range(_READINGS):
        first, second = pairs[reading % _PAIRS]
        started = perf_counter_ns()
        for _ in repeat(None, _LOOPS):
            first == second  # noqa: B015
        compared = perf_counter_ns()
        for _ in repeat(None, _LOOPS):
            called.method()
        done = perf_counter_ns()
        compare.append(compared - started)
        call.append(done - compared)
    return Yardstick(statistics.median(compare) / _LOOPS, statistics.median(call) / _LOOPS)


def _equal_pairs() -> list[tuple[bytes, bytes]]:
    """Equal and not the same object: comparing an object with itself reads nothing."""
    content = bytes(range(256)) * (_COMPARED_BYTES // 256)
    return [(bytes(bytearray(content)), bytes(bytearray(content))) for _ in range(_PAIRS)]


def mean_yardstick(measured: Sequence[Yardstick]) -> Yardstick:
    """Of those taken before, between and after."""
    return Yardstick(
        statistics.fmean(one.compare_ns for one in measured),
        statistics.fmean(one.call_ns for one in measured),
    )
