"""Whose tickets are open: nobody gives back another tenant's, and none takes the places of all. Pure.

A ticket counts until its time is over, also where it was given back: whoever asks and asks and uses none is who this is about.
"""

from collections import Counter, deque
from typing import Final

from prefixmesh.errors import OverloadedError
from prefixmesh.ids import RequestId, TenantId

MAX_OF_TENANT: Final = 16_384
"""A quarter of all that a router keeps: what is left serves the others. 1,600 a second of one tenant, for tickets of ten seconds."""


class OpenTickets:
    """Tickets in the order in which they were given, which is that in which they end. All of it is O(1) amortised."""

    def __init__(self, most: int = MAX_OF_TENANT) -> None:
        self._most = most
        self._ends: deque[tuple[float, RequestId]] = deque()
        self._owners: dict[RequestId, TenantId] = {}
        self._counts: Counter[TenantId] = Counter()

    def __len__(self) -> int:
        return len(self._ends)

    def check(self, tenant: TenantId, now: float) -> None:
        """Raise OverloadedError where ``tenant`` has as many as it may."""
        self._forget(now)
        if self._counts[tenant] >= self._most:
            raise OverloadedError(
                f"{self._most} tickets of this tenant have not ended, which is its limit at this router",
                max(0.0, self._ends[0][0] - now),
            )

    def given(self, request_id: RequestId, tenant: TenantId, ends_at: float) -> None:
        """A ticket was given that ends no sooner than any before it."""
        self._ends.append((ends_at, request_id))
        self._owners[request_id] = tenant
        self._counts[tenant] += 1

    def is_of(self, request_id: str, tenant: TenantId) -> bool:
        """Whether ``tenant`` was given this ticket."""
        return self._owners.get(RequestId(request_id)) == tenant

    def _forget(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, request_id = self._ends.popleft()
            tenant = self._owners.pop(request_id)
            self._counts[tenant] -= 1
            if not self._counts[tenant]:
                del self._counts[tenant]
