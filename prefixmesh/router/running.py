"""The requests that a router is answering now: bounded, owned by tenants, stopped by id, and waited for at the end."""

import asyncio
from collections.abc import Callable
from typing import Final

from prefixmesh.errors import CancelledError, OverloadedError, PrefixmeshError, StoppingError
from prefixmesh.ids import RequestId, TenantId

MAX_RUNNING_REQUESTS: Final = 10_000
"""A router holds some 100 KB for a streaming request; past this it refuses instead of running out of memory."""


class RunningRequest:
    """One request, from its arrival to its end."""

    __slots__ = ("_cancel", "request_id", "stopped_by", "tenant")

    def __init__(self, request_id: RequestId, tenant: TenantId) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.stopped_by: PrefixmeshError | None = None
        """Why it must end, once somebody has stopped it; its stream raises this."""

        self._cancel: Callable[[], object] | None = None

    def on_stop(self, cancel: Callable[[], object]) -> None:
        """What ends the call that the request waits for now. Raises at once when the request has been stopped already."""
        self.check()
        self._cancel = cancel

    def stop(self, reason: PrefixmeshError) -> None:
        """End the request with ``reason``; a second stop changes nothing."""
        if self.stopped_by is None:
            self.stopped_by = reason
            if self._cancel is not None:
                self._cancel()

    def check(self) -> None:
        """Raise the reason when the request has been stopped."""
        if self.stopped_by is not None:
            raise self.stopped_by


class RunningRequests:
    """Table of running requests by the router's own ids. One event loop owns it; every method but ``stop_all`` is O(1)."""

    def __init__(self, limit: int = MAX_RUNNING_REQUESTS) -> None:
        self._limit = limit
        self._requests: dict[RequestId, RunningRequest] = {}
        self._refusal: str | None = None
        self._drain: str | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._requests)

    def enter(self, request_id: RequestId, tenant: TenantId) -> "RunningPlace":
        """A place for one request, held while it is entered. Entering raises StoppingError once closed and while drained, OverloadedError
        when all places are taken."""
        return RunningPlace(self, RunningRequest(request_id, tenant))

    def take(self, request: RunningRequest) -> None:
        """A request runs from now on; raises as ``enter`` says. For places."""
        refusal = self._refusal or self._drain
        if refusal is not None:
            raise StoppingError(refusal)
        if len(self._requests) >= self._limit:
            raise OverloadedError(f"this router is answering {self._limit} requests, which is its limit")
        self._requests[request.request_id] = request
        self._idle.clear()

    def give_back(self, request: RunningRequest) -> None:
        """A request runs no longer. For places."""
        del self._requests[request.request_id]
        if not self._requests:
            self._idle.set()

    def abort(self, request_id: RequestId, tenant: TenantId) -> None:
        """Stop a request of this tenant; unknown ids, ended requests and other tenants' are left alone, silently."""
        request = self._requests.get(request_id)
        if request is not None and request.tenant == tenant:
            request.stop(CancelledError("the request was aborted"))

    def close(self, reason: str) -> None:
        """Refuse every further request with ``reason``; the running ones go on."""
        self._refusal = reason

    @property
    def is_draining(self) -> bool:
        """Whether ``drain`` is in force."""
        return self._drain is not None

    def drain(self, reason: str | None) -> None:
        """Refuse further requests with ``reason`` until this is called with None; the running ones go on."""
        self._drain = reason

    def stop_all(self, reason: str) -> None:
        """End every running request with UNAVAILABLE."""
        for request in list(self._requests.values()):
            request.stop(StoppingError(reason))

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request runs; False when that took longer than ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


class RunningPlace:
    """A request's place; made by ``RunningRequests.enter``. A class, because a generator takes three times as long, and every request has
    one."""

    __slots__ = ("_request", "_table")

    def __init__(self, table: RunningRequests, request: RunningRequest) -> None:
        self._table = table
        self._request = request

    def __enter__(self) -> RunningRequest:
        self._table.take(self._request)
        return self._request

    def __exit__(self, *_: object) -> None:
        self._table.give_back(self._request)
