"""The requests that a router has placed and that have not ended, and the ways in which they end. Pure.

Some pass through this router, which sees their streams. Of those whose callers stream from the worker itself only reports tell, and where
nobody is left who would, time does: a ticket that nobody used, a stream of news whose first report does not name a request any more, a
life of a worker that is over. However a request ends, it is settled once, and what it has left is predicted until the worker has told.
"""

import heapq
from collections.abc import Collection, Sequence
from typing import Final

from prefixmesh.history import NO_HISTORY, History, Settled
from prefixmesh.ids import Fingerprint, RequestId
from prefixmesh.router.fleet_state import FleetState
from prefixmesh.router.lingering import Lingering
from prefixmesh.router.placement import Placement
from prefixmesh.router.reservation import ReservationState
from prefixmesh.router.worker_entry import WorkerEntry
from prefixmesh.worker_report import WorkerReport

LATE_REPORT_S: Final = 1.0
"""How much later than its ticket's end a request may be reported as taken in: it was, and the report is on its way."""

LOST_AFTER_S: Final = 10.0
"""A worker that could not be reached for so long has died for the requests whose callers stream from it: nobody tells of them any more. A
connection that only broke is back within seconds."""


class Placements:
    """Open requests by id. Not thread-safe."""

    def __init__(self, fleet: FleetState, history: History = NO_HISTORY) -> None:
        self._fleet = fleet
        self._history = history
        self._open: dict[RequestId, Placement] = {}
        # When tickets end, earliest first.
        self._tickets: list[tuple[float, RequestId]] = []
        # Since when workers with open reservations have not been reached.
        self._away: dict[WorkerEntry, float] = {}

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    @property
    def open_tickets(self) -> int:
        """Tickets that were given and whose time is not over."""
        return len(self._tickets)

    def by_ticket(self, request_id: str) -> Placement | None:
        """A request whose caller streams from the worker itself, for as long as it is not known to have ended; None for any other."""
        placement = self._open.get(RequestId(request_id))
        return None if placement is None or placement.expires_at is None else placement

    def add(self, placement: Placement) -> None:
        """A request was placed. Its id must not be open. O(log tickets)."""
        assert placement.request_id not in self._open, placement.request_id
        self._open[placement.request_id] = placement
        if placement.expires_at is not None:
            heapq.heappush(self._tickets, (placement.expires_at, placement.request_id))
        self._fleet.load_changed(placement.entry)

    def end(self, placement: Placement, now: float, left: Sequence[Sequence[Fingerprint]]) -> None:
        """Settle, and let stay for a while what the request has ``left`` there: its prompt, each as an answer goes on from it. Ended
        already, as reported: nothing happens. O(blocks)."""
        if placement.reservation.has_ended:
            return
        if not (left and self.is_current(placement)):
            self._settle(placement)
            return
        # The prompt's own prediction goes on; only what comes after it is new.
        named = len(placement.fingerprints)
        after = [self._fleet.view.expect(placement.endpoint, one[named:]) for one in left if one[named:]]
        self._close(placement)
        self.lingering(placement).keep(placement.request_id, placement.prediction, after, now)

    def on_report(self, entry: WorkerEntry, report: WorkerReport) -> None:
        """End what the worker has ended; it has told before what that has left. O(ids), and O(reservations there) for a stream's first
        report, which names all that runs: what was taken in and is not named any more ended while nobody listened."""
        for request_id in report.ended:
            placement = self._open.get(RequestId(request_id))
            if placement is not None and placement.entry is entry and self.is_current(placement):
                self._settle(placement)
        if entry.awaits_first_report:
            entry.awaits_first_report = False
            self._end_what_is_gone(entry, frozenset(report.accepted))

    def withdraw(self, request_id: str) -> bool:
        """A caller does not use its ticket: what was reserved with it is given back, unless the worker has taken the request in. False when
        nothing was. O(blocks)."""
        placement = self.by_ticket(request_id)
        if placement is None or placement.reservation.state is not ReservationState.RESERVED:
            return False
        self._settle(placement)
        return True

    def expire(self, now: float) -> None:
        """End the reservations of tickets that are over and that no worker has reported to be used. O(1) for each."""
        while self._tickets and self._tickets[0][0] + LATE_REPORT_S <= now:
            _, request_id = heapq.heappop(self._tickets)
            self.withdraw(request_id)

    def abandon(self, entry: WorkerEntry) -> None:
        """A life of a worker is over for this router: nobody will tell any more how requests that it does not carry have ended."""
        for reservation in entry.load.open_reservations():
            placement = self.by_ticket(reservation.request_id)
            if placement is not None:
                self._settle(placement)

    def abandon_lost(self, now: float) -> None:
        """The same for workers that have not been reached for long. O(workers)."""
        away = {
            entry: self._away.get(entry, now)
            for entry in self._fleet.registry
            if entry.unreachable and entry.load.in_flight
        }
        for entry, since in away.items():
            if now - since >= LOST_AFTER_S:
                self.abandon(entry)
        self._away = away

    def lingering(self, placement: Placement) -> Lingering:
        """What ended requests have left at the placement's worker, which is known."""
        followed = self._fleet.view.get(placement.endpoint)
        assert followed is not None, placement
        return followed.lingering

    def is_current(self, placement: Placement) -> bool:
        """Whether the worker's life that the decision was about is still the one that is known."""
        entry = self._fleet.registry.get(placement.endpoint)
        return entry is placement.entry and entry.load.incarnation == placement.incarnation

    def _settle(self, placement: Placement) -> None:
        """End it, and expect nothing of it any more."""
        self._close(placement)
        self._fleet.view.predictions.end(placement.prediction)

    def _close(self, placement: Placement) -> None:
        placement.reservation.settle()
        if self._history.is_on:
            self._history.note(Settled, placement.request_id, reservation=placement.request_id)
        del self._open[placement.request_id]
        self._fleet.load_changed(placement.entry)

    def _end_what_is_gone(self, entry: WorkerEntry, running: Collection[str]) -> None:
        """Requests that pass through this router know their own end."""
        for reservation in entry.load.open_reservations():
            placement = self.by_ticket(reservation.request_id)
            is_taken_in = reservation.state is not ReservationState.RESERVED
            if placement is not None and is_taken_in and placement.request_id not in running:
                self._settle(placement)
