"""How fast KV moves between device and host, as the copies themselves show: what a load-back is weighed by. Pure.

Milliseconds a token, as moving averages over copies, each way on its own, from what a profile found at start. Without a profile, what
backups took stands for load-backs until the first of them has ended, for both go over the same link; and before any copy, a guess. Whoever is turned away by a rate would never find out
that it has fallen: so each refusal makes it a little lower, down to what backups say, and in the end one load-back is tried.
"""

import math
from typing import Final

WEIGHT: Final = 0.2
"""Weight of the newest copy: the last five or so count."""

MOST_OFF: Final = 4.0
"""A copy that took so many times what was expected counts as if it had taken just that: a machine that stood still for a moment is not
slow, and one that has become slow is believed within a few copies."""

LEAST_RATED_TOKENS: Final = 32
"""Copies of fewer tokens rate nothing: most of their time is their fixed cost."""

FIXED_MS: Final = 0.5
"""What a load-back costs however little it brings: its admission waits for a mover's turn and is seen between two steps."""

GUESSED_BYTES_PER_S: Final = 4e9
"""Before any copy: what one core copies in pages, and less than any link to a GPU carries."""

KEPT_PER_REFUSAL: Final = 0.97
"""Of what a rate is above what backups say. A rate that was measured ten times too high is given another try after some 75 refusals."""

_MS_PER_S = 1000.0


class LoadBackRates:
    """Moving averages, never negative. Every method is O(1)."""

    def __init__(self, *, token_bytes: float, ms_per_token: float = 0.0) -> None:
        """``token_bytes`` is one token's KV in all layers, ``ms_per_token`` what a profile found for load-backs; 0 without one."""
        guess = ms_per_token or token_bytes / GUESSED_BYTES_PER_S * _MS_PER_S
        self._guess = guess
        self._refused_at = -math.inf
        self._offload = _Rate(guess)
        self._restore = _Rate(guess)
        self._restore.is_measured = ms_per_token > 0.0

    @property
    def load_back_ms_per_token(self) -> float:
        """As measured by load-backs; 0 before the first one, where there was no profile."""
        return self._restore.ms_per_token if self._restore.is_measured else 0.0

    def restored(self, size_tokens: int, elapsed_s: float) -> None:
        """A load-back has ended well."""
        self._restore.record(size_tokens, elapsed_s)

    def offloaded(self, size_tokens: int, elapsed_s: float) -> None:
        """A backup has ended well."""
        self._offload.record(size_tokens, elapsed_s)
        if not self._restore.is_measured:
            self._restore.ms_per_token = self._offload.ms_per_token

    def refused(self) -> None:
        """Somebody computed instead, because of this rate."""
        above = self._restore.ms_per_token - self._offload.ms_per_token
        if above > 0.0:
            self._restore.ms_per_token -= above * (1.0 - KEPT_PER_REFUSAL)

    def save_refused(self, now: float) -> None:
        """Somebody's pages went without a copy, because of these rates: the same for both, once a moment, down to the first guess."""
        if now <= self._refused_at:
            return
        self._refused_at = now
        self.refused()
        above = self._offload.ms_per_token - self._guess
        if above > 0.0:
            self._offload.ms_per_token -= above * (1.0 - KEPT_PER_REFUSAL)

    def restore_ms(self, size_tokens: int) -> float:
        """What a load-back of so many tokens takes once its turn has come."""
        return FIXED_MS + self._restore.ms_per_token * size_tokens

    def offload_ms(self, size_tokens: int) -> float:
        """What a backup of so many tokens takes."""
        return FIXED_MS + self._offload.ms_per_token * size_tokens


class _Rate:
    __slots__ = ("is_measured", "ms_per_token")

    def __init__(self, guess: float) -> None:
        self.ms_per_token = guess
        self.is_measured = False

    def record(self, size_tokens: int, elapsed_s: float) -> None:
        if elapsed_s <= 0.0 or (size_tokens < LEAST_RATED_TOKENS and self.is_measured) or not size_tokens:
            return
        measured = elapsed_s * _MS_PER_S / size_tokens
        if not self.is_measured:
            self.is_measured = True
            self.ms_per_token = measured
            return
        self.ms_per_token += WEIGHT * (min(measured, self.ms_per_token * MOST_OFF) - self.ms_per_token)
