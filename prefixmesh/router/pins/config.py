"""How fast the pin controller acts, and how patient it is. Frozen."""

import math
from dataclasses import dataclass

from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE
from prefixmesh.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class PinControllerConfig:
    """One controller."""

    max_moves: int = 4
    """Most ``Warm`` under way at once. Each costs its worker a prefill, or its source and it the bandwidth of a copy, and callers wait
    behind that: four bring a lost worker's pins back within seconds, and leave the rest of the fleet alone."""

    max_moves_per_worker: int = 2
    """Of those, to one worker: one can be copied while another is computed. A third would only wait, and hold a place in ``max_moves``
    that another worker could use."""

    max_releases: int = 16
    """Most ``Unpin`` under way at once. They cost a worker microseconds; that they have a bound of their own keeps a removal from waiting
    behind slow moves."""

    warm_timeout_s: float = 120.0
    """Longest that a ``Warm`` may take: a prompt of 8,000 tokens takes a CPU about a minute. Whoever performs it must give up by then, too."""

    first_alone_s: float = 20.0
    """What no worker has is computed by one, and copied by the others when it is there: a copy costs a fifth of a computation, or less. For so
    long they wait for the first; then they compute, too."""

    unpin_timeout_s: float = 10.0
    """Longest that an ``Unpin`` may take: a worker answers within one step of its engine."""

    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0
    """Before a worker is asked again for what it failed at, doubled from the first to the longest with each failure in a row."""

    patience_s: float = 2.0
    """For so long a worker that cannot be used, and does not drain, is expected back with its pins before others are warmed for it: a
    connection that blinks moves nothing, and a router that has just started waits for the workers that it knows."""

    proof_within_s: float = 30.0
    """A worker that says it holds a prefix, and whose events have not proved it for so long, is not waited for any longer: another worker is
    warmed, too. A router's view is resynchronised within seconds."""

    block_size: int = DEFAULT_BLOCK_SIZE
    """Tokens of the blocks that events tell of: what is behind the last whole one cannot be proved, and need not be."""

    def __post_init__(self) -> None:
        for name in ("max_moves", "max_moves_per_worker", "max_releases", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            "warm_timeout_s",
            "first_alone_s",
            "unpin_timeout_s",
            "first_pause_s",
            "longest_pause_s",
            "patience_s",
            "proof_within_s",
        ):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be seconds from 0 on, got {getattr(self, name)}")
        if self.longest_pause_s < self.first_pause_s:
            raise ConfigError(
                f"longest_pause_s must be at least first_pause_s ({self.first_pause_s}), got {self.longest_pause_s}"
            )
