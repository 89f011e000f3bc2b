"""``prefixmesh workers``: the workers of a router: which there are, how much is known of them, and what operators do with them."""

import json
from typing import TYPE_CHECKING, Any, Final

import click

from prefixmesh.cli.options import connection_options
from prefixmesh.cli.router_calls import all_pins, open_router
from prefixmesh.cli.status import copied, copies_as_dict
from prefixmesh.cli.tables import print_table
from prefixmesh.seconds_flag import Seconds

if TYPE_CHECKING:
    from prefixmesh.proto.v1.router_pb2 import WorkerView

DEFAULT_GRACE_S: Final = 30.0
"""How long a drain waits for answers that run."""

_MS: Final = 1000


@click.group()
def workers() -> None:
    """List, add, remove, drain and flush the workers of a router. Needs an administrator's key where the router asks for keys."""


@workers.command(name="list", short_help="Show the workers, their load and what is known of their caches.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@connection_options
def list_(*, as_json: bool, **values: Any) -> None:
    """Show every worker as the router sees it now.

    Trust says how far the router believes its view of a worker's cache. The errors are of its predictions: the mean of what came true
    less what was predicted, and after +- the mean of the difference's size.
    """
    from prefixmesh.cli.pin_text import held_at, pins_line
    from prefixmesh.proto.v1 import router_pb2 as pb

    with open_router(values) as call:
        views = call("ListWorkers", pb.ListWorkersRequest()).workers
        pins = all_pins(call) or []
    held = held_at(pins)
    if as_json:
        told = [as_dict(view) | {"pins_held": held[view.address]} for view in views]
        click.echo(json.dumps({"workers": told}, indent=2))
        return
    print_table(
        (
            "worker", "address", "trust", "here", "running", "queued", "work ms", "blocks", "pins", "copied tokens",
            "routed", "resyncs", "cached off by", "first token ms off by", "state",
        ),
        [_row(view, held[view.address]) for view in views],
        texts=3,
    )  # fmt: skip
    if pins:
        click.echo(pins_line(pins))


@workers.command(short_help="Follow a worker from now on.")
@click.argument("worker", metavar="HOST:PORT")
@connection_options
def add(*, worker: str, **values: Any) -> None:
    """Have the router follow the worker at HOST:PORT. It need not be there yet, and comes back with a router whose state is in a file.

    Each worker needs a --worker-id of its own. `prefixmesh workers list` shows under state why one is not used.
    """
    from prefixmesh.proto.v1 import router_pb2 as pb

    with open_router(values) as call:
        answer = call("AddWorker", pb.AddWorkerRequest(address=worker))
    click.echo(f"added {worker}" if answer.added else f"{worker} was known already")
    if answer.problem:
        click.echo(f"it is sent nothing yet: it {answer.problem}", err=True)


@workers.command(short_help="Forget a worker.")
@click.argument("worker", metavar="WORKER")
@connection_options
def remove(*, worker: str, **values: Any) -> None:
    """Send a worker, named by HOST:PORT or by its id, nothing more and forget it; its running answers end undisturbed."""
    from prefixmesh.proto.v1 import router_pb2 as pb

    with open_router(values) as call:
        answer = call("RemoveWorker", pb.RemoveWorkerRequest(address=worker))
    click.echo(f"removed {worker}" if answer.removed else f"{worker} was not known")


@workers.command(short_help="Have a worker take nothing new and finish what runs.")
@click.argument("worker", metavar="WORKER")
@click.option(
    "--grace",
    type=Seconds(),
    default=DEFAULT_GRACE_S,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait for running answers; 0 does not wait.",
)
@click.option(
    "--hand-over",
    type=Seconds(),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest time for bringing its pinned and most used prefixes to other workers before that.",
)
@click.option("--undo", is_flag=True, help="Let a drained worker take requests again.")
@connection_options
def drain(*, worker: str, grace: float, hand_over: float, undo: bool, **values: Any) -> None:
    """Have a worker, named by HOST:PORT or by its id, take nothing new, and wait until what runs there has ended.

    Exit code 1 when requests were still running after the grace: they run on, and the worker stays drained.
    """
    from prefixmesh.proto.v1 import router_pb2 as pb

    grace_ms = 0 if undo else round(grace * _MS)
    hand_over_ms = 0 if undo else round(hand_over * _MS)
    with open_router(values) as call:
        request = pb.DrainWorkerRequest(
            address=worker, grace_ms=grace_ms, undo=undo, hand_over_ms=hand_over_ms
        )
        answer = call("DrainWorker", request, more_time_s=(grace_ms + hand_over_ms) / _MS)
    if undo:
        click.echo(f"{worker} takes requests again")
    elif not answer.running_requests:
        click.echo(f"{worker} is drained")
    else:
        message = f"{worker} takes nothing new; {answer.running_requests} requests are still running"
        if grace_ms:
            raise click.ClickException(message)
        click.echo(message)


@workers.command(short_help="Have a worker empty its prefix cache.")
@click.argument("worker", metavar="WORKER")
@connection_options
def flush(*, worker: str, **values: Any) -> None:
    """Have a worker, named by HOST:PORT or by its id, empty its prefix cache. Running answers go on."""
    from prefixmesh.proto.v1 import router_pb2 as pb

    with open_router(values) as call:
        call("FlushWorker", pb.FlushWorkerRequest(address=worker))
    click.echo(f"flushed {worker}")


def as_dict(view: "WorkerView") -> dict[str, Any]:
    """A worker for ``--json``: plain values, milliseconds."""
    plain = (
        "worker_id", "address", "ready", "problem", "draining", "trust", "in_flight", "work_ms", "running_requests",
        "queued_requests", "uncached_tokens", "blocks", "host_blocks", "load_back_ms_per_token", "routed", "prompt_tokens",
        "cached_tokens", "cached_tokens_bias", "cached_tokens_error", "first_token_ms_bias", "first_token_ms_error", "ejected",
        "failures",
    )  # fmt: skip
    return {name: getattr(view, name) for name in plain} | {
        "resyncs": dict(view.resyncs),
        "adapters": list(view.adapters),
        "copies": copies_as_dict(view),
    }


def _row(view: "WorkerView", pins: int) -> tuple[str, ...]:
    state = "draining" if view.draining else "ready" if view.ready else view.problem or "not ready"
    if view.ready and view.failures:
        state += f", failing ({view.failures})"
    return (
        view.worker_id or "-",
        view.address,
        view.trust or "-",
        f"{view.in_flight}",
        f"{view.running_requests}",
        f"{view.queued_requests}",
        f"{view.work_ms:.0f}",
        f"{view.blocks}",
        f"{pins}",
        copied(view),
        f"{view.routed}",
        f"{sum(view.resyncs.values())}",
        f"{view.cached_tokens_bias:+.0f} +- {view.cached_tokens_error:.0f}",
        f"{view.first_token_ms_bias:+.0f} +- {view.first_token_ms_error:.0f}",
        state,
    )
