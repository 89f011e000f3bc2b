"""Reservations: work is booked at the decision, moves forward once, leaves exactly once; and with others' work it makes a sum in which
nobody is counted twice."""

import pytest

from prefixmesh.errors import DoubleReleaseError, InvariantError
from prefixmesh.ids import Incarnation, RequestId
from prefixmesh.router.load import MAX_UNTOLD, LoadReport, LoadSum, WorkerLoad
from prefixmesh.router.reservation import ReservationState

A, B = RequestId("a"), RequestId("b")


def report(
    answers: int,
    own: int = 0,
    *,
    prefill_ms: float = 0.0,
    accepted: tuple[str, ...] = (),
    prefilled: tuple[str, ...] = (),
    ended: tuple[str, ...] = (),
) -> LoadReport:
    return LoadReport(
        answers=answers,
        own_requests=own,
        prefill_ms=prefill_ms,
        decode_ms_each=10.0,
        accepted=accepted,
        prefilled=prefilled,
        ended=ended,
    )


def test_reservation_moves_from_reserved_to_ended() -> None:
    """The part for prefill is corrected at admission and given back at the first token; the rest at the end."""
    load = WorkerLoad(Incarnation(1))
    reservation = load.reserve(A, prefill_ms=100.0, decode_ms=20.0)
    assert (load.in_flight, load.work_ms) == (1, 120.0)
    reservation.accept(prefill_ms=10.0)
    assert (load.in_flight, load.prefill_ms, load.work_ms) == (1, 10.0, 30.0)
    reservation.first_token()
    assert (load.in_flight, load.prefill_ms, load.work_ms) == (1, 0.0, 20.0)
    reservation.settle()
    assert (load.in_flight, load.work_ms) == (0, 0.0)
    assert reservation.state is ReservationState.ENDED


def test_late_news_changes_nothing() -> None:
    """An admission told after the first token, or anything told after the end, books nothing."""
    load = WorkerLoad(Incarnation(1))
    reservation = load.reserve(A, prefill_ms=100.0, decode_ms=0.0)
    reservation.first_token()
    reservation.accept(prefill_ms=50.0)
    assert load.work_ms == 0.0
    reservation.settle()
    reservation.first_token()
    reservation.accept(prefill_ms=50.0)
    assert repr(load) == "WorkerLoad(0 in flight, 0.0 ms)"


def test_settling_twice_raises_and_changes_nothing() -> None:
    """A second settlement is a bug that is told, and no count goes below zero."""
    load = WorkerLoad(Incarnation(1))
    first = load.reserve(A, prefill_ms=1.0, decode_ms=1.0)
    load.reserve(B, prefill_ms=2.0, decode_ms=2.0)
    first.settle()
    with pytest.raises(DoubleReleaseError):
        first.settle()
    assert (load.in_flight, load.work_ms) == (1, 4.0)
    load.check_invariants()


def test_idle_load_is_exactly_zero() -> None:
    """Sums of floats drift; an idle worker's do not."""
    load = WorkerLoad(Incarnation(1))
    for _ in range(10):
        reservations = [load.reserve(RequestId(str(i)), prefill_ms=0.1 * i, decode_ms=0.3) for i in range(7)]
        load.check_invariants()
        for reservation in reservations:
            reservation.settle()
        assert load.work_ms == 0.0


def test_broken_sums_are_noticed() -> None:
    """check_invariants recomputes the sums."""
    load = WorkerLoad(Incarnation(1))
    load.reserve(A, prefill_ms=5.0, decode_ms=0.0).prefill_ms = 1.0
    with pytest.raises(InvariantError, match="differ"):
        load.check_invariants()


def test_others_work_is_what_is_reported_less_ours() -> None:
    """Three run there, one of them ours: two are others', and ours counts by its own reservation."""
    load = WorkerLoad(Incarnation(1))
    load.reserve(A, prefill_ms=100.0, decode_ms=20.0)
    load.on_report(report(3, 1, prefill_ms=400.0, accepted=("a",)))
    assert load.total == LoadSum(3, 400.0, 2 * 10.0 + 20.0)
    assert (load.in_flight, load.work_ms) == (1, 120.0), "own work is told apart"
    load.check_invariants()


def test_a_request_counts_once_before_and_after_the_report_that_knows_it() -> None:
    """Under way, reported, ended here and not reported ended yet, reported ended: 1, 1, 0, 0, beside another's one throughout."""
    load = WorkerLoad(Incarnation(1))
    load.on_report(report(1))
    reservation = load.reserve(A, prefill_ms=100.0, decode_ms=0.0)
    counts = [load.total.in_flight]
    load.on_report(report(1))
    counts.append(load.total.in_flight)
    load.on_report(report(2, 1, prefill_ms=100.0, accepted=("a",)))
    counts.append(load.total.in_flight)
    reservation.settle()
    counts.append(load.total.in_flight)
    load.on_report(report(1))
    counts.append(load.total.in_flight)
    assert counts == [2, 2, 2, 1, 1]
    assert load.total.prefill_ms == 0.0


def test_branches_count_as_the_worker_counts_them() -> None:
    """A worker counts answers that run, and requests that are ours; of a request with three branches nothing is left for others."""
    load = WorkerLoad(Incarnation(1))
    reservation = load.reserve(A, prefill_ms=10.0, decode_ms=30.0, branches=3)
    assert load.total.in_flight == 3
    load.on_report(report(4, 1, prefill_ms=10.0, accepted=("a",)))
    assert load.total.in_flight == 4
    load.check_invariants()
    reservation.settle()
    load.check_invariants()
    assert load.total.in_flight == 1


def test_prefill_that_goes_on_is_taken_off_what_ours_claim() -> None:
    """Half of what two of ours claimed is computed; a third that the report does not know counts in full; one that then has its first
    token takes what was left of its claim away."""
    load = WorkerLoad(Incarnation(1))
    first = load.reserve(A, prefill_ms=300.0, decode_ms=0.0)
    load.reserve(B, prefill_ms=100.0, decode_ms=0.0)
    load.on_report(report(2, 2, prefill_ms=200.0, accepted=("a", "b")))
    assert load.total.prefill_ms == pytest.approx(200.0)
    load.reserve(RequestId("c"), prefill_ms=70.0, decode_ms=0.0)
    assert load.total.prefill_ms == pytest.approx(270.0)
    first.first_token()
    assert load.total.prefill_ms == pytest.approx(50.0 + 70.0)
    load.check_invariants()


def test_reports_move_reservations_forward_and_never_back() -> None:
    """A caller that streams from the worker itself is known by reports alone; what is said twice or late changes nothing."""
    load = WorkerLoad(Incarnation(1))
    reservation = load.reserve(A, prefill_ms=100.0, decode_ms=5.0)
    load.on_report(report(1, 1, prefill_ms=100.0, accepted=("a", "unknown")))
    assert reservation.state is ReservationState.ACCEPTED
    load.on_report(report(1, 1, prefilled=("a",)))
    assert (reservation.state, load.prefill_ms) == (ReservationState.PREFILLED, 0.0)
    load.on_report(report(1, 1, accepted=("a",)))
    assert (reservation.state, load.total) == (ReservationState.PREFILLED, LoadSum(1, 0.0, 5.0))


def test_what_the_worker_says_it_found_corrects_the_claim_also_after_a_report() -> None:
    """The report that it was taken in may come before the stream says how much is cached."""
    load = WorkerLoad(Incarnation(1))
    reservation = load.reserve(A, prefill_ms=100.0, decode_ms=0.0)
    load.on_report(report(1, 1, prefill_ms=100.0, accepted=("a",)))
    reservation.accept(prefill_ms=10.0)
    assert load.total.prefill_ms == pytest.approx(10.0)
    load.check_invariants()


def test_a_silent_workers_word_on_others_is_forgotten_and_own_work_is_not() -> None:
    load = WorkerLoad(Incarnation(1))
    load.reserve(A, prefill_ms=100.0, decode_ms=1.0)
    load.on_report(report(9, 1, prefill_ms=900.0, accepted=("a",)))
    load.forget_report()
    assert load.total == LoadSum(1, 100.0, 1.0)
    load.check_invariants()


def test_figures_that_do_not_fit_never_make_a_count_negative() -> None:
    """A worker whose sums are older than its list of requests."""
    load = WorkerLoad(Incarnation(1))
    first, second = (load.reserve(name, prefill_ms=0.0, decode_ms=0.0) for name in (A, B))
    load.on_report(report(1, 5, accepted=("a", "b")))
    first.settle()
    second.settle()
    assert load.total == LoadSum(0, 0.0, 0.0)


def test_a_request_of_ours_that_runs_without_a_reservation_counts_like_others() -> None:
    """Its ticket was given back and then used, or the worker was removed and added again."""
    load = WorkerLoad(Incarnation(1))
    load.reserve(A, prefill_ms=100.0, decode_ms=5.0)
    load.on_report(report(2, 2, prefill_ms=300.0, accepted=("a", "unbooked")))
    assert load.total == LoadSum(2, 300.0, 15.0)
    load.on_report(report(1, 1, prefill_ms=100.0))
    assert load.total == LoadSum(1, 100.0, 5.0)


def test_after_a_silence_on_one_stream_ours_are_counted_once() -> None:
    """Only a new stream's first report names again who is there."""
    load = WorkerLoad(Incarnation(1))
    load.reserve(A, prefill_ms=100.0, decode_ms=1.0, branches=3)
    load.on_report(report(3, 1, prefill_ms=100.0, accepted=("a",)))
    load.forget_report()
    load.on_report(report(3, 1, prefill_ms=100.0))
    assert load.total == LoadSum(3, 100.0, 1.0)
    load.on_opened()
    load.on_report(report(3, 1, prefill_ms=100.0, accepted=("a",)))
    assert load.total == LoadSum(3, 100.0, 1.0)
    load.check_invariants()


def test_a_request_whose_end_is_known_before_the_worker_tells_it_is_nobodys_work() -> None:
    """Its stream's end overtakes a report that was made while it ran. What runs there beside it is somebody's, as ever."""
    load = WorkerLoad(Incarnation(1))
    reservation = load.reserve(A, prefill_ms=100.0, decode_ms=20.0, branches=2)
    reservation.first_token()
    reservation.settle()
    load.on_report(report(2, own=1, accepted=(A,)))
    assert load.total == LoadSum(0, 0.0, 0.0)
    load.on_report(report(3, own=1))
    assert load.total.in_flight == 1
    load.on_report(report(0, ended=(A,)))
    load.on_report(report(2, own=1))  # it runs once more under nobody's name
    assert load.total.in_flight == 2


def test_a_request_that_was_given_back_unused_and_runs_all_the_same_counts_like_others() -> None:
    load = WorkerLoad(Incarnation(1))
    load.reserve(A, prefill_ms=100.0, decode_ms=20.0).settle()
    load.on_report(report(1, own=1, accepted=(A,)))
    assert load.total.in_flight == 1


def test_ends_that_a_worker_never_tells_are_forgotten_in_the_end() -> None:
    load = WorkerLoad(Incarnation(1))
    for number in range(MAX_UNTOLD + 10):
        reservation = load.reserve(RequestId(str(number)), prefill_ms=1.0, decode_ms=1.0)
        reservation.accept()
        reservation.settle()
    assert len(load._untold) == MAX_UNTOLD
    load.on_report(report(2, own=2))
    assert load.total == LoadSum(0, 0.0, 0.0)
    load.on_opened()
    load.on_report(report(2, own=2))
    assert load.total.in_flight == 2
