"""How busy one life of one worker is: what this router has given it and not seen done, and what everybody else has.

Two units, never mixed: ``in_flight`` counts requests, ``..._ms`` milliseconds. Requests are not a measure of work: one of 60,000
tokens outweighs many of ten. Own work is booked by reservations only, so that whatever way a request ends, its part leaves with it.

Others' work is what the worker reports less what it counts of our open reservations in the same report. So nobody is counted twice, a
request of ours counts from the decision to its end, whether or not a report knows of it yet, and one that runs there though its
reservation is gone (a ticket that was given back and then used, a worker that was removed and added again) counts like others':

    sum = (reported - our reservations among it) + our open reservations

A request's end comes by its own stream, and may be here before a report that was made while it ran. Until the worker has told of that end,
it is known as ours and over, and what it counts there is nobody's work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from prefixmesh.errors import InvariantError
from prefixmesh.ids import Incarnation, RequestId
from prefixmesh.router.reservation import Reservation, ReservationState

MAX_UNTOLD: Final = 1024
"""Ended requests whose end a worker has not told. Reports tell within a tenth of a second; of a worker that never does, the oldest are
forgotten."""


class LoadSum(NamedTuple):
    """Everybody's work on a worker, as this router sees it now."""

    in_flight: int
    """Answers that are on their way there, wait, or are computed; a branch counts as one."""

    prefill_ms: float
    """Milliseconds of prefill that stand before a new request."""

    decode_ms: float
    """Milliseconds of expected decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """A worker's own word on its load, in milliseconds already."""

    answers: int
    """Running and queued, of everybody; a branch counts as one."""

    own_requests: int
    """Requests of this router among them, by the worker's count; a request counts as one."""

    prefill_ms: float
    """Of everybody, still to be computed."""

    decode_ms_each: float
    """Expected of an answer of which nothing is known."""

    accepted: Sequence[str] = ()
    prefilled: Sequence[str] = ()
    ended: Sequence[str] = ()


class WorkerLoad:
    """The open reservations on one incarnation of one worker, their sums, and others' work.

    A worker that is removed and added again, or that restarts, gets a new one: reservations of the old life settle
    against the old sums, which nobody reads any more, and no count can go below zero.
    """

    def __init__(self, incarnation: Incarnation) -> None:
        self.incarnation = incarnation
        self._open: dict[RequestId, Reservation] = {}
        self._prefill_ms = 0.0
        self._decode_ms = 0.0
        self._answers = 0
        self._reported_ms = 0.0
        # Of our reservations those that the worker's reports count, and their branches beyond the first.
        self._reported = self._reported_more = 0
        # Of the claims that the last report counts, how much of them it has left at most: prefill goes on while a claim stands.
        self._left_share = 1.0
        self._others = LoadSum(0, 0.0, 0.0)
        # Branches of requests that ended here and, as far as the worker has told, run there.
        self._untold: dict[str, int] = {}

    def __repr__(self) -> str:
        others = f", others {self._others.in_flight}" if self._others.in_flight else ""
        return f"WorkerLoad({self.in_flight} in flight, {self.work_ms:.1f} ms{others})"

    @property
    def in_flight(self) -> int:
        """Requests of this router's that were sent and not seen end."""
        return len(self._open)

    @property
    def prefill_ms(self) -> float:
        """Milliseconds of prefill that this router's requests still claim."""
        return self._prefill_ms

    @property
    def work_ms(self) -> float:
        """Milliseconds of this router's prefill and expected decoding accepted and not done."""
        return self._prefill_ms + self._decode_ms

    @property
    def total(self) -> LoadSum:
        """Everybody's work, own reservations among it. O(1)."""
        others = self._others
        done_ms = (1.0 - self._left_share) * self._reported_ms
        return LoadSum(
            others.in_flight + self._answers,
            others.prefill_ms + max(0.0, self._prefill_ms - done_ms),
            others.decode_ms + self._decode_ms,
        )

    def open_reservations(self) -> tuple[Reservation, ...]:
        """The reservations that have not ended; O(in_flight)."""
        return tuple(self._open.values())

    def get(self, request_id: str) -> Reservation | None:
        """The open reservation of a request; None when there is none. O(1)."""
        return self._open.get(RequestId(request_id))

    def reserve(
        self, request_id: RequestId, *, prefill_ms: float, decode_ms: float, branches: int = 1
    ) -> Reservation:
        """Book a request's expected work; O(1). ``request_id`` must not be open here."""
        assert request_id not in self._open, request_id
        reservation = Reservation(
            self, request_id, prefill_ms=prefill_ms, decode_ms=decode_ms, branches=branches
        )
        self._open[request_id] = reservation
        self._answers += branches
        self._prefill_ms += prefill_ms
        self._decode_ms += decode_ms
        return reservation

    def on_report(self, report: LoadReport) -> None:
        """Take over what the worker says: who of ours has come how far, and what others have there. O(ids + in_flight).

        Ends settle nothing here: whoever owns the request settles its reservation before.
        """
        for request_id in report.ended:
            self._untold.pop(request_id, None)
        for request_id in report.accepted:
            reservation = self.get(request_id)
            if reservation is not None:
                reservation.accept()
                self._count_in(reservation)
        for request_id in report.prefilled:
            reservation = self.get(request_id)
            if reservation is not None:
                reservation.first_token()
        claimed_ms = self._reported_ms
        self._left_share = min(1.0, report.prefill_ms / claimed_ms) if claimed_ms > 0.0 else 1.0
        others = max(0, report.answers - self._ours_among(report.own_requests))
        self._others = LoadSum(
            others, max(0.0, report.prefill_ms - claimed_ms), others * report.decode_ms_each
        )

    def forget_report(self) -> None:
        """The worker is silent: what it said of others is too old to be believed. Its next report on the same stream counts in who was
        counted in before. O(1)."""
        self._others = LoadSum(0, 0.0, 0.0)
        self._left_share = 1.0

    def on_opened(self) -> None:
        """A stream of reports begins: its first names everything of ours that it counts. O(in_flight)."""
        self._left_share, self._reported_ms, self._reported, self._reported_more = 1.0, 0.0, 0, 0
        self._untold.clear()
        for reservation in self._open.values():
            reservation.is_reported = False

    def adjust(self, reservation: Reservation, *, prefill_ms: float) -> None:
        """Take over what a reservation's prefill has become; called by the reservation itself. O(1)."""
        change_ms = prefill_ms - reservation.prefill_ms
        self._prefill_ms += change_ms
        if reservation.is_reported:
            self._reported_ms = max(0.0, self._reported_ms + change_ms)

    def close(self, reservation: Reservation) -> None:
        """Drop an ended reservation; called by the reservation itself. O(1)."""
        self.adjust(reservation, prefill_ms=0.0)
        self._decode_ms -= reservation.decode_ms
        self._answers -= reservation.branches
        if reservation.is_reported:
            self._reported -= 1
            self._reported_more -= reservation.branches - 1
        del self._open[reservation.request_id]
        if reservation.is_reported or reservation.state is not ReservationState.RESERVED:
            self._untold[reservation.request_id] = reservation.branches
            if len(self._untold) > MAX_UNTOLD:
                del self._untold[next(iter(self._untold))]
        if not self._open:
            # Sums of floats drift; an idle worker's are exactly zero.
            self._prefill_ms = self._decode_ms = self._reported_ms = 0.0

    def check_invariants(self) -> None:
        """Recompute the sums; raises InvariantError when they differ from what is booked. O(in_flight)."""
        booked = self._open.values()
        prefill_ms = sum(reservation.prefill_ms for reservation in booked)
        decode_ms = sum(reservation.decode_ms for reservation in booked)
        reported_ms = sum(reservation.prefill_ms for reservation in booked if reservation.is_reported)
        drift = abs(prefill_ms - self._prefill_ms) + abs(decode_ms - self._decode_ms)
        drift += abs(reported_ms - self._reported_ms)
        if drift > 1e-6 * (1.0 + prefill_ms + decode_ms):
            raise InvariantError(f"sums differ from the reservations by {drift} ms; {self!r}")
        reported = [reservation.branches for reservation in booked if reservation.is_reported]
        if (
            self._answers != sum(reservation.branches for reservation in booked)
            or len(reported) != self._reported
            or sum(reported) != self._reported + self._reported_more
        ):
            raise InvariantError(f"answers are miscounted; {self!r}")
        if any(reservation.state is ReservationState.ENDED for reservation in booked):
            raise InvariantError(f"an ended reservation is still counted; {self!r}")

    def _ours_among(self, own_requests: int) -> int:
        """Answers of ours among those that a report counts, of which ``own_requests`` requests are ours. O(1) mostly."""
        ours = min(own_requests, self._reported) + self._reported_more
        more = own_requests - self._reported
        if more > 0 and self._untold:
            # Those that have ended since the report was made: the newest ends.
            ours += sum(islice(reversed(self._untold.values()), more))
        return ours

    def _count_in(self, reservation: Reservation) -> None:
        if not reservation.is_reported:
            reservation.is_reported = True
            self._reported_ms += reservation.prefill_ms
            self._reported += 1
            self._reported_more += reservation.branches - 1
