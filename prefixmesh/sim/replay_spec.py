"""Which fleet a replay has, and how it is driven."""

import math
from dataclasses import dataclass
from typing import Final

from prefixmesh.errors import ConfigError
from prefixmesh.router.policy import PICKS, PolicyConfig
from prefixmesh.router_config import MAX_SPILL_WEIGHT
from prefixmesh.sim.replay_cache import CACHE_KINDS, CacheKind
from prefixmesh.sim.replay_cascade import cascade_min_reads
from prefixmesh.sim.replay_figures import NO_OBJECTIVE, Objective
from prefixmesh.sim.rivals.catalogue import RULES
from prefixmesh.sim.timing import H100X2_70B, TimingModel
from prefixmesh.worker.adapters import MAX_NAMES

CEILINGS: Final = ("one_pooled_cache", "one_infinite_cache")
"""What no router can pass: all workers find in one cache what any of them has computed, or is about to."""

POLICIES: Final = tuple(dict.fromkeys(("cost", *RULES, *PICKS, *CEILINGS)))
"""By name: ours first, others' rules, those beside ours, ceilings."""

MAX_WORKERS: Final = 4096
"""As many as a router knows: its tables of holders and loads are as long as its fleet."""

MAX_ROUTERS: Final = 64
"""Each is a whole core with an index of all workers' caches, in this one process."""

MAX_CONCURRENCY: Final = 1 << 20
"""As many requests as a trace of a million has: more cannot be under way."""

MAX_TOKENS: Final = 1 << 40
"""Of a cache: more than any host has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySpec:
    """Checked when it is made; raises ConfigError naming the field and its limit."""

    workers: int = 8
    routers: int = 1
    """Cores of ours, each of which gets every so manieth request and knows of the others only by what workers report."""

    cache: CacheKind = "radix"
    """What each worker keeps (``replay_cache``). Ceilings have trees."""

    device_tokens: int = 2_000_000
    """Of each worker's cache."""

    host_tokens: int = 0
    """Of each worker's host tier, in which all that is on the device is as well; 0: none."""

    timing: TimingModel = H100X2_70B
    chunk_tokens: int = 2048
    """Most tokens of prefill in a step."""

    max_running: int = 0
    """Most requests that a worker computes at a time; 0: as many as have room."""

    max_resident_adapters: int = 8
    """Most LoRA adapters in a worker's memory, as many as an engine has unless told (``EngineConfig``). 0: all are, and nothing is loaded."""

    pins: bool = False
    """Whether what requests want pinned is, from the beginning and for ever (``replay_pins``). Ceilings pin nothing, and ``off`` has nothing to pin."""

    cascade: bool = False
    """Whether KV that several who decode share is read once a step (``replay_cascade``), as the engine does, or for each of them."""

    cascade_min_reads: int = cascade_min_reads(8)
    """Sequences times shared tokens from which on it is."""

    speed: float = 1.0
    """How many times faster than in the workload requests arrive. Pauses stay."""

    concurrency: int = 0
    """So many conversations at a time, whenever the workload has them begin (``replay_arrivals``); 0: when it says."""

    objective: Objective = NO_OBJECTIVE

    spill_weight: float = PolicyConfig().spill_weight
    """Of the policy ``cost``."""

    at_once: bool = False
    """Look caches up and fill them in the moment in which a request is sent, let a whole prompt be found, and take no room for what runs: how
    figures of studies by blocks are counted, and ceilings always, which nothing is to escape because it was asked for twice in a moment.
    Otherwise a request finds what is there when its turn comes, leaves its blocks when they are computed, and computes its last token."""

    seed: int = 0
    """For policies that draw."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("workers", 1, MAX_WORKERS),
            ("routers", 1, MAX_ROUTERS),
            ("device_tokens", 1, MAX_TOKENS),
            ("host_tokens", 0, MAX_TOKENS),
            ("chunk_tokens", 1, MAX_TOKENS),
            ("max_running", 0, MAX_CONCURRENCY),
            ("concurrency", 0, MAX_CONCURRENCY),
            ("max_resident_adapters", 0, MAX_NAMES),
            ("cascade_min_reads", 1, MAX_TOKENS),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"{name} must be from {least} to {most}, got {value}")
        if self.cache not in CACHE_KINDS:
            raise ConfigError(f"cache must be one of {', '.join(CACHE_KINDS)}, got {self.cache!r}")
        if self.pins and self.at_once:
            raise ConfigError("pins cannot be with at_once, where caches lock nothing")
        if not 0.0 < self.speed < math.inf:
            raise ConfigError(f"speed must be a number above 0, got {self.speed}")
        if self.concurrency and self.speed != 1.0:
            raise ConfigError("speed cannot be with concurrency, where no request comes by the trace's times")
        if not 0.0 <= self.spill_weight <= MAX_SPILL_WEIGHT:
            raise ConfigError(f"spill_weight must be from 0 to {MAX_SPILL_WEIGHT:g}, got {self.spill_weight}")
        for name, milliseconds in self.objective._asdict().items():
            if not milliseconds > 0.0:
                raise ConfigError(f"objective: {name} must be milliseconds above 0, got {milliseconds}")
