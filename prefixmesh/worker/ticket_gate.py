"""What a router's ticket admits here: one call, in its time, within its limits. Pure.

A ticket is believed by its signature (``ticket.verify``). Here is what remains of it: a client that streams directly holds its ticket and
could send it twice, late, or with a larger request than was routed. The ids of used tickets are kept until the tickets expire, and so an
id can never come in twice. A ticket without an expiry, which a router uses itself, is kept by nobody: it is refused while its call runs
(``running_calls``).
"""

import heapq
from typing import Final

from prefixmesh.errors import ExpiredTicketError, OverloadedError, TicketLimitError, UsedTicketError
from prefixmesh.ids import RequestId
from prefixmesh.ticket import Ticket

MAX_USED: Final = 131_072
"""Used tickets whose time is not over, about 250 bytes each: four thousand calls a second of tickets that live half a minute. With more,
calls are refused for the moment: to forget one would let it in again."""


class TicketGate:
    """The used tickets of one life of one worker. One event loop owns it."""

    def __init__(self, *, max_used: int = MAX_USED) -> None:
        self._max_used = max_used
        self._used: set[RequestId] = set()
        self._expiries: list[tuple[int, RequestId]] = []
        """A heap: the next to expire first."""

        self._forgotten_ms = 0
        """The latest expiry among the forgotten: were the clock set back, those would come in again."""

    def __len__(self) -> int:
        """Used tickets that are remembered."""
        return len(self._used)

    def admit(self, ticket: Ticket, now_unix_ms: int) -> None:
        """Use up a ticket. O(log used). Raises ExpiredTicketError, UsedTicketError, or OverloadedError where no more can be remembered."""
        if not ticket.expires_unix_ms:
            return
        if now_unix_ms > ticket.expires_unix_ms:
            late_s = (now_unix_ms - ticket.expires_unix_ms) / 1000
            raise ExpiredTicketError(f"the ticket expired {late_s:.1f} s ago by this worker's clock")
        self._forget_expired(now_unix_ms)
        if ticket.expires_unix_ms <= self._forgotten_ms:
            raise ExpiredTicketError("the ticket had expired before this worker's clock was set back")
        if ticket.request_id in self._used:
            raise UsedTicketError("this ticket was used already: each admits one call")
        if len(self._used) >= self._max_used:
            raise OverloadedError(f"{self._max_used} tickets were used here that have not expired yet")
        self._used.add(ticket.request_id)
        heapq.heappush(self._expiries, (ticket.expires_unix_ms, ticket.request_id))

    def _forget_expired(self, now_unix_ms: int) -> None:
        while self._expiries and self._expiries[0][0] < now_unix_ms:
            self._forgotten_ms, request_id = heapq.heappop(self._expiries)
            self._used.discard(request_id)


def check_limits(ticket: Ticket, *, prompt_tokens: int, max_tokens: int, branches: int) -> None:
    """Raise TicketLimitError where a request asks for more than its ticket admits. O(1)."""
    for name, asked, limit in (
        ("prompt_tokens", prompt_tokens, ticket.prompt_tokens),
        ("max_tokens", max_tokens, ticket.max_tokens),
        ("branches", branches, ticket.branches),
    ):
        if limit and asked > limit:
            raise TicketLimitError(f"{name}: the ticket admits {limit}, the request asks for {asked}")
