"""The calls that are being answered now: bounded, owned by tenants, and waited for when the worker stops."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from prefixmesh.errors import (
    CancelledError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    UsedTicketError,
)
from prefixmesh.ids import RequestId, TenantId


class CallPlace:
    """What one call holds in the table: a place for each of its branches."""

    __slots__ = ("branches", "is_aborted", "tenant", "waiting")

    def __init__(self, tenant: TenantId, branches: int) -> None:
        self.tenant = tenant
        self.branches = branches
        self.waiting = branches
        """Branches that the engine has not begun with, as far as it has told."""

        self.is_aborted = False
        """Whether it was aborted, be it known to the engine or not."""

    def check_wanted(self) -> None:
        """Raise CancelledError for a call that was aborted: to be asked just before the engine hears of it."""
        if self.is_aborted:
            raise CancelledError("the request was aborted")

    def admitted(self) -> None:
        """The engine has begun with one more branch."""
        self.waiting -= 1


class RunningCalls:
    """Table of running Generate calls by the server's id. One event loop owns it.

    A call counts as many requests as it has branches, and gets places for all of them or for none. For a call of several, the table
    also sees to it that the engine's queue takes them all: it counts who waits, and always as many as the engine does or more, since
    it learns of an admission only afterwards. (A call of one is left to the engine, which knows better.)
    """

    def __init__(self, limit: int, *, queue_limit: int) -> None:
        """``limit`` requests may run or wait here; the engine's queue holds ``queue_limit``."""
        self._limit = limit
        self._queue_limit = queue_limit
        self._places: dict[RequestId, CallPlace] = {}
        self._taken = 0
        self._refusal: str | None = None
        self._drain: str | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._places)

    @contextmanager
    def enter(self, request_id: RequestId, tenant: TenantId, branches: int = 1) -> Iterator[CallPlace]:
        """Hold places for one call. O(1), and O(calls) with several branches. One of no branch, which is the worker's own, takes no caller's
        place, but is waited for as any.

        Raises UnavailableError once ``close`` was called and while drained, OverloadedError when there are too few places,
        InvalidRequestError when there can never be enough, UsedTicketError when a call with this id is running: a ticket was sent twice.
        """
        self.check_open()
        if request_id in self._places:
            raise UsedTicketError("this ticket is in use already")
        if branches > 1:
            self._check_queue(branches)
        if self._taken + branches > self._limit:
            raise OverloadedError(f"{self._limit} requests are running or waiting here, which is the limit")
        place = self._places[request_id] = CallPlace(tenant, branches)
        self._taken += branches
        self._idle.clear()
        try:
            yield place
        finally:
            self._taken -= branches
            del self._places[request_id]
            if not self._places:
                self._idle.set()

    def check_open(self) -> None:
        """Raise UnavailableError once ``close`` was called and while drained. O(1)."""
        refusal = self._refusal or self._drain
        if refusal is not None:
            raise UnavailableError(refusal)

    def abort(self, request_id: RequestId, tenant: TenantId) -> int:
        """Note that the call of this id is wanted no more, when it is running and this tenant's; returns how many branches it has, else 0.
        O(1)."""
        place = self._places.get(request_id)
        if place is None or place.tenant != tenant:
            return 0
        place.is_aborted = True
        return place.branches

    def _check_queue(self, branches: int) -> None:
        if branches > self._queue_limit:
            raise InvalidRequestError(
                "branches", f"at most {self._queue_limit} fit the queue here, got {branches}"
            )
        waiting = sum(place.waiting for place in self._places.values())
        if waiting + branches > self._queue_limit:
            raise OverloadedError(
                f"{waiting} requests are waiting here of {self._queue_limit} that may: too many for {branches} branches more"
            )

    def close(self, reason: str) -> None:
        """Refuse every further call with ``reason``; the running ones go on."""
        self._refusal = reason

    @property
    def is_draining(self) -> bool:
        """Whether ``drain`` is in force."""
        return self._drain is not None

    def drain(self, reason: str | None) -> None:
        """Refuse further calls with ``reason`` until this is called with None; the running ones go on."""
        self._drain = reason

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no call runs; False when that took longer than ``timeout_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return self._idle.is_set()
