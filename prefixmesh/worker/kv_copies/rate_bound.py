"""How soon a worker may send more KV to others, so that copies never take more of its network than they may. Pure.

A bucket that fills at the rate: what is sent may overdraw it, and whoever sends next waits until it is level again.
"""

from typing import Final

BURST_S: Final = 0.1
"""What a quiet time leaves to be sent at once is what the rate gives in so long."""


class RateBound:
    """One for all streams of a worker."""

    def __init__(self, bytes_per_s: float) -> None:
        """0 bytes a second: no bound."""
        self._rate = bytes_per_s
        self._burst = self._level = bytes_per_s * BURST_S
        self._now = 0.0

    def take(self, size_bytes: int, now: float) -> float:
        """Count so many bytes; returns the seconds to wait before they are sent. O(1)."""
        if not self._rate:
            return 0.0
        self._level = min(self._burst, self._level + max(0.0, now - self._now) * self._rate) - size_bytes
        self._now = max(now, self._now)
        return max(0.0, -self._level / self._rate)

    def give_back(self, size_bytes: int) -> None:
        """So many bytes were counted and are not sent. O(1)."""
        self._level = min(self._burst, self._level + size_bytes)
