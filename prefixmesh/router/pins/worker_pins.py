"""What workers say of their pins (``ListPins``): asked for when it has changed, and now and then all the same."""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from prefixmesh.cache.tier import Tier
from prefixmesh.errors import InvalidRequestError, PrefixmeshError, UnsupportedError
from prefixmesh.ids import Incarnation
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.pins.wishes import PinSeen
from prefixmesh.router.registry import WorkerRegistry
from prefixmesh.router.worker_entry import WorkerEntry
from prefixmesh.router.workers import WorkerPool

_log = logging.getLogger(__name__)

ASK_EVERY_S: Final = 30.0
"""A worker that tells of changes in its reports is asked so often beside: a report may be lost with a connection."""

RETRY_S: Final = 1.0
"""A worker that did not answer is asked again after so long."""

ASK_TIMEOUT_S: Final = 5.0
"""A worker answers between two steps of its engine."""

MOST_AT_ONCE: Final = 16
"""Workers that are asked at the same time: of a large fleet that has just come, the others wait a moment."""

NOT_TOLD: Final = -1

MAX_PINS: Final = 65_536
"""More than any router orders; whoever tells of more is passed over."""

MAX_TOKENS: Final = 2**36
"""More than any pool has; sums of it over pins and workers can still be told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToldPins:
    """What one life of a worker has told."""

    incarnation: Incarnation
    version: int
    """Of its pins, as its reports count them."""

    asked_at: float
    pins: Mapping[str, PinSeen] = field(default_factory=dict)
    budget_tokens: int = NOT_TOLD
    owner_budget_tokens: int = NOT_TOLD
    host_budget_tokens: int = 0
    host_owner_budget_tokens: int = 0


class WorkerPins:
    """Keeps what all workers have told. Call ``refresh`` a few times a second, ``close`` at the end."""

    def __init__(self, registry: WorkerRegistry, pool: WorkerPool, on_news: Callable[[], None]) -> None:
        """``on_news`` is called whenever a worker has answered."""
        self._registry = registry
        self._pool = pool
        self._on_news = on_news
        self._told: dict[Endpoint, ToldPins] = {}
        self._failed_at: dict[Endpoint, float] = {}
        self._is_old: set[Endpoint] = set()
        self._asking: dict[Endpoint, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(MOST_AT_ONCE)

    def told(self, entry: WorkerEntry) -> ToldPins:
        """What this life of a worker has told; nothing before its first answer."""
        told = self._told.get(entry.endpoint)
        if told is None or told.incarnation != entry.load.incarnation:
            return ToldPins(incarnation=entry.load.incarnation, version=0, asked_at=-math.inf)
        return told

    def expect_change(self, endpoint: Endpoint) -> None:
        """A worker has just done something about its pins: it is asked at the next occasion, also if its reports do not tell."""
        self._is_old.add(endpoint)

    def refresh(self, now: Callable[[], float]) -> None:
        """Ask whoever has something new to tell. Nobody waits. O(workers)."""
        known = {entry.endpoint for entry in self._registry}
        for kept in (self._told, self._failed_at):
            for gone in kept.keys() - known:
                del kept[gone]
        self._is_old &= known
        for entry in self._registry:
            if entry.facts is not None and not entry.unreachable and self._must_ask(entry, now()):
                self._is_old.discard(entry.endpoint)
                task = asyncio.create_task(self._ask(entry, now))
                self._asking[entry.endpoint] = task

    async def close(self) -> None:
        """Ask nobody any more."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _must_ask(self, entry: WorkerEntry, now: float) -> bool:
        if entry.endpoint in self._asking or now - self._failed_at.get(entry.endpoint, -math.inf) < RETRY_S:
            return False
        told = self.told(entry)
        has_changed = entry.report is not None and entry.report.pins_version != told.version
        return entry.endpoint in self._is_old or has_changed or now - told.asked_at >= ASK_EVERY_S

    async def _ask(self, entry: WorkerEntry, now: Callable[[], float]) -> None:
        endpoint, incarnation = entry.endpoint, entry.load.incarnation
        try:
            async with self._places:
                asked_at = now()
                link = self._pool.find_link(endpoint)
                if link is None:
                    return
                answer = await link.control(_list_pins, ASK_TIMEOUT_S)
                page_size = entry.facts.page_size if entry.facts else 1
                self._told[endpoint] = _read(answer, page_size, incarnation, asked_at)
                self._failed_at.pop(endpoint, None)
        except UnsupportedError:
            self._told[endpoint] = ToldPins(
                incarnation=incarnation, version=self._reported(entry), asked_at=now()
            )
        except PrefixmeshError as error:
            self._failed_at[endpoint] = now()
            _log.warning("worker_pins_not_told endpoint=%s problem=%r", endpoint, str(error))
        except Exception:  # a bug of ours: the other workers are asked on
            self._failed_at[endpoint] = now()
            _log.exception("worker_pins_failed endpoint=%s", endpoint)
        finally:
            self._asking.pop(endpoint, None)
            self._on_news()

    def _reported(self, entry: WorkerEntry) -> int:
        return 0 if entry.report is None else entry.report.pins_version


async def _list_pins(stub: Any, settings: Any) -> pb.WorkerPinsResponse:
    answer: pb.WorkerPinsResponse = await stub.ListPins(pb.WorkerPinsRequest(), **settings)
    return answer


def _read(
    answer: pb.WorkerPinsResponse, page_size: int, incarnation: Incarnation, asked_at: float
) -> ToldPins:
    """What is said, in tokens. Raises InvalidRequestError for what nothing can be reckoned with. O(pins)."""
    if len(answer.pins) > MAX_PINS:
        raise InvalidRequestError("pins", f"at most {MAX_PINS} are believed, got {len(answer.pins)}")
    return ToldPins(
        incarnation=incarnation,
        version=answer.version,
        asked_at=asked_at,
        pins={pin.pin_id: _pin(pin, page_size, asked_at) for pin in answer.pins},
        budget_tokens=_size("budget_pages", answer.budget_pages, page_size),
        owner_budget_tokens=_size("owner_budget_pages", answer.owner_budget_pages, page_size),
        host_budget_tokens=_size("host_budget_pages", answer.host_budget_pages, page_size),
        host_owner_budget_tokens=_size("host_owner_budget_pages", answer.host_owner_budget_pages, page_size),
    )


def _pin(pin: pb.WorkerPinState, page_size: int, asked_at: float) -> PinSeen:
    return PinSeen(
        owner=pin.owner,
        tier=Tier.HOST if pin.tier == pb.TIER_HOST else Tier.DEVICE,
        size_tokens=_size("pins.pages", pin.pages, page_size),
        held_tokens=_size("pins.held_tokens", pin.held_tokens),
        missing_tokens=_size("pins.missing_tokens", pin.missing_tokens),
        expires_at=asked_at + 1e-3 * pin.expires_in_ms if pin.expires_in_ms else None,
    )


def _size(field: str, value: int, unit: int = 1) -> int:
    """So many ``unit`` of tokens; refused beyond what any pool has: sums of them are told on the wire, too."""
    if not 0 <= value * unit <= MAX_TOKENS:
        raise InvalidRequestError(field, f"must be 0 to {MAX_TOKENS} tokens, got {value} of {unit}")
    return value * unit
