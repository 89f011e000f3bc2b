"""The pins of one tier of a worker's tree: who wants which prefix kept there, for how long, and whether the budget allows it.

A pin may come before what it pins. It holds what the tier has, waits at the place where that ends for the rest to appear,
and so grows with whatever prompt is computed next; nobody has to look for it. After a flush it is a wish again, wholly missing.
A charge is for the whole wish: a pin that was allowed is allowed however much of it comes to be held.

There is no clock here: pins end in the calls that pass ``now``. The tree does ``hold`` and ``release`` for its pins, and calls

* ``if now >= pins.next_expiry: pins.expire(now)`` where a match or an insert begins;
* ``if pins.waiting: pins.grown(parent, edge)`` where one ends that gave ``parent`` a child ``edge`` on the tier which it did
  not have (of several new ones below each other, the topmost: nobody waits below what was missing);
* ``pins.let_go()`` before a flush and ``pins.hold_again()`` after it.

With a host tier there are two tables, each with a budget in its tier's pages. They share their ends, so that one look at
``next_expiry`` is for both, and either's ``expire`` ends the pins of both.

``TreeNode.pin_ref`` (``host_pin_ref``) is counted here; a split copies it, and the tree never gives up a locked node, so never a pinned one.
"""

import math
from collections.abc import Callable
from typing import Final

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.deadlines import Deadlines
from prefixmesh.cache.node import INDEX_BYTES, TreeNode
from prefixmesh.cache.pin import Held as Held
from prefixmesh.cache.pin import Pin as Pin
from prefixmesh.cache.pin import PinBudget as PinBudget
from prefixmesh.cache.pin import PinnedTree as PinnedTree
from prefixmesh.cache.pin import PinStatus as PinStatus
from prefixmesh.cache.pin import digest_of
from prefixmesh.cache.pin_invariants import check_pins
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import (
    AccessDeniedError,
    BudgetError,
    InvalidRequestError,
    NotFoundError,
)
from prefixmesh.tokens import TOKEN_BYTES

_SLOTS: Final = {Tier.DEVICE: ("pin_ref", "pages"), Tier.HOST: ("host_pin_ref", "host_pages")}
"""Where a node counts a tier's pins, and where it keeps its pages."""

DEFAULT_BUDGET: Final = PinBudget()


class Account:
    """What one owner has pinned; gone with its last pin."""

    __slots__ = ("pages", "pins")

    def __init__(self) -> None:
        self.pages = 0
        """Of all its wishes."""
        self.pins = 0


class PinTable:
    """The pins of one tier of a tree. Not thread-safe: the tree's loop owns it.

    * wish and unwish: ``add``, ``remove``, ``expire``
    * told by the tree: ``grown``, ``let_go``, ``hold_again``
    * look at: ``awaits``, ``status``, ``of``, ``statuses``, ``charged_to``, ``check_invariants``
    """

    def __init__(
        self,
        tree: PinnedTree,
        budget: PinBudget = DEFAULT_BUDGET,
        tier: Tier = Tier.DEVICE,
        beside: "PinTable | None" = None,
    ) -> None:
        """``tree`` holds prefixes on this tier; ``beside`` is the same tree's table of the other one."""
        self._tree = tree
        self.tier = tier
        self._ref, self._held_pages = _SLOTS[tier]
        self.page_size = tree.page_size
        self.budget = budget
        self.next_expiry = math.inf
        """When the next pin ends; infinite when none does."""
        self.waiting: dict[tuple[TreeNode, bytes], dict[Pin, None]] = {}
        """Pins that are not wholly held, by where they would go on: (end of what is held, name of the missing child)."""
        self.pinned_pages = 0
        """Pages on the tier that at least one pin protects."""
        self.charged_pages = 0
        """Pages of all wishes, counted once per pin."""
        self.pins: dict[tuple[RadixKey, str], Pin] = {}
        """All pins, oldest first; this, ``accounts`` and ``deadlines`` are for looking at, and changed here alone."""
        self.accounts: dict[str, Account] = {}
        self.deadlines: Deadlines[Pin] = Deadlines() if beside is None else beside.deadlines
        self.together: list[PinTable] = [self] if beside is None else beside.together
        """All tables of the tree, in the order of ``Tier``."""
        self.changes = 0
        """Rises with every pin that comes, goes or gets another end, and whenever one comes to hold more or less than it did."""
        self.on_expired: Callable[[Pin], None] = _nobody_asks
        """Told of every pin that has ended by itself, once it is gone."""
        if beside is not None:
            self.together.append(self)

    def __len__(self) -> int:
        """How many pins there are. O(1)."""
        return len(self.pins)

    def add(self, key: RadixKey, owner: str, now: float, ttl_s: float | None = None) -> PinStatus:
        """Pin the whole pages of ``key`` for ``owner``, for ``ttl_s`` from ``now`` on or, with None, until it is removed.

        The same key and owner again only renew the TTL, or make the pin permanent or not. Whatever has expired at ``now`` is
        let go first. O(length of the key + depth), and the length again where the tree is split. Raises, having pinned nothing,
        InvalidRequestError for less than a page or a bad TTL, and BudgetError, with the sums, for what the budget forbids.
        """
        wish = self.wish(key)
        if ttl_s is not None and not 0.0 < ttl_s < math.inf:
            raise InvalidRequestError("ttl_s", f"must be finite and above 0, got {ttl_s}")
        self.expire(now)
        pin = self.pins.get((wish, owner))
        if pin is None:
            pin = Pin(wish, owner, len(wish.tokens) // TOKEN_BYTES // self.page_size, self.tier)
            self._require_room(pin)
            self._hold(pin)
            self._enter(pin)
        self._end_at(pin, None if ttl_s is None else now + ttl_s)
        return pin.status()

    def remove(self, key: RadixKey, owner: str, now: float) -> None:
        """Let go of ``owner``'s pin of ``key``: what it alone protected may be evicted from now on. O(length + depth).

        Whatever has expired at ``now`` is let go first. Raises AccessDeniedError when others have pinned that prefix and
        ``owner`` has not, NotFoundError when nobody has (both O(pins)), InvalidRequestError for less than a page.
        """
        wish = self.wish(key)
        self.expire(now)
        pin = self.pins.get((wish, owner))
        if pin is not None:
            self._drop(pin)
        elif any(pinned == wish for pinned, _ in self.pins):
            raise AccessDeniedError(f"the pin of {digest_of(wish)} is not {owner!r}'s to remove")
        else:
            raise NotFoundError(f"there is no pin of {digest_of(wish)}")

    def expire(self, now: float) -> list[Pin]:
        """Let go of every pin whose time has come at ``now``, on every tier; returns them, soonest first. O(1) before
        ``next_expiry``."""
        gone: list[Pin] = []
        while self.next_expiry <= now and (pin := self.deadlines.first()) is not None:
            self.together[pin.tier]._drop(pin)
            gone.append(pin)
        for pin in gone:
            self.together[pin.tier].on_expired(pin)
        return gone

    def grown(self, parent: TreeNode, edge: bytes) -> None:
        """``parent`` has a child ``edge`` on the tier that it did not have: who waited there now holds what there is.

        Call it with the tree's books closed: nodes may be split and locked here. O(1), and what ``hold`` costs for each pin
        that waited exactly there.
        """
        for pin in tuple(self.waiting.get((parent, edge), ())):
            self._hold(pin)

    def awaits(self, node: TreeNode) -> bool:
        """Whether a pin waits for this tier to have what lies on the path to ``node``. O(1) while none waits, else O(depth)."""
        if not self.waiting:
            return False
        while (parent := node.parent) is not None:
            if (parent, node.edge) in self.waiting:
                return True
            node = parent
        return False

    def let_go(self) -> None:
        """Release all that is held, for a flush; every pin stays, as a wish. O(pins x depth)."""
        for pin in self.pins.values():
            self._let_go(pin)

    def hold_again(self) -> None:
        """After ``let_go``, hold what the tree has now: nothing, if it was flushed. O(pins x depth)."""
        for pin in self.pins.values():
            self._hold(pin)

    def status(self, key: RadixKey, owner: str) -> PinStatus | None:
        """``owner``'s pin of ``key`` as the last call left it; None when there is none. O(length).

        Raises InvalidRequestError for less than a page.
        """
        pin = self.pins.get((self.wish(key), owner))
        return pin.status() if pin else None

    def of(self, owner: str) -> list[PinStatus]:
        """An owner's pins, oldest first. O(all pins)."""
        return [pin.status() for pin in self.pins.values() if pin.owner == owner]

    def statuses(self) -> list[PinStatus]:
        """All pins, oldest first. O(pins)."""
        return [pin.status() for pin in self.pins.values()]

    def charged_to(self, owner: str) -> int:
        """Pages of all wishes of an owner. O(1)."""
        account = self.accounts.get(owner)
        return account.pages if account else 0

    def wish(self, key: RadixKey) -> RadixKey:
        """The prefix that ``key`` names: cut to whole pages, without a boundary that nothing follows. A prefix has one such form,
        so that a pin is found whichever prompt named it. O(length); raises InvalidRequestError for less than a page, and for a boundary
        at which the tree cannot divide."""
        page_bytes = self.page_size * TOKEN_BYTES
        whole = len(key.tokens) // page_bytes * page_bytes
        if not whole:
            tokens = len(key.tokens) // TOKEN_BYTES
            raise InvalidRequestError(
                "tokens", f"a pin takes at least a page of {self.page_size} tokens, got {tokens}"
            )
        if key.boundary_tokens * TOKEN_BYTES >= whole:
            return RadixKey(key.namespace, key.tokens[:whole])
        if not self._tree.can_hold(key):
            raise InvalidRequestError(
                "boundary_tokens", f"a public part ends at whole pages and blocks, got {key.boundary_tokens}"
            )
        return key._replace(tokens=key.tokens[:whole])

    def check_invariants(self) -> None:
        """Recompute everything from the pins and the nodes they hold; raises InvariantError with the state. O(pins x depth).

        What it cannot see is a count of pins on a node that no pin holds: the tree compares ``pinned_pages`` with its own.
        """
        check_pins(self)

    def __repr__(self) -> str:
        return (
            f"PinTable(pins={len(self.pins)}, owners={len(self.accounts)}, charged_pages={self.charged_pages}, "
            f"pinned_pages={self.pinned_pages}, waiting={sum(map(len, self.waiting.values()))}, "
            f"next_expiry={self.next_expiry:g})"
        )

    # Wishes.

    def _require_room(self, pin: Pin) -> None:
        budget = self.budget
        account = self.accounts.get(pin.owner) or Account()
        for wanted, used, limit, unit in (
            (pin.pages, account.pages, budget.pages_per_owner, "pages per owner"),
            (pin.pages, self.charged_pages, budget.pages_in_all, "pages in all"),
            (1, account.pins, budget.pins_per_owner, "pins per owner"),
            (1, len(self.pins), budget.pins_in_all, "pins in all"),
        ):
            if limit is not None and used + wanted > limit:
                raise BudgetError(
                    f"pin of owner {pin.owner!r}: {wanted} more wanted, {used} used, limit {limit} {unit}"
                )

    def _enter(self, pin: Pin) -> None:
        account = self.accounts.setdefault(pin.owner, Account())
        account.pins += 1
        account.pages += pin.pages
        self.charged_pages += pin.pages
        self.pins[pin.key, pin.owner] = pin
        self.changes += 1

    def _drop(self, pin: Pin) -> None:
        """The one way out, for removal and expiry."""
        self._let_go(pin)
        self.changes += 1
        del self.pins[pin.key, pin.owner]
        account = self.accounts[pin.owner]
        account.pins -= 1
        account.pages -= pin.pages
        if not account.pins:
            del self.accounts[pin.owner]
        self.charged_pages -= pin.pages
        self.deadlines.forget(pin)
        self._note_soonest()

    def _end_at(self, pin: Pin, expires_at: float | None) -> None:
        if pin.expires_at != expires_at:
            self.changes += 1
        pin.expires_at = expires_at
        if expires_at is None:
            self.deadlines.forget(pin)
        else:
            self.deadlines.set(pin, expires_at)
        self._note_soonest()

    def _note_soonest(self) -> None:
        for table in self.together:
            table.next_expiry = self.deadlines.soonest

    # Holds.

    def _hold(self, pin: Pin) -> None:
        """Hold what there is now, and only then let go of what was held before: nothing is unprotected in between."""
        held = self._tree.hold(pin.key)
        if pin.held is None or pin.held.held_tokens != held.held_tokens:
            self.changes += 1
        node = held.node
        while (parent := node.parent) is not None:
            self._count(node, 1)
            node = parent
        self._let_go(pin)
        pin.held = held
        if held.next_edge is not None:
            self.waiting.setdefault((held.node, held.next_edge), {})[pin] = None

    def _let_go(self, pin: Pin) -> None:
        """Release what the pin holds, if anything, and stop waiting beyond it."""
        held = pin.held
        if held is None:
            return
        pin.held = None
        if held.next_edge is not None:
            waiters = self.waiting[held.node, held.next_edge]
            del waiters[pin]
            if not waiters:
                del self.waiting[held.node, held.next_edge]
        node = held.node
        while (parent := node.parent) is not None:
            self._count(node, -1)
            node = parent
        self._tree.release(held.receipt)

    def _count(self, node: TreeNode, change: int) -> None:
        """One pin more or less goes through ``node``. O(1)."""
        before: int = getattr(node, self._ref)
        setattr(node, self._ref, before + change)
        if not before or not before + change:
            self.pinned_pages += change * self.held_pages(node)

    def pins_through(self, node: TreeNode) -> int:
        """How many pins of this tier are counted on ``node``. O(1)."""
        pins: int = getattr(node, self._ref)
        return pins

    def held_pages(self, node: TreeNode) -> int:
        """Pages that ``node`` has on this tier. O(1)."""
        packed: bytes = getattr(node, self._held_pages)
        return len(packed) // INDEX_BYTES


def _nobody_asks(_: Pin) -> None:
    """Until somebody wants to be told."""
