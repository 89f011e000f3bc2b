"""The calls that are being answered now: bounded, owned by tenants, and waited for when the worker stops."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from prefixmesh.errors import AuthenticationError, OverloadedError, UnavailableError
from prefixmesh.ids import RequestId, TenantId


class RunningCalls:
    """Table of running Generate calls by the server's id. One event loop owns it; every method is O(1)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tenants: dict[RequestId, TenantId] = {}
        self._refusal: str | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._tenants)

    @contextmanager
    def enter(self, request_id: RequestId, tenant: TenantId) -> Iterator[None]:
        """Hold a place for one call.

        Raises UnavailableError once ``close`` was called, OverloadedError when all places are taken, AuthenticationError when a
        call with this id is running: a ticket was sent twice.
        """
        if self._refusal is not None:
            raise UnavailableError(self._refusal)
        if request_id in self._tenants:
            raise AuthenticationError("this ticket is in use already")
        if len(self._tenants) >= self._limit:
            raise OverloadedError(f"{self._limit} requests are running or waiting here, which is the limit")
        self._tenants[request_id] = tenant
        self._idle.clear()
        try:
            yield
        finally:
            del self._tenants[request_id]
            if not self._tenants:
                self._idle.set()

    def belongs_to(self, request_id: RequestId, tenant: TenantId) -> bool:
        """Whether a call with this id is running for this tenant."""
        return self._tenants.get(request_id) == tenant

    def close(self, reason: str) -> None:
        """Refuse every further call with ``reason``; the running ones go on."""
        self._refusal = reason

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no call runs; False when that took longer than ``timeout_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return self._idle.is_set()
