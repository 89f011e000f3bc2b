"""How far predictions are from what comes true: the mean error, with its sign, and the mean of its size. Pure.

The newer an error, the more it counts, so that a worker that has changed is not judged by what it was.
"""

from typing import Final

MEMORY: Final = 64
"""Errors after which an old one counts a third: a minute of a busy worker's requests."""


class ForecastError:
    """The error of one kind of prediction for one worker. O(1) memory."""

    __slots__ = ("bias", "count", "size")

    def __init__(self) -> None:
        self.count = 0
        """Predictions that were compared."""

        self.bias = 0.0
        """Mean of what came true minus what was predicted; 0 before the first."""

        self.size = 0.0
        """Mean of the difference's absolute value; 0 before the first."""

    def add(self, predicted: float, came_true: float) -> None:
        """Compare one prediction with what came true, both in the same unit. O(1)."""
        self.count += 1
        weight = 1.0 / min(self.count, MEMORY)
        error = came_true - predicted
        self.bias += weight * (error - self.bias)
        self.size += weight * (abs(error) - self.size)

    def __repr__(self) -> str:
        return f"ForecastError({self.count} compared, bias {self.bias:+.1f}, size {self.size:.1f})"
