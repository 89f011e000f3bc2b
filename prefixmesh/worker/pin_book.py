"""By which names a worker's pins are known: ids that others chose, each for one owner's prefix on one tier, each with an end of its own.

The tree knows no names: a pin there is a prefix and an owner. Ids that mean the same share one tree pin, which stays as long as any of
them. What a pin ends by in the tree is told at once, so that the book never names what is not there. Pure: times come in as arguments.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.deadlines import Deadlines
from prefixmesh.cache.pins import Pin, PinStatus, PinTable
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import BudgetError, InvalidRequestError, InvariantError, UnsupportedError

MAX_PIN_IDS: Final = 4096
"""Ids at once. The tree bounds its pins (``PinBudget.pins_in_all``), and several ids may share one; this bounds what they take beside it,
and how long listing them all may stop the engine."""


class Wish(NamedTuple):
    """What an id stands for."""

    tier: Tier
    key: RadixKey
    """As the tree keeps it: whole pages (``PinTable.wish``)."""
    owner: str


class Added(NamedTuple):
    """What an add came to."""

    pin: "NamedPin"
    made: bool
    """Whether there was no such id before."""


class NamedPin(NamedTuple):
    """One id and how its pin is now."""

    pin_id: str
    status: PinStatus
    """Its ``expires_at`` is this id's, where the tree's pin may stay longer for others."""


class PinBook:
    """See the module. Not thread-safe: the engine's loop owns it, and nobody else pins in its tables."""

    def __init__(self, tables: Sequence[PinTable]) -> None:
        """``tables`` are the tree's, in the order of ``Tier``: the device's, and the host's where it has one."""
        self._tables = tables
        self._wishes: dict[str, Wish] = {}
        """By id, oldest first."""
        self._ids: dict[Wish, dict[str, float]] = {}
        """The ids of each wish, and when each ends: infinite for one that does not."""
        self._ends: Deadlines[str] = Deadlines()
        self._changes = 0
        for table in tables:
            table.on_expired = self._expired

    def __len__(self) -> int:
        """How many ids there are. O(1)."""
        return len(self._wishes)

    @property
    def version(self) -> int:
        """Rises whenever an id comes, goes or ends otherwise, and when a pin comes to hold more or less. O(1)."""
        return self._changes + sum(table.changes for table in self._tables)

    @property
    def next_expiry(self) -> float:
        """When the next id ends; infinite when none does. O(1)."""
        return self._ends.soonest

    def add(
        self, pin_id: str, key: RadixKey, owner: str, tier: Tier, now: float, ttl_s: float | None
    ) -> Added:
        """Pin the whole pages of ``key`` under this id, for ``ttl_s`` from now on or, with None, until it is removed; once more, and its
        end begins anew. O(length of the key + depth + ids of the same wish).

        Raises, having pinned nothing, InvalidRequestError for an id that means something else, for less than a page and for a bad TTL;
        UnsupportedError without this tier; and BudgetError, with the sums, where there is no room for it.
        """
        self.expire(now)
        table = self._table(tier)
        wish = Wish(tier, table.wish(key), owner)
        known = self._wishes.get(pin_id)
        if known is not None and known != wish:
            raise InvalidRequestError("pin_id", f"is the name of {_difference(known, wish)}")
        if known is None and len(self._wishes) >= MAX_PIN_IDS:
            raise BudgetError(f"pin {pin_id!r}: {len(self._wishes)} pin ids are in use, limit {MAX_PIN_IDS}")
        end = math.inf if ttl_s is None else now + ttl_s
        others = (when for other, when in self._ids.get(wish, {}).items() if other != pin_id)
        latest = max(others, default=-math.inf)
        table.add(wish.key, owner, now, ttl_s if end >= latest else _ttl(latest, now))
        self._enter(pin_id, wish, end)
        return Added(self._named(pin_id, wish), known is None)

    def remove(self, pin_id: str, now: float) -> NamedPin | None:
        """Let go of an id, and of its pin where no other has it; how it was, None where there was no such id. O(depth + ids of the same
        wish)."""
        self.expire(now)
        wish = self._wishes.get(pin_id)
        if wish is None:
            return None
        was = self._named(pin_id, wish)
        self._let_go(pin_id, now)
        return was

    def expire(self, now: float) -> None:
        """Let go of every id whose time has come. O(1) before ``next_expiry``."""
        if now < self._ends.soonest:
            return
        self._tables[0].expire(now)
        while self._ends.soonest <= now and (pin_id := self._ends.first()) is not None:
            self._let_go(pin_id, now)

    def pin(self, pin_id: str) -> NamedPin | None:
        """What this id stands for, as it is now; None where there is no such id. O(1)."""
        wish = self._wishes.get(pin_id)
        return None if wish is None else self._named(pin_id, wish)

    def pins(self) -> list[NamedPin]:
        """All ids, oldest first. O(ids)."""
        return [self._named(pin_id, wish) for pin_id, wish in self._wishes.items()]

    def check_invariants(self) -> None:
        """That ids and tree pins are each other's; raises InvariantError. O(ids + pins)."""
        in_tree = {
            Wish(pin.tier, pin.key, pin.owner) for table in self._tables for pin in table.pins.values()
        }
        in_book = {pin_id: wish for wish, ids in self._ids.items() for pin_id in ids}
        ends = {pin_id: end for ids in self._ids.values() for pin_id, end in ids.items() if end < math.inf}
        if in_tree != self._ids.keys() or in_book != self._wishes or not all(self._ids.values()):
            raise InvariantError(f"{len(in_tree)} pins in the tree, {len(self._ids)} in {self!r}")
        if any(self._ends.when(pin_id) != end for pin_id, end in ends.items()) or len(self._ends) != len(
            ends
        ):
            raise InvariantError(f"{len(ends)} ids end, {len(self._ends)} by their ends in {self!r}")

    def __repr__(self) -> str:
        return f"PinBook(ids={len(self._wishes)}, pins={len(self._ids)}, next_expiry={self.next_expiry:g})"

    def _table(self, tier: Tier) -> PinTable:
        if tier >= len(self._tables):
            raise UnsupportedError("this worker has no host tier to pin on; start it with one")
        return self._tables[tier]

    def _named(self, pin_id: str, wish: Wish) -> NamedPin:
        pin = self._tables[wish.tier].pins[wish.key, wish.owner]
        end = self._ids[wish][pin_id]
        return NamedPin(pin_id, pin.status()._replace(expires_at=None if end == math.inf else end))

    def _enter(self, pin_id: str, wish: Wish, end: float) -> None:
        ids = self._ids.setdefault(wish, {})
        if ids.get(pin_id) != end:
            self._changes += 1
        ids[pin_id] = end
        self._wishes[pin_id] = wish
        if end == math.inf:
            self._ends.forget(pin_id)
        else:
            self._ends.set(pin_id, end)

    def _forget(self, pin_id: str) -> Wish:
        wish = self._wishes.pop(pin_id)
        ids = self._ids[wish]
        del ids[pin_id]
        if not ids:
            del self._ids[wish]
        self._ends.forget(pin_id)
        self._changes += 1
        return wish

    def _let_go(self, pin_id: str, now: float) -> None:
        wish = self._forget(pin_id)
        table, left = self._tables[wish.tier], self._ids.get(wish)
        if left is None:
            table.remove(wish.key, wish.owner, now)
        else:
            table.add(wish.key, wish.owner, now, _ttl(max(left.values()), now))

    def _expired(self, pin: Pin) -> None:
        """For the tables: the tree has let go of a pin by itself, and with it of every id that it had."""
        for pin_id in tuple(self._ids.get(Wish(pin.tier, pin.key, pin.owner), ())):
            self._forget(pin_id)


def _ttl(end: float, now: float) -> float | None:
    return None if end == math.inf else end - now


def _difference(known: Wish, wanted: Wish) -> str:
    if known.owner != wanted.owner:
        return "another owner's pin; unpin it, or name this one otherwise"
    if known.tier != wanted.tier:
        return "a pin on another tier; unpin it, or name this one otherwise"
    return "a pin of another prefix; unpin it, or name this one otherwise"
