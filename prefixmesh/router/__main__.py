"""``python -m prefixmesh.router``: one router on this machine, until a signal ends it."""

import asyncio
import logging
from pathlib import Path
from typing import Any, Final, get_args

import click

from prefixmesh import paths
from prefixmesh.cache.namespace import Isolation
from prefixmesh.errors import PrefixmeshError
from prefixmesh.fleet_secret import load_or_create
from prefixmesh.router.options import routing_options
from prefixmesh.router.server import BoundRouter, RouterServer
from prefixmesh.router_config import RouterConfig
from prefixmesh.rpc.until_signal import DEFAULT_GRACE_S, run_until_signal
from prefixmesh.seconds_flag import Seconds

_DEFAULTS: Final = RouterConfig(workers=("localhost:1",))  # any address: only the other fields are read


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--worker",
    "workers",
    multiple=True,
    metavar="HOST:PORT",
    help="A worker's address; once for each. Not needed with a --state that remembers some.",
)
@click.option(
    "--model", default=_DEFAULTS.model, show_default=True, help="What the workers serve: a name or a path."
)
@click.option(
    "--host", default=_DEFAULTS.host, show_default=True, help="Beyond loopback API keys are needed."
)
@click.option("--port", type=int, default=_DEFAULTS.port, show_default=True, help="0 takes a free port.")
@routing_options
@click.option(
    "--block-size",
    type=int,
    default=_DEFAULTS.block_size,
    show_default=True,
    help="Tokens per block, the same as the workers'.",
)
@click.option(
    "--max-tree-blocks",
    type=int,
    default=_DEFAULTS.max_tree_blocks,
    show_default=True,
    help="Most blocks remembered of all workers' caches.",
)
@click.option(
    "--answer-memory-bytes",
    type=int,
    default=_DEFAULTS.answer_memory_bytes,
    show_default=True,
    help="Most bytes of recent answers' token ids kept for chats.",
)
@click.option(
    "--api-keys-file",
    type=click.Path(dir_okay=False),
    help="Hashed API keys and their tenants; without it, loopback only.",
)
@click.option(
    "--isolation",
    type=click.Choice(get_args(Isolation)),
    default=_DEFAULTS.isolation,
    show_default=True,
    help="tenant keeps tenants' KV apart; shared makes all callers one trust domain.",
)
@click.option(
    "--state",
    default=_DEFAULTS.state,
    show_default=True,
    envvar="PREFIXMESH_STATE",
    show_envvar=True,
    metavar="memory://|file://PATH|redis://HOST:PORT/DB",
    help="Where workers that are added later are remembered. A URL with a password is better given by the environment: others see a command's arguments.",
)
@click.option(
    "--fleet-secret-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The fleet's secret, made when missing.  [default: fleet_secret in ~/.prefixmesh]",
)
@click.option(
    "--grace-s",
    type=Seconds(),
    default=DEFAULT_GRACE_S,
    show_default=True,
    help="Seconds that running answers may take to finish after SIGTERM or Ctrl-C.",
)
def main(fleet_secret_file: Path | None, grace_s: float, **settings: Any) -> None:
    """Send each request to the worker that will answer it soonest, over gRPC."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        config = RouterConfig(**settings)
        secret = load_or_create(fleet_secret_file or paths.fleet_secret_file())
        asyncio.run(run_until_signal(RouterServer(config, secret), _announce, grace_s))
    except PrefixmeshError as error:
        raise click.ClickException(str(error)) from error


def _announce(bound: BoundRouter) -> None:
    """The one line on stdout: what started this program reads it."""
    click.echo(f"prefixmesh router listening on {bound.address}")


if __name__ == "__main__":
    main(prog_name="python -m prefixmesh.router")
