"""What heat may do, at most. Frozen; checked where it comes in (``RouterConfig``)."""

from dataclasses import dataclass

from prefixmesh.router_config import DEFAULT_HEAT_MAX_PREFIXES, DEFAULT_HEAT_MAX_TOKENS


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatConfig:
    """Of one router."""

    enabled: bool = True
    max_replicas: int = 0
    """Most workers that a hot prefix or adapter is wished on; 0: all."""

    max_prefixes: int = DEFAULT_HEAT_MAX_PREFIXES
    """Most hot prefixes at a time, and most hot adapters: each is pins on some workers."""

    max_tokens: int = DEFAULT_HEAT_MAX_TOKENS
    """Of all hot prefixes together: what a worker that holds all of them gives up of its cache."""
