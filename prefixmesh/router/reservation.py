"""One request's claim on a worker: made at the decision, before anything is sent, and settled exactly once.

::

    reserved --accept--> accepted --first_token--> prefilled --settle--> ended
        \\________________________\\______________________________________/
                       settle: error, cancel, the worker's death, a ticket that was never used

Whoever learns of a step first moves it: the stream that carries the answer, or the worker's report. The part for prefill is corrected
when the worker says what it found cached, and is given back at the first token; the part for decoding stays until the end.
"""

import enum
from typing import Protocol

import msgspec

from prefixmesh.errors import DoubleReleaseError
from prefixmesh.ids import RequestId


class ReservationState(enum.Enum):
    """Where a request stands; it only moves forward."""

    RESERVED = enum.auto()
    ACCEPTED = enum.auto()
    PREFILLED = enum.auto()
    ENDED = enum.auto()


class Ledger(Protocol):
    """Where a reservation is booked (``load.WorkerLoad``)."""

    def adjust(self, reservation: "Reservation", *, prefill_ms: float) -> None:
        """Take over what the reservation's prefill is about to become."""
        ...

    def close(self, reservation: "Reservation") -> None:
        """Drop the reservation."""
        ...


class Reservation(msgspec.Struct, eq=False):
    """A claim of ``prefill_ms`` and ``decode_ms`` on the life of a worker that ``ledger`` stands for."""

    ledger: Ledger
    request_id: RequestId
    """Its name in the ticket and in the worker's reports."""

    prefill_ms: float
    """Milliseconds of prefill still claimed."""

    decode_ms: float
    """Milliseconds of expected decoding still claimed."""

    branches: int = 1
    """Answers that are computed from the one prompt."""

    is_reported: bool = False
    """Whether the worker's last report counts it in; kept by the ledger."""

    state: ReservationState = ReservationState.RESERVED

    def __repr__(self) -> str:
        return f"Reservation({self.state.name.lower()}, {self.prefill_ms:.1f} + {self.decode_ms:.1f} ms)"

    @property
    def has_ended(self) -> bool:
        """Whether it was settled."""
        return self.state is ReservationState.ENDED

    def accept(self, prefill_ms: float | None = None) -> None:
        """The worker has the request, and will compute ``prefill_ms`` of it (None: it has not said how much). Ignored past the first
        token; said twice, the later figure holds."""
        if self.state in (ReservationState.RESERVED, ReservationState.ACCEPTED):
            if prefill_ms is not None:
                self._claim(prefill_ms)
            self.state = ReservationState.ACCEPTED

    def first_token(self) -> None:
        """Prefill is over; ignored past that point."""
        if self.state in (ReservationState.RESERVED, ReservationState.ACCEPTED):
            self._claim(0.0)
            self.state = ReservationState.PREFILLED

    def settle(self) -> None:
        """Give everything back. Raises DoubleReleaseError, changing nothing, the second time."""
        if self.has_ended:
            raise DoubleReleaseError("a reservation was settled twice")
        self.ledger.close(self)
        self.prefill_ms = self.decode_ms = 0.0
        self.state = ReservationState.ENDED

    def _claim(self, prefill_ms: float) -> None:
        self.ledger.adjust(self, prefill_ms=prefill_ms)
        self.prefill_ms = prefill_ms
