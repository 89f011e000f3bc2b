"""What must hold of a simulated fleet once its faults are over and it is quiet: nothing lost, nothing double, nothing stuck.

Each rule recomputes what it can from nothing: answers from the prompts, histories by the checker that reads real ones, the cores by their
own ``check_invariants``, views by the caches' own sums.
"""

from collections.abc import Iterator
from functools import reduce
from operator import xor
from typing import TYPE_CHECKING, Final

from prefixmesh.cache.events import TierState
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import CancelledError, InvariantError
from prefixmesh.history import Asked, Ended
from prefixmesh.history_check import HistoryChecker
from prefixmesh.router.worker_view import Trust
from prefixmesh.sim.fault_pins import broken_pins
from prefixmesh.sim.simulated_client import SimulatedClient
from prefixmesh.sim.simulated_router import RouterLife, SimulatedRouter
from prefixmesh.sim.simulated_worker import SimulatedWorker

if TYPE_CHECKING:
    from prefixmesh.sim.fault_run import FaultRun

TYPED: Final = frozenset({"UNAVAILABLE", "OVERLOADED", "DEADLINE_EXCEEDED"})
"""What a request may end in when things go wrong: nothing that says it was malformed, that there is a bug, or that its caller has left; only
of one that has left it is said."""

LATE_S: Final = 1e-5
"""Histories are rounded to the microsecond."""


def broken_rules(run: "FaultRun") -> list[str]:
    """What does not hold. O(everything)."""
    return list(_broken(run))


def is_quiet(run: "FaultRun") -> bool:
    """Whether nothing is left that only time takes away: workers that are out, expectations, views that are not proved. O(workers)."""
    lives = [router.life for router in run.routers]
    if run.state is not None and not run.state.is_quiet([life for life in lives if life is not None]):
        return False
    return all(
        life is not None
        and not (life.requests or life.core.view.predictions or life.core.open_tickets)
        and all(
            entry.ready
            and (followed := life.core.view.get(entry.endpoint)) is not None
            and followed.view.trust(run.sim.now) is Trust.EXACT
            for entry in life.core.registry
        )
        for life in lives
    )


def _broken(run: "FaultRun") -> Iterator[str]:
    for client in run.callers.clients:
        yield from _of_client(client, run.callers.expected(client))
    for client in run.last:
        if client.error is not None or client.ended_at is None:
            yield f"{client!r}: asked when all was quiet, and not answered: {client.error}"
    yield from _of_histories(run)
    for router in run.routers:
        if router.life is None:
            yield f"{router!r} is down"
        else:
            yield from _of_router(router, router.life)
    for worker in run.workers.values():
        yield from _of_worker(worker)
    lives = [router.life for router in run.routers if router.life is not None]
    # A worker that was lost from the registry, as it may be with a store that lost all, keeps what it has.
    followed = [one for name, one in run.workers.items() if all(name in life.links for life in lives)]
    yield from broken_pins(run.wishes, followed, run.sim.now)
    if run.state is not None:
        yield from run.state.broken(run.routers)


def _of_client(client: SimulatedClient, expected: list[int]) -> Iterator[str]:
    if client.ended_at is None:
        yield f"{client!r} has no end"
    elif client.ended_at > client.deadline + LATE_S:
        yield f"{client!r} ended {client.ended_at - client.deadline:.3f} s after its deadline"
    if client.problem:
        yield f"{client!r}: {client.problem}"
    may_end_in = {CancelledError.reason} if client.has_left else TYPED
    if client.error is not None and client.error.reason not in may_end_in:
        yield f"{client!r} ended in {client.error.reason}: {client.error}"
    wanted = expected if client.error is None else expected[: len(client.tokens)]
    if client.tokens != wanted:
        yield f"{client!r} was told {client.tokens}, undisturbed it is {expected}"


def _of_histories(run: "FaultRun") -> Iterator[str]:
    checker = HistoryChecker()
    for name, history in run.histories.items():
        due: dict[str, float] = {}
        for number, record in enumerate(history.records, 1):
            checker.take(name, number, record)
            if isinstance(record, Asked) and record.timeout_s is not None:
                due[record.request_id] = record.at + record.timeout_s
            elif isinstance(record, Ended) and record.at > due.get(record.request_id, record.at) + LATE_S:
                yield f"{name}: {record.request_id} ended {record.at - due[record.request_id]:.3f} s after its deadline"
    for violation in checker.finish().violations:
        yield str(violation)


def _of_router(router: SimulatedRouter, life: RouterLife) -> Iterator[str]:
    core = life.core
    try:
        core.check_invariants()
    except InvariantError as error:
        yield f"{router.name}: {error}"
    left = {
        "requests": len(life.requests),
        "answers": len(life.answers),
        "requests in the retry budget": life.budget.active,
        "open tickets": core.open_tickets,
        "predictions": len(core.view.predictions),
        "workers that are not ready": sum(not entry.ready for entry in core.registry),
    }
    yield from (f"{router.name}: {count} {what} are left" for what, count in left.items() if count)
    for entry in core.registry:
        total = entry.load.total
        if entry.load.in_flight or total.in_flight or total.prefill_ms or total.decode_ms:
            yield f"{router.name}: {entry.load!r}, {total} are left on {entry.name}"
        yield from _of_view(router, life, life.links[entry.endpoint].worker)


def _of_view(router: SimulatedRouter, life: RouterLife, worker: SimulatedWorker) -> Iterator[str]:
    endpoint = next(place for place, link in life.links.items() if link.worker is worker)
    followed = life.core.view.get(endpoint)
    if followed is None or worker.life is None:
        yield f"{router.name} does not follow {worker.name}"
        return
    view, trust = followed.view, followed.view.trust(router.sim.now)
    if trust is not Trust.EXACT:
        yield f"{router.name}: its view of {worker.name} is {trust.value}"
    for tier in (Tier.DEVICE, Tier.HOST):
        held = life.core.view.index.held(view.slot, tier)
        true = worker.life.publisher.state(tier)
        if not view.state(tier) == TierState(len(held), reduce(xor, held, 0)) == true:
            yield f"{router.name}: it sees {len(held)} blocks of {worker.name}, {view.state(tier)}; it has {true}"


def _of_worker(worker: SimulatedWorker) -> Iterator[str]:
    life = worker.life
    if life is None:
        yield f"{worker.name} is down"
        return
    try:
        life.engine.core.check_invariants()
        life.publisher.check_invariants()
    except InvariantError as error:
        yield f"{worker.name}: {error}"
    kv, stats = life.engine.scheduler.kv, life.engine.core.stats()
    left = {
        "calls": life.open_calls,
        "running requests": life.load.running + stats.running,
        "queued requests": life.load.queued + stats.queued,
        "locks": kv.receipts_out,
        "pages that nobody owns": kv.total_pages
        - kv.free_pages
        - kv.evictable_pages
        - stats.pins.pinned_pages,
        "double releases": stats.double_releases,
        "copies between tiers": stats.tiers.copies_in_flight,
        "locked host pages": stats.tiers.host_protected_pages,
        "host pages that nobody owns": stats.tiers.host_total_pages
        - stats.tiers.host_free_pages
        - stats.tiers.host_evictable_pages,
    }
    yield from (f"{worker.name}: {count} {what} are left" for what, count in left.items() if count)
