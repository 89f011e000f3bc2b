"""``prefixmesh adapter``: LoRA adapters of a fleet, put at its router, or at workers themselves."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from prefixmesh.cli.failure import BadRequest, one_line
from prefixmesh.errors import NotFoundError

if TYPE_CHECKING:
    from prefixmesh.cli.router_calls import RouterCalls
    from prefixmesh.proto.v1.router_pb2 import FleetAdapter

_Command = TypeVar("_Command", bound=Callable[..., Any])

DEFAULT_TIMEOUT_S: Final = 120.0
"""A load reads all of an adapter's bytes, on every worker; an unload at a worker waits for the answers that use it."""

_OPTIONS: Final = (
    click.option(
        "--router",
        "--address",
        "address",
        metavar="HOST:PORT",
        help="The fleet's router. [default: that of the fleet `up` started]",
    ),
    click.option(
        "--api-key",
        envvar="PREFIXMESH_API_KEY",
        show_envvar=True,
        help="An administrator's; better given by the environment: others see a command's arguments.",
    ),
    click.option("--tenant", help="Who is calling, in ASCII; believed only by servers without API keys."),
    click.option(
        "--worker",
        "workers",
        multiple=True,
        metavar="HOST:PORT",
        help="Instead of the router a worker itself; once for each. Nobody remembers that: it lasts for the worker's life.",
    ),
    click.option(
        "--fleet-secret-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="With --worker: the fleet's secret.  [default: fleet_secret in ~/.prefixmesh]",
    ),
    click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=DEFAULT_TIMEOUT_S,
        show_default=True,
        metavar="SECONDS",
        help="Longest wait for the workers.",
    ),
)
_wait_option = click.option(
    "--wait/--no-wait", default=True, show_default=True, help="Wait until all ready workers have done it."
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def _fleet_options(command: _Command) -> _Command:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.group()
def adapter() -> None:
    """Load, list and unload LoRA adapters on all workers of a fleet, those that join or restart later too.

    Exit code: 0 when every ready worker did it, 2 when none did and the request is at fault, 1 otherwise.
    """


@adapter.command(short_help="Load an adapter on all workers.")
@click.argument("name")
@click.argument("path")
@click.option("--pin", is_flag=True, help="Keep its weights in the device's memory.")
@_wait_option
@_json_option
@_fleet_options
def load(*, name: str, path: str, pin: bool, wait: bool, as_json: bool, **values: Any) -> None:
    """Make the adapter in the folder PATH, relative to the workers' --adapter-root, known as NAME.

    The fleet's router remembers it, and has every worker load it. Under a name that is known already it replaces the other one, on a few
    workers at a time: new requests get the new weights, running ones keep theirs. Load it again when its files have changed.
    """
    from prefixmesh.cli.adapter_text import adapter_as_dict, progress
    from prefixmesh.cli.adapter_wait import wait_until_loaded
    from prefixmesh.cli.adapter_workers import load_at_workers
    from prefixmesh.cli.router_calls import open_router
    from prefixmesh.proto.v1 import router_pb2 as pb

    if _is_direct(values, as_json=as_json, wait=wait):
        load_at_workers(values, name, path, pinned=pin)
        return
    spec = pb.AdapterSpec(name=name, path=path, pinned=pin)
    with open_router(_for_router(values)) as call:
        put = seen = call("PutAdapter", pb.PutAdapterRequest(spec=spec)).adapter
        if wait:
            seen = wait_until_loaded(call, put, values["timeout"])
    if as_json:
        click.echo(json.dumps(adapter_as_dict(seen), indent=2))
    else:
        click.echo(progress(seen))
    if wait:
        _check_loaded(put, seen, values["timeout"])


@adapter.command(short_help="Forget an adapter on all workers.")
@click.argument("name")
@_wait_option
@_json_option
@_fleet_options
def unload(*, name: str, wait: bool, as_json: bool, **values: Any) -> None:
    """Forget the adapter NAME: new requests for it are refused at once, and running ones finish.

    Workers that are out of reach are told when they are back within a day. What workers were started with, and was never loaded at the
    router, is theirs; with --worker they can be told to forget that, too.
    """
    from prefixmesh.cli.adapter_text import told
    from prefixmesh.cli.adapter_wait import wait_until_forgotten
    from prefixmesh.cli.adapter_workers import unload_at_workers
    from prefixmesh.cli.router_calls import open_router
    from prefixmesh.proto.v1 import router_pb2 as pb

    if _is_direct(values, as_json=as_json, wait=wait):
        unload_at_workers(values, name)
        return
    with open_router(_for_router(values)) as call:
        if not call("RemoveAdapter", pb.RemoveAdapterRequest(name=name)).removed:
            raise NotFoundError(_not_remembered(call, name))
        left = wait_until_forgotten(call, name, values["timeout"]) if wait else None
    if as_json:
        click.echo(
            json.dumps({"removed": True, "left": [one.worker_id for one in left.workers] if left else []})
        )
    else:
        click.echo(f"unloaded {one_line(name)}" if left is None else told(left))
    if left is not None:
        raise click.ClickException(f"not all workers have forgotten it after {values['timeout']:g} s")


@adapter.command(name="list", short_help="List the adapters of the fleet.")
@_json_option
@_fleet_options
def list_(*, as_json: bool, **values: Any) -> None:
    """List the adapters that requests may name: which content each means, how many workers have it, and why others do not.

    With --worker: what each of these has, and where the weights are.
    """
    from prefixmesh.cli.adapter_text import adapters_as_dict, print_adapters
    from prefixmesh.cli.adapter_workers import list_at_workers
    from prefixmesh.cli.router_calls import open_router
    from prefixmesh.proto.v1 import router_pb2 as pb

    if _is_direct(values):
        list_at_workers(values, as_json=as_json)
        return
    with open_router(_for_router(values)) as call:
        answer = call("ListAdapters", pb.ListFleetAdaptersRequest())
    if as_json:
        click.echo(json.dumps(adapters_as_dict(answer), indent=2))
    else:
        print_adapters(answer)


def _is_direct(values: Mapping[str, Any], *, as_json: bool = False, wait: bool = True) -> bool:
    """Whether workers are named and not the router. Refuses what would be left out of account: ``as_json`` and ``wait`` of those commands that
    have no such thing at workers."""
    if values["workers"] and (as_json or not wait):
        raise click.UsageError(f"{'--json' if as_json else '--no-wait'} does not go with --worker here.")
    if values["workers"] and values["address"] is not None:
        raise click.UsageError("Give one of --router and --worker.")
    if values["fleet_secret_file"] is not None and not values["workers"]:
        raise click.UsageError(
            "--fleet-secret-file goes with --worker; a router takes an administrator's --api-key."
        )
    return bool(values["workers"])


def _for_router(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same for calls to a router, which answers at once however long the workers take."""
    return {**values, "timeout": None}


def _check_loaded(put: "FleetAdapter", seen: "FleetAdapter", wait_s: float) -> None:
    """End the command as what became of it asks for: each worker that lacks it in a line, and an exit code."""
    from prefixmesh.cli.adapter_text import LACKING, named
    from prefixmesh.cli.adapter_wait import is_another, is_loaded, is_refused

    if is_another(put, seen):
        raise click.ClickException(
            f"{one_line(put.spec.name)} was changed or unloaded by somebody else meanwhile"
        )
    if is_loaded(seen):
        return
    if not seen.wanted:
        raise click.ClickException(
            f"no worker is ready after {wait_s:g} s; those that come will load it, unless it is unloaded"
        )
    for one in seen.workers:
        if one.state in LACKING:
            problem = f"{one.state}: {one_line(one.problem)}" if one.problem else one.state
            click.echo(f"{one_line(named(one))}  {problem}", err=True)
    lacking = seen.wanted - seen.held
    undone = f"{one_line(seen.kept.path)} is loaded again" if seen.kept_generation else "it is unloaded"
    message = f"{lacking} of {seen.wanted} workers lack it; it is tried again, unless {undone}"
    raise BadRequest(message) if is_refused(seen) and not seen.held else click.ClickException(message)


def _not_remembered(call: "RouterCalls", name: str) -> str:
    from prefixmesh.cli.adapter_text import named
    from prefixmesh.cli.adapter_wait import ask

    seen = ask(call, name)
    if seen is None or not seen.workers:
        return f"no adapter {name!r} is loaded here"
    owners = ", ".join(sorted(named(one) for one in seen.workers))
    return f"the adapter {name!r} was not loaded at the router; {owners} has it as its own, and forgets it with --worker"
