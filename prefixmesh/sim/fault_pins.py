"""The pins of a fault run: what operators wish for in it, and what must hold of it once all is quiet.

Two of the beginnings that conversations share are pinned, one on two workers and one on all, or what a workload says is. Mishaps hit the controller like
everything else: its router dies, its workers die with what they hold, links are cut, calls are late, and the store in which wishes and the
lease to act are is gone (``fault_state``).
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import InternalError
from prefixmesh.ids import Namespace
from prefixmesh.router.pins.sizes import size_tokens
from prefixmesh.router.pins.wishes import PinVersion, Wish
from prefixmesh.sim.fault_traffic import NAMESPACES, system_prompt
from prefixmesh.sim.simulated_router import SimulatedRouter
from prefixmesh.sim.simulated_worker import SimulatedWorker
from prefixmesh.tokens import pack
from prefixmesh.worker.prefix_messages import ListPins, PinTotals, PrefixAnswer

PIN_SHARE: Final = 0.4
"""Of the small pools: room for one of the wishes on each worker, and for both on most."""

REST_S: Final = 10.0
"""Without an order for so long, pins are as they will be: more than any pause."""


class Pinned(NamedTuple):
    """A prefix that somebody wants kept."""

    name: str
    namespace: Namespace
    tokens: bytes
    """Packed."""

    replicas: int
    """0: on all workers."""


def beginnings(vocab_size: int) -> list[Pinned]:
    """Two of those that conversations of our own share."""
    return [
        Pinned(f"system-{system}", NAMESPACES[0], pack(system_prompt(system, vocab_size)), replicas)
        for system, replicas in ((0, 2), (1, 0))
    ]


def wish_of(pinned: Pinned) -> Wish:
    """What the controller is to bring about for it."""
    return Wish(
        source="pin",
        owner="operator",
        name=pinned.name,
        tier=Tier.DEVICE,
        replicas=pinned.replicas,
        version=PinVersion(
            generation=1,
            namespace=pinned.namespace,
            tokens=pinned.tokens,
            fingerprints=block_fingerprints(pinned.namespace, pinned.tokens),
        ),
    )


def pins_rest(routers: Sequence[SimulatedRouter], now: float) -> bool:
    """Whether nothing is under way for pins, and nothing was ordered lately."""
    keepers = [router.life.pins for router in routers if router.life is not None]
    return all(
        pins is None or (not pins.controller.under_way and now - pins.ordered_at >= REST_S)
        for pins in keepers
    )


def pins_held(wishes: Sequence[Wish], workers: Sequence[SimulatedWorker], now: float) -> int:
    """Pins that workers hold whole, all together. O(pins)."""
    answers = [_pins_of(worker, now) for worker in workers if worker.life is not None]
    return sum(_holds(answer, wish) for answer in answers for wish in wishes)


def broken_pins(wishes: Sequence[Wish], workers: Sequence[SimulatedWorker], now: float) -> Iterator[str]:
    """What does not hold: wishes that are short though there is room, pins that are too many, or that nobody has wished. O(pins)."""
    ids = {wish.pin_id for wish in wishes}
    answers = {worker.name: _pins_of(worker, now) for worker in workers if worker.life is not None}
    for name, answer in answers.items():
        yield from (
            f"{name}: pin {pin.pin_id} is nobody's wish" for pin in answer.pins if pin.pin_id not in ids
        )
    for wish in wishes:
        held = {name for name, answer in answers.items() if _holds(answer, wish)}
        if wish.replicas and len(held) > wish.replicas:
            yield f"{wish.pin_id}: {len(held)} workers hold it"
        if len(held) < (wish.replicas or len(answers)):
            for worker in workers:
                if (
                    worker.name in answers
                    and worker.name not in held
                    and _has_room(worker, answers[worker.name], wish)
                ):
                    yield f"{wish.pin_id}: {sorted(held)} hold it, and {worker.name} has room and does not"


def _pins_of(worker: SimulatedWorker, now: float) -> PrefixAnswer:
    """By the engine's own word, which is at rest."""
    assert worker.life is not None
    (answer,) = worker.life.engine.core.handle(ListPins(question=0), now)
    if not isinstance(answer, PrefixAnswer):
        raise InternalError(f"{answer!r} is no answer about pins")
    return answer


def _holds(answer: PrefixAnswer, wish: Wish) -> bool:
    return any(pin.pin_id == wish.pin_id and not pin.missing_tokens for pin in answer.pins)


def _has_room(worker: SimulatedWorker, answer: PrefixAnswer, wish: Wish) -> bool:
    totals = answer.totals or PinTotals(charged_pages=0, budget_pages=0, owner_budget_pages=0, version=0)
    pages = size_tokens(wish.version, worker.config.page_size) // worker.config.page_size
    # A prefix that fills no page cannot be pinned there.
    return 0 < pages <= min(totals.budget_pages, totals.owner_budget_pages) - totals.charged_pages
