"""The Ray actors: a worker's or a router's server in an actor's event loop, and nothing else.

Ray gives them a process, a node and a lifetime; no request passes through Ray. What an actor starts ends with it: the engine
process of a worker notices that its socket closed. Errors meant for the user come back as values, because Ray would wrap
an exception in a trace of its own. One actor is one life of its part: it is never restarted, only followed by another
(``prefixmesh.fleet.supervision``).
"""

import asyncio
import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import ray

from prefixmesh.collector import freeze_what_stays
from prefixmesh.config import WorkerConfig
from prefixmesh.errors import PrefixmeshError, UnavailableError
from prefixmesh.fleet.plan import LOOPBACK, Bind
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.router_config import RouterConfig

if TYPE_CHECKING:
    from prefixmesh.router.model import RouterModel
    from prefixmesh.router.server import RouterServer
    from prefixmesh.worker.server import WorkerServer

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """A server that listens."""

    address: str
    incarnation: int = 0
    """The life of a worker; 0 for a router."""

    memory_sums: str = ""
    """How a worker divided its memory, in one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartFailed:
    """Why a server could not start, in one line for the user."""

    problem: str
    reason: str
    """``PrefixmeshError.reason`` of what went wrong."""


StartOutcome = Serving | StartFailed


class WorkerActor:
    """Hosts one WorkerServer; its engine is a process of its own."""

    def __init__(self, config: WorkerConfig, secret: bytes, bind: Bind) -> None:
        _log_to_stderr()
        self._config, self._secret, self._bind = config, FleetSecret(secret), bind
        self._server: WorkerServer | None = None
        self._serving: Serving | None = None
        self._has_started = asyncio.Event()

    async def ping(self) -> int:
        """The actor's process id: it runs."""
        return os.getpid()

    async def start(self) -> StartOutcome:
        """Load the model and listen; seconds to minutes."""
        from prefixmesh.worker.server import WorkerServer

        host = LOOPBACK if self._bind == "loopback" else _node_address()
        try:
            self._server = WorkerServer(dataclasses.replace(self._config, host=host), self._secret)
            bound = await self._server.start()
        except PrefixmeshError as error:
            return StartFailed(problem=str(error), reason=error.reason)
        self._has_started.set()
        self._serving = Serving(
            address=bound.address, incarnation=bound.incarnation, memory_sums=bound.memory_sums
        )
        return self._serving

    async def serving(self) -> Serving | None:
        """Where it listens, for a supervisor that was restarted; None before it does."""
        return self._serving

    async def wait_closed(self) -> None:
        """Return when the server has ended, for whatever reason."""
        await self._has_started.wait()
        assert self._server is not None
        await self._server.wait_closed()

    async def stop(self, grace_s: float) -> None:
        """Finish running requests within ``grace_s``, then end the engine."""
        if self._server is not None:
            await self._server.stop(grace_s)


class RouterActor:
    """Hosts one RouterServer. ``prepare`` alone makes it a standby: everything is loaded, and no port is bound."""

    def __init__(self, config: RouterConfig, secret: bytes) -> None:
        """``config`` says what to load; where to listen and whom to route to is told at ``start``."""
        _log_to_stderr()
        self._config, self._secret = config, FleetSecret(secret)
        self._preparing: asyncio.Task[RouterModel] | None = None
        self._server: RouterServer | None = None
        self._serving: Serving | None = None
        self._has_started = asyncio.Event()
        self._told: frozenset[str] = frozenset()

    async def ping(self) -> int:
        """The actor's process id: it runs."""
        return os.getpid()

    async def prepare(self) -> StartFailed | None:
        """Import the server and load the model's text side; about two seconds. What can be wrong then comes back."""
        try:
            await self._model()
        except PrefixmeshError as error:
            return StartFailed(problem=str(error), reason=error.reason)
        return None

    async def start(self, config: RouterConfig, meet_workers_s: float) -> StartOutcome:
        """Listen, and return once every worker of ``config`` is ready to be routed to, but after ``meet_workers_s`` it is a failure that
        one is not; 0 does not wait for them. Those that were added to an earlier router may come later.
        """
        from prefixmesh.router.server import RouterServer

        try:
            model = await self._model()
            self._server = RouterServer(config, self._secret, model=model)
            self._told = frozenset(config.workers)
            bound = await self._server.start()
        except PrefixmeshError as error:
            return StartFailed(problem=str(error), reason=error.reason)
        problem = await self._missing_workers(self._server, meet_workers_s) if meet_workers_s else ""
        if problem:
            return StartFailed(problem=problem, reason=UnavailableError.reason)
        freeze_what_stays()
        self._has_started.set()
        self._serving = Serving(address=bound.address)
        return self._serving

    async def serving(self) -> Serving | None:
        """Where it listens, for a supervisor that was restarted; None before it does."""
        return self._serving

    async def route_to(self, addresses: Sequence[str]) -> None:
        """Route to the fleet's workers at ``addresses`` and no more to those that an earlier list or ``start`` named. Workers that
        operators added are none of it."""
        if self._server is None:
            return
        told, self._told = self._told, frozenset(addresses)
        for address in sorted(told - self._told):
            self._server.remove_worker(address)
        for address in sorted(self._told - told):
            try:
                self._server.add_worker(address)
            except PrefixmeshError as error:  # too many: the others serve
                _log.warning("worker_not_added endpoint=%s problem=%r", address, str(error))

    async def wait_closed(self) -> None:
        """Return when the server has ended, for whatever reason; a standby's has not begun."""
        await self._has_started.wait()
        assert self._server is not None
        await self._server.wait_closed()

    async def stop(self, grace_s: float) -> None:
        """Finish running requests within ``grace_s``."""
        if self._server is not None:
            await self._server.stop(grace_s)

    async def _model(self) -> "RouterModel":
        """Loaded once, whoever asks first."""
        if self._preparing is None:
            self._preparing = asyncio.create_task(asyncio.to_thread(_load_router, self._config))
        return await asyncio.shield(self._preparing)

    async def _missing_workers(self, server: "RouterServer", wait_s: float) -> str:
        """Wait until no worker is missing; what is wrong with those that still are after ``wait_s``."""
        own = [entry for entry in server.core.registry if entry.endpoint in self._told]
        try:
            async with asyncio.timeout(wait_s):
                while not all(entry.ready for entry in own):  # noqa: ASYNC110  a registry is plain state, without news
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return "; ".join(f"{entry.name} {entry.problem}" for entry in own if entry.problem)
        return ""


def _load_router(config: RouterConfig) -> "RouterModel":
    """In a thread: the imports alone take a second, and a server of the same process must not stand still for them."""
    import prefixmesh.router.server
    from prefixmesh.router.model import load_router_model

    assert prefixmesh.router.server
    return load_router_model(config)


def _node_address() -> str:
    """The address by which other nodes reach this actor's node."""
    find: Callable[[], str] = ray.util.get_node_ip_address
    return find()


def _log_to_stderr() -> None:
    """Ray keeps an actor's stderr in its session's log folder."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
