"""What the scheduler must know. Plain numbers: the engine fills them from ``EngineConfig`` and from the model."""

from dataclasses import dataclass
from typing import Final

from prefixmesh.config import SchedulePolicy

UNCHUNKED_STEP_TOKENS: Final = 8192
"""With chunking off, prompts join a step until it has so many tokens: activations need memory too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """The scheduler's bounds and policies."""

    max_running_requests: int
    max_queued_requests: int
    chunked_prefill_size: int
    """Most prompt tokens in one step; 0 computes each prompt whole."""

    schedule_policy: SchedulePolicy
    context_length: int
    """Most tokens of prompt and answer together, by the model."""

    vocab_size: int
    shares_prefixes: bool = True
    """False when the cache keeps nothing: then nobody waits for another one's prefix."""

    max_passed_over: int = 32
    """At most so many later arrivals are admitted before a request of equal priority; and under ``priority`` the oldest of all goes
    next after so many others."""

    queue_timeout_s: float = 0.0
    """Most seconds that a request waits for its first admission; 0 is for ever."""

    hold_min_tokens: int = 32
    """A request waits for another one's prefill when that will save it at least so many tokens, or all that it could find; less is
    computed as fast."""

    decode_room_tokens: int | None = None
    """Tokens that an admission leaves every running request to grow by; None learns from the answers that ended."""

    @property
    def is_chunked(self) -> bool:
        """Whether a prompt may be computed over several steps."""
        return self.chunked_prefill_size > 0

    @property
    def step_tokens(self) -> int:
        """Most prompt tokens that a step begins with."""
        return self.chunked_prefill_size or UNCHUNKED_STEP_TOKENS
