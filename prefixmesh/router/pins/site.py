"""One worker as the controller believes it to be: what it told, what has ended since, and what is under way there. Pure.

Charges are kept on the safe side. A pin counts from the moment that it is ordered until a list without it comes, or the worker has said that it
let go; a wish's size and owner are the wish's own, whatever the worker says of them.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from prefixmesh.cache.tier import Tier
from prefixmesh.router.pins.sizes import has_prompt, size_tokens
from prefixmesh.router.pins.under_way import UnderWay
from prefixmesh.router.pins.wishes import PinSeen, Wish, WorkerSeen

NOT_TOLD: Final = -1
"""A budget that a worker has not told yet."""


class Charge(NamedTuple):
    """What a pin takes."""

    tier: Tier
    owner: str
    size: int
    """Tokens."""


class Room(NamedTuple):
    """Tokens that may still be pinned on a tier of a worker."""

    left: int
    """By all pins together."""

    owner_left: int
    """By one owner."""

    def holds(self, size: int) -> bool:
        """Whether so much fits."""
        return size <= self.left and size <= self.owner_left


class Site:
    """One worker in one step. O(its pins) to make; all else O(1) where nothing else is said."""

    __slots__ = (
        "_all",
        "_current",
        "_owners",
        "chosen",
        "leaving",
        "moves",
        "pins",
        "resident",
        "seen",
        "shaky",
        "warming",
    )

    def __init__(self, seen: WorkerSeen, under_way: UnderWay, current: Mapping[str, Wish]) -> None:
        """``current``: wishes by the pin ids of their versions."""
        self.seen = seen
        self.warming = dict(under_way.warms_at(seen.endpoint))
        """``Warm`` under way, by pin id."""
        self.leaving = set(under_way.unpins_at(seen.endpoint))
        """Pins whose ``Unpin`` is under way."""
        self.resident = seen.resident_adapters
        """Digests of adapters whose weights are there."""
        self.shaky: set[str] = set()
        """Pins that may be there or not: what was last done about them has failed, or was not heard of."""
        self.pins = self._believed(under_way)
        """By pin id, those that leave and those that may not be there among them."""
        self.chosen: set[str] = set()
        """Pin ids that this step has chosen the worker for."""
        self.moves = len(self.warming)
        """``Warm`` under way, and those that this step has chosen the worker for."""
        self._current = current
        self._all = [0 for _ in Tier]
        self._owners: dict[tuple[Tier, str], int] = {}
        for pin_id in self.pins:
            tier, owner, size = self.charge_of(pin_id)
            self.take(tier, owner, size)
        for pin_id, warm in self.warming.items():
            if pin_id not in self.pins:
                self.take(warm.wish.tier, warm.wish.owner, self.size(warm.wish))

    def has(self, pin_id: str) -> bool:
        """Whether the pin is there and stays, as far as is known."""
        return pin_id in self.pins and pin_id not in self.leaving and pin_id not in self.shaky

    def lacks(self, wish: Wish) -> bool:
        """Whether nothing of the wish's version is there, or on its way, not even as something that leaves."""
        pin_id = wish.pin_id
        if pin_id in self.chosen or pin_id in self.warming:
            return False
        if has_prompt(wish.version):
            return pin_id not in self.pins
        return wish.version.adapter_digest not in self.resident

    def size(self, wish: Wish) -> int:
        """What ``wish`` takes here."""
        return size_tokens(wish.version, self.seen.page_size)

    def budget(self, tier: Tier) -> Room:
        """What may be pinned at most; negative while it is not told."""
        if tier is Tier.DEVICE:
            return Room(self.seen.budget_tokens, self.seen.owner_budget_tokens)
        return Room(self.seen.host_budget_tokens, self.seen.host_owner_budget_tokens)

    def room(self, tier: Tier, owner: str) -> Room:
        """What may still be pinned."""
        budget = self.budget(tier)
        return Room(budget.left - self._all[tier], budget.owner_left - self._owners.get((tier, owner), 0))

    def take(self, tier: Tier, owner: str, size: int) -> None:
        """Charge so much more (less, where negative), for the rest of the step."""
        self._all[tier] += size
        self._owners[tier, owner] = self._owners.get((tier, owner), 0) + size

    def charge_of(self, pin_id: str) -> Charge:
        """What one of its pins takes."""
        wish = self._current.get(pin_id)
        if wish is not None:
            return Charge(wish.tier, wish.owner, self.size(wish))
        pin = self.pins[pin_id]
        return Charge(pin.tier, pin.owner, max(0, pin.size_tokens))

    def charged(self, tier: Tier) -> int:
        """Tokens of all pins."""
        return self._all[tier]

    def _believed(self, under_way: UnderWay) -> Mapping[str, PinSeen]:
        seen = self.seen
        outcomes = under_way.outcomes_at(seen.endpoint)
        if not outcomes:
            return seen.pins
        pins = dict(seen.pins)
        for pin_id, outcome in outcomes.items():
            wish = outcome.wish
            if wish is not None and not has_prompt(wish.version):
                if outcome.kind == "present":
                    self.resident |= {wish.version.adapter_digest}
                continue
            if outcome.kind == "absent":
                pins.pop(pin_id, None)
                continue
            if outcome.kind == "unsure":
                self.shaky.add(pin_id)
            if wish is not None and (outcome.kind == "present" or pin_id not in pins):
                size = self.size(wish)
                held = size if outcome.kind == "present" else 0
                pins[pin_id] = PinSeen(
                    owner=wish.owner,
                    tier=wish.tier,
                    size_tokens=size,
                    held_tokens=held,
                    missing_tokens=size - held,
                    expires_at=wish.expires_at,
                )
        return pins
