"""``prefixmesh adapter``: load, list and unload LoRA adapters on every worker of a fleet."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from prefixmesh.cli.failure import BadRequest, one_line
from prefixmesh.cli.terminal import print_note
from prefixmesh.errors import InvalidRequestError, NotFoundError, UnavailableError

if TYPE_CHECKING:
    from prefixmesh.fleet_control import Outcome
    from prefixmesh.proto.v1.worker_control_pb2 import Adapter

_Command = TypeVar("_Command", bound=Callable[..., Any])

DEFAULT_TIMEOUT_S: Final = 120.0
"""A load reads all of an adapter's bytes, on every worker; an unload waits for the answers that use it."""

DIGEST_CHARS: Final = 12
"""Of a digest in tables: enough to see whether two are the same."""

_OPTIONS: Final = (
    click.option(
        "--worker",
        "workers",
        multiple=True,
        metavar="HOST:PORT",
        help="A worker's address; once for each.  [default: those of the fleet `up` started]",
    ),
    click.option(
        "--fleet-secret-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="The fleet's secret.  [default: fleet_secret in ~/.prefixmesh]",
    ),
    click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=DEFAULT_TIMEOUT_S,
        show_default=True,
        metavar="SECONDS",
        help="Longest wait for a worker.",
    ),
)


def _fleet_options(command: _Command) -> _Command:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.group()
def adapter() -> None:
    """Load, list and unload LoRA adapters on all workers of a fleet.

    Exit code: 0 when every worker did it, 2 when none did and the request is at fault, 1 otherwise.
    """


@adapter.command(short_help="Load an adapter on all workers.")
@click.argument("name")
@click.argument("path")
@click.option("--pin", is_flag=True, help="Keep its weights in the device's memory.")
@_fleet_options
def load(*, name: str, path: str, pin: bool, **values: Any) -> None:
    """Make the adapter in the folder PATH, relative to the workers' --adapter-root, known as NAME.

    Under a name that is known already it replaces the other one: new requests get the new weights, running ones keep theirs.
    """
    from prefixmesh.proto.v1 import worker_control_pb2 as pb

    async def call(stub: Any, settings: Any) -> "Adapter":
        request = pb.LoadAdapterRequest(name=name, path=path, pinned=pin)
        answer: pb.LoadAdapterResponse = await stub.LoadAdapter(request, **settings)
        return answer.adapter

    outcomes = _call_workers(call, values)
    for outcome in outcomes:
        if outcome.answer is not None:
            click.echo(f"{one_line(outcome.worker_id)}  loaded {describe(outcome.answer)}")
    _end(outcomes)


@adapter.command(short_help="Forget an adapter on all workers.")
@click.argument("name")
@_fleet_options
def unload(*, name: str, **values: Any) -> None:
    """Forget the adapter NAME: new requests for it are refused at once, and the command waits until the running ones have ended.

    When --timeout passes before that, the adapter leaves all the same.
    """
    from prefixmesh.proto.v1 import worker_control_pb2 as pb

    async def call(stub: Any, settings: Any) -> bool:
        await stub.UnloadAdapter(pb.UnloadAdapterRequest(name=name), **settings)
        return True

    outcomes = _call_workers(call, values)
    for outcome in outcomes:
        if outcome.answer is not None:
            click.echo(f"{one_line(outcome.worker_id)}  unloaded {one_line(name)}")
    _end(outcomes)


@adapter.command(name="list", short_help="List the adapters of all workers.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_fleet_options
def list_(*, as_json: bool, **values: Any) -> None:
    """List the adapters that requests may name, worker by worker, and where their weights are."""
    from prefixmesh.proto.v1 import worker_control_pb2 as pb

    async def call(stub: Any, settings: Any) -> "Sequence[Adapter]":
        answer: pb.ListAdaptersResponse = await stub.ListAdapters(pb.ListAdaptersRequest(), **settings)
        return answer.adapters

    outcomes = _call_workers(call, values)
    if as_json:
        click.echo(json.dumps({"workers": [as_dict(outcome) for outcome in outcomes]}, indent=2))
    else:
        _print_table(outcomes)
    for name in names_that_differ(outcomes):
        print_note(f"{one_line(name)} is not the same on all workers; load it again to make it so")
    _end(outcomes)


def describe(one: "Adapter") -> str:
    """An adapter in one line."""
    state = "pinned" if one.pinned else "resident" if one.resident else "on disk"
    size = f"{one.size_bytes / 1e6:.1f} MB"
    return f"{one_line(one.name)}  {one.digest[:DIGEST_CHARS]}  rank {one.rank}  {size}  {state}"


def as_dict(outcome: "Outcome[Sequence[Adapter]]") -> dict[str, Any]:
    """A worker's adapters for ``--json``: plain values."""
    fields = ("name", "digest", "rank", "size_bytes", "resident", "pinned", "running_requests")
    return {
        "worker_id": outcome.worker_id,
        "address": outcome.address,
        "error": None if outcome.error is None else str(outcome.error),
        "adapters": [{field: getattr(one, field) for field in fields} for one in outcome.answer or ()],
    }


def names_that_differ(outcomes: "Sequence[Outcome[Sequence[Adapter]]]") -> list[str]:
    """Names that mean one content on one worker and another, or none, on another; sorted. Workers that did not answer do not count."""
    answered = [
        {one.name: one.digest for one in outcome.answer} for outcome in outcomes if outcome.answer is not None
    ]
    names = {name for worker in answered for name in worker}
    return sorted(name for name in names if len({worker.get(name) for worker in answered}) > 1)


def _print_table(outcomes: "Sequence[Outcome[Sequence[Adapter]]]") -> None:
    rows = [
        f"{one_line(outcome.worker_id)}  {describe(one)}  {one.running_requests} running"
        for outcome in outcomes
        for one in outcome.answer or ()
    ]
    if rows or any(outcome.error for outcome in outcomes):
        click.echo("".join(f"{row}\n" for row in rows), nl=False)
    else:
        click.echo("No adapter is loaded.")


def _call_workers(call: Any, values: dict[str, Any]) -> "list[Outcome[Any]]":
    from prefixmesh import fleet_secret, fleet_state, paths
    from prefixmesh.fleet.hold import find_fleet
    from prefixmesh.fleet_control import call_workers

    workers = {address: address for address in values["workers"]}
    if not workers:
        if find_fleet() is None:
            raise NotFoundError(
                "no fleet is up; start one with: prefixmesh up, or name workers with --worker"
            )
        workers = dict(fleet_state.load().workers)
    secret = fleet_secret.load_or_create(values["fleet_secret_file"] or paths.fleet_secret_file())
    return asyncio.run(call_workers(workers, secret, call, values["timeout"]))


def _end(outcomes: "Sequence[Outcome[Any]]") -> None:
    """Tell what failed, each worker in a line, and end the command accordingly."""
    failed = [(outcome, outcome.error) for outcome in outcomes if outcome.error is not None]
    if not failed:
        return
    for outcome, error in failed:
        click.echo(f"{one_line(outcome.worker_id)}  failed: {one_line(_problem(outcome, error))}", err=True)
    message = f"{len(failed)} of {len(outcomes)} workers failed"
    everywhere = len(failed) == len(outcomes)
    if everywhere and all(isinstance(error, InvalidRequestError) for _, error in failed):
        raise BadRequest(message)
    raise click.ClickException(message)


def _problem(outcome: "Outcome[Any]", error: Exception) -> str:
    if isinstance(error, UnavailableError):
        return f"{outcome.address} does not answer ({error})"
    return str(error)
