"""Whole fleets in simulated time under mixed faults: every request ends once, in time, with its own answer or a typed error, and nothing is
left of any of them. And the runs can fail: bugs that are planted on purpose are found.

A seed that fails is run again by ``python -m prefixmesh.sim.fault_run --seed N --trace``.
"""

import re
from collections import Counter
from collections.abc import Callable

import pytest

from prefixmesh.answer_record import AnswerRecord
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.ids import Incarnation
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import ticket_pb2
from prefixmesh.router.placements import Placements
from prefixmesh.sim import simulated_life, simulated_request
from prefixmesh.sim.fault_run import FaultReport, first_failing, run_seed
from prefixmesh.ticket import Ticket, verify
from prefixmesh.worker.kv_manager import KvManager

FEW = range(3)
MANY = range(200)
DEEP = 1000
MAC_BYTES = 32


def check(seeds: range) -> Counter[str]:
    """Every seed holds; what they have done."""
    done = Counter[str]()

    def count(report: FaultReport) -> None:
        done.update(requests=report.requests, finished=report.finished, resumed=report.resumed)
        done.update(attempts=report.attempts, loaded_back=report.loaded_back)
        for line in report.script.lines():
            done[line.split(": ", 1)[1].split(" ", 1)[0]] += 1

    report = first_failing(seeds, count)
    assert report is None, str(report)
    return done


def test_a_few_seeds_of_mixed_faults_lose_nothing_and_leave_nothing() -> None:
    done = check(FEW)
    assert done["finished"] > 0.6 * done["requests"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_seeds_of_mixed_faults_lose_nothing_and_leave_nothing() -> None:
    done = check(MANY)
    assert done["finished"] > 0.7 * done["requests"]
    # Else nothing was tried.
    assert done["resumed"] > len(MANY) // 2
    assert done["attempts"] > 1.01 * done["requests"]
    assert done["loaded_back"] > 10 * len(MANY)
    worker_faults = ("crash", "stall", "delay", "refuse", "stall_stream", "silence", "clock", "copy_delay")
    for kind in (*worker_faults, "copy_fail", "wrong_cached", "wrong_sums", "cut", "cut_silently", "bad"):
        assert done[kind] > 10, kind


@pytest.mark.deep
@pytest.mark.parametrize("first", range(0, 10 * DEEP, DEEP))
def test_ten_thousand_seeds_of_mixed_faults_lose_nothing_and_leave_nothing(first: int) -> None:
    check(range(first, first + DEEP))


def test_one_seed_is_one_run() -> None:
    """Else nothing that it finds could be found again."""

    def run(seed: int) -> tuple[object, ...]:
        report = run_seed(seed)
        return report.calls, report.requests, report.finished, report.attempts, report.script.lines()

    assert run(3) == run(3)
    assert run(3) != run(4)


def plant_a_reservation_that_is_not_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in twenty ends is forgotten."""
    end, ends = Placements.end, iter(range(1 << 30))

    def forgetful(*arguments: object) -> None:
        if next(ends) % 20 != 19:
            end(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Placements, "end", forgetful)


def plant_a_lock_that_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in fifty requests leaves its prefix locked."""
    release, releases = KvManager._release_receipt, iter(range(1 << 30))

    def forgetful(kv: KvManager, request: object) -> None:
        if next(releases) % 50 == 49:
            request.receipt = None  # type: ignore[attr-defined]
            kv.receipts_out -= 1
        else:
            release(kv, request)  # type: ignore[arg-type]

    monkeypatch.setattr(KvManager, "_release_receipt", forgetful)


def plant_a_worker_that_ignores_the_incarnation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tickets for another life of it are taken."""

    def credulous(note: bytes, secret: FleetSecret, _: Incarnation) -> Ticket:
        meant = ticket_pb2.Ticket.FromString(note[:-MAC_BYTES]).incarnation
        return verify(note, secret, Incarnation(meant))

    monkeypatch.setattr(simulated_life, "verify", credulous)


def plant_a_retry_from_the_beginning_after_a_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that does not care what it has told already."""

    class Careless(AnswerRecord):
        def resume(self, request: pb.GenerateRequest) -> None:
            """Ask for the whole answer again."""

        def continued(
            self, response: pb.GenerateResponse, now_s: float | None = None
        ) -> pb.GenerateResponse | None:
            return response

    monkeypatch.setattr(simulated_request, "AnswerRecord", Careless)


def plant_a_worker_that_aborts_what_nobody_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in thirty calls."""
    take, calls = simulated_life.Life.take, iter(range(1 << 30))

    def wayward(life: simulated_life.Life, call: simulated_life.Call) -> None:
        take(life, call)
        if next(calls) % 30 == 29:
            life.abort(call.submit.request_id)

    monkeypatch.setattr(simulated_life.Life, "take", wayward)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("plant", "shown_by"),
    [
        (plant_a_reservation_that_is_not_settled, "every reservation is settled once"),
        (plant_a_lock_that_is_not_released, "pages"),
        (plant_a_worker_that_ignores_the_incarnation, "taken in by the life it was placed on"),
        (plant_a_retry_from_the_beginning_after_a_delta, "each position once, in order|the answer twice"),
        (plant_a_worker_that_aborts_what_nobody_has_left, "ended in CANCELLED"),
    ],
)
def test_planted_bugs_are_found_within_two_hundred_seeds(
    plant: Callable[[pytest.MonkeyPatch], None], shown_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    report = first_failing(MANY)
    assert report is not None, "not found"
    assert any(re.search(shown_by, problem) for problem in report.problems), str(report)
