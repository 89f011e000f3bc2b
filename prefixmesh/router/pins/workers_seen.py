"""What a router sees of its workers, put together for the pin controller: who they are, what they say of their pins, and what their events
prove. Reads only."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Fingerprint
from prefixmesh.router.fleet_state import FleetState
from prefixmesh.router.fleet_view import FleetView
from prefixmesh.router.pins.wishes import PinSeen, Wish, WorkerSeen
from prefixmesh.router.pins.worker_pins import ToldPins
from prefixmesh.router.worker_entry import WorkerEntry
from prefixmesh.router.worker_view import Trust

BELIEVED: Final = frozenset({Trust.EXACT, Trust.CATCHING_UP})
"""How a view must stand for what it shows to prove anything."""

Proofs = dict[int, dict[str, int]]
"""By slot of the index, and by pin id: leading tokens that are there."""


def seen_workers(
    fleet: FleetState,
    told_by: Callable[[WorkerEntry], ToldPins],
    proofs: Proofs,
    hidden: Collection[str] = (),
) -> list[WorkerSeen]:
    """All workers that have told who they are. O(workers + pins).

    Args:
        told_by: what a worker has said of its pins.
        proofs: see ``prove``.
        hidden: keys of wishes whose pins are left out: nobody is to judge them.
    """
    return [
        _seen(entry, told_by(entry), _proven(fleet.view, entry, proofs), hidden)
        for entry in fleet.registry
        if entry.facts is not None
    ]


def prove(view: FleetView, wishes: Iterable[Wish], block_size: int, proofs: Proofs) -> None:
    """Add to ``proofs`` what workers hold of each wish on its tier, by their events alone: what is expected of requests under way is not
    counted. O(blocks walked + workers) for each wish; of the host tier, O(blocks * workers)."""
    slots = [followed.slot for _, followed in view]
    for wish in wishes:
        fingerprints = wish.version.fingerprints
        if wish.tier is Tier.HOST:
            held: Mapping[int, int] = {
                slot: view.index.leading_blocks(slot, Tier.HOST, fingerprints) for slot in slots
            }
        else:
            held = _on_device(view, fingerprints, slots)
        for slot, blocks in held.items():
            proofs.setdefault(slot, {})[wish.pin_id] = blocks * block_size


def _on_device(
    view: FleetView, fingerprints: Sequence[Fingerprint], slots: Iterable[int]
) -> Mapping[int, int]:
    falls = view.index.find_matches(fingerprints).device
    return {slot: fall.blocks for fall in falls for slot in slots if fall.slots >> slot & 1}


def _proven(view: FleetView, entry: WorkerEntry, proofs: Proofs) -> Mapping[str, int]:
    followed = view.get(entry.endpoint)
    if followed is None or followed.trust not in BELIEVED:
        return {}
    return proofs.get(followed.slot, {})


def _seen(
    entry: WorkerEntry, told: ToldPins, proven: Mapping[str, int], hidden: Collection[str]
) -> WorkerSeen:
    facts = entry.facts
    assert facts is not None, entry.endpoint
    resident = facts.resident_adapters if entry.report is None else entry.report.resident_adapters
    return WorkerSeen(
        endpoint=entry.endpoint,
        worker_id=facts.worker_id,
        incarnation=entry.load.incarnation,
        host=entry.endpoint.rpartition(":")[0],
        usable=entry.ready,
        draining=(entry.draining or entry.leaving) and not entry.unreachable,
        page_size=max(1, facts.page_size),
        work_ms=entry.load.work_ms,
        budget_tokens=told.budget_tokens,
        owner_budget_tokens=told.owner_budget_tokens,
        pins=_shown(told.pins, hidden),
        pins_at=told.asked_at,
        proven=proven,
        kv_layout=facts.kv_layout,
        adapters=frozenset(one.digest for one in entry.adapters.values()),
        resident_adapters=frozenset(resident),
        host_budget_tokens=told.host_budget_tokens,
        host_owner_budget_tokens=told.host_owner_budget_tokens,
    )


def _shown(pins: Mapping[str, PinSeen], hidden: Collection[str]) -> Mapping[str, PinSeen]:
    if not hidden:
        return pins
    return {pin_id: pin for pin_id, pin in pins.items() if pin_id.rpartition("@")[0] not in hidden}
