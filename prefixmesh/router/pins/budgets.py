"""Whether a wish fits a fleet, with the sums for whoever it is refused to, and what an owner's pins take. Pure.

What is asked is not whether there is room at this moment, but whether there is a place for every wish: other wishes are put where they are, or where the
most room is; heat has none, since it gives way. So a pin is refused when it is asked for, and not found to be short later. It is a first fit and
no search for the best one: a fleet that is full to its last page may refuse what a cleverer order would place.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from prefixmesh.cache.tier import Tier
from prefixmesh.router.pins.scene import HEAT_SOURCE, PIN_SOURCE
from prefixmesh.router.pins.site import NOT_TOLD, Room
from prefixmesh.router.pins.sizes import has_prompt, size_tokens
from prefixmesh.router.pins.wishes import Wish, WorkerSeen

MAX_WORKERS_TOLD: Final = 8
"""In one refusal: who reads it wants to know what kind of room is lacking."""


class OwnerUse(NamedTuple):
    """What an owner's pins take on the devices of all workers together, in tokens, and what they may."""

    charged_tokens: int
    budget_tokens: int


def owner_use(owner: str, workers: Iterable[WorkerSeen]) -> OwnerUse:
    """By what workers say. O(their pins)."""
    charged = budget = 0
    for worker in workers:
        budget += max(0, worker.owner_budget_tokens)
        charged += sum(
            max(0, pin.size_tokens)
            for pin in worker.pins.values()
            if pin.owner == owner and pin.tier is Tier.DEVICE
        )
    return OwnerUse(charged, budget)


def why_it_does_not_fit(wish: Wish, wishes: Iterable[Wish], workers: Iterable[WorkerSeen]) -> str:
    """The sums, where the fleet has no place for ``wish`` beside all other ``wishes``; empty where it has, or is not known yet.

    As many workers must have room as are wanted, or all there are when they are fewer: those that join later are not asked for. Where ``wishes`` have
    another version of it, some worker must have room for both, or two must hold the old one, so that one of them can let go (``rolling``). Workers that
    drain, have not told their budgets, or do not know the adapter are left out. O(wishes * workers).
    """
    able = [_Shelf(worker) for worker in workers if _can_be_asked(wish, worker)]
    if not able or not has_prompt(wish.version):
        return ""
    before = None
    for other in sorted(wishes, key=lambda each: each.key):
        if other.key == wish.key:
            before = other
        elif other.source == "pin":
            _place(other, able)
    lacking = [shelf for shelf in able if not shelf.has_room(wish)]
    needed = min(wish.replicas or len(able), len(able))
    if len(able) - len(lacking) < needed:
        return _sums(wish, needed, able, lacking)
    if before is not None and before.pin_id != wish.pin_id:
        return _why_it_cannot_roll(wish, before, able)
    return ""


class _Shelf:
    """What is placed on a worker so far: at first, pins that are no wishes of the router."""

    def __init__(self, worker: WorkerSeen) -> None:
        self.worker = worker
        # By tier. What owners have is by number and name, since a tier's hash is slow to make.
        self._left = [worker.budget_tokens, worker.host_budget_tokens]
        self._owner_budget = (worker.owner_budget_tokens, worker.host_owner_budget_tokens)
        self._of_owner: Counter[tuple[int, str]] = Counter()
        for pin_id, pin in worker.pins.items():
            if not pin_id.startswith((PIN_SOURCE, HEAT_SOURCE)):
                self._charge(pin.tier, pin.owner, max(0, pin.size_tokens))

    def budget(self, tier: Tier) -> Room:
        worker = self.worker
        if tier is Tier.DEVICE:
            return Room(worker.budget_tokens, worker.owner_budget_tokens)
        return Room(worker.host_budget_tokens, worker.host_owner_budget_tokens)

    def room(self, wish: Wish) -> Room:
        return Room(self.left(wish), self._owner_left(wish))

    def left(self, wish: Wish) -> int:
        return self._left[wish.tier]

    def size(self, wish: Wish) -> int:
        return size_tokens(wish.version, self.worker.page_size)

    def has_room(self, wish: Wish) -> bool:
        return 0 < self.size(wish) <= min(self.left(wish), self._owner_left(wish))

    def take(self, wish: Wish) -> None:
        self._charge(wish.tier, wish.owner, self.size(wish))

    def _owner_left(self, wish: Wish) -> int:
        return self._owner_budget[wish.tier] - self._of_owner[int(wish.tier), wish.owner]

    def _charge(self, tier: Tier, owner: str, size: int) -> None:
        self._left[tier] -= size
        self._of_owner[int(tier), owner] += size


def _can_be_asked(wish: Wish, worker: WorkerSeen) -> bool:
    digest = wish.version.adapter_digest
    return (
        not worker.draining and worker.budget_tokens != NOT_TOLD and (not digest or digest in worker.adapters)
    )


def _place(wish: Wish, shelves: Sequence[_Shelf]) -> list[_Shelf]:
    """Who holds it first, then who has the most room."""
    fit = [shelf for shelf in shelves if _can_be_asked(wish, shelf.worker) and shelf.has_room(wish)]
    if 0 < wish.replicas < len(fit):
        pin_id = wish.pin_id
        fit.sort(
            key=lambda shelf: (pin_id not in shelf.worker.pins, -shelf.left(wish), shelf.worker.endpoint)
        )
        del fit[wish.replicas :]
    for shelf in fit:
        shelf.take(wish)
    return fit


def _why_it_cannot_roll(wish: Wish, before: Wish, able: Sequence[_Shelf]) -> str:
    placed = _place(before, able)
    if len(placed) > 1 or any(shelf.has_room(wish) for shelf in able):
        return ""
    return (
        f"{_named(wish)}: no worker has room for it beside the version before, and one must hold it before that is let go; "
        f"remove the pin first{_told(wish, able)}"
    )


def _sums(wish: Wish, needed: int, able: Sequence[_Shelf], lacking: Sequence[_Shelf]) -> str:
    return (
        f"{_named(wish)}: wanted on {needed} of {len(able)} workers, and {len(able) - len(lacking)} have room"
        f"{_told(wish, lacking)}"
    )


def _named(wish: Wish) -> str:
    return f"pin {wish.name!r} of owner {wish.owner!r}"


def _told(wish: Wish, shelves: Sequence[_Shelf]) -> str:
    parts = [_lack(wish, shelf) for shelf in shelves[:MAX_WORKERS_TOLD]]
    if len(shelves) > MAX_WORKERS_TOLD:
        parts.append(f"and {len(shelves) - MAX_WORKERS_TOLD} workers more")
    return "".join(f"; {part}" for part in parts)


def _lack(wish: Wish, shelf: _Shelf) -> str:
    worker, size = shelf.worker, shelf.size(wish)
    name = worker.worker_id or worker.endpoint
    if not size:
        return f"{name}: it is shorter than a page of {worker.page_size} tokens"
    room, budget = shelf.room(wish), shelf.budget(wish.tier)
    return (
        f"{name}: {size} tokens wanted on the {wish.tier.name.lower()}, {max(0, room.owner_left)} of {budget.owner_left} are left "
        f"to {wish.owner!r}, {max(0, room.left)} of {budget.left} to all pins"
    )
