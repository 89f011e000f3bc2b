"""Requests that are never admitted in time end unserved, at the cost of those alone."""

import math

from prefixmesh.worker.messages import Ended
from prefixmesh.worker.queue_deadlines import SLACK, QueueDeadlines, queue_deadline
from prefixmesh.worker.request import Phase, Request
from tests.support.fake_model import expected_output
from tests.support.scheduling import Bench, make_request


def test_the_smaller_limit_that_is_set_holds() -> None:
    assert queue_deadline(10.0, 0.0, 0.0) == math.inf
    assert queue_deadline(10.0, 5.0, 0.0) == queue_deadline(10.0, 0.0, 5.0) == 15.0
    assert queue_deadline(10.0, 5.0, 3.0) == 13.0


def test_a_request_that_waits_too_long_ends_and_computes_nothing() -> None:
    """By the engine's limit or by its own, whichever is less; those that run and those with time left go on."""
    bench = Bench(max_running=1, queue_timeout_s=30.0)
    bench.submit("runs", [1], max_tokens=20)
    bench.step()
    bench.submit("by the engine's", [2, 2], max_tokens=1)
    bench.submit("by its own", [3, 3], max_tokens=1, queue_timeout_s=6.0)
    bench.submit("asks for more", [4, 4], max_tokens=1, queue_timeout_s=90.0)
    bench.run()
    reasons = {event.request_id: event.reason for event in bench.events if isinstance(event, Ended)}
    assert reasons == {
        "runs": "length",
        "by the engine's": "queue_timeout",
        "by its own": "queue_timeout",
        "asks for more": "queue_timeout",
    }
    assert bench.admitted() == ["runs"]
    order = [event.request_id for event in bench.events if isinstance(event, Ended)]
    assert order.index("by its own") < order.index("by the engine's")
    ended = bench.ended("by its own")
    assert (ended.completion_tokens, ended.prefill_ms, ended.first_token_ms) == (0, 0.0, 0.0)


def test_whoever_was_admitted_in_time_is_served_to_the_end() -> None:
    """Also preempted, and waiting again long after."""
    bench = Bench(total_pages=24, decode_room=0, queue_timeout_s=8.0)
    for i in range(3):
        bench.submit(f"r{i}", [i, i, i], max_tokens=12)
    preempted = 0
    while bench.scheduler.has_work:
        before = bench.scheduler.running
        bench.step()
        preempted += sum(request.phase is Phase.PREEMPTED for request in before)
    assert preempted, "the test must preempt to mean anything"
    assert bench.now > 30
    for i in range(3):
        assert bench.output(f"r{i}") == expected_output([i, i, i], 12)


def test_an_aborted_or_admitted_request_does_not_time_out_later() -> None:
    bench = Bench(max_running=1, queue_timeout_s=5.0)
    bench.submit("runs", [1], max_tokens=10)
    bench.step()
    bench.submit("aborted", [2], max_tokens=1)
    bench.abort("aborted")
    bench.run()
    assert bench.ended("aborted").reason == "aborted"
    assert bench.ended("runs").reason == "length"


def test_a_place_in_the_queue_is_free_again_at_once() -> None:
    bench = Bench(max_running=1, max_queued=1)
    bench.submit("runs", [1], max_tokens=20)
    bench.step()
    bench.submit("late", [2], max_tokens=1, queue_timeout_s=2.0)
    for _ in range(3):
        bench.step()
    bench.submit("next", [3], max_tokens=1)
    bench.run()
    assert bench.ended("late").reason == "queue_timeout"
    assert bench.ended("next").reason == "length"


def waiting(number: int, deadline: float) -> Request:
    request = make_request([1], number=number)
    request.queue_deadline = deadline
    return request


def test_only_what_has_expired_is_touched_and_others_are_forgotten() -> None:
    """The earliest first; those that were admitted do not fill it up."""
    deadlines = QueueDeadlines()
    requests = [waiting(number, 100.0 - number) for number in range(50)]
    for request in [*requests, waiting(99, math.inf)]:
        deadlines.add(request)
    assert deadlines.take_expired(50.9) == []
    assert [request.number for request in deadlines.take_expired(53.0)] == [49, 48, 47]
    assert len(deadlines) == 47
    for number in range(100, 100 + 2 * SLACK):
        request = waiting(number, 1e9)
        deadlines.add(request)
        request.phase = Phase.PREFILLING
        deadlines.forget_others(waiting=47)
    assert len(deadlines) <= 2 * 47 + SLACK
    assert len(deadlines.take_expired(1e9)) == 47


def test_an_infinite_timeout_outlives_the_engine_s_own() -> None:
    """For branches whose call has begun: only the first gives up."""
    assert queue_deadline(10.0, math.inf, 5.0) == math.inf
    assert queue_deadline(10.0, 0.0, 5.0) == 15.0
