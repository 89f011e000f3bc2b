"""The supervisor as a Ray actor of its own: detached, so that a fleet outlives the process that started it, and restarted by Ray.

It hosts a ``Fleet`` and adds a memory beyond its own life: before it acts it notes its parts in the cluster's key-value store, where Ray Serve's
controller keeps its checkpoint too. A restarted one reads the note, finds the actors by their names, and goes on. Requests know nothing of it.
"""

import asyncio
import logging
import os
import secrets
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

import ray
from ray.experimental import internal_kv

from prefixmesh.errors import PrefixmeshError
from prefixmesh.fleet.actors import StartFailed
from prefixmesh.fleet.events import FleetEvent
from prefixmesh.fleet.fleet import Endpoints, Fleet
from prefixmesh.fleet.plan import FleetPlan
from prefixmesh.fleet.ray_session import RaySession
from prefixmesh.fleet.record import decode_parts, encode_parts, shift
from prefixmesh.fleet.supervision import Part
from prefixmesh.fleet_secret import FleetSecret

_log = logging.getLogger(__name__)

MAX_EVENTS: Final = 1024
"""What a listener that was away is told afterwards: the start of a fleet of hundreds, or days of deaths."""

_NOTES: Final = b"prefixmesh"
_STOP_WAIT_S: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorOrder:
    """What a supervisor is to look after; Ray hands the same to each of its lives."""

    plan: FleetPlan
    secret: bytes
    namespace: str
    home_node: str
    address: str
    """Of the cluster's head, for the log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class News:
    """What has happened since a listener heard last."""

    teller: str
    """Names this life of the supervisor; its numbers are its own."""

    number: int
    """Counts all news."""

    events: tuple[FleetEvent, ...]
    parts: tuple[Part, ...]
    """As they are now, by the wall clock."""

    is_over: bool
    """Everything has been given up."""


class SupervisorActor:
    """Hosts one Fleet whose actors are detached."""

    async def __init__(self, order: SupervisorOrder) -> None:  # type: ignore[misc]  # Ray awaits it, in the actor's loop
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        self._teller = secrets.token_hex(8)
        self._key = order.namespace.encode()
        self._events: deque[tuple[int, FleetEvent]] = deque(maxlen=MAX_EVENTS)
        self._number = 0
        self._is_over = False
        self._has_news = asyncio.Event()
        self._supervising: asyncio.Task[None] | None = None
        self._fleet = Fleet(
            order.plan,
            RaySession(ray=ray, address=order.address, is_local=False),
            FleetSecret(order.secret),
            self._hear,
            namespace=order.namespace,
            home_node=order.home_node,
            is_detached=True,
            on_change=self._note,
        )
        noted = internal_kv._internal_kv_get(self._key, namespace=_NOTES)
        if noted is not None:
            self._fleet.resume(shift(decode_parts(noted), -_wall_clock_ahead()))
            self._supervising = asyncio.create_task(self._supervise())

    async def ping(self) -> int:
        """The actor's process id: it runs."""
        return os.getpid()

    async def start(self) -> Endpoints | StartFailed:
        """Bring the fleet up, and look after it from then on."""
        try:
            endpoints = await self._fleet.start()
        except PrefixmeshError as error:
            return StartFailed(problem=str(error), reason=error.reason)
        self._supervising = asyncio.create_task(self._supervise())
        return endpoints

    async def news(self, teller: str, seen: int) -> News:
        """What has happened after news ``seen`` of ``teller``; waits until something has."""
        seen = seen if teller == self._teller else -1
        while self._number <= seen:
            await self._has_news.wait()
        return News(
            teller=self._teller,
            number=self._number,
            events=tuple(event for number, event in self._events if number > seen),
            parts=self._parts(),
            is_over=self._is_over,
        )

    async def revive(self) -> None:
        """Try again what was given up."""
        self._fleet.revive()

    async def stop(self, grace_s: float) -> None:
        """Finish what runs within ``grace_s`` seconds, end every other actor of the fleet, and forget it."""
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.wait({self._supervising}, timeout=_STOP_WAIT_S)
        try:
            await self._fleet.stop(grace_s)
        finally:
            self._fleet.kill()
            internal_kv._internal_kv_del(self._key, namespace=_NOTES)

    async def _supervise(self) -> None:
        try:
            while True:
                await self._fleet.supervise()
                self._is_over = True
                self._wake()  # it may be asked to try again
        except Exception:
            _log.exception("supervisor_failed")
            os._exit(1)  # a bug of ours: Ray starts it again, and it goes on from its note

    def _parts(self) -> tuple[Part, ...]:
        return shift(self._fleet.parts, _wall_clock_ahead())

    def _note(self) -> None:
        self._is_over = False
        note = encode_parts(self._parts())
        try:
            internal_kv._internal_kv_put(self._key, note, overwrite=True, namespace=_NOTES)
        except (
            Exception
        ):  # the head is away; the next note tells this too, and the fleet must be looked after meanwhile
            _log.exception("supervisor_note_not_kept")
        self._wake()

    def _hear(self, event: FleetEvent) -> None:
        self._events.append((self._number + 1, event))
        self._wake()

    def _wake(self) -> None:
        self._number += 1
        self._has_news.set()
        self._has_news = asyncio.Event()


def _wall_clock_ahead() -> float:
    """Of this process's monotonic clock, seconds."""
    return time.time() - time.monotonic()
