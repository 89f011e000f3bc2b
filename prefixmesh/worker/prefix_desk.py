"""What the engine's core answers to commands about prefixes: pins, and what is used most. (KV that is read and written is ``kv_desk``'s.)

It knows the cache, and computes nothing. The engine's loop calls it between two steps.
"""

import math

from prefixmesh.cache.base import PrefixCache
from prefixmesh.cache.pin import PinStatus
from prefixmesh.cache.pins import PinTable
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import (
    BudgetError,
    InvalidRequestError,
    PrefixmeshError,
    UnsupportedError,
)
from prefixmesh.worker.engine_stats import PinCounts
from prefixmesh.worker.pin_book import NamedPin, PinBook
from prefixmesh.worker.prefix_messages import (
    ListHotPrefixes,
    ListPins,
    PinInfo,
    PinPrefix,
    PinTotals,
    PrefixAnswer,
    PrefixCommand,
    PrefixProblem,
    ReadKv,
    UnpinPrefix,
    WriteKv,
)

_NO_RADIX = "this worker's cache keeps no prefixes by name; start it with prefix_cache=radix"


class PrefixDesk:
    """See the module."""

    def __init__(self, cache: PrefixCache | None = None) -> None:
        """Only a radix cache pins."""
        self._pins = PinBook(cache.pins.together) if isinstance(cache, RadixCache) else None
        self._device = cache.pins if isinstance(cache, RadixCache) else None
        self._host = cache.host_pins if isinstance(cache, RadixCache) else None

    def handle(self, command: PrefixCommand, now: float) -> PrefixAnswer:
        """Do what a command says, and answer it. What is refused has changed nothing."""
        try:
            if isinstance(command, ReadKv | WriteKv):
                raise UnsupportedError("this engine's KV is not copied")
            if isinstance(command, ListHotPrefixes):
                raise UnsupportedError(_NO_RADIX)
            if self._pins is None or self._device is None:
                raise UnsupportedError(_NO_RADIX)
            return self._see_to(self._pins, self._device, command, now)
        except PrefixmeshError as error:
            return _refusal(command.question, error)

    def expire(self, now: float) -> None:
        """Let go of every pin whose time has come. O(1) before the first one's end."""
        if self._pins is not None and now >= self._pins.next_expiry:
            self._pins.expire(now)

    def counts(self) -> PinCounts:
        """How many pins there are, and what they take. O(1)."""
        if self._pins is None or self._device is None:
            return _NO_PINS
        host = self._host
        return PinCounts(
            pins=len(self._pins),
            pinned_pages=self._device.pinned_pages,
            charged_pages=self._device.charged_pages,
            budget_pages=self._device.budget.pages_in_all or 0,
            host_pinned_pages=0 if host is None else host.pinned_pages,
            host_charged_pages=0 if host is None else host.charged_pages,
            version=self._pins.version,
        )

    def check_invariants(self) -> None:
        """The pins' ids against the tree's pins. O(pins)."""
        if self._pins is not None:
            self._pins.check_invariants()

    def _see_to(
        self, book: PinBook, device: PinTable, command: PinPrefix | UnpinPrefix | ListPins, now: float
    ) -> PrefixAnswer:
        named: list[NamedPin] = []
        match command:
            case PinPrefix():
                ttl_s = command.ttl_s or None
                key, tier = command.prefix.key(), _tier(command.tier)
                named = [book.add(command.pin_id, key, command.owner, tier, now, ttl_s)]
            case UnpinPrefix():
                removed = book.remove(command.pin_id, now)
                named = [] if removed is None else [removed]
            case ListPins():
                book.expire(now)
                named = book.pins()
        totals = _totals(device, book.version)
        infos = tuple(_info(pin_id, status, now) for pin_id, status in named)
        return PrefixAnswer(question=command.question, pins=infos, totals=totals)


_NO_PINS = PinCounts()


def _tier(number: int) -> Tier:
    try:
        return Tier(number)
    except ValueError:
        raise InvalidRequestError("tier", f"must be one of {[tier.value for tier in Tier]}") from None


def _totals(device: PinTable, version: int) -> PinTotals:
    budget = device.budget
    in_all = budget.pages_in_all or 0
    return PinTotals(
        charged_pages=device.charged_pages,
        budget_pages=in_all,
        owner_budget_pages=in_all if budget.pages_per_owner is None else budget.pages_per_owner,
        version=version,
    )


def _info(pin_id: str, status: PinStatus, now: float) -> PinInfo:
    left_s = 0.0 if status.expires_at is None else max(status.expires_at - now, math.ulp(0.0))
    return PinInfo(
        pin_id=pin_id,
        owner=status.owner,
        tier=int(status.tier),
        pages=status.pages,
        held_tokens=status.held_tokens,
        missing_tokens=status.missing_tokens,
        expires_in_s=left_s,
    )


def _refusal(question: int, error: PrefixmeshError) -> PrefixAnswer:
    """The answer to what cannot be done. Anything but what a caller can cause is a bug, and goes on."""
    problem: PrefixProblem
    field, text = "", str(error)
    match error:
        case InvalidRequestError():
            problem, field, text = "invalid", error.field, error.problem
        case BudgetError():
            problem = "over_budget"
        case UnsupportedError():
            problem = "unsupported"
        case _:
            raise error
    return PrefixAnswer(question=question, error=problem, field=field, problem=text)
