"""Settings of a router: frozen, checked when made, never changed after; each field is one flag, as in ``config``."""

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

from prefixmesh.addresses import check_port, is_address
from prefixmesh.cache.namespace import Isolation
from prefixmesh.config import DEFAULT_MODEL
from prefixmesh.errors import ConfigError
from prefixmesh.state_url import FILE_STATE, MEMORY_STATE, check_state_url

OnOff = Literal["on", "off"]
RoutingPolicy = Literal[
    "cost", "round_robin", "random", "least_loaded", "power_of_two", "longest_match", "prefix_hash"
]

DEFAULT_SPILL_WEIGHT: Final = 1.85
"""λ of the router's cost (docs/router.md). From 1.8 to 1.9, 32 simultaneous requests with one new prefix of some 4,000 tokens settle on two
workers, neither of which gets more than 60 %, whatever the shape of the prefill's curve."""

MAX_SPILL_WEIGHT: Final = 1e6
"""A larger λ would say no more, and the largest floats make costs that are no numbers."""

DEFAULT_SLOW_START_S: Final = 10.0
"""How long a worker's life is young: it compiles, warms its memory and measures itself meanwhile."""

DEFAULT_MAX_WAIT_S: Final = 300.0
"""Longer than anybody waits before a screen. A batch job without a deadline is better told to come back than kept in a queue for longer."""

DEFAULT_HEAT_MAX_PREFIXES: Final = 32
"""More than that are rarely hotter than a worker can serve: an application has a few system prompts."""

DEFAULT_HEAT_MAX_TOKENS: Final = 262_144
"""Thirty-two system prompts of 8,192 tokens. Workers keep to their own budgets for pins besides."""

DEFAULT_STREAM_IDLE_S: Final = 60.0
"""A worker that is well needs milliseconds from token to token, and some seconds where a request was preempted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """One router."""

    workers: tuple[str, ...] = ()
    """Addresses (``host:port``) of the workers. None: those that ``state`` remembers, and whoever is added later."""

    model: str = DEFAULT_MODEL
    """The model that the workers serve; the router needs its tokenizer and chat template."""

    host: str = "127.0.0.1"
    port: int = 0
    policy: RoutingPolicy = "cost"
    """``cost`` weighs match against load in milliseconds; the others are there to compare with."""

    spill_weight: float = DEFAULT_SPILL_WEIGHT
    """λ of the cost: how much the work a choice adds for everyone else counts beside the request's own wait."""

    affinity_ms: float = 0.0
    """Milliseconds by which the worker of a session's last request is preferred where the cost hardly tells workers apart; 0: not at all."""

    slow_start_s: float = DEFAULT_SLOW_START_S
    """For so long a worker that joins is fed at a rate that grows (policy ``cost`` only); 0 lets the cost decide at once."""

    max_wait_s: float = DEFAULT_MAX_WAIT_S
    """A request that would wait longer for its worker to begin is refused at once, as is one that would end after its deadline; 0 refuses
    nobody for how long it would wait."""

    stream_idle_timeout_s: float = DEFAULT_STREAM_IDLE_S
    """A worker that says nothing for so long after an answer's first token has lost it: it is aborted there and goes on elsewhere; 0 waits
    for as long as the caller does. Before the first token a worker may be silent."""

    heat: OnOff = "on"
    """Whether prefixes and adapters that are asked for more than their holders can serve are replicated, for as long as they are."""

    heat_max_replicas: int = 0
    """Most workers that one of them is replicated to; 0: all, where it is that hot."""

    heat_max_prefixes: int = DEFAULT_HEAT_MAX_PREFIXES
    """Most hot prefixes at a time, and most hot adapters."""

    heat_max_tokens: int = DEFAULT_HEAT_MAX_TOKENS
    """Most tokens of all hot prefixes together."""

    block_size: int = 64
    """Tokens per block by which prompts are compared. Workers that name blocks of another size are refused."""

    max_tree_blocks: int = 1_000_000
    """Most blocks that are remembered of all workers' caches; what came first and was not asked for since leaves first."""

    answer_memory_bytes: int = 64 * 2**20
    """Most bytes of recent answers' token ids kept for multi-turn chats."""

    api_keys_file: str | None = None
    """File of hashed API keys; without one the router binds to loopback only."""

    isolation: Isolation = "tenant"

    state: str = MEMORY_STATE
    """Where workers that operators add, pins and adapters are remembered: ``memory://``, until this router ends, ``file://PATH``, or
    ``redis://HOST:PORT/DATABASE``, which several routers share."""

    history: str | None = None
    """File that what happens to every request is appended to, for ``prefixmesh history``; None keeps none."""

    record: str | None = None
    """File that requests are recorded in, as lengths and numbers, for ``prefixmesh replay``; None records none."""

    def __post_init__(self) -> None:
        check_port(self.port)
        check_state_url(self.state)
        if not self.workers and self.state == MEMORY_STATE:
            raise ConfigError(
                "workers must name at least one address (--worker HOST:PORT), or state what remembers some "
                f"(--state {FILE_STATE}PATH or redis://HOST:PORT/DATABASE)"
            )
        for address in self.workers:
            if not is_address(address):
                raise ConfigError(f"workers must be host:port each, got {address!r}")
        if (
            not 0 <= self.spill_weight <= MAX_SPILL_WEIGHT
        ):  # NaN, which compares false to everything, is refused too
            raise ConfigError(f"spill_weight must be from 0 to {MAX_SPILL_WEIGHT:g}, got {self.spill_weight}")
        if not 0 <= self.affinity_ms < math.inf:
            raise ConfigError(f"affinity_ms must be milliseconds from 0 on, got {self.affinity_ms}")
        if not 0 <= self.slow_start_s < math.inf:
            raise ConfigError(f"slow_start_s must be seconds from 0 on, got {self.slow_start_s}")
        for name in ("max_wait_s", "stream_idle_timeout_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be seconds from 0 on, got {getattr(self, name)}")
        if self.heat not in get_args(OnOff):
            raise ConfigError(f"heat must be on or off, got {self.heat!r}")
        if self.heat_max_replicas < 0:
            raise ConfigError(f"heat_max_replicas must be 0 (all) or more, got {self.heat_max_replicas}")
        counts = (
            "block_size",
            "max_tree_blocks",
            "answer_memory_bytes",
            "heat_max_prefixes",
            "heat_max_tokens",
        )
        for name in counts:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
