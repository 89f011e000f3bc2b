"""``prefixmesh status``: the fleet and its workers, as the router sees them."""

import json
import sys
from typing import TYPE_CHECKING, Any, Final

import click

from prefixmesh.cli.failure import one_line
from prefixmesh.cli.options import connection_options
from prefixmesh.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefixmesh.fleet_state import FleetState
    from prefixmesh.proto.v1.router_pb2 import WorkerView

DEFAULT_TIMEOUT_S: Final = 10.0
"""The router answers from what it knows; longer means that nobody is there."""

PIPE_WIDTH: Final = 160
"""Where no terminal sets a width: addresses and problems stay on their line."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@connection_options
def status(*, as_json: bool, **values: Any) -> None:
    """Show the fleet and its workers; exit code 1 when none is up."""
    from prefixmesh import fleet_state
    from prefixmesh.client.target import make_target
    from prefixmesh.fleet.hold import find_holder

    state: FleetState | None = None
    if values["address"] is None:
        if find_holder() is None:
            raise NotFoundError("no fleet is up; start one with: prefixmesh up")
        state = fleet_state.load()
    target = make_target(
        values["address"] or (state.router if state else None),
        values["api_key"],
        values["tenant"],
        values["timeout"] or DEFAULT_TIMEOUT_S,
    )
    workers = _list_workers(target)
    if as_json:
        click.echo(json.dumps(as_dict(target.address, state, workers), indent=2))
    else:
        _print_table(target.address, state, workers)


def _list_workers(target: Any) -> "Sequence[WorkerView]":
    import grpc

    from prefixmesh.proto.v1 import router_pb2, router_pb2_grpc
    from prefixmesh.rpc.channel import open_sync_channel

    make_stub: Any = router_pb2_grpc.RouterStub
    with open_sync_channel(target.address) as channel:
        try:
            response: router_pb2.ListWorkersResponse = make_stub(channel).ListWorkers(
                router_pb2.ListWorkersRequest(), timeout=target.timeout_s(None), metadata=target.metadata
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise NotFoundError(
                    f"{target.address} is not a router, and only a router knows the fleet"
                ) from error
            raise target.error(error) from error
    return response.workers


def as_dict(router: str, state: "FleetState | None", workers: "Sequence[WorkerView]") -> dict[str, Any]:
    """The fleet for ``--json``: plain values."""
    return {
        "router": router,
        "model": state.model if state else None,
        "ray_address": state.ray_address if state else None,
        "pid": state.pid if state else None,
        "workers": [
            {
                "worker_id": worker.worker_id,
                "address": worker.address,
                "ready": worker.ready,
                "problem": worker.problem,
                "in_flight": worker.in_flight,
                "work_ms": round(worker.work_ms, 1),
                "blocks": worker.blocks,
                "routed": worker.routed,
                "prompt_tokens": worker.prompt_tokens,
                "cached_tokens": worker.cached_tokens,
                "adapters": list(worker.adapters),
                "cache": cache_as_dict(worker),
            }
            for worker in workers
        ],
    }


def cache_as_dict(worker: "WorkerView") -> dict[str, Any] | None:
    """What the worker itself has counted, of all its callers: hits by tier, misses by cause; None when it has told nothing."""
    from prefixmesh.proto.cache_counts import decode_cache_counts

    if not worker.HasField("cache"):
        return None
    row = decode_cache_counts(worker.cache)
    return {
        "requests": row.requests,
        "prompt_tokens": row.prompt_tokens,
        "hit_tokens": row.hit_tokens._asdict(),
        "miss_tokens": row.miss_tokens._asdict(),
        "cache_hit_rate": row.cache_hit_rate(),
    }


def hit_share(worker: "WorkerView") -> str:
    """Share of prompt tokens that were cached, for people: of all the worker was asked for, by its own count; where it does not
    tell, of what this router has sent there."""
    cache = cache_as_dict(worker)
    if cache is not None:
        rate = cache["cache_hit_rate"]
    else:
        rate = worker.cached_tokens / worker.prompt_tokens if worker.prompt_tokens else None
    return "-" if rate is None else f"{rate:.0%}"


def _print_table(router: str, state: "FleetState | None", workers: "Sequence[WorkerView]") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    click.echo(f"router {router}" + (f" · model {one_line(state.model)}" if state else ""))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("worker", no_wrap=True)
    table.add_column("address", no_wrap=True)
    table.add_column("state", overflow="fold")
    for name in ("in flight", "work ms", "requests", "blocks", "cached"):
        table.add_column(name, justify="right", no_wrap=True)
    has_adapters = any(worker.adapters for worker in workers)
    if has_adapters:
        table.add_column("adapters", overflow="fold")
    for worker in workers:
        condition = (
            Text("ready", "green") if worker.ready else Text(one_line(worker.problem) or "not ready", "red")
        )
        table.add_row(
            Text(one_line(worker.worker_id)),
            Text(one_line(worker.address)),
            condition,
            f"{worker.in_flight}",
            f"{worker.work_ms:.0f}",
            f"{worker.routed}",
            f"{worker.blocks}",
            hit_share(worker),
            *([Text(one_line(", ".join(worker.adapters)))] if has_adapters else []),
        )
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)
