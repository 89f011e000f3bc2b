"""The Ray actors: a worker's or a router's server in an actor's event loop, and nothing else.

Ray gives them a process, a node and a lifetime; no request passes through Ray. What an actor starts ends with it: the engine
process of a worker notices that its socket closed. Errors meant for the user come back as values, because Ray would wrap
an exception in a trace of its own.
"""

import asyncio
import dataclasses
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import ray

from prefixmesh.config import RouterConfig, WorkerConfig
from prefixmesh.errors import PrefixmeshError, UnavailableError
from prefixmesh.fleet.plan import LOOPBACK, Bind
from prefixmesh.fleet_secret import FleetSecret

if TYPE_CHECKING:
    from prefixmesh.router.server import RouterServer
    from prefixmesh.worker.server import WorkerServer

MEET_WORKERS_S: Final = 20.0
"""The workers serve already when the router starts; a busy machine may take seconds to connect to them."""

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
        return Serving(address=bound.address, incarnation=bound.incarnation, memory_sums=bound.memory_sums)

    async def wait_closed(self) -> None:
        """Return when the server has ended, for whatever reason."""
        await _wait_closed(self._server)

    async def stop(self, grace_s: float) -> None:
        """Finish running requests within ``grace_s``, then end the engine."""
        if self._server is not None:
            await self._server.stop(grace_s)


class RouterActor:
    """Hosts one RouterServer."""

    def __init__(self, config: RouterConfig, secret: bytes) -> None:
        _log_to_stderr()
        self._config, self._secret = config, FleetSecret(secret)
        self._server: RouterServer | None = None

    async def ping(self) -> int:
        """The actor's process id: it runs."""
        return os.getpid()

    async def start(self) -> StartOutcome:
        """Listen, and return once every worker of this fleet is ready to be routed to. Those that were added to an earlier router may come
        later."""
        from prefixmesh.router.server import RouterServer

        try:
            self._server = RouterServer(self._config, self._secret)
            bound = await self._server.start()
        except PrefixmeshError as error:
            return StartFailed(problem=str(error), reason=error.reason)
        problem = await self._missing_workers(self._server)
        if problem:
            return StartFailed(problem=problem, reason=UnavailableError.reason)
        return Serving(address=bound.address)

    async def wait_closed(self) -> None:
        """Return when the server has ended, for whatever reason."""
        await _wait_closed(self._server)

    async def stop(self, grace_s: float) -> None:
        """Finish running requests within ``grace_s``."""
        if self._server is not None:
            await self._server.stop(grace_s)

    async def _missing_workers(self, server: "RouterServer") -> str:
        """Wait until no worker is missing; what is wrong with those that still are after ``MEET_WORKERS_S``."""
        own = [entry for entry in server.core.registry if entry.endpoint in self._config.workers]
        try:
            async with asyncio.timeout(MEET_WORKERS_S):
                while not all(entry.ready for entry in own):  # noqa: ASYNC110  a registry is plain state, without news
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return "; ".join(f"{entry.name} {entry.problem}" for entry in own if entry.problem)
        return ""


def _node_address() -> str:
    """The address by which other nodes reach this actor's node."""
    find: Callable[[], str] = ray.util.get_node_ip_address
    return find()


async def _wait_closed(server: "WorkerServer | RouterServer | None") -> None:
    if server is not None:
        waiting: Awaitable[object] = server.wait_closed()
        await waiting


def _log_to_stderr() -> None:
    """Ray keeps an actor's stderr in its session's log folder."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
