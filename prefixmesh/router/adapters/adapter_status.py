"""How far an adapter is in the fleet, as the wire tells it."""

import math
from collections.abc import Iterable

from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.router.adapters.adapter_keeper import see
from prefixmesh.router.adapters.controller import AdapterController
from prefixmesh.router.adapters.orders import Standing, WorkerSeen
from prefixmesh.router.adapters.records import AdapterRecord
from prefixmesh.router.worker_entry import WorkerEntry

Sighting = tuple[WorkerEntry, WorkerSeen | None]
"""A worker, and as the controller goes by it; None before its first answer."""


def sight(workers: Iterable[WorkerEntry]) -> list[Sighting]:
    """All workers, looked at once for many names. O(workers)."""
    return [(entry, see(entry) if entry.facts else None) for entry in workers]


def status_of(
    record: AdapterRecord, controller: AdapterController, workers: Iterable[Sighting], now: float
) -> pb.FleetAdapter:
    """A name of the store, as of the last step. O(workers)."""
    told = pb.FleetAdapter(
        spec=record.spec,
        digest=controller.digest_of(record),
        generation=record.generation,
        removed=record.is_removed,
    )
    if record.kept is not None and not told.digest:
        told.kept.CopyFrom(record.kept.spec)
        told.kept_generation = record.kept.generation
    for entry, seen in workers:
        if record.is_removed and (seen is None or record.name not in seen.adapters):
            continue
        standing = Standing("away") if seen is None else controller.standing(seen, record.name)
        told.workers.append(_at(entry, standing, record.name, now))
        told.wanted += seen is not None and seen.is_ready and not record.is_removed
        told.held += standing.state == "held"
    return told


def of_their_own(name: str, workers: Iterable[Sighting]) -> pb.FleetAdapter:
    """A name that the store does not know, and some workers have. O(workers)."""
    told = pb.FleetAdapter(spec=pb.AdapterSpec(name=name))
    for entry, seen in workers:
        if seen is not None and name in seen.adapters:
            told.workers.append(_at(entry, Standing("none"), name, 0.0))
            told.spec.pinned |= name in seen.pinned
    digests = {one.digest for one in told.workers}
    if len(digests) == 1:
        told.digest = digests.pop()
    return told


def shortened(told: pb.FleetAdapter, most: int) -> pb.FleetAdapter:
    """The same with those workers alone that are yet to do something, and so many of them at most. O(workers)."""
    rows = [one for one in told.workers if one.state not in ("held", "none")][:most]
    del told.workers[:]
    told.workers.extend(rows)
    return told


def _at(entry: WorkerEntry, standing: Standing, name: str, now: float) -> pb.AdapterAtWorker:
    has = entry.adapters.get(name)
    return pb.AdapterAtWorker(
        worker_id=entry.facts.worker_id if entry.facts else "",
        address=entry.endpoint,
        state=standing.state,
        problem=entry.problem if standing.state == "away" else _problem(standing, now),
        digest=has.digest if has is not None else "",
    )


def _problem(standing: Standing, now: float) -> str:
    failure = standing.failure
    if failure is None:
        return ""
    times = f"failed {failure.times} times in a row" if failure.times > 1 else "failed"
    left_s = math.ceil(failure.until - now)
    again = f", tried again in {left_s} s" if left_s > 0 else ""
    return f"{times}{again}: {failure.problem}"
