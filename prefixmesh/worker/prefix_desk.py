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
from prefixmesh.ids import Namespace
from prefixmesh.worker.engine_stats import PinCounts
from prefixmesh.worker.messages import Submit
from prefixmesh.worker.namespace_adapters import NamespaceAdapters
from prefixmesh.worker.pin_book import NamedPin, PinBook
from prefixmesh.worker.prefix_messages import (
    HotPrefixInfo,
    KvWritten,
    ListHotPrefixes,
    ListPins,
    PinInfo,
    PinPrefix,
    PinTotals,
    PrefixAnswer,
    PrefixCommand,
    PrefixName,
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
        self._cache = cache if isinstance(cache, RadixCache) else None
        self._pins = None if self._cache is None else PinBook(self._cache.pins.together)
        self._adapters = NamespaceAdapters()

    def handle(self, command: PrefixCommand, now: float) -> PrefixAnswer:
        """Do what a command says, and answer it. What is refused has changed nothing."""
        try:
            if self._pins is None or self._cache is None:
                raise UnsupportedError(_NO_RADIX)
            if isinstance(command, ListHotPrefixes):
                return self._hottest(self._cache, command, now)
            if isinstance(command, ReadKv | WriteKv):
                return _look(self._cache, command)
            return self._see_to(self._pins, self._cache, command, now)
        except PrefixmeshError as error:
            return _refusal(command.question, error)

    def expire(self, now: float) -> None:
        """Let go of every pin whose time has come. O(1) before the first one's end."""
        if self._pins is not None and now >= self._pins.next_expiry:
            self._pins.expire(now)

    def counts(self) -> PinCounts:
        """How many pins there are, and what they take. O(1)."""
        if self._pins is None or self._cache is None:
            return _NO_PINS
        device, host = self._cache.pins, self._cache.host_pins
        return PinCounts(
            pins=len(self._pins),
            pinned_pages=device.pinned_pages,
            charged_pages=device.charged_pages,
            budget_pages=device.budget.pages_in_all or 0,
            host_pinned_pages=0 if host is None else host.pinned_pages,
            host_charged_pages=0 if host is None else host.charged_pages,
            version=self._pins.version,
        )

    def note(self, command: Submit) -> None:
        """A request comes: with which adapter the KV of its namespaces is computed. O(its public prefixes)."""
        namespaces = [Namespace(command.namespace), *(public.namespace for public in command.public)]
        self._adapters.note(namespaces, command.adapter)

    def check_invariants(self) -> None:
        """The pins' ids against the tree's pins. O(pins)."""
        if self._pins is not None:
            self._pins.check_invariants()

    def _hottest(self, cache: RadixCache, command: ListHotPrefixes, now: float) -> PrefixAnswer:
        """What is used most, but for prefixes of which nobody knows any more what they were computed with."""
        found = cache.hot_prefixes(now, max_prefixes=command.max_prefixes, max_tokens=command.max_tokens)
        hot: list[HotPrefixInfo] = []
        for prefix in found:
            adapter = self._adapters.adapter_of(prefix.key.namespace)
            if adapter is not None:
                name = PrefixName(*prefix.key)
                hot.append(HotPrefixInfo(prefix=name, hits=prefix.hits, owner=prefix.owner, adapter=adapter))
        return PrefixAnswer(question=command.question, hot=tuple(hot))

    def _see_to(
        self, book: PinBook, cache: RadixCache, command: PinPrefix | UnpinPrefix | ListPins, now: float
    ) -> PrefixAnswer:
        named: list[NamedPin] = []
        made = False
        match command:
            case PinPrefix():
                ttl_s = command.ttl_s or None
                key, tier = command.prefix.key(), _tier(command.tier)
                added = book.add(command.pin_id, key, command.owner, tier, now, ttl_s)
                named, made = [added.pin], added.made
            case UnpinPrefix():
                removed = book.remove(command.pin_id, now)
                named = [] if removed is None else [removed]
            case ListPins(pin_id=""):
                book.expire(now)
                named = book.pins()
            case ListPins():
                book.expire(now)
                found = book.pin(command.pin_id)
                named = [] if found is None else [found]
        totals = _totals(cache, book.version)
        infos = tuple(_info(pin_id, status, now) for pin_id, status in named)
        return PrefixAnswer(question=command.question, pins=infos, made=made, totals=totals)


_NO_PINS = PinCounts()


def _look(cache: RadixCache, command: ReadKv | WriteKv) -> PrefixAnswer:
    """How much of a prefix is here: all that can be asked of an engine whose KV is not copied."""
    if isinstance(command, ReadKv) or command.kv:
        raise UnsupportedError("this engine's KV is not copied")
    key = command.prefix.key()
    if not cache.can_hold(key):
        raise InvalidRequestError("boundary_tokens", "is not at whole pages and blocks here")
    found = cache.peek_tiers(key)
    written = KvWritten(held_tokens=found.device, host_tokens=found.host)
    return PrefixAnswer(question=command.question, written=written)


def _tier(number: int) -> Tier:
    try:
        return Tier(number)
    except ValueError:
        raise InvalidRequestError("tier", f"must be one of {[tier.value for tier in Tier]}") from None


def _totals(cache: RadixCache, version: int) -> PinTotals:
    in_all, per_owner = _bounds(cache.pins)
    host_in_all, host_per_owner = (0, 0) if cache.host_pins is None else _bounds(cache.host_pins)
    return PinTotals(
        charged_pages=cache.pins.charged_pages,
        budget_pages=in_all,
        owner_budget_pages=per_owner,
        version=version,
        host_budget_pages=host_in_all,
        host_owner_budget_pages=host_per_owner,
    )


def _bounds(pins: PinTable) -> tuple[int, int]:
    """Most pages of all pins of a tier, and of one owner's."""
    in_all = pins.budget.pages_in_all or 0
    per_owner = pins.budget.pages_per_owner
    return in_all, in_all if per_owner is None else min(in_all, per_owner)


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
