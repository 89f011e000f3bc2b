"""How fast this engine is, as it measures itself: the rates from which a router and a scheduler predict. Pure.

The time of a prefill is a curve: a share for each token, and one that grows with what stands before it, which is attention's::

    prefill from a to b = linear * (b - a) + quadratic * (b**2 - a**2)        milliseconds

Divided by the tokens that is a line over ``a + b``, so that two weighted sums of least squares find it. Steps long ago count less and less.
"""

from typing import Final

WEIGHT: Final = 0.1
"""Weight of the newest step in the moving averages: the last ten or so steps count, one slow step does not."""

INTERVAL_WEIGHT: Final = 0.03
"""The same of steps that decode, whatever they prefill beside it: of those some do and some do not, and the mean of both is wanted."""

KEPT_PER_STEP: Final = 0.98
"""Of what was learned of prefills before: the last fifty steps count. More than of decode steps, for the curve needs long prompts and short
ones, and they come in any mixture."""

LEAST_RATED_TOKENS: Final = 128
"""A prefill of fewer tokens rates nothing: most of such a step is its fixed cost, so traffic with warm prompts would make a worker
believe that it is slow, and a router send its prefixes elsewhere."""

LEAST_PREFILL_SHARE: Final = 0.1
"""Of a step that prefills and decodes, at least so much of the time is put down to the prefill, however slow decoding was."""

SPREAD_TOKENS: Final = 512.0
"""Contexts that differ by less tell noise from growth badly: the growth that they seem to show is halved where their spread is this, and
hardly believed where it is less."""

MOST_OFF: Final = 4.0
"""A step that took so many times what the curve or the mean says, or a prefill that took so much less, counts as if it had taken just that:
a machine that stood still for a moment is not slow, and one that has become slow is believed within a few steps."""

PROFILE_TOKENS: Final = 512.0
"""The prompt of the profile at start, about; and what a rate without a context is told for."""

PROFILE_STEPS: Final = 5.0
"""So many steps of traffic weigh as much as the profile did."""


class EngineRates:
    """Moving averages over steps, from what a profile found at start (0: the first step sets it). Nothing here is ever negative."""

    def __init__(self, *, prefill_tokens_per_s: float = 0.0, decode_step_ms: float = 0.0) -> None:
        self.decode_step_ms = decode_step_ms
        """Of steps that only decode."""

        self.token_interval_ms = decode_step_ms
        """Of all steps that decode, with what they prefill: from one token of an answer to its next."""

        self._line = _Line()
        if prefill_tokens_per_s > 0.0:
            self._line.add(PROFILE_STEPS * PROFILE_TOKENS, PROFILE_TOKENS, 1000.0 / prefill_tokens_per_s)

    @property
    def prefill_ms_per_token(self) -> float:
        """The curve's linear part; 0 before anything was measured."""
        return self._line.start

    @property
    def prefill_ms_per_token2(self) -> float:
        """The curve's quadratic part; 0 where it cannot be told from none."""
        return self._line.slope

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of a prompt of ``PROFILE_TOKENS`` tokens; 0 before anything was measured."""
        ms_per_token = self._line.at(PROFILE_TOKENS)
        return 1000.0 / ms_per_token if ms_per_token > 0.0 else 0.0

    def prefill_ms(self, begin: int, end: int) -> float:
        """What a prefill of the tokens from ``begin`` to ``end`` of a prompt takes by the curve; 0 before anything was measured. O(1)."""
        return self._line.start * (end - begin) + self._line.slope * (end**2 - begin**2)

    def record(
        self, *, prefill_tokens: int, decoding: int, elapsed_s: float, prefill_squares: int = 0
    ) -> None:
        """Count one step. ``prefill_squares`` is the sum of ``b**2 - a**2`` over its prefills. Of a mixed step, the decode's usual time is
        taken off before the prefill is rated. O(1)."""
        if elapsed_s <= 0.0:
            return
        elapsed_ms = elapsed_s * 1000.0
        if decoding:
            self.token_interval_ms = _average(self.token_interval_ms, elapsed_ms, INTERVAL_WEIGHT)
        if not prefill_tokens:
            self.decode_step_ms = _average(self.decode_step_ms, elapsed_ms)
            return
        if prefill_tokens < LEAST_RATED_TOKENS and self._line.weight > 0.0:
            return
        prefill_ms = elapsed_ms
        if decoding:
            prefill_ms = max(elapsed_ms - self.decode_step_ms, elapsed_ms * LEAST_PREFILL_SHARE)
        context = prefill_squares / prefill_tokens
        ms_per_token = prefill_ms / prefill_tokens
        if (expected := self._line.at(context)) > 0.0:
            ms_per_token = min(max(ms_per_token, expected / MOST_OFF), expected * MOST_OFF)
        self._line.forget(KEPT_PER_STEP)
        self._line.add(float(prefill_tokens), context, ms_per_token)


class _Line:
    """A weighted regression that forgets: the cost of a token over its context, rising or level."""

    __slots__ = ("_x", "_xx", "_xy", "_y", "slope", "start", "weight")

    def __init__(self) -> None:
        self.weight = self._x = self._y = self._xx = self._xy = 0.0
        self.start = self.slope = 0.0

    def at(self, x: float) -> float:
        return self.start + self.slope * x

    def forget(self, kept: float) -> None:
        self.weight *= kept
        self._x *= kept
        self._y *= kept
        self._xx *= kept
        self._xy *= kept

    def add(self, weight: float, x: float, y: float) -> None:
        self.weight += weight
        self._x += weight * x
        self._y += weight * y
        self._xx += weight * x * x
        self._xy += weight * x * y
        self._fit()

    def _fit(self) -> None:
        mean_x, mean_y = self._x / self.weight, self._y / self.weight
        spread = max(self._xx / self.weight - mean_x * mean_x, 0.0)
        together = self._xy / self.weight - mean_x * mean_y
        slope = max(together / (spread + SPREAD_TOKENS * SPREAD_TOKENS), 0.0)
        # A line through the mean that starts below nothing would make short prompts free.
        self.slope = min(slope, mean_y / mean_x) if mean_x > 0.0 else 0.0
        self.start = max(mean_y - self.slope * mean_x, 0.0)


def _average(old: float, new: float, weight: float = WEIGHT) -> float:
    return new if old == 0.0 else old + weight * (min(new, old * MOST_OFF) - old)
