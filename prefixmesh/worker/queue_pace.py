"""How fast a queue moves, by those who have left it for the batch: when somebody who finds it full may come back. Pure."""

from collections import deque
from typing import Final

WINDOW: Final = 32
"""Admissions that are remembered: a few seconds of a busy worker, and so few that a change of traffic is followed."""

RETRY_SHARE: Final = 1 / 8
"""Of its bound, so much of the queue is to have moved on before somebody who was refused comes back. Fewer places, and all who come would
meet a full queue again; more, and places would stand empty."""


class QueuePace:
    """The last admissions of one queue, while somebody has waited without a break."""

    def __init__(self) -> None:
        self._admitted_at: deque[float] = deque(maxlen=WINDOW)

    def admitted(self, count: int, now: float) -> None:
        """So many were admitted. O(count)."""
        self._admitted_at.extend([now] * count)

    def idle(self) -> None:
        """Nobody waits: what comes in the meantime is no measure of how fast the queue moves."""
        self._admitted_at.clear()

    def retry_after_s(self, max_queued: int, now: float) -> float | None:
        """Seconds until a share of the queue has moved on, at its pace up to ``now``; None before anybody was seen to leave it. O(1)."""
        if not self._admitted_at or now <= self._admitted_at[0]:
            return None
        seconds_each = (now - self._admitted_at[0]) / len(self._admitted_at)
        return max(1.0, RETRY_SHARE * max_queued) * seconds_each
