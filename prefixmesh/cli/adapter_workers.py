"""``prefixmesh adapter`` at workers themselves, without a router: each does at once what it is told, and nobody remembers it."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from prefixmesh.cli.failure import BadRequest, one_line
from prefixmesh.cli.terminal import print_note
from prefixmesh.errors import InvalidRequestError, UnavailableError

if TYPE_CHECKING:
    from prefixmesh.fleet_control import Outcome
    from prefixmesh.proto.v1.worker_control_pb2 import Adapter

DIGEST_CHARS: Final = 12
"""Of a digest for people: enough to see whether two are the same."""

NOT_REMEMBERED: Final = "this is the workers' own for as long as they live: the fleet's router does not remember it, and gives it to no other"


def load_at_workers(values: Mapping[str, Any], name: str, path: str, *, pinned: bool) -> None:
    """Have each of the workers that are named load an adapter."""
    from prefixmesh.proto.v1 import worker_control_pb2 as pb

    async def call(stub: Any, settings: Any) -> "Adapter":
        request = pb.LoadAdapterRequest(name=name, path=path, pinned=pinned)
        answer: pb.LoadAdapterResponse = await stub.LoadAdapter(request, **settings)
        return answer.adapter

    outcomes = _call_workers(call, values)
    for outcome in outcomes:
        if outcome.answer is not None:
            click.echo(f"{one_line(outcome.worker_id)}  loaded {describe(outcome.answer)}")
    print_note(NOT_REMEMBERED)
    _end(outcomes)


def unload_at_workers(values: Mapping[str, Any], name: str) -> None:
    """Have each of them forget a name; waits for the answers that use it."""
    from prefixmesh.proto.v1 import worker_control_pb2 as pb

    async def call(stub: Any, settings: Any) -> bool:
        await stub.UnloadAdapter(pb.UnloadAdapterRequest(name=name), **settings)
        return True

    outcomes = _call_workers(call, values)
    for outcome in outcomes:
        if outcome.answer is not None:
            click.echo(f"{one_line(outcome.worker_id)}  unloaded {one_line(name)}")
    _end(outcomes)


def list_at_workers(values: Mapping[str, Any], *, as_json: bool) -> None:
    """What each of them has, and where the weights are."""
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


def _call_workers(call: Any, values: Mapping[str, Any]) -> "list[Outcome[Any]]":
    from prefixmesh import fleet_secret, paths
    from prefixmesh.fleet_control import call_workers

    workers = {address: address for address in values["workers"]}
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
