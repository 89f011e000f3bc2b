"""How much work a router has given to one life of one worker and not seen done.

Two units, never mixed: ``in_flight`` counts requests, ``work_ms`` milliseconds. Requests are not a measure of work: one of 60,000
tokens outweighs many of ten. Work is booked by reservations only, so that whatever way a request ends, its part leaves with it.
"""

from prefixmesh.errors import InvariantError
from prefixmesh.ids import Incarnation
from prefixmesh.router.reservation import Reservation, ReservationState


class WorkerLoad:
    """The open reservations on one incarnation of one worker, and their sums.

    A worker that is removed and added again, or that restarts, gets a new one: reservations of the old life settle
    against the old sums, which nobody reads any more, and no count can go below zero.
    """

    def __init__(self, incarnation: Incarnation) -> None:
        self.incarnation = incarnation
        self._open: set[Reservation] = set()
        self._prefill_ms = 0.0
        self._decode_ms = 0.0

    def __repr__(self) -> str:
        return f"WorkerLoad({self.in_flight} in flight, {self.work_ms:.1f} ms)"

    @property
    def in_flight(self) -> int:
        """Requests sent and not seen end."""
        return len(self._open)

    @property
    def prefill_ms(self) -> float:
        """Milliseconds of prefill that stand before a new request."""
        return self._prefill_ms

    @property
    def work_ms(self) -> float:
        """Milliseconds of prefill and expected decoding accepted and not done."""
        return self._prefill_ms + self._decode_ms

    def open_reservations(self) -> frozenset[Reservation]:
        """The reservations that have not ended; O(in_flight)."""
        return frozenset(self._open)

    def reserve(self, *, prefill_ms: float, decode_ms: float) -> Reservation:
        """Book a request's expected work; O(1)."""
        reservation = Reservation(self, prefill_ms=prefill_ms, decode_ms=decode_ms)
        self._open.add(reservation)
        self._prefill_ms += prefill_ms
        self._decode_ms += decode_ms
        return reservation

    def adjust(self, reservation: Reservation, *, prefill_ms: float, decode_ms: float) -> None:
        """Take over what a reservation's parts have become; called by the reservation itself. O(1)."""
        self._prefill_ms += prefill_ms - reservation.prefill_ms
        self._decode_ms += decode_ms - reservation.decode_ms

    def close(self, reservation: Reservation) -> None:
        """Drop an ended reservation; called by the reservation itself. O(1)."""
        self.adjust(reservation, prefill_ms=0.0, decode_ms=0.0)
        self._open.remove(reservation)
        if not self._open:
            # Sums of floats drift; an idle worker's are exactly zero.
            self._prefill_ms = self._decode_ms = 0.0

    def check_invariants(self) -> None:
        """Recompute the sums; raises InvariantError when they differ from what is booked. O(in_flight)."""
        prefill_ms = sum(reservation.prefill_ms for reservation in self._open)
        decode_ms = sum(reservation.decode_ms for reservation in self._open)
        drift = abs(prefill_ms - self._prefill_ms) + abs(decode_ms - self._decode_ms)
        if drift > 1e-6 * (1.0 + prefill_ms + decode_ms):
            raise InvariantError(f"sums differ from the reservations by {drift} ms; {self!r}")
        if any(reservation.state is ReservationState.ENDED for reservation in self._open):
            raise InvariantError(f"an ended reservation is still counted; {self!r}")
