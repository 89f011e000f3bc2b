"""Adapters of a fleet as commands show them: rows for tables, lines, plain values for ``--json``."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from prefixmesh.cli.failure import one_line
from prefixmesh.cli.tables import print_table

if TYPE_CHECKING:
    from prefixmesh.proto.v1.router_pb2 import AdapterAtWorker, FleetAdapter, ListFleetAdaptersResponse

DIGEST_CHARS: Final = 12
"""Of a digest for people: enough to see whether two are the same."""

SHOWN: Final = 3
"""Workers or names told of in one line; the others are counted."""

LACKING: Final = frozenset({"loading", "waiting", "failed", "refused"})
"""States of a worker that is ready and is yet to have it."""


def print_adapters(answer: "ListFleetAdaptersResponse") -> None:
    """A table of names; below it who acts, where that is another router."""
    if answer.adapters:
        columns = ("name", "path", "content", "version", "pinned", "loaded", "why")
        print_table(columns, [_row(one) for one in answer.adapters], texts=3)
    else:
        click.echo("No adapter is loaded.")
    if not answer.acting:
        click.echo("another router acts for the adapters; this one tells what it sees of them")


def told(adapter: "FleetAdapter") -> str:
    """How far an adapter is, and why it is no further, in one line."""
    return "; ".join(filter(None, (progress(adapter), why_not(adapter))))


def progress(adapter: "FleetAdapter") -> str:
    """How far an adapter is, in one line."""
    content = f" ({one_line(adapter.digest[:DIGEST_CHARS])})" if adapter.digest else ""
    if adapter.removed:
        return f"{one_line(adapter.spec.name)}: {_count(len(adapter.workers))} still to forget it"
    counts = f"{adapter.held} of {_count(adapter.wanted)} loaded version {adapter.generation}{content}"
    return "; ".join(filter(None, (f"{one_line(adapter.spec.name)}: {counts}", kept(adapter))))


def kept(adapter: "FleetAdapter") -> str:
    """What the name goes on to mean, where no worker has loaded its newest version yet; else empty."""
    if not adapter.kept_generation:
        return ""
    return f"version {adapter.kept_generation} ({one_line(adapter.kept.path)}) stays until one has"


def why_not(adapter: "FleetAdapter") -> str:
    """Why some workers lack it, or have not forgotten it, up to a few of them; empty where it is only a matter of time."""
    problems = [
        f"{one_line(named(one))} {one_line(one.problem)}"
        for one in adapter.workers
        if one.problem and one.state != "away"
    ]
    more = len(problems) - SHOWN
    return "; ".join(problems[:SHOWN]) + (f"; and {more} more" if more > 0 else "")


def named(one: "AdapterAtWorker") -> str:
    """A worker by its id, where it has told that."""
    return one.worker_id or one.address


def adapters_as_dict(answer: "ListFleetAdaptersResponse") -> dict[str, Any]:
    """A list of adapters for ``--json``."""
    return {"acting": answer.acting, "adapters": [adapter_as_dict(one) for one in answer.adapters]}


def adapter_as_dict(adapter: "FleetAdapter") -> dict[str, Any]:
    """An adapter for ``--json``: plain values. ``remembered`` is false for what workers have of their own."""
    return {
        "name": adapter.spec.name,
        "path": adapter.spec.path,
        "pinned": adapter.spec.pinned,
        "digest": adapter.digest,
        "generation": adapter.generation,
        "kept_generation": adapter.kept_generation,
        "kept_path": adapter.kept.path,
        "remembered": adapter.generation > 0 and not adapter.removed,
        "removed": adapter.removed,
        "wanted": adapter.wanted,
        "held": adapter.held,
        "workers": [
            {field.name: getattr(one, field.name) for field in one.DESCRIPTOR.fields}
            for one in adapter.workers
        ],
    }


def summary_as_dict(adapters: "Sequence[FleetAdapter]") -> dict[str, Any]:
    """All that the fleet is to have, together, for ``--json``; of those that lack workers, which and why."""
    wished = _wished(adapters)
    return {
        "adapters": len(wished),
        "held": sum(one.held for one in wished),
        "wanted": sum(one.wanted for one in wished),
        "missing": [
            {
                "name": one.spec.name,
                "workers": [
                    {
                        "worker_id": at.worker_id,
                        "address": at.address,
                        "state": at.state,
                        "problem": at.problem,
                    }
                    for at in one.workers
                    if at.state in LACKING
                ],
            }
            for one in wished
            if one.held < one.wanted
        ],
    }


def adapters_line(adapters: "Sequence[FleetAdapter]") -> str:
    """The same in one line for people; empty where the fleet is to have none."""
    wished = _wished(adapters)
    if not wished:
        return ""
    short = [told(one) for one in wished if one.held < one.wanted]
    missing = f" · missing: {' · '.join(short[:SHOWN])}" if short else ""
    more = f" and {len(short) - SHOWN} more" if len(short) > SHOWN else ""
    held, wanted = sum(one.held for one in wished), sum(one.wanted for one in wished)
    return f"adapters: {len(wished)} · {held} of {wanted} loaded{missing}{more}"


def _wished(adapters: "Iterable[FleetAdapter]") -> "list[FleetAdapter]":
    return [one for one in adapters if one.generation and not one.removed]


def _row(adapter: "FleetAdapter") -> tuple[str, ...]:
    own = not adapter.generation
    loaded = f"{len(adapter.workers)}" if own or adapter.removed else f"{adapter.held} of {adapter.wanted}"
    why = "the workers' own, not put at the router" if own else why_not(adapter)
    return (
        adapter.spec.name,
        adapter.spec.path or "-",
        adapter.digest[:DIGEST_CHARS] or "-",
        f"{adapter.generation or '-'}",
        "yes" if adapter.spec.pinned else "-",
        loaded,
        "; ".join(filter(None, ("is being forgotten" if adapter.removed else "", kept(adapter), why))),
    )


def _count(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"
