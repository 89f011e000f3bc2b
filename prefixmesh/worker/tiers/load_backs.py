"""Load-backs: whether one is worth it, and what is under way. Pure.

What the host alone has of a prompt is loaded when that takes less time than computing it. Both are measured::

    load      what other load-backs have before it + fixed cost + rate * tokens
    compute   linear * (b - a) + quadratic * (b**2 - a**2)            the prefill's curve, from token a to b

Computing grows with what stands before it, loading does not; so if any part of what the host has is worth loading, all of it is.
"""

from collections.abc import Iterable
from typing import Final

from prefixmesh.cache.transfers import Restore
from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.tiers.load_back_rates import LoadBackRates

MAX_STALL_MS: Final = 5.0
"""A step may begin while KV for it is still coming if it will hardly have to wait for it; so long at most, as far as is known, for others
in the step wait as well."""

LEAST_LOAD_WAIT_S: Final = 1.0
"""A load-back that has not come after so long, nor after ``PATIENCE`` times what it was expected to take, is waited for no longer."""

PATIENCE: Final = 4.0

_MS_PER_S = 1000.0


class Load:
    """One load-back, and the request that waits for it."""

    __slots__ = (
        "began_at",
        "copy",
        "elapsed_s",
        "error",
        "expected_ms",
        "has_ended",
        "is_waited_for",
        "joined_at",
        "number",
        "size_tokens",
    )

    def __init__(self, number: int, copy: Restore, size_tokens: int, now: float, expected_ms: float) -> None:
        self.number = number
        """Its job's."""
        self.copy = copy
        self.size_tokens = size_tokens
        self.began_at = now
        self.expected_ms = expected_ms
        """From its beginning to its end, with what stood before it."""
        self.is_waited_for = True
        """Whether its request is still there: what nobody waits for goes on, and ends as cached KV."""
        self.joined_at: float | None = None
        """When its request joined a step, the last layers still on their way; None when all had come before."""
        self.has_ended = False
        self.elapsed_s = 0.0
        """What the copying took."""
        self.error = ""
        """Of one that has ended: what went wrong; empty when all has come."""

    def waited_s(self, now: float) -> float:
        """How long its request has waited for it that ends ``now``: until it joined a step, and no less than the copying took."""
        joined_at = now if self.joined_at is None else self.joined_at
        return max(joined_at - self.began_at, self.elapsed_s)

    @property
    def wait_until(self) -> float:
        """When its request gives up waiting."""
        return self.began_at + max(LEAST_LOAD_WAIT_S, PATIENCE * self.expected_ms / _MS_PER_S)

    def left_ms(self, now: float) -> float:
        """How long its last layer is still to be expected to take; 0 for one that is late."""
        return max(0.0, self.expected_ms - (now - self.began_at) * _MS_PER_S)

    def is_late(self, now: float) -> bool:
        """Whether it takes longer than was expected: how much longer nobody knows."""
        return (now - self.began_at) * _MS_PER_S > self.expected_ms + MAX_STALL_MS

    def __repr__(self) -> str:
        return f"Load({self.number}: {self.size_tokens} tokens)"


def is_worth_loading(
    rates: LoadBackRates, engine: EngineRates, device_tokens: int, host_tokens: int, before_ms: float
) -> bool:
    """Whether ``host_tokens`` after the first ``device_tokens`` are there sooner if they are loaded than if they are computed;
    ``before_ms`` is what the mover has before them. A rate that nobody has measured yet is not held against loading. O(1)."""
    if not host_tokens:
        return False
    compute_ms = engine.prefill_ms(device_tokens, device_tokens + host_tokens)
    return compute_ms <= 0.0 or before_ms + rates.restore_ms(host_tokens) < compute_ms


def queued_ms(loads: Iterable[Load], now: float) -> float:
    """What the mover has to do still for ``loads``, which it does one after the other: as long as the last of them is expected to take.
    O(loads)."""
    return max((load.left_ms(now) for load in loads), default=0.0)
