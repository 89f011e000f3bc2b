"""How fast this engine is, as it measures itself: the rates from which a router and a scheduler predict. Pure."""

from typing import Final

WEIGHT: Final = 0.1
"""Weight of the newest step in the moving averages: the last ten or so steps count, one slow step does not."""

LEAST_RATED_TOKENS: Final = 128
"""A prefill of fewer tokens rates nothing: most of such a step is its fixed cost, so traffic with warm prompts would make a worker
believe that it is slow, and a router send its prefixes elsewhere."""

LEAST_PREFILL_SHARE: Final = 0.1
"""Of a step that prefills and decodes, at least so much of the time is put down to the prefill, however slow decoding was."""


class EngineRates:
    """Exponential moving averages over steps, from what a profile found at start (0: the first step sets it)."""

    def __init__(self, *, prefill_tokens_per_s: float = 0.0, decode_step_ms: float = 0.0) -> None:
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.decode_step_ms = decode_step_ms

    def record(self, *, prefill_tokens: int, decoding: int, elapsed_s: float) -> None:
        """Count one step. Of a mixed step, the decode's usual time is taken off before the prefill is rated. O(1)."""
        if elapsed_s <= 0.0:
            return
        if not prefill_tokens:
            self.decode_step_ms = _average(self.decode_step_ms, elapsed_s * 1000.0)
            return
        if prefill_tokens < LEAST_RATED_TOKENS and self.prefill_tokens_per_s > 0.0:
            return
        prefill_s = elapsed_s
        if decoding:
            prefill_s = max(elapsed_s - self.decode_step_ms / 1000.0, elapsed_s * LEAST_PREFILL_SHARE)
        self.prefill_tokens_per_s = _average(self.prefill_tokens_per_s, prefill_tokens / prefill_s)


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else old + WEIGHT * (new - old)
