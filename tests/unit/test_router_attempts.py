"""One request over all its attempts: what each kind of failure leads to, what is held meanwhile, and that it is given back."""

from collections.abc import Callable
from typing import Any

import pytest

from prefixmesh.errors import (
    AdapterChangedError,
    AuthenticationError,
    CancelledError,
    DeadlineError,
    DeviceLostError,
    EngineLostError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OtherLifeError,
    OverloadedError,
    PrefixmeshError,
    QueueTimeoutError,
    UnavailableError,
)
from prefixmesh.history import HistoryList
from prefixmesh.ids import RequestId
from prefixmesh.router.attempts import (
    MAX_ATTEMPTS,
    MAX_FRUITLESS,
    MAX_PREPARATIONS,
    Attempts,
    End,
    Prepare,
    Send,
    Step,
    Wait,
)
from prefixmesh.router.failure_kind import FailureKind, is_workers_fault, kind_of
from prefixmesh.router.placement import Placement
from prefixmesh.router.retry_budget import LEAST_RETRIES, RetryBudget
from prefixmesh.router.routing import RouterCore
from tests.support.simulated_fleet import NOW, add_ready, entry_of, facts, make_core, prompt, unique

DIED, REFUSED, CALLERS = FailureKind.DIED, FailureKind.REFUSED, FailureKind.CALLERS
GONE = UnavailableError("the connection broke")
FULL = OverloadedError("the queue is full", 2.0)
PROMPT = prompt(unique(1, 300), max_tokens=50)


class Fleet:
    """A core with so many workers, and requests before it."""

    def __init__(self, workers: int = 4) -> None:
        self.core: RouterCore = make_core(workers)
        self.budget = RetryBudget()
        self.requests = 0
        self.notes = HistoryList(lambda: NOW)

    def request(self, **more: Any) -> Attempts:
        self.requests += 1
        name = RequestId(f"r{self.requests}")
        return Attempts(self.core, self.budget, PROMPT, name, history=self.notes, **more)

    def begun(self, **more: Any) -> tuple[Attempts, Placement]:
        attempts = self.request(**more)
        return attempts, sent(attempts.begin(NOW))

    def loads(self) -> int:
        return sum(entry.load.in_flight for entry in self.core.registry)

    def is_clean(self) -> bool:
        self.core.check_invariants()
        return not self.loads() and not self.budget.active and "0 of" in repr(self.budget)


def sent(step: Step) -> Placement:
    assert isinstance(step, Send), step
    return step.placement


def error_of(step: Step) -> PrefixmeshError:
    assert isinstance(step, End), step
    return step.error


@pytest.mark.parametrize(
    ("error", "is_told", "was_accepted", "kind"),
    [
        (UnavailableError("socket closed"), False, False, "died"),
        (UnavailableError("socket closed"), False, True, "died"),
        (UnavailableError("it is draining"), True, False, "refused"),
        (UnavailableError("the engine's process ended"), True, True, "died"),
        (OtherLifeError("restarted"), True, False, "died"),
        (DeviceLostError("gone"), True, False, "died"),
        (EngineLostError("the engine's process ended"), True, False, "died"),
        (CancelledError("stopped"), False, True, "died"),
        (CancelledError("aborted"), True, True, "callers"),
        (OverloadedError("full"), True, False, "refused"),
        (OverloadedError("full"), False, False, "refused"),
        (AuthenticationError("a ticket that it does not know"), True, False, "refused"),
        (QueueTimeoutError("waited long enough"), True, False, "callers"),
        (InvalidRequestError("prompt", "too long"), True, False, "callers"),
        (NotFoundError("no such model"), True, False, "callers"),
        (DeadlineError("too late"), False, True, "callers"),
        (InternalError("a bug"), True, True, "internal"),
        (InternalError("RST_STREAM with error code 2"), False, True, "died"),
        (AdapterChangedError("other content"), True, False, "changed"),
    ],
    ids=str,
)
def test_kind_of_failure(error: PrefixmeshError, is_told: bool, was_accepted: bool, kind: str) -> None:
    assert kind_of(error, is_told=is_told, was_accepted=was_accepted).value == kind


def test_only_deaths_and_bugs_are_the_workers_fault() -> None:
    """F63: a breaker that counted callers' errors would open by bad input."""
    assert {kind for kind in FailureKind if is_workers_fault(kind)} == {DIED, FailureKind.INTERNAL}


def test_a_dead_worker_is_replaced_and_what_was_reserved_there_given_back() -> None:
    """F15: the request migrates; the first worker has 0, the second 1."""
    fleet = Fleet(2)
    attempts, first = fleet.begun()
    second = sent(attempts.failed(DIED, GONE, NOW))
    assert second.endpoint != first.endpoint
    assert (first.entry.load.in_flight, second.entry.load.in_flight) == (0, 1)
    assert (first.request_id, second.request_id) == ("r1", "r1.2")
    attempts.accepted(0, NOW)
    attempts.first_token(NOW)
    attempts.finished(NOW)
    attempts.close(NOW)
    assert attempts.outcome == "finished"
    assert fleet.is_clean()


@pytest.mark.parametrize("kind", [DIED, REFUSED])
def test_no_worker_gets_a_request_again_that_it_has_failed(kind: FailureKind) -> None:
    fleet = Fleet(1)
    attempts, _ = fleet.begun()
    error = error_of(attempts.failed(kind, GONE, NOW))
    assert isinstance(error, UnavailableError)
    assert "w0 failed this request: the connection broke" in str(error)
    attempts.close(NOW)
    assert fleet.is_clean()


@pytest.mark.parametrize(("resumed", "told"), [((), 5.0), ((0, 0), 5.0), ((0, 3), None)])
def test_only_a_request_that_was_never_taken_may_be_refused_for_its_wait(
    resumed: tuple[int, ...], told: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that rides over a router's restart brings tokens along: refused now, they would be lost."""
    fleet, left = Fleet(2), []
    route = fleet.core.route

    def noting(*args: Any, time_left_s: float | None = None, **more: Any) -> Placement:
        left.append(time_left_s)
        return route(*args, time_left_s=time_left_s, **more)

    monkeypatch.setattr(fleet.core, "route", noting)
    attempts, _ = fleet.begun(deadline=NOW + 5.0, resumed=resumed)
    attempts.close(NOW)
    assert left == [told]


def test_workers_that_are_put_out_for_a_stall_do_not_use_up_the_deaths_of_a_request() -> None:
    """One killed, one stopped, and the third is well: nothing says that the request has done it."""
    fleet = Fleet(4)
    attempts, _ = fleet.begun()
    for _ in range(2):
        sent(attempts.failed(DIED, GONE, NOW, was_put_out=True))
    sent(attempts.failed(DIED, GONE, NOW))
    attempts.close(NOW)
    assert fleet.is_clean()


def test_a_new_life_of_the_worker_that_failed_it_is_another_worker() -> None:
    """F23: what was decided about a life that is over is decided anew."""
    fleet = Fleet(1)
    attempts, first = fleet.begun()
    fleet.core.described(first.endpoint, facts("w0", incarnation=2), NOW)
    again = sent(attempts.failed(DIED, OtherLifeError("restarted"), NOW))
    assert (again.endpoint, again.incarnation) == (first.endpoint, 2)


@pytest.mark.parametrize("kind", [CALLERS, FailureKind.INTERNAL])
def test_a_callers_error_and_a_bug_are_passed_on_as_they_are(kind: FailureKind) -> None:
    fleet = Fleet()
    attempts, _ = fleet.begun()
    error = InvalidRequestError("sampling.top_k", "too odd")
    assert error_of(attempts.failed(kind, error, NOW)) is error
    attempts.close(NOW)
    assert attempts.outcome == error.reason
    assert fleet.is_clean()


def test_a_refusal_is_tried_once_elsewhere_and_then_passed_on_in_the_workers_words() -> None:
    """F68: the first worker refuses, the second serves; where that refuses too, the caller learns when to come back."""
    fleet = Fleet()
    attempts, _ = fleet.begun()
    sent(attempts.failed(REFUSED, FULL, NOW))
    assert error_of(attempts.failed(REFUSED, FULL, NOW)) is FULL


def test_a_request_that_kills_who_takes_it_does_not_go_round() -> None:
    fleet = Fleet(8)
    attempts, _ = fleet.begun()
    steps = [attempts.failed(DIED, GONE, NOW) for _ in range(MAX_FRUITLESS)]
    assert [type(step) for step in steps] == [Send, End]
    attempts.close(NOW)
    assert fleet.is_clean()


def test_progress_earns_further_attempts_up_to_a_bound() -> None:
    """A long answer outlives several workers; and yet it ends."""
    fleet = Fleet(MAX_ATTEMPTS + 3)
    attempts, _ = fleet.begun()
    for number in range(1, MAX_ATTEMPTS):
        attempts.first_token(NOW)
        assert sent(attempts.failed(DIED, GONE, NOW)).request_id == f"r1.{number + 1}"
    attempts.first_token(NOW)
    assert error_of(attempts.failed(DIED, GONE, NOW))


def test_after_a_token_nothing_begins_anew() -> None:
    """What goes on says so, and counts what was sent as a part of the prompt."""
    fleet = Fleet()
    attempts = fleet.request()
    step = attempts.begin(NOW)
    assert isinstance(step, Send)
    assert not step.goes_on
    attempts.first_token(NOW)
    step = attempts.failed(DIED, GONE, NOW, sent_tokens=20)
    assert isinstance(step, Send)
    assert step.goes_on
    assert attempts.has_token
    asked = step.placement.request
    assert (asked.prompt_tokens, asked.max_tokens) == (320, 30)
    assert asked.fingerprints == PROMPT.fingerprints


def test_an_adapter_that_changes_is_prepared_anew_a_few_times() -> None:
    fleet = Fleet(1)
    attempts, first = fleet.begun()
    changed = AdapterChangedError("loaded anew")
    for _ in range(MAX_PREPARATIONS - 1):
        assert isinstance(attempts.failed(FailureKind.CHANGED, changed, NOW), Prepare)
        again = sent(attempts.prepared(PROMPT, NOW))
        assert again.endpoint == first.endpoint, "nobody has failed it"
    assert error_of(attempts.failed(FailureKind.CHANGED, changed, NOW)) is changed


def test_a_worker_that_does_not_take_what_was_told_has_nothing_against_the_request() -> None:
    """A grammar that refuses the tokens: before the first token the same error is the caller's own."""
    fleet, error = Fleet(), InvalidRequestError("resumed_output", "the grammar does not allow it")
    attempts, _ = fleet.begun()
    attempts.first_token(NOW)
    sent(attempts.failed(DIED, GONE, NOW, sent_tokens=3))
    told = error_of(attempts.failed(CALLERS, error, NOW, sent_tokens=3))
    assert isinstance(told, UnavailableError)
    assert "cannot be gone on with: resumed_output: the grammar" in str(told)


def test_an_answer_whose_adapter_changes_ends_in_an_error() -> None:
    fleet = Fleet()
    attempts, _ = fleet.begun()
    attempts.accepted(0, NOW)
    error = error_of(attempts.failed(FailureKind.CHANGED, AdapterChangedError("loaded anew"), NOW))
    assert isinstance(error, UnavailableError)
    assert "cannot go on" in str(error)


def test_one_deadline_holds_over_all_attempts() -> None:
    fleet = Fleet()
    attempts, _ = fleet.begun(deadline=NOW + 5.0)
    assert sent(attempts.failed(DIED, GONE, NOW + 4.9))
    assert isinstance(error_of(attempts.failed(CALLERS, DeadlineError("late"), NOW + 5.0)), DeadlineError)
    late, _ = fleet.begun(deadline=NOW + 5.0)
    assert isinstance(error_of(late.failed(DIED, GONE, NOW + 5.0)), DeadlineError)


def test_deaths_of_many_at_once_wait_for_places_in_order() -> None:
    """One of four workers dies with a share of all requests: they are taken up again as others get their tokens, none is lost."""
    fleet, told = Fleet(), list[int]()
    running: list[Attempts] = []
    for number in range(6):
        attempts, _ = fleet.begun(on_place=_noting(told, number))
        running.append(attempts)
    steps = [attempts.failed(DIED, GONE, NOW) for attempts in running]
    assert [type(step) for step in steps] == [Send] * LEAST_RETRIES + [Wait] * 3
    running[0].first_token(NOW)
    assert told == [3]
    assert sent(running[3].place_held(NOW))
    running[4].close(NOW)  # its caller has left
    running[1].close(NOW)
    assert told == [3, 5]
    assert sent(running[5].place_held(NOW))
    for attempts in running:
        attempts.close(NOW)
    assert fleet.is_clean()


def test_refusals_wait_for_nobody() -> None:
    fleet = Fleet()
    for _ in range(LEAST_RETRIES):
        attempts, _ = fleet.begun()
        sent(attempts.failed(REFUSED, FULL, NOW))
    attempts, _ = fleet.begun()
    assert error_of(attempts.failed(REFUSED, FULL, NOW)) is FULL


def test_attempts_are_at_most_a_fifth_more_than_requests_while_all_refuse() -> None:
    """F69: 20 s at 100 requests a second."""
    fleet, tries, now = Fleet(), 0, NOW
    for _ in range(2000):
        now += 0.01
        attempts = fleet.request()
        step = attempts.begin(now)
        while isinstance(step, Send):
            tries += 1
            step = attempts.failed(REFUSED, FULL, now)
        attempts.close(now)
    assert 2000 < tries <= 1.2 * 2000
    assert fleet.is_clean()


def test_a_retry_that_fails_keeps_its_place_for_the_next() -> None:
    """It goes on being one that has no token."""
    fleet = Fleet(8)
    attempts, _ = fleet.begun()
    sent(attempts.failed(DIED, GONE, NOW))
    sent(attempts.failed(REFUSED, FULL, NOW))
    assert "1 of 3 places held" in repr(fleet.budget)
    attempts.first_token(NOW)
    assert "0 of 3 places held" in repr(fleet.budget)


def test_a_caller_may_leave_in_every_state() -> None:
    """And twice over: everything is given back once."""

    def accepted(attempts: Attempts) -> None:
        attempts.accepted(0, NOW)

    def streaming(attempts: Attempts) -> None:
        accepted(attempts)
        attempts.first_token(NOW)

    def retried(attempts: Attempts) -> None:
        streaming(attempts)
        sent(attempts.failed(DIED, GONE, NOW, sent_tokens=3))

    def preparing(attempts: Attempts) -> None:
        attempts.failed(FailureKind.CHANGED, AdapterChangedError("loaded anew"), NOW)

    for reach in (lambda _: None, accepted, streaming, retried, preparing):
        fleet = Fleet()
        attempts, _ = fleet.begun()
        reach(attempts)
        attempts.close(NOW)
        attempts.close(NOW)
        assert attempts.outcome == "CANCELLED"
        assert fleet.is_clean(), reach


def test_nobody_ready_ends_it_at_once() -> None:
    fleet = Fleet(1)
    fleet.core.unreachable(add_ready(fleet.core, "w0"), "gone")
    attempts = fleet.request()
    assert "w0" in str(error_of(attempts.begin(NOW)))
    attempts.close(NOW)
    assert fleet.is_clean()


def test_the_history_tells_every_step() -> None:
    fleet = Fleet()
    attempts, first = fleet.begun(deadline=NOW + 9.0)
    attempts.accepted(7, NOW)
    attempts.first_token(NOW)
    attempts.told(0, 0, 2)
    second = sent(attempts.failed(DIED, GONE, NOW, sent_tokens=2))
    attempts.resumed_at([2])
    attempts.told(0, 2, 1)
    attempts.finished(NOW)
    attempts.close(NOW)
    told = [(type(note).__name__, getattr(note, "reservation", "")) for note in fleet.notes.records]
    assert told == [
        ("Asked", ""),
        ("Placed", first.request_id),
        ("Admitted", ""),
        ("Tokens", ""),
        ("Failed", ""),
        ("Placed", second.request_id),
        ("Resumed", ""),
        ("Tokens", ""),
        ("Ended", ""),
    ]
    assert getattr(fleet.notes.records[-1], "completion_tokens", None) == 3
    assert entry_of(fleet.core, second.endpoint).load.in_flight == 0


def _noting(told: list[int], number: int) -> Callable[[], None]:
    return lambda: told.append(number)
