"""Reservations: work is booked at the decision, moves forward once, and leaves exactly once."""

import pytest

from prefixmesh.errors import DoubleReleaseError, InvariantError
from prefixmesh.ids import Incarnation
from prefixmesh.router.load import WorkerLoad
from prefixmesh.router.reservation import ReservationState


def test_reservation_moves_from_reserved_to_ended() -> None:
    """The part for prefill is corrected at admission and given back at the first token; the rest at the end."""
    load = WorkerLoad(Incarnation(1))
    reservation = load.reserve(prefill_ms=100.0, decode_ms=20.0)
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
    reservation = load.reserve(prefill_ms=100.0, decode_ms=0.0)
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
    first, _second = load.reserve(prefill_ms=1.0, decode_ms=1.0), load.reserve(prefill_ms=2.0, decode_ms=2.0)
    first.settle()
    with pytest.raises(DoubleReleaseError):
        first.settle()
    assert (load.in_flight, load.work_ms) == (1, 4.0)
    load.check_invariants()


def test_idle_load_is_exactly_zero() -> None:
    """Sums of floats drift; an idle worker's do not."""
    load = WorkerLoad(Incarnation(1))
    for _ in range(10):
        reservations = [load.reserve(prefill_ms=0.1 * i, decode_ms=0.3) for i in range(7)]
        load.check_invariants()
        for reservation in reservations:
            reservation.settle()
        assert load.work_ms == 0.0


def test_broken_sums_are_noticed() -> None:
    """check_invariants recomputes the sums."""
    load = WorkerLoad(Incarnation(1))
    load.reserve(prefill_ms=5.0, decode_ms=0.0).prefill_ms = 1.0
    with pytest.raises(InvariantError, match="differ"):
        load.check_invariants()
