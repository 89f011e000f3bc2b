"""What this machine can do at most of what an engine's time goes into, measured beside its figures.

Three measures. *Products*: one bfloat16 product of the size that SmolLM2-135M's widest layer has in a 1,500-token prompt. *Reads*: the
sum of as many bytes as that model's weights have in bfloat16, which no cache holds. *Python*: the cache bench's yardstick. The
first two on all of torch's threads. Medians, not bests: a figure is a median of what was possible at the time, too.
"""

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Final

import torch

from prefixmesh.bench.engine_figures import Ceiling
from prefixmesh.bench.yardstick import measure_yardstick

ROWS: Final = 1_500
INNER: Final = 576
COLUMNS: Final = 3_072

READ_BYTES: Final = 269_000_000
"""134.5 million weights in bfloat16: the layers and the output head of SmolLM2-135M."""

PRODUCTS: Final = 15
READS: Final = 5


class CeilingMeter:
    """The operands, made once: some 300 MB."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        rng = torch.Generator().manual_seed(0)
        self._rows = torch.randn((ROWS, INNER), generator=rng).bfloat16()
        self._weight = torch.randn((COLUMNS, INNER), generator=rng).bfloat16()
        self._memory = torch.ones(READ_BYTES // 4)
        self.measure()  # the first finds kernels and touches memory

    def measure(self) -> Ceiling:
        """Measure now; half a second."""
        product_s = self._median(lambda: torch.nn.functional.linear(self._rows, self._weight), PRODUCTS)
        read_s = self._median(self._memory.sum, READS)
        return Ceiling(
            2.0 * ROWS * INNER * COLUMNS / product_s, self._memory.nbytes / read_s, measure_yardstick()
        )

    def _median(self, operation: Callable[[], object], times: int) -> float:
        took = []
        for _ in range(times):
            started = self._clock()
            operation()
            took.append(self._clock() - started)
        return statistics.median(took)
