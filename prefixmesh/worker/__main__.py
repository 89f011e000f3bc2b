"""``python -m prefixmesh.worker``: one worker on this machine, without Ray, until a signal ends it."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_args

import click

from prefixmesh import paths
from prefixmesh.cache.namespace import Isolation
from prefixmesh.config import WorkerConfig
from prefixmesh.errors import PrefixmeshError
from prefixmesh.fleet_secret import load_or_create
from prefixmesh.rpc.until_signal import DEFAULT_GRACE_S, run_until_signal
from prefixmesh.seconds_flag import Seconds
from prefixmesh.worker.options import engine_config_from, engine_options
from prefixmesh.worker.server import BoundWorker, WorkerServer

_DEFAULTS: Final = WorkerConfig()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--host", default=_DEFAULTS.host, show_default=True, help="Beyond loopback only tickets count.")
@click.option("--port", type=int, default=_DEFAULTS.port, show_default=True, help="0 takes a free port.")
@click.option(
    "--metrics-port",
    type=int,
    default=_DEFAULTS.metrics_port,
    help="Serve /metrics to this machine; 0 takes a free port.  [default: none]",
)
@click.option("--worker-id", default=_DEFAULTS.worker_id, show_default=True, help="Its name in the fleet.")
@engine_options
@click.option(
    "--isolation",
    type=click.Choice(get_args(Isolation)),
    default=_DEFAULTS.isolation,
    show_default=True,
    help="tenant keeps tenants' KV apart; shared makes all callers one trust domain.",
)
@click.option(
    "--tickets-only", is_flag=True, help="Serve only calls that come through a router of this fleet."
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
def main(**options: Any) -> None:
    """Serve a model from this machine, over gRPC."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        config = worker_config_from(options)
        secret = load_or_create(options["fleet_secret_file"] or paths.fleet_secret_file())
        asyncio.run(run_until_signal(WorkerServer(config, secret), announce, options["grace_s"]))
    except PrefixmeshError as error:
        raise click.ClickException(str(error)) from error


def worker_config_from(options: Mapping[str, Any]) -> WorkerConfig:
    """A worker's settings from this command's parsed values. Raises ConfigError."""
    return WorkerConfig(
        engine=engine_config_from(options),
        worker_id=options["worker_id"],
        host=options["host"],
        port=options["port"],
        metrics_port=options["metrics_port"],
        isolation=options["isolation"],
        tickets_only=options["tickets_only"],
    )


def announce(bound: BoundWorker) -> None:
    """What started this program reads it on stdout: a line, and one more where there are metrics."""
    click.echo(f"prefixmesh worker {bound.worker_id} listening on {bound.address}")
    if bound.metrics_url is not None:
        click.echo(f"prefixmesh worker {bound.worker_id} metrics on {bound.metrics_url}")


if __name__ == "__main__":
    main(prog_name="python -m prefixmesh.worker")
