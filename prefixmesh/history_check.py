"""Reads histories, of one writer or of several, and says what in them must not be. Pure: records in, violations out.

What holds of every request, whatever has failed meanwhile:

- it was asked once and ends once, and nothing comes after its end;
- each branch's tokens are passed on in order, each position once, and as many as the end says;
- its attempts come one after the other, and one that begins after tokens were passed on goes on at the next of each branch;
- every reservation is settled once, every one that a worker took in is released once, and only that life of a worker takes it in for which
  it was placed.

A life that never said ``closed`` runs still, or was killed: what is open there is counted and no violation. Work is O(records), memory
O(requests): each is remembered after its end, or nothing could be seen to come after it.
"""

from collections.abc import Iterable

from prefixmesh.history import (
    FINISHED,
    Admitted,
    Asked,
    Began,
    Closed,
    Ended,
    Failed,
    Lost,
    Placed,
    Record,
    Released,
    Resumed,
    Settled,
    Taken,
    Tokens,
)
from prefixmesh.history_report import HistoryReport, Place, Rule, Violation


class _Request:
    """One that was asked."""

    __slots__ = ("attempt", "end", "failed", "goes_on", "last", "next", "told")

    def __init__(self, asked: Asked, place: Place) -> None:
        self.next = [*asked.resumed, *[0] * (asked.branches - len(asked.resumed))]
        self.told = 0
        self.attempt = 0
        self.failed = True
        """Whether the latest attempt is over: there is none before the first."""

        self.goes_on = False
        """Whether the latest attempt was told where to go on."""

        self.last = place
        self.end: Place | None = None


class _Reservation:
    """One that was placed."""

    __slots__ = ("is_settled", "placed", "where")

    def __init__(self, placed: Placed, where: Place) -> None:
        self.placed = placed
        self.where = where
        self.is_settled = False


class _Life:
    """One life of one writer."""

    __slots__ = ("name", "requests", "reservations", "taken")

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: dict[str, _Request] = {}
        self.reservations: dict[str, _Reservation] = {}
        self.taken: dict[str, Place] = {}


class HistoryChecker:
    """Takes the records of each writer in their order; those of several in any."""

    def __init__(self) -> None:
        self._report = HistoryReport()
        self._lives: dict[str, _Life] = {}
        self._placed: dict[str, _Reservation] = {}
        self._takes: dict[str, tuple[Taken, Place]] = {}

    def take(self, source: str, number: int, record: Record | None) -> None:
        """A writer's next record, and where it stands; None for a line that cannot be read. O(branches)."""
        place = Place(source, number)
        life = self._lives.get(source)
        if life is None or isinstance(record, Began):
            life = self._begin(source, record)
        match record:
            case None:
                self._report.unread += 1
            case Began():
                pass
            case Lost():
                self._report.lost += record.count
            case Closed():
                self._end(life, place)
                del self._lives[source]
            case Asked():
                self._on_asked(life, record, place)
            case Placed():
                self._on_placed(life, record, place)
            case Settled():
                self._on_settled(life, record, place)
            case Taken():
                self._on_taken(life, record, place)
            case Released():
                self._on_released(life, record, place)
            case _:
                self._on_progress(life, record, place)

    def finish(self) -> HistoryReport:
        """All was taken: what it comes to."""
        for life in self._lives.values():
            self._cut_off(life)
        self._lives.clear()
        for taken, place in self._takes.values():
            self._check_life(taken, place)
        return self._report

    def _begin(self, source: str, record: Record | None) -> _Life:
        before = self._lives.get(source)
        if before is not None:
            self._cut_off(before)
        self._report.lives += 1
        life = self._lives[source] = _Life(source if record is None else record.request_id)
        return life

    def _on_asked(self, life: _Life, asked: Asked, place: Place) -> None:
        before = life.requests.get(asked.request_id)
        if before is not None:
            self._violated(Rule.ASKED_ONCE, asked, "was asked again", before.last, place)
            return
        self._report.requests += 1
        life.requests[asked.request_id] = _Request(asked, place)

    def _on_placed(self, life: _Life, placed: Placed, place: Place) -> None:
        self._report.reservations += 1
        self._report.attempts += 1
        before = self._placed.get(placed.reservation)
        if before is not None:
            problem = f"the reservation {placed.reservation} was placed again"
            self._violated(Rule.SETTLED_ONCE, placed, problem, before.where, place)
        made = life.reservations[placed.reservation] = _Reservation(placed, place)
        self._placed[placed.reservation] = made
        if placed.by_ticket:
            return
        request = self._going_on(life, placed, place)
        if request is None:
            return
        if not request.failed or placed.attempt != request.attempt + 1:
            state = "failed" if request.failed else "is under way"
            problem = f"attempt {placed.attempt} begins where attempt {request.attempt} {state}"
            self._violated(Rule.ATTEMPTS, placed, problem, request.last, place)
        request.attempt, request.failed, request.goes_on = placed.attempt, False, not request.told
        request.last = place

    def _on_progress(self, life: _Life, record: Record, place: Place) -> None:
        """What happens between a request's beginning and its end."""
        request = self._going_on(life, record, place)
        if request is None:
            return
        match record:
            case Admitted():
                self._check_attempt(request, record, record.attempt, place)
            case Tokens():
                self._on_tokens(request, record, place)
            case Failed():
                self._check_attempt(request, record, record.attempt, place)
                request.failed = True
            case Resumed():
                self._check_attempt(request, record, record.attempt, place)
                self._on_resumed(request, record, place)
            case Ended():
                self._on_ended(request, record, place)
        request.last = place

    def _on_tokens(self, request: _Request, tokens: Tokens, place: Place) -> None:
        self._report.tokens += tokens.count
        if request.failed:
            self._violated(Rule.ATTEMPTS, tokens, "tokens come while no attempt runs", request.last, place)
        if request.attempt > 1 and request.told and not request.goes_on:
            problem = f"attempt {request.attempt} tells tokens, and was not told to go on after the {request.told} before it"
            self._violated(Rule.NEVER_ANEW, tokens, problem, request.last, place)
        request.told += tokens.count
        if tokens.branch >= len(request.next):
            problem = f"a token of branch {tokens.branch}, of {len(request.next)} that were asked for"
            self._violated(Rule.POSITIONS, tokens, problem, request.last, place)
            return
        expected = request.next[tokens.branch]
        if tokens.position != expected:
            problem = f"branch {tokens.branch} goes on at token {tokens.position}, {expected} was next"
            self._violated(Rule.POSITIONS, tokens, problem, request.last, place)
        request.next[tokens.branch] = tokens.position + tokens.count

    def _on_resumed(self, request: _Request, resumed: Resumed, place: Place) -> None:
        self._report.resumed += 1
        request.goes_on = True
        if list(resumed.positions) != request.next:
            problem = (
                f"attempt {resumed.attempt} goes on at {list(resumed.positions)}, {request.next} were next"
            )
            self._violated(Rule.RESUMED_FITS, resumed, problem, request.last, place)

    def _on_ended(self, request: _Request, ended: Ended, place: Place) -> None:
        request.end = place
        self._report.outcomes[ended.outcome] = self._report.outcomes.get(ended.outcome, 0) + 1
        if ended.completion_tokens != request.told:
            problem = f"it says {ended.completion_tokens} tokens, {request.told} were passed on"
            self._violated(Rule.COUNTED, ended, problem, request.last, place)
        if ended.outcome == FINISHED and request.failed:
            self._violated(Rule.ATTEMPTS, ended, "it finished while no attempt ran", request.last, place)

    def _on_settled(self, life: _Life, settled: Settled, place: Place) -> None:
        reservation = life.reservations.get(settled.reservation)
        if reservation is None:
            problem = f"the reservation {settled.reservation} was settled, and never placed"
            self._violated(Rule.SETTLED_ONCE, settled, problem, place)
        elif reservation.is_settled:
            problem = f"the reservation {settled.reservation} was settled again"
            self._violated(Rule.SETTLED_ONCE, settled, problem, reservation.where, place)
        else:
            reservation.is_settled = True

    def _on_taken(self, life: _Life, taken: Taken, place: Place) -> None:
        before = self._takes.get(taken.request_id)
        if before is not None:
            self._violated(Rule.TAKEN_ONCE, taken, "was taken in again", before[1], place)
        self._takes[taken.request_id] = taken, place
        life.taken[taken.request_id] = place

    def _on_released(self, life: _Life, released: Released, place: Place) -> None:
        if life.taken.pop(released.request_id, None) is None:
            self._violated(Rule.TAKEN_ONCE, released, "was released, and is not held", place)

    def _going_on(self, life: _Life, record: Record, place: Place) -> _Request | None:
        """The request that a record is of, where it was asked and has not ended."""
        request = life.requests.get(record.request_id)
        if request is None:
            self._violated(Rule.ASKED_ONCE, record, f"{_kind(record)}, and was never asked", place)
        elif request.end is not None:
            rule = Rule.ENDS_ONCE if isinstance(record, Ended) else Rule.NOTHING_AFTER_END
            self._violated(rule, record, f"{_kind(record)} after its end", request.end, place)
        else:
            return request
        return None

    def _check_attempt(self, request: _Request, record: Record, attempt: int, place: Place) -> None:
        if request.failed or attempt != request.attempt:
            running = "none" if request.failed else str(request.attempt)
            problem = f"{_kind(record)} of attempt {attempt}, and {running} runs"
            self._violated(Rule.ATTEMPTS, record, problem, request.last, place)

    def _check_life(self, taken: Taken, place: Place) -> None:
        """Whether a worker took in what was meant for it, where the history of who placed it is there."""
        made = self._placed.get(taken.request_id)
        if made is not None and made.placed.incarnation != taken.incarnation:
            problem = f"placed on life {made.placed.incarnation:016x} of {made.placed.worker}, taken in by {taken.incarnation:016x}"
            self._violated(Rule.SAME_LIFE, taken, problem, made.where, place)

    def _end(self, life: _Life, place: Place) -> None:
        """A life ended in order, and owes nothing any more."""
        for request_id, request in life.requests.items():
            if request.end is None:
                problem = f"{life.name} closed before it ended"
                self._report.add(Violation(Rule.ENDS_ONCE, request_id, problem, (request.last, place)))
        for name, reservation in life.reservations.items():
            if reservation.is_settled:
                continue
            if reservation.placed.by_ticket:  # its caller may stream on without the router
                self._report.open_reservations += 1
                continue
            problem = f"the reservation {name} was never settled"
            where = (reservation.where, place)
            self._report.add(Violation(Rule.SETTLED_ONCE, reservation.placed.request_id, problem, where))
        for request_id, taken in life.taken.items():
            self._report.add(Violation(Rule.TAKEN_ONCE, request_id, "was never released", (taken, place)))

    def _cut_off(self, life: _Life) -> None:
        """A life goes on, or was killed."""
        self._report.open_requests += sum(one.end is None for one in life.requests.values())
        self._report.open_reservations += sum(not one.is_settled for one in life.reservations.values())

    def _violated(self, rule: Rule, record: Record, problem: str, *places: Place) -> None:
        self._report.add(Violation(rule, record.request_id, problem, tuple(dict.fromkeys(places))))


def check_records(records: Iterable[Record], source: str = "history") -> HistoryReport:
    """What the records of one writer say, each known by its number from 1 on. O(records)."""
    checker = HistoryChecker()
    for number, record in enumerate(records, 1):
        checker.take(source, number, record)
    return checker.finish()


def _kind(record: Record) -> str:
    return type(record).__name__.lower()
