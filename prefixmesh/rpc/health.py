"""``grpc.health.v1``: what a server says of itself, to whoever asks and to whoever watches.

Not grpc_health's own servicer: that writes to each watcher under a lock which every change of the state takes, too. One watcher that takes
nothing (its process stopped, or its window of zero bytes) then held up all further changes, and with them a drain and the end of a server.
Here nobody waits for a watcher. One that is slow is told what holds once it takes something again; what it missed in between nobody needs.
"""

import asyncio
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixmesh.rpc.status import AnyContext

_STATES = health_pb2.HealthCheckResponse
State: TypeAlias = Any
"""One of ``HealthCheckResponse.ServingStatus``, which the stubs make no type that can be named."""


class HealthService(health_pb2_grpc.HealthServicer):
    """The states of one server's services by name; the empty name stands for the server. One event loop owns it."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {"": _STATES.SERVING}
        self._changed = asyncio.Event()
        self._is_leaving = False

    async def Check(  # noqa: N802  the service's own name
        self, request: health_pb2.HealthCheckRequest, context: AnyContext
    ) -> health_pb2.HealthCheckResponse:
        """How a service is; NOT_FOUND for one that is not here."""
        state = self._states.get(request.service)
        if state is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=state)

    async def Watch(  # noqa: N802  the service's own name
        self, request: health_pb2.HealthCheckRequest, context: AnyContext
    ) -> None:
        """How a service is, now and at each change, until the caller leaves."""
        told: State | None = None
        while True:
            changed = self._changed
            state = self._states.get(request.service, _STATES.SERVICE_UNKNOWN)
            if state != told:
                await context.write(health_pb2.HealthCheckResponse(status=state))
                told = state
            await changed.wait()

    async def set(self, service: str, status: State) -> None:
        """A service is so from now on. Waits for nobody; once the server is leaving, nothing changes any more."""
        if not self._is_leaving:
            self._states[service] = status
            self._tell()

    async def enter_graceful_shutdown(self) -> None:
        """All services are NOT_SERVING from now on, for good."""
        self._is_leaving = True
        self._states = dict.fromkeys(self._states, _STATES.NOT_SERVING)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
