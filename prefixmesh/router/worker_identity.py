"""Who a worker says it is, how fast it has been measured to be, and what it must share with the router to be used at all. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE
from prefixmesh.cache.ledger import LedgerRow
from prefixmesh.ids import Incarnation, WorkerId
from prefixmesh.worker_report import PagePool


class Rates(NamedTuple):
    """How fast a worker has been measured to be, by its own answer; 0 means not measured yet."""

    prefill_tokens_per_s: float
    decode_step_ms: float
    prefill_ms_per_token: float = 0.0
    prefill_ms_per_token2: float = 0.0
    """The prefill's curve; both 0 from workers that tell only the rate."""

    load_back_ms_per_token: float = 0.0
    adapter_load_ms: float = 0.0

    @property
    def linear_ms_per_token(self) -> float:
        """The curve's linear part; from the rate, as if there were no bend, where no curve is told."""
        if self.prefill_ms_per_token or self.prefill_ms_per_token2:
            return self.prefill_ms_per_token
        return 1e3 / self.prefill_tokens_per_s if self.prefill_tokens_per_s > 0.0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a worker tells about itself."""

    worker_id: WorkerId
    incarnation: Incarnation
    model: str
    model_revision: str
    tokenizer_digest: str
    protocol_version: int
    fingerprint_version: int
    context_length: int
    """Most tokens of prompt and answer together."""

    max_running_requests: int
    match_unit: int
    """Its cache matches whole multiples of so many tokens; 0 when it has no prefix cache."""

    rates: Rates
    page_size: int = 1
    block_size: int = DEFAULT_BLOCK_SIZE
    """Tokens in a block that it names."""

    total_tokens: int = 0
    """Size of its KV pool; 0 when it does not tell."""

    draining: bool = False
    """Takes nothing new."""

    host_pool: PagePool | None = None
    """Pages of its host tier; None when it has none, or is of a version that knows none."""

    tiers: Mapping[str, int] = field(default_factory=dict)
    """What moved between its tiers, by the wire's names (``TierCounts``); empty when it has no host tier."""

    kv_layout: str = ""
    """Workers with equal ones can copy KV from each other; empty: not at all."""

    copies: Mapping[str, int] = field(default_factory=dict)
    """What it has copied from others and given to them, by the wire's names (``CopyCounts``); empty where it does not tell."""

    cache: LedgerRow | None = None
    """What its cache was asked for and gave, by its own count; None when it does not tell."""

    adapters: Mapping[str, str] = field(default_factory=dict)
    """Content digests of the LoRA adapters that requests may name there, by name."""

    pinned_adapters: frozenset[str] = frozenset()
    """Names of those whose weights are kept in the device's memory."""

    resident_adapters: frozenset[str] = frozenset()
    """Content digests of those whose weights were in the device's memory."""

    @property
    def standing(self) -> tuple[object, ...]:
        """What decides whether it may be sent requests: while that stays, nothing is to be reviewed."""
        return (
            self.worker_id,
            self.model_revision,
            self.tokenizer_digest,
            self.protocol_version,
            self.fingerprint_version,
            self.block_size,
            self.context_length,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What every worker must share with this router."""

    model_revision: str
    tokenizer_digest: str
    protocol_version: int
    fingerprint_version: int
    block_size: int = DEFAULT_BLOCK_SIZE

    def problem_of(self, facts: WorkerFacts) -> str:
        """How ``facts`` differ from what is expected; empty when they do not."""
        if abs(facts.protocol_version - self.protocol_version) > 1:  # neighbours understand each other
            return f"speaks protocol {facts.protocol_version}, this router {self.protocol_version}"
        if facts.model_revision != self.model_revision:
            return (
                f"serves another revision of the model: {facts.model_revision[:12]} ({facts.model}), "
                f"this router {self.model_revision[:12]}"
            )
        if facts.tokenizer_digest != self.tokenizer_digest:
            return "uses another tokenizer or chat template than this router"
        if facts.fingerprint_version != self.fingerprint_version:
            return f"names blocks by fingerprint version {facts.fingerprint_version}, this router {self.fingerprint_version}"
        if facts.block_size != self.block_size:
            return f"names blocks of {facts.block_size} tokens, this router of {self.block_size}"
        return ""
