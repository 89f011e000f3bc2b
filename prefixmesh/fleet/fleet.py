"""A fleet's life: its parts are started together, started again when they die, and stopped together.

A thin shell: what to start was decided in ``prefixmesh.fleet.plan``, what becomes of the dead in ``prefixmesh.fleet.supervision``; Ray is behind
``prefixmesh.fleet.launcher``. Here is the loop between them: what happens is put into one queue, read by ``supervise`` alone.
"""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prefixmesh.errors import PrefixmeshError, UnavailableError
from prefixmesh.fleet.events import FleetEvent, Report
from prefixmesh.fleet.launcher import MEET_WORKERS_S, ROUTER, STOP_SLACK_S, Launcher, LifeKey
from prefixmesh.fleet.plan import FleetPlan, WorkerPlan
from prefixmesh.fleet.ray_session import RaySession
from prefixmesh.fleet.supervision import (
    NEVER,
    Action,
    End,
    GivenUp,
    Lost,
    Part,
    Prepare,
    RouteTo,
    Start,
    Supervision,
)
from prefixmesh.fleet_secret import FleetSecret

_log = logging.getLogger(__name__)

_LOST_UNSEEN: Final = "it ended while nobody watched over it"
_LEFT_STARTING: Final = "its supervisor ended while it started"


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoints:
    """Where a fleet that is up listens."""

    router: str
    workers: Mapping[str, str]


class Fleet:
    """One fleet: ``start`` or ``resume`` it once, ``supervise`` it, ``stop`` it once."""

    supervisor = ""
    """This object looks after it, in whatever process it is."""

    def __init__(
        self,
        plan: FleetPlan,
        session: RaySession,
        secret: FleetSecret,
        report: Report,
        *,
        namespace: str | None = None,
        home_node: str | None = None,
        is_detached: bool = False,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_change`` is called whenever ``parts`` have changed, before that is acted upon."""
        self.namespace = namespace or new_namespace()
        """Ray namespace of the actors: fleets that share a cluster never meet."""
        self._plan = plan
        self._report = report
        self._on_change = on_change
        self._launcher = Launcher(
            plan,
            session,
            secret,
            report,
            namespace=self.namespace,
            home_node=home_node or session.ray.get_runtime_context().get_node_id(),
            is_detached=is_detached,
        )
        self._core = Supervision(plan.request.restart_policy())
        self._addresses: tuple[str, ...] = ()
        self._port: int | None = None
        self._news: asyncio.Queue[Callable[[float], list[Action]]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watched: dict[LifeKey, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"Fleet({self.namespace}: {self._core})"

    @property
    def parts(self) -> tuple[Part, ...]:
        """What is known of each part; times are of ``time.monotonic``."""
        return tuple(self._core.parts.values())

    async def start(self) -> Endpoints:
        """Start all workers at once, then the router; raises the first failure, after which ``stop`` is due.

        It names the part and its problem in one line: ConfigError or ModelFileError for what the user must change, else UnavailableError.
        """
        starting = [asyncio.create_task(self._start_worker(worker, 1)) for worker in self._plan.workers]
        try:
            addresses = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            raise
        self._addresses = tuple(addresses)
        router = await self._start_router(1, MEET_WORKERS_S)
        now = time.monotonic()
        names = [worker.config.worker_id for worker in self._plan.workers]
        parts = [Part(ROUTER, "router", address=router, since=now)]
        for name, address in zip(names, addresses, strict=True):
            parts.append(Part(name, "worker", address=address, since=now))
        self._perform(self._core.adopt(parts, now))
        return Endpoints(router=router, workers=dict(zip(names, addresses, strict=True)))

    def resume(self, parts: Sequence[Part]) -> None:
        """Go on with the fleet of an earlier process, as it noted it last (``on_change``). Lives that were starting are begun anew."""
        for part in parts:
            if part.address and part.kind == "router":
                self._port = _port_of(part.address)
            if part.standby and self._launcher.find(part.name, part.standby):
                self._spawn(self._stand_by(part.standby))
            elif part.standby:
                self._tell_lost(part.name, part.standby, _LOST_UNSEEN)
            has_actor = part.phase in ("starting", "serving") and self._launcher.find(part.name, part.life)
            if part.phase == "serving" and has_actor:
                self._watch(part.name, part.life)
            elif part.phase in ("starting", "serving"):
                self._tell_lost(
                    part.name, part.life, _LEFT_STARTING if part.phase == "starting" else _LOST_UNSEEN
                )
        self._addresses = tuple(part.address for part in parts if part.kind == "worker" and part.address)
        self._perform(self._core.adopt(parts, time.monotonic()))

    async def supervise(self) -> None:
        """Start again what dies; returns when everything has been given up. May be called again after ``revive``."""
        while True:
            self._perform(await self._next_actions())
            if self._core.is_over:
                return

    def revive(self) -> None:
        """Try again what was given up."""
        self._news.put_nowait(self._core.revive)

    async def stop(self, grace_s: float) -> None:
        """Finish what runs within ``grace_s`` seconds and end every actor: the router first, so that nothing new arrives."""
        watchers = self._unwatch()
        lives = self._launcher.lives
        await self._launcher.stop([key for key in lives if key[0] == ROUTER], grace_s)
        await self._launcher.stop(self._launcher.lives, grace_s)
        if watchers:
            await asyncio.wait(watchers, timeout=STOP_SLACK_S)

    def kill(self) -> None:
        """End every actor now."""
        self._unwatch()
        for key in self._launcher.lives:
            self._launcher.end(*key)

    async def _next_actions(self) -> list[Action]:
        due = self._core.due
        try:
            async with asyncio.timeout(None if due == NEVER else max(0.0, due - time.monotonic())):
                hear = await self._news.get()
        except TimeoutError:
            return self._core.tick(time.monotonic())
        return hear(time.monotonic())

    def _perform(self, actions: Sequence[Action]) -> None:
        """Noted before it is done: whoever goes on from the note looks for lives that may not be there, and misses none."""
        self._on_change()
        for action in actions:
            self._perform_one(action)

    def _perform_one(self, action: Action) -> None:
        match action:
            case Start(part, life):
                self._spawn(self._bring_up(part, life))
            case Prepare(_, life):
                self._spawn(self._stand_by(life))
            case End(part, life):
                self._launcher.end(part, life)
            case RouteTo(addresses):
                self._addresses = addresses or self._addresses
                router = self._core.parts[ROUTER]
                if router.phase == "serving":
                    self._spawn(self._launcher.route_to(router.life, addresses))
            case Lost(part, life, reason, restart_in_s):
                _log.info("fleet_part_lost part=%s life=%d problem=%s", part, life, reason)
                self._report(FleetEvent(kind="lost", subject=part, detail=reason, seconds=restart_in_s))
            case GivenUp(part, reason):
                _log.info("fleet_part_given_up part=%s problem=%s", part, reason)
                self._report(FleetEvent(kind="given_up", subject=part, detail=reason))

    async def _bring_up(self, name: str, life: int) -> None:
        """Start a life and tell how that went."""
        try:
            if name == ROUTER:
                address = await self._start_router(life, 0.0)
            else:
                address = await self._start_worker(self._worker(name), life)
        except PrefixmeshError as error:
            self._tell_lost(name, life, str(error))
        except Exception as error:  # a bug of ours: the part must not stay "starting" for ever
            _log.exception("fleet_part_not_started part=%s life=%d", name, life)
            self._tell_lost(name, life, f"{type(error).__name__}: {error}")
        else:
            self._news.put_nowait(lambda now: self._core.served(name, life, address, now))

    async def _stand_by(self, life: int) -> None:
        """Have a router ready; from then on it is watched as any life is."""
        try:
            await self._launcher.prepare_router(life)
        except PrefixmeshError as error:
            self._tell_lost(ROUTER, life, str(error))
        except Exception as error:  # a bug of ours: the next one may stand by
            _log.exception("fleet_standby_not_started life=%d", life)
            self._tell_lost(ROUTER, life, f"{type(error).__name__}: {error}")
        else:
            self._watch(ROUTER, life)

    async def _start_worker(self, worker: WorkerPlan, life: int) -> str:
        serving = await self._launcher.start_worker(worker, life)
        self._watch(worker.config.worker_id, life)
        return str(serving.address)

    async def _start_router(self, life: int, meet_workers_s: float) -> str:
        serving = await self._launcher.start_router(life, self._addresses, self._port, meet_workers_s)
        self._watch(ROUTER, life)
        self._port = _port_of(serving.address)  # callers know it: every later life listens there too
        return str(serving.address)

    def _worker(self, name: str) -> WorkerPlan:
        return next(worker for worker in self._plan.workers if worker.config.worker_id == name)

    def _watch(self, name: str, life: int) -> None:
        if (name, life) not in self._watched:
            self._watched[name, life] = asyncio.create_task(self._tell_end(name, life))

    async def _tell_end(self, name: str, life: int) -> None:
        reason = await self._launcher.wait_ended(name, life)
        if self._watched.pop((name, life), None) is not None:
            self._tell_lost(name, life, reason)

    def _tell_lost(self, name: str, life: int, reason: str) -> None:
        draw = random.random()  # noqa: S311 - it spreads restarts, and guards nothing
        self._news.put_nowait(lambda now: self._core.lost(name, life, reason, now, draw))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _unwatch(self) -> list[asyncio.Task[None]]:
        """Take the end of any part for what was wanted. The watching tasks end with their actors: Ray's client logs a trace when
        cancelled."""
        for task in self._tasks:
            task.cancel()
        watchers = list(self._watched.values())
        self._watched.clear()
        return watchers


def new_namespace() -> str:
    """A Ray namespace for one fleet."""
    return f"prefixmesh-{secrets.token_hex(4)}"


def given_up_error(parts: Sequence[Part]) -> UnavailableError:
    """Why a fleet is over: the last reason of each part."""
    return UnavailableError("; ".join(f"{part.name} {part.reason}" for part in parts))


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])
