"""``prefixmesh up``: start a fleet on Ray and hold it."""

import logging
from typing import TYPE_CHECKING, Any, get_args

import click

from prefixmesh import paths
from prefixmesh.cache.namespace import Isolation
from prefixmesh.fleet.supervision import DEFAULT_MAX_RESTARTS
from prefixmesh.router.options import routing_from, routing_options
from prefixmesh.router_config import RouterConfig
from prefixmesh.rpc.until_signal import DEFAULT_GRACE_S
from prefixmesh.seconds_flag import Seconds
from prefixmesh.state_url import FILE_STATE
from prefixmesh.worker.options import engine_config_from, engine_options

if TYPE_CHECKING:
    from prefixmesh.fleet.plan import FleetRequest
    from prefixmesh.fleet_state import FleetState

_ROUTER = RouterConfig(workers=("unused:1",))


@click.command()
@click.option("--workers", type=click.IntRange(min=1), help="[default: one per GPU, or 2 without GPUs]")
@engine_options
@routing_options
@click.option(
    "--router-host", default=_ROUTER.host, show_default=True, help="Beyond loopback needs --api-keys-file."
)
@click.option("--router-port", type=int, default=_ROUTER.port, show_default=True, help="0 takes a free port.")
@click.option(
    "--metrics-port", type=int, help="Worker N serves /metrics to its own node, at this + N.  [default: none]"
)
@click.option(
    "--api-keys-file", type=click.Path(dir_okay=False), help="Who may call; see `prefixmesh keys new --help`."
)
@click.option(
    "--isolation",
    type=click.Choice(get_args(Isolation)),
    default="tenant",
    show_default=True,
    help="tenant keeps tenants' KV apart; shared makes all callers one trust domain.",
)
@click.option(
    "--state",
    envvar="PREFIXMESH_STATE",
    show_envvar=True,
    metavar="memory://|file://PATH|redis://HOST:PORT/DB",
    help="Where the router remembers workers that are added later, pins and adapters. A URL with a password is better given by the environment: others see a command's arguments.  [default: router_state.json in ~/.prefixmesh]",
)
@click.option(
    "--address",
    metavar="auto|HOST:PORT|ray://HOST:PORT",
    help="Join this Ray cluster.  [default: start a local Ray that ends with the fleet]",
)
@click.option("--detach", is_flag=True, help="Return when the fleet is up and leave it in the background.")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=DEFAULT_MAX_RESTARTS,
    show_default=True,
    help="Give a worker or the router up after so many restarts in a row; one that served for a minute begins anew.",
)
@click.option(
    "--standby-router/--no-standby-router",
    default=True,
    show_default=True,
    help="Keep a router's process ready that serves within a second when the router dies.",
)
@click.option(
    "--revive",
    is_flag=True,
    help="Start nothing: have the fleet that is up try again what it gave up; `prefixmesh status` shows what becomes of it.",
)
@click.option(
    "--start-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait for a worker to find room and load its model.",
)
@click.option(
    "--grace",
    type=Seconds(),
    default=DEFAULT_GRACE_S,
    show_default=True,
    metavar="SECONDS",
    help="How long running answers may take to finish when the fleet stops.",
)
def up(grace: float, *, detach: bool, revive: bool, **options: Any) -> None:
    """Start workers and a router, and hold them until Ctrl-C or `prefixmesh down`. What dies meanwhile is started again.

    The workers of one machine without GPUs divide its cores and --mem-fraction-static among them.
    """
    from prefixmesh import fleet_state
    from prefixmesh.cli.progress import FleetProgress
    from prefixmesh.fleet.control import revive_fleet
    from prefixmesh.fleet.detached import start_detached
    from prefixmesh.fleet.keeper import keep_fleet

    if revive:
        revive_fleet()
        return
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    request = _request(options)
    with FleetProgress() as progress:
        if detach:
            start_detached(request, progress, grace)
            click.echo(describe_fleet(fleet_state.load(), is_detached=True))
        else:

            def report(event: Any) -> None:
                progress(event)
                if event.kind == "fleet_ready":
                    click.echo(describe_fleet(fleet_state.load(), is_detached=False))

            keep_fleet(request, report, grace)


def _request(options: dict[str, Any]) -> "FleetRequest":
    from prefixmesh.fleet.plan import FleetRequest

    return FleetRequest(
        engine=engine_config_from(options),
        workers=options["workers"],
        routing=RouterConfig(workers=_ROUTER.workers, **routing_from(options)),
        router_host=options["router_host"],
        router_port=options["router_port"],
        metrics_port=options["metrics_port"],
        api_keys_file=options["api_keys_file"],
        state=options["state"] or FILE_STATE + _state_file(options["address"]),
        isolation=options["isolation"],
        address=options["address"],
        start_timeout_s=options["start_timeout"],
        max_restarts=options["max_restarts"],
        standby_router=options["standby_router"],
    )


def _state_file(ray_address: str | None) -> str:
    """Where the router remembers: with this user's other files; through Ray's client, with those of the head's user."""
    if ray_address is not None and ray_address.startswith("ray://"):
        return "~/.prefixmesh/router_state.json"
    return str(paths.router_state_file().absolute())


def describe_fleet(state: "FleetState", *, is_detached: bool) -> str:
    """The endpoints and what to do next."""
    width = max(len(name) for name in ("router", *state.workers))
    lines = [f"{'router':{width}}  {state.router}"]
    lines += [f"{name:{width}}  {address}" for name, address in state.workers.items()]
    end = "prefixmesh down" if is_detached else "Ctrl-C"
    return "\n".join(["The fleet is up.", *lines, f"Talk to it: prefixmesh chat    Stop it: {end}"])
