"""How long it takes to copy a token's KV from another worker, as this worker finds it. Pure.

A moving average over copies, and before the first a guess by the bytes: routers weigh copies by it from the start, and what is never tried is
never measured.
"""

from typing import Final

GUESSED_BYTES_PER_S: Final = 250e6
"""Of a copy before any was measured: a quarter of what a link of 10 Gbit/s carries, and what the worker's processes pass on without a core to
themselves."""

LEAST_RATED_TOKENS: Final = 64
"""A copy of fewer tells how long it takes to begin one, and nothing of what a token takes."""

WEIGHT: Final = 0.25
"""Of the newest copy: they are rare, and each is some megabytes long."""

MOST_OFF: Final = 4.0
"""A copy that took so many times what was believed counts as if it had taken just that: a source that stood still is not a slow network."""


class CopyRates:
    """See the module."""

    def __init__(self, token_bytes: float) -> None:
        """``token_bytes`` is what a token's KV takes; more than 0."""
        self._ms_per_token = 1e3 * token_bytes / GUESSED_BYTES_PER_S
        self._is_measured = False

    @property
    def ms_per_token(self) -> float:
        """Milliseconds; never 0."""
        return self._ms_per_token

    def record(self, tokens: int, elapsed_ms: float) -> None:
        """Count what a source gave in one go, and how long that took, the asking included. O(1)."""
        if tokens < LEAST_RATED_TOKENS or elapsed_ms <= 0.0:
            return
        told = elapsed_ms / tokens
        if not self._is_measured:
            self._is_measured, self._ms_per_token = True, told
            return
        self._ms_per_token += WEIGHT * (min(told, self._ms_per_token * MOST_OFF) - self._ms_per_token)
