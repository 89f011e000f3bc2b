"""``prefixmesh status``: the fleet's parts as their supervisor sees them, and its workers as the router does."""

import json
import math
import sys
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import click

from prefixmesh.cli.failure import one_line
from prefixmesh.cli.options import connection_options
from prefixmesh.errors import NotFoundError, PrefixmeshError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from prefixmesh.fleet_state import FleetState, PartState
    from prefixmesh.proto.v1.router_pb2 import FleetAdapter, PinStatus, WorkerView

DEFAULT_TIMEOUT_S: Final = 10.0
"""The router answers from what it knows; longer means that nobody is there."""

_PHASE_STYLES: Final = {"serving": "green", "given_up": "red"}

ROUTER_SILENT: Final = "the router does not answer, so that what its workers do is not known"

PIPE_WIDTH: Final = 160
"""Where no terminal sets a width: addresses and problems stay on their line."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@connection_options
def status(*, as_json: bool, **values: Any) -> None:
    """Show the fleet, its workers, pins and adapters; exit code 1 when none is up."""
    from prefixmesh.cli.adapter_text import adapters_line
    from prefixmesh.cli.pin_text import pins_line
    from prefixmesh.client.target import make_target
    from prefixmesh.fleet.control import see_fleet

    state = see_fleet() if values["address"] is None else None
    target = make_target(
        values["address"] or (state.router if state else None),
        values["api_key"],
        values["tenant"],
        values["timeout"] or DEFAULT_TIMEOUT_S,
    )
    problem: PrefixmeshError | None = None
    workers: list[WorkerView] = []
    pins: list[PinStatus] | None = None
    adapters: list[FleetAdapter] | None = None
    try:
        workers, pins, adapters = _ask(target)
    except PrefixmeshError as error:
        if state is None:
            raise
        # The router may be one of the dead parts that are told of: then its address and how to start a fleet are no news.
        problem = UnavailableError(ROUTER_SILENT) if isinstance(error, UnavailableError) else error
    if as_json:
        click.echo(json.dumps(as_dict(target.address, state, workers, problem, pins, adapters), indent=2))
    else:
        click.echo(f"router {target.address}" + (f" · model {one_line(state.model)}" if state else ""))
        if state is not None and state.parts:
            print_parts(state.parts, time.time())
        if problem is None:
            print_workers(workers, pins or ())
        lines = filter(None, (pins_line(pins) if pins else "", adapters_line(adapters or ())))
        if told := "\n".join(lines):
            click.echo(f"\n{told}")
    if problem is not None:
        raise problem


def _ask(target: Any) -> "tuple[list[WorkerView], list[PinStatus] | None, list[FleetAdapter] | None]":
    """The workers, everybody's pins, and the adapters; None for what a router does not tell of."""
    from prefixmesh.cli.router_calls import RouterCalls, all_adapters, all_pins
    from prefixmesh.proto.v1 import router_pb2, router_pb2_grpc
    from prefixmesh.rpc.channel import open_sync_channel

    make_stub: Any = router_pb2_grpc.RouterStub
    with open_sync_channel(target.address) as channel:
        call = RouterCalls(make_stub(channel), target)
        try:
            answer: router_pb2.ListWorkersResponse = call("ListWorkers", router_pb2.ListWorkersRequest())
        except NotFoundError as error:
            raise NotFoundError(
                f"{target.address} is not a router, and only a router knows the fleet"
            ) from error
        return list(answer.workers), all_pins(call), all_adapters(call)


def as_dict(
    router: str,
    state: "FleetState | None",
    workers: "Sequence[WorkerView]",
    problem: PrefixmeshError | None = None,
    pins: "Sequence[PinStatus] | None" = None,
    adapters: "Sequence[FleetAdapter] | None" = None,
) -> dict[str, Any]:
    """The fleet for ``--json``: plain values. ``problem`` is why the router does not tell of its workers; ``pins`` and ``adapters`` None where
    it tells of none."""
    from prefixmesh.cli.adapter_text import summary_as_dict as adapters_summary
    from prefixmesh.cli.pin_text import held_at, summary_as_dict

    held = held_at(pins or ())
    return {
        "router": router,
        "model": state.model if state else None,
        "ray_address": state.ray_address if state else None,
        "pid": state.pid if state else None,
        "problem": str(problem) if problem else None,
        "pins": None if pins is None else summary_as_dict(pins),
        "adapters": None if adapters is None else adapters_summary(adapters),
        "parts": [_part_as_dict(part) for part in state.parts] if state else [],
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
                "host_tier": host_tier_as_dict(worker),
                "pins_held": held[worker.address],
                "copies": copies_as_dict(worker),
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
        "hit_rates": {
            tier: found / row.prompt_tokens if row.prompt_tokens else None
            for tier, found in row.hit_tokens._asdict().items()
        },
    }


def host_tier_as_dict(worker: "WorkerView") -> dict[str, Any] | None:
    """Its host tier: what fits, what is in use, how fast it is, and what moved; None when it has none."""
    if not worker.HasField("host_pool"):
        return None
    pool, page_size = worker.host_pool, worker.page_size
    return {
        "total_tokens": pool.total_pages * page_size,
        "used_tokens": (pool.total_pages - pool.free_pages) * page_size,
        "protected_tokens": pool.protected_pages * page_size,
        "blocks": worker.host_blocks,
        "load_back_ms_per_token": worker.load_back_ms_per_token,
        "moved": {field.name: getattr(worker.tiers, field.name) for field in worker.tiers.DESCRIPTOR.fields},
    }


def host_tier(worker: "WorkerView") -> str:
    """The same for people: its size, and how much of that is in use."""
    told = host_tier_as_dict(worker)
    if told is None or not told["total_tokens"]:
        return "-"
    return f"{told['used_tokens'] / told['total_tokens']:.0%} of {told['total_tokens']:,} tokens"


def copies_as_dict(worker: "WorkerView") -> dict[str, Any] | None:
    """KV that it has copied from other workers and given to them; None when it has told of none."""
    if not worker.HasField("copies"):
        return None
    counts = {field.name: getattr(worker.copies, field.name) for field in worker.copies.DESCRIPTOR.fields}
    return counts | {"copy_ms_per_token": worker.copy_ms_per_token}


def copied(worker: "WorkerView") -> str:
    """The same for people: tokens that came, and tokens that it gave."""
    if not worker.copies.copied_tokens and not worker.copies.given_tokens:
        return "-"
    return f"{worker.copies.copied_tokens:,} in, {worker.copies.given_tokens:,} out"


def tier_share(worker: "WorkerView", tier: str) -> str:
    """Share of all prompt tokens that were found on ``tier``, for people."""
    cache = cache_as_dict(worker)
    rate = None if cache is None else cache["hit_rates"][tier]
    return "-" if rate is None else f"{rate:.0%}"


def hit_share(worker: "WorkerView") -> str:
    """Share of prompt tokens that were cached, for people: of all the worker was asked for, by its own count; where it does not
    tell, of what this router has sent there."""
    cache = cache_as_dict(worker)
    if cache is not None:
        rate = cache["cache_hit_rate"]
    else:
        rate = worker.cached_tokens / worker.prompt_tokens if worker.prompt_tokens else None
    return "-" if rate is None else f"{rate:.0%}"


def _part_as_dict(part: "PartState") -> dict[str, Any]:
    return {
        "name": part.name,
        "kind": part.kind,
        "phase": part.phase,
        "life": part.life,
        "restarts": part.restarts,
        "since_unix_s": part.since_unix_s,
        "reason": part.reason,
        "address": part.address,
    }


def print_parts(parts: "Sequence[PartState]", now_unix_s: float) -> None:
    """What the supervisor sees of each part."""
    from rich.text import Text

    table = _make_table()
    table.add_column("part", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("life", "restarts", "since"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("last ended by", overflow="fold")
    for part in parts:
        table.add_row(
            Text(one_line(part.name)),
            Text(part.phase.replace("_", " "), _PHASE_STYLES.get(part.phase, "")),
            f"{part.life}",
            f"{part.restarts}",
            describe_age(now_unix_s - part.since_unix_s),
            Text(one_line(part.reason) or "-"),
        )
    _print(table)
    click.echo()


def describe_age(seconds: float) -> str:
    """How long something has lasted, for people: in its largest whole unit."""
    for unit, size_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size_s:
            return f"{seconds // size_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def describe_left(seconds: float) -> str:
    """How long something will yet last, for people: in two units, so that two hours are not one when a moment has gone."""
    left_s = max(0, math.ceil(seconds))
    for (unit, size_s), (smaller, smaller_s) in pairwise(
        (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
    ):
        if left_s >= size_s:
            rest = left_s % size_s // smaller_s
            return f"{left_s // size_s} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{left_s} s"


def print_workers(workers: "Sequence[WorkerView]", pins: "Sequence[PinStatus]" = ()) -> None:
    """What the router sees of each worker."""
    from rich.text import Text

    from prefixmesh.cli.pin_text import held_at

    table = _make_table()
    table.add_column("worker", no_wrap=True)
    table.add_column("address", no_wrap=True)
    table.add_column("state", overflow="fold")
    for name in ("in flight", "work ms", "requests", "blocks", "cached"):
        table.add_column(name, justify="right", no_wrap=True)
    has_host = any(worker.HasField("host_pool") for worker in workers)
    for name in ("from host", "from disk", "host tier") if has_host else ():
        table.add_column(name, justify="right", no_wrap=True)
    has_copies = any(copied(worker) != "-" for worker in workers)
    for name in ("pins",) * bool(pins) + ("copied tokens",) * has_copies:
        table.add_column(name, justify="right", no_wrap=True)
    held = held_at(pins)
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
            *(
                (tier_share(worker, "host"), tier_share(worker, "disk"), host_tier(worker))
                if has_host
                else ()
            ),
            *((f"{held[worker.address]}",) if pins else ()),
            *((copied(worker),) if has_copies else ()),
            *([Text(one_line(", ".join(worker.adapters)))] if has_adapters else []),
        )
    _print(table)


def _make_table() -> "Table":
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)


def _print(table: "Table") -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)
