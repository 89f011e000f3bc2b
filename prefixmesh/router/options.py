"""The flags that say how a router decides, in one place for every command that starts one.

Each flag is one field of ``RouterConfig`` and carries its default. Where a router listens, whom it serves and what it remembers is the
command's own matter.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, get_args

import click

from prefixmesh.router_config import OnOff, RouterConfig, RoutingPolicy

_Command = TypeVar("_Command", bound=Callable[..., Any])
_DEFAULTS: Final = RouterConfig(workers=("unused:1",))

_OPTIONS: Final = (
    click.option(
        "--policy",
        type=click.Choice(get_args(RoutingPolicy)),
        default=_DEFAULTS.policy,
        show_default=True,
        help="How a worker is chosen; the others are there to compare cost with.",
    ),
    click.option(
        "--spill-weight",
        type=float,
        default=_DEFAULTS.spill_weight,
        show_default=True,
        help="How much work added for others counts beside a request's own wait.",
    ),
    click.option(
        "--affinity-ms",
        type=float,
        default=_DEFAULTS.affinity_ms,
        show_default=True,
        help="Prefer the worker of a session's last request by so much, among workers that differ little.",
    ),
    click.option(
        "--slow-start-s",
        type=float,
        default=_DEFAULTS.slow_start_s,
        show_default=True,
        help="Seconds in which a worker that joins is fed at a growing rate; 0 switches that off.",
    ),
    click.option(
        "--max-wait-s",
        type=float,
        default=_DEFAULTS.max_wait_s,
        show_default=True,
        help="Refuse at once who would wait longer, or end after its deadline; 0 refuses nobody for that.",
    ),
    click.option(
        "--stream-idle-timeout-s",
        type=float,
        default=_DEFAULTS.stream_idle_timeout_s,
        show_default=True,
        help="Seconds of silence between tokens after which an answer goes on at another worker; 0 waits on.",
    ),
    click.option(
        "--heat",
        type=click.Choice(get_args(OnOff)),
        default=_DEFAULTS.heat,
        show_default=True,
        help="Replicate prefixes and adapters that are asked for more than their holders can serve.",
    ),
    click.option(
        "--heat-max-replicas",
        type=int,
        default=_DEFAULTS.heat_max_replicas,
        show_default=True,
        help="Most workers that one of them is replicated to; 0: all, where it is that hot.",
    ),
    click.option(
        "--heat-max-prefixes",
        type=int,
        default=_DEFAULTS.heat_max_prefixes,
        show_default=True,
        help="Most hot prefixes at a time, and most hot adapters.",
    ),
    click.option(
        "--heat-max-tokens",
        type=int,
        default=_DEFAULTS.heat_max_tokens,
        show_default=True,
        help="Most tokens of all hot prefixes together.",
    ),
    click.option(
        "--history",
        type=click.Path(dir_okay=False),
        help="Append what happens to each request to this file, for `prefixmesh history`.  [default: none]",
    ),
    click.option(
        "--record",
        type=click.Path(dir_okay=False),
        help="Record requests in this file for `prefixmesh replay`: when each came, lengths, numbers of blocks, no prompts. Taken already: "
        "FILE-1 and so on. Direct clients' are not seen.  [default: none]",
    ),
)

ROUTING_FIELDS: Final = (
    "policy",
    "spill_weight",
    "affinity_ms",
    "slow_start_s",
    "max_wait_s",
    "stream_idle_timeout_s",
    "heat",
    "heat_max_replicas",
    "heat_max_prefixes",
    "heat_max_tokens",
    "history",
    "record",
)
"""The fields of ``RouterConfig`` that ``routing_options`` sets."""


def routing_options(command: _Command) -> _Command:
    """Decorate a click command with these flags."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def routing_from(options: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a command's options that ``routing_options`` added, as fields of ``RouterConfig``."""
    return {name: options[name] for name in ROUTING_FIELDS}
