"""How fast this engine is, as it measures itself: the rates from which a router and a scheduler predict. Pure.

A step costs something whatever is in it (a model's weights are read once), and more for each answer that it carries on, and for what it
prefills::

    step = step_ms + decoding * each + prefill

Steps that only decode tell the first two, a line over how many they carried on. What a step that prefills took beyond that line is the
prefill's, whether others decoded in it or nobody did: an engine that is idle measures the same speed as one that is busy. That is a curve, a
share for each token, and one that grows with what stands before it, which is attention's::

    prefill from a to b = linear * (b - a) + quadratic * (b**2 - a**2)        milliseconds

Divided by the tokens that is a line over ``a + b``. Both lines are found by sums of least squares, in which steps long ago count less and
less, by how many came since and by the time: an engine that was slow before it had nothing to do for a while is believed what it does now. A prompt is computed in chunks, each a step: the curve that is told has a step's own cost in it, once for so many tokens as a chunk has.
"""

from typing import Final

WEIGHT: Final = 0.1
"""Weight of the newest step in the moving averages: the last ten or so steps count, one slow step does not."""

INTERVAL_WEIGHT: Final = 0.03
"""The same of steps that decode, whatever they prefill beside it: of those some do and some do not, and the mean of both is wanted."""

KEPT_PER_STEP: Final = 0.98
"""Of what was learned of prefills before: the last fifty steps count. More than of decode steps, for the curve needs long prompts and short
ones, and they come in any mixture."""

HALF_LIFE_S: Final = 10.0
"""What was learned counts half after so long, in which a busy engine makes some hundred steps. After a minute the first prompts decide."""

LEAST_RATED_TOKENS: Final = 128
"""A prefill of fewer tokens rates nothing: most of such a step is its fixed cost, and what wobbles in that would be put down to a few tokens.
"""

LEAST_PREFILL_SHARE: Final = 0.1
"""Of a step that prefills, at least so much of the time is put down to the prefill, however slow steps without one were."""

SPREAD_DECODING: Final = 1.0
"""As ``SPREAD_TOKENS``, of how many answers the steps that only decode carried on."""

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

    def __init__(
        self,
        *,
        prefill_tokens_per_s: float = 0.0,
        decode_step_ms: float = 0.0,
        chunk_tokens: int = 0,
        now: float | None = None,
    ) -> None:
        """``chunk_tokens``: most that a step prefills; 0: as many as there are. ``now`` is when the profile was made; None: it does not become
        old before the first step."""
        self._step_share = 1.0 / chunk_tokens if chunk_tokens else 0.0
        self.decode_step_ms = decode_step_ms
        """Of steps that only decode."""

        self.token_interval_ms = decode_step_ms
        """Of all steps that decode, with what they prefill: from one token of an answer to its next."""

        self.rated_prefills = 0
        """How often a prefill was rated, the profile counted in: what that has found becomes old while it stays as it is."""

        self._line = _Line(SPREAD_TOKENS, now)
        self._decodes = _Line(SPREAD_DECODING, now)
        if decode_step_ms > 0.0:
            self._decodes.add(PROFILE_STEPS, 1.0, decode_step_ms)
        if prefill_tokens_per_s > 0.0:
            took_ms = self._beyond_decoding(1000.0 * PROFILE_TOKENS / prefill_tokens_per_s, 0)
            self._line.add(PROFILE_STEPS * PROFILE_TOKENS, PROFILE_TOKENS, took_ms / PROFILE_TOKENS)
            self.rated_prefills = 1

    @property
    def step_ms(self) -> float:
        """Of every step, whatever is in it; 0 before one that only decodes was measured."""
        return self._decodes.start

    @property
    def prefill_ms_per_token(self) -> float:
        """The curve's linear part, a step for each chunk counted in; 0 before anything was measured."""
        return self._line.start + self.step_ms * self._step_share if self._line.weight > 0.0 else 0.0

    @property
    def prefill_ms_per_token2(self) -> float:
        """The curve's quadratic part; 0 where it cannot be told from none."""
        return self._line.slope

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of a prompt of ``PROFILE_TOKENS`` tokens, alone in a step; 0 before anything was measured."""
        ms_per_token = self._line.at(PROFILE_TOKENS) + self.step_ms / PROFILE_TOKENS
        return 1000.0 / ms_per_token if ms_per_token > 0.0 and self._line.weight > 0.0 else 0.0

    def prefill_ms(self, begin: int, end: int) -> float:
        """What a prefill of the tokens from ``begin`` to ``end`` of a prompt takes by the curve: what it adds to others', and as many more
        steps as it has chunks, the broken one by its share. 0 before anything was measured. O(1)."""
        return self.prefill_ms_per_token * (end - begin) + self._line.slope * (end**2 - begin**2)

    def record(
        self, *, prefill_tokens: int, decoding: int, elapsed_s: float, now: float, prefill_squares: int = 0
    ) -> None:
        """Count one step, which ended ``now`` (seconds of one clock). ``prefill_squares`` is the sum of ``b**2 - a**2`` over its prefills. What the step takes without them is taken off
        before they are rated. O(1)."""
        if elapsed_s <= 0.0:
            return
        elapsed_ms = elapsed_s * 1000.0
        if decoding:
            self.token_interval_ms = _average(self.token_interval_ms, elapsed_ms, INTERVAL_WEIGHT)
        if not prefill_tokens:
            self.decode_step_ms = _average(self.decode_step_ms, elapsed_ms)
            self._decodes.learn(1.0, float(decoding), elapsed_ms, now)
        elif prefill_tokens >= LEAST_RATED_TOKENS or not self._line.weight:
            prefill_ms = self._beyond_decoding(elapsed_ms, decoding)
            self._line.learn(
                float(prefill_tokens), prefill_squares / prefill_tokens, prefill_ms / prefill_tokens, now
            )
            self.rated_prefills += 1

    def _beyond_decoding(self, elapsed_ms: float, decoding: int) -> float:
        """What the prefills of a step took, beside so many who decoded."""
        return max(elapsed_ms - self._decodes.at(float(decoding)), elapsed_ms * LEAST_PREFILL_SHARE)


class _Line:
    """A weighted regression that forgets: a cost over what it grows with, rising or level."""

    __slots__ = ("_learned_at", "_least_spread", "_x", "_xx", "_xy", "_y", "slope", "start", "weight")

    def __init__(self, spread: float, now: float | None = None) -> None:
        """``spread``: of ``x``, below which noise is not told from growth. ``now``: when what is added first was measured."""
        self._least_spread = spread * spread
        self._learned_at = now
        self.weight = self._x = self._y = self._xx = self._xy = 0.0
        self.start = self.slope = 0.0

    def at(self, x: float) -> float:
        return self.start + self.slope * x

    def learn(self, weight: float, x: float, y: float, now: float) -> None:
        """Count in a step, no more off what is expected than ``MOST_OFF``, and forget a little of those before."""
        if (expected := self.at(x)) > 0.0:
            y = min(max(y, expected / MOST_OFF), expected * MOST_OFF)
        age_s = 0.0 if self._learned_at is None else max(0.0, now - self._learned_at)
        self._learned_at = now
        kept = KEPT_PER_STEP * 0.5 ** (age_s / HALF_LIFE_S)
        self.weight *= kept
        self._x *= kept
        self._y *= kept
        self._xx *= kept
        self._xy *= kept
        self.add(weight, x, y)

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
        slope = max(together / (spread + self._least_spread), 0.0)
        # A line through the mean that starts below nothing would make short prompts free.
        self.slope = min(slope, mean_y / mean_x) if mean_x > 0.0 else 0.0
        self.start = max(mean_y - self.slope * mean_x, 0.0)


def _average(old: float, new: float, weight: float = WEIGHT) -> float:
    return new if old == 0.0 else old + weight * (min(new, old * MOST_OFF) - old)
