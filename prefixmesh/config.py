"""Settings of a worker: frozen, checked when made, never changed after. A router's are in ``router_config``.

Command-line flags carry the names engineers of this field know (``--page-size``, ``--mem-fraction-static``, …); each field
here is one flag. The effective configuration is logged once at start through ``describe``, which leaves secrets out.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Final, Literal

from prefixmesh.adapter_names import NAME_RULE, split_adapter_setting
from prefixmesh.addresses import check_port
from prefixmesh.cache.namespace import Isolation
from prefixmesh.errors import ConfigError
from prefixmesh.state_url import without_password

PrefixCacheKind = Literal["radix", "hash", "off"]
EvictionPolicy = Literal["lru", "lfu", "priority"]
SchedulePolicy = Literal["lpm", "fcfs", "priority"]
HostWritePolicy = Literal["write_through", "write_through_selective"]
Dtype = Literal["auto", "float32", "bfloat16"]
AttentionBackendName = Literal["auto", "torch", "flashinfer"]

DEFAULT_PIN_SHARE: Final = 0.3
"""Most of a pool stays for what is not pinned."""

DEFAULT_PIN_OWNER_SHARE: Final = 0.15
"""Half of what all have: one owner cannot take it all, and two can."""

DEFAULT_MODEL: Final = "smollm2"
MAX_PAGE_SIZE: Final = 256
MOST_TIER_SIZE: Final = 2**20
"""GiB, or times the device's pool: more than any machine has, and sums of it are still numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """What the engine process of a worker needs to know."""

    model: str = DEFAULT_MODEL
    """A known model's name, a Hugging Face folder, or a GGUF file."""

    dtype: Dtype = "auto"
    """``auto`` is bfloat16 where the device computes it fast, float32 elsewhere."""

    device: str = "auto"
    """A torch device; ``auto`` is the first GPU, else the CPU."""

    page_size: int = 1
    """Tokens per KV page, a power of two. 1 shares prefixes to the exact token; 16 suits a host tier."""

    prefix_cache: PrefixCacheKind = "radix"
    """``radix`` shares any common prefix, ``hash`` whole 16-token blocks, ``off`` nothing."""

    eviction_policy: EvictionPolicy = "lru"
    """What a full ``radix`` cache gives up first: ``lru`` the least recently used, ``lfu`` the least often used, ``priority`` what
    was used with the lowest priority (all are equal until callers can give one). The other caches know only ``lru``."""

    mem_fraction_static: float = 0.5
    """Share of the device's memory for weights and KV together, when ``max_total_tokens`` is not given."""

    max_total_tokens: int | None = None
    """Size of the KV pool in tokens; overrides ``mem_fraction_static``."""

    hicache_ratio: float = 0.0
    """Size of the host tier as a multiple of the KV pool on the device; 0 with no ``hicache_size`` is no host tier."""

    hicache_size: float = 0.0
    """Size of the host tier in GiB; overrides ``hicache_ratio``."""

    hicache_write_policy: HostWritePolicy = "write_through"
    """What gets a copy on the host: ``write_through`` all that is cached, ``write_through_selective`` what was asked for twice."""

    disk_cache_dir: str | None = None
    """A folder of this worker's own in which prefixes outlive it; needs a host tier. None keeps none."""

    disk_cache_size: float = 10.0
    """Most GiB of files in ``disk_cache_dir``."""

    kv_copy_rate: float = 0.0
    """Most MB of KV a second that it gives to other workers; 0 sets no bound."""

    pin_share: float = DEFAULT_PIN_SHARE
    """Share of the KV pool, and of the host tier, that all pins together may have: the rest stays for what is not pinned. 0 allows no pins."""

    pin_owner_share: float = DEFAULT_PIN_OWNER_SHARE
    """The same for the pins of one owner."""

    max_running_requests: int = 64
    """Most requests computed together in one step."""

    max_queued_requests: int = 1024
    """Most requests waiting; one more is refused at once."""

    chunked_prefill_size: int = 512
    """Most prompt tokens computed in one step, so that a long prompt does not stop others' decoding; 0 means no chunking."""

    schedule_policy: SchedulePolicy = "lpm"
    """Who is admitted next: ``lpm`` the longest cached prefix, ``fcfs`` the oldest, ``priority`` the highest priority and among
    equal ones the longest cached prefix. ``max_passed_over`` keeps the first and the last from making anyone wait for ever."""

    max_passed_over: int = 32
    """``lpm``: at most so many later arrivals are admitted before a request. ``priority``: the same among equal priorities, and
    the oldest request of all goes next after so many others went before it. 0 is the order of arrival."""

    queue_timeout_s: float = 0.0
    """A request that was not admitted within so many seconds ends unserved; 0 lets it wait. A call may ask for less."""

    attention_backend: AttentionBackendName = "auto"
    """``auto`` is ``flashinfer`` on a GPU where it can serve the model, ``torch`` elsewhere; ``flashinfer`` by name refuses to start
    where it cannot."""

    cuda_graphs: bool = True
    """Replay decode steps on a GPU from CUDA graphs (with ``flashinfer``); no effect elsewhere."""

    threads: int = 0
    """CPU threads for the model's arithmetic; 0 lets torch choose."""

    adapter_root: str | None = None
    """The folder below which LoRA adapters lie; none is read from anywhere else. Without one the engine knows no adapters."""

    adapters: tuple[str, ...] = ()
    """Adapters to load at start, ``NAME=PATH`` each, the path relative to ``adapter_root``."""

    max_resident_adapters: int = 8
    """Most adapters whose weights are in the device's memory at once; memory is set aside for so many."""

    def __post_init__(self) -> None:
        size = self.page_size
        if not 1 <= size <= MAX_PAGE_SIZE or size & (size - 1):
            raise ConfigError(f"page_size must be a power of two from 1 to {MAX_PAGE_SIZE}, got {size}")
        if self.prefix_cache == "hash" and size > 16:
            raise ConfigError(f"page_size must be at most 16 with prefix_cache=hash, got {size}")
        if self.prefix_cache != "radix" and self.eviction_policy != "lru":
            raise ConfigError(
                f"eviction_policy must be lru with prefix_cache={self.prefix_cache}, got {self.eviction_policy}"
            )
        if not 0.0 < self.mem_fraction_static <= 1.0:
            raise ConfigError(
                f"mem_fraction_static must be above 0 and at most 1, got {self.mem_fraction_static}"
            )
        if self.max_total_tokens is not None and self.max_total_tokens < size:
            raise ConfigError(
                f"max_total_tokens must hold at least one page of {size}, got {self.max_total_tokens}"
            )
        for name in ("pin_share", "pin_owner_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must be a share from 0 to 1, got {getattr(self, name)}")
        self._check_tiers()
        self._check_adapters()
        for name in ("max_running_requests", "max_queued_requests", "max_resident_adapters"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("chunked_prefill_size", "threads", "max_passed_over"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.queue_timeout_s < math.inf:  # NaN, which compares false to all, is refused too
            raise ConfigError(f"queue_timeout_s must be seconds from 0 on, got {self.queue_timeout_s}")

    @property
    def has_host_tier(self) -> bool:
        """Whether evicted KV may outlive device memory."""
        return bool(self.hicache_ratio or self.hicache_size)

    def _check_tiers(self) -> None:
        if not 0.0 <= self.kv_copy_rate < math.inf:  # NaN is refused too
            raise ConfigError(f"kv_copy_rate must be MB a second from 0 on, got {self.kv_copy_rate}")
        for name in ("hicache_ratio", "hicache_size"):
            if not 0.0 <= getattr(self, name) <= MOST_TIER_SIZE:
                raise ConfigError(
                    f"{name} must be a number from 0 to {MOST_TIER_SIZE:,}, got {getattr(self, name)}"
                )
        if self.has_host_tier and self.prefix_cache != "radix":
            raise ConfigError(
                f"hicache_ratio and hicache_size need prefix_cache=radix, not {self.prefix_cache}"
            )
        if not 0.0 < self.disk_cache_size <= MOST_TIER_SIZE:
            raise ConfigError(
                f"disk_cache_size must be GiB above 0, {MOST_TIER_SIZE:,} at most, got {self.disk_cache_size}"
            )
        if self.disk_cache_dir is not None and not self.disk_cache_dir.strip():
            raise ConfigError(
                "disk_cache_dir must name a folder, got nothing"
            )  # it would be the one we are in
        if self.disk_cache_dir is not None and not self.has_host_tier:
            raise ConfigError("disk_cache_dir needs a host tier: give hicache_ratio or hicache_size")

    def _check_adapters(self) -> None:
        if self.adapters and self.adapter_root is None:
            raise ConfigError("adapters need an adapter_root (--adapter-root) that they lie in")
        for setting in self.adapters:
            name, path = split_adapter_setting(setting)
            if not (name and path):
                raise ConfigError(f"adapters must be NAME=PATH each, the name {NAME_RULE}, got {setting!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """One worker: its engine and its gRPC front."""

    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    worker_id: str = "worker-0"
    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback a worker serves only calls that carry a router's ticket."""

    port: int = 0
    """0 takes a free port."""

    metrics_port: int | None = None
    """Port of ``/metrics``, on loopback whatever ``host`` is: it asks for no credentials. 0 takes a free one, None serves none."""

    tickets_only: bool = False
    """Serve only calls that carry a router's ticket, also on loopback: for fleets whose router asks for API keys."""

    isolation: Isolation = "tenant"
    """``tenant`` keeps tenants' KV apart; ``shared`` makes all callers one trust domain."""

    in_process: bool = False
    """Run the engine in a thread of the front instead of a process of its own (tests, simulation)."""

    def __post_init__(self) -> None:
        check_port(self.port)
        if self.metrics_port is not None:
            check_port(self.metrics_port, "metrics_port")
        if not self.worker_id:
            raise ConfigError("worker_id must not be empty")


def describe(config: Any) -> dict[str, Any]:
    """The effective settings as a flat-enough dict for one log line, without what is secret in them: a state's password (F70)."""
    settings = dataclasses.asdict(config)
    if "state" in settings:
        settings["state"] = without_password(settings["state"])
    return settings
