"""One request's claim on a worker: made at the decision, before anything is sent, and settled exactly once.

::

    reserved --accept--> accepted --first_token--> prefilled --settle--> ended
        \\________________________\\______________________________________/
                       settle: error, cancel, the worker's death

The part for prefill is corrected when the worker says what it found cached, and is given back at the first token; the part for
decoding stays until the end.
"""

import enum
from typing import Protocol

from prefixmesh.errors import DoubleReleaseError


class ReservationState(enum.Enum):
    """Where a request stands; it only moves forward."""

    RESERVED = enum.auto()
    ACCEPTED = enum.auto()
    PREFILLED = enum.auto()
    ENDED = enum.auto()


class Ledger(Protocol):
    """Where a reservation is booked (``load.WorkerLoad``)."""

    def adjust(self, reservation: "Reservation", *, prefill_ms: float, decode_ms: float) -> None:
        """Take over what the reservation's parts are about to become."""
        ...

    def close(self, reservation: "Reservation") -> None:
        """Drop the reservation."""
        ...


class Reservation:
    """A claim of ``prefill_ms`` and ``decode_ms`` on the life of a worker that ``ledger`` stands for."""

    __slots__ = ("_ledger", "decode_ms", "prefill_ms", "state")

    def __init__(self, ledger: Ledger, *, prefill_ms: float, decode_ms: float) -> None:
        self._ledger = ledger
        self.prefill_ms = prefill_ms
        """Milliseconds of prefill still claimed."""

        self.decode_ms = decode_ms
        """Milliseconds of expected decoding still claimed."""

        self.state = ReservationState.RESERVED

    def __repr__(self) -> str:
        return f"Reservation({self.state.name.lower()}, {self.prefill_ms:.1f} + {self.decode_ms:.1f} ms)"

    def accept(self, prefill_ms: float) -> None:
        """The worker has admitted the request and will compute ``prefill_ms`` of it; ignored past that point."""
        if self.state is ReservationState.RESERVED:
            self._claim(prefill_ms)
            self.state = ReservationState.ACCEPTED

    def first_token(self) -> None:
        """Prefill is over; ignored past that point."""
        if self.state in (ReservationState.RESERVED, ReservationState.ACCEPTED):
            self._claim(0.0)
            self.state = ReservationState.PREFILLED

    def settle(self) -> None:
        """Give everything back. Raises DoubleReleaseError, changing nothing, the second time."""
        if self.state is ReservationState.ENDED:
            raise DoubleReleaseError("a reservation was settled twice")
        self._ledger.close(self)
        self.prefill_ms = self.decode_ms = 0.0
        self.state = ReservationState.ENDED

    def _claim(self, prefill_ms: float) -> None:
        self._ledger.adjust(self, prefill_ms=prefill_ms, decode_ms=self.decode_ms)
        self.prefill_ms = prefill_ms
