"""``python -m prefixmesh.sim.fake_worker``: a worker that is real but for its model, and does wrong when told.

It takes every flag of ``python -m prefixmesh.worker``, and serves the same gRPC services from the same front. A router takes it in as a
worker of the model that ``--model`` names: revision, tokenizer and chat template are read from its files, its weights are not, so it is
there within seconds and takes next to no memory. What it answers is gibberish, and known beforehand (``fake_model.expected_answer``).
"""

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from prefixmesh import paths
from prefixmesh.errors import PrefixmeshError
from prefixmesh.fleet_secret import FleetSecret, load_or_create
from prefixmesh.rpc.until_signal import run_until_signal
from prefixmesh.sim.fake_engine import ModelIdentity
from prefixmesh.sim.faulty_worker import FaultFile, FaultyEngine, FaultyWatchers, crash_when_told
from prefixmesh.sim.timing import QUICK, TimingModel
from prefixmesh.worker.__main__ import announce, worker_config_from
from prefixmesh.worker.__main__ import main as worker_command
from prefixmesh.worker.server import WorkerServer

TIMES: Final = tuple(TimingModel.__dataclass_fields__)
"""Each is a flag; ``TimingModel`` says what it means."""


def _time_flags() -> list[click.Parameter]:
    return [
        click.Option(
            [f"--{name.replace('_', '-')}"],
            type=float,
            default=getattr(QUICK, name),
            show_default=True,
            help="Milliseconds; see prefixmesh/sim/timing.py.",
        )
        for name in TIMES
    ]


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    params=[*worker_command.params, *_time_flags()],
)
@click.option(
    "--faults",
    "faults_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A JSON list of faults (prefixmesh/sim/faults.py), read again whenever it changes.",
)
def main(faults_file: Path | None, **options: Any) -> None:
    """Serve a timing model from this machine, over gRPC."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        timing = TimingModel(**{name: options[name] for name in TIMES})
        secret = load_or_create(options["fleet_secret_file"] or paths.fleet_secret_file())
        asyncio.run(_serve(options, secret, timing, FaultFile(faults_file)))
    except PrefixmeshError as error:
        raise click.ClickException(str(error)) from error


async def _serve(
    options: dict[str, Any], secret: FleetSecret, timing: TimingModel, faults: FaultFile
) -> None:
    config = worker_config_from(options)
    identity = await asyncio.to_thread(ModelIdentity.of_files, config.engine.model)
    engine = FaultyEngine(config.engine, identity, timing, faults)
    server = WorkerServer(config, secret, engine=engine, make_watchers=partial(FaultyWatchers, faults))
    crashing = asyncio.create_task(crash_when_told(faults))
    try:
        await run_until_signal(server, announce, options["grace_s"])
    finally:
        crashing.cancel()


if __name__ == "__main__":
    main(prog_name="python -m prefixmesh.sim.fake_worker")
