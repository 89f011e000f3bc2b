"""A queue that is full and deadlines that come near: who is refused, who gives way, and what is not begun with any more."""

import pytest

from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.messages import Ended, Refused
from prefixmesh.worker.queue_pace import RETRY_SHARE, QueuePace
from tests.support.scheduling import Bench


def full_bench(*, waiting: int = 2, priority: int = 0) -> Bench:
    """One that runs for long, and as many that wait as may."""
    bench = Bench(max_running=1, max_queued=waiting, total_pages=200)
    bench.submit("runs", [1], max_tokens=50)
    bench.step()
    for number in range(waiting):
        bench.submit(f"w{number}", [2, number], priority=priority)
    return bench


def refused(bench: Bench) -> list[str]:
    return [event.request_id for event in bench.events if isinstance(event, Refused)]


def refusal_of(bench: Bench, request_id: str) -> Refused:
    (found,) = (e for e in bench.events if isinstance(e, Refused) and e.request_id == request_id)
    return found


def test_one_that_matters_no_more_finds_a_full_queue_full() -> None:
    bench = full_bench(priority=3)
    for priority in (-5, 3):
        bench.submit(f"p{priority}", [5], priority=priority)
    assert refused(bench) == ["p-5", "p3"]
    assert "2 requests are waiting already" in refusal_of(bench, "p3").problem


def test_one_that_matters_more_takes_the_place_of_the_last_that_matters_least() -> None:
    """Whoever has waited longer of equals stays; what gave way ends once, has computed nothing, and is known no more."""
    bench = full_bench(waiting=3, priority=0)
    bench.abort("w1")
    bench.submit("low", [4], priority=-1)
    bench.submit("first", [5], priority=2)
    bench.submit("second", [6], priority=2)
    bench.submit("third", [7], priority=2)
    assert refused(bench) == ["low", "w2", "w0"]
    assert "higher priority" in refusal_of(bench, "low").problem
    assert refusal_of(bench, "low").field == "", "it is no error of the caller's"
    bench.submit("low", [4], priority=-1)
    assert refused(bench)[3:] == ["low"], "its name may come again, and meets the same"
    bench.run()
    assert bench.admitted() == ["runs", "first", "second", "third"]


@pytest.mark.parametrize("fields", [{"is_follower": True}, {"resumed": [3]}])
def test_what_is_part_of_an_answer_that_has_begun_gives_way_to_nobody(fields: dict[str, object]) -> None:
    """A further branch of a call, and an answer that goes on here: a refusal would lose what others have computed."""
    bench = Bench(max_running=1, max_queued=1, total_pages=200)
    bench.submit("runs", [1], max_tokens=50)
    bench.step()
    bench.submit("part", [2], max_tokens=9, **fields)  # type: ignore[arg-type]
    bench.submit("urgent", [3], priority=100)
    assert refused(bench) == ["urgent"]


def test_the_running_and_the_preempted_give_way_to_nobody() -> None:
    """Their work is done in part; only who was never admitted is refused for somebody else."""
    bench = Bench(total_pages=24, decode_room=0, max_running=3, max_queued=1)
    for number in range(3):
        bench.submit(f"r{number}", [number, number, number], max_tokens=12)
        bench.step()
    while not bench.scheduler.preemptions:
        bench.step()
    bench.submit("waits", [9], priority=1)
    bench.submit("comes", [10], priority=5)
    assert refused(bench) == ["waits"]
    bench.run()
    assert sorted(bench.admitted()) == ["comes", "r0", "r1", "r2"]


def test_a_refusal_tells_when_places_come_free_at_the_pace_seen_so_far() -> None:
    """Nothing is told before anybody was seen to leave the queue."""
    bench = full_bench()
    bench.submit("early", [5])
    assert refusal_of(bench, "early").retry_after_s is None
    bench = Bench(max_running=1, max_queued=2, total_pages=200)
    for number in range(3):
        bench.submit(f"a{number}", [number], max_tokens=3)
        if not number:
            bench.step()
    while "a1" not in bench.admitted():
        bench.step()
    bench.submit("b0", [20])
    began = bench.now
    bench.submit("late", [21])
    told = refusal_of(bench, "late").retry_after_s
    assert told is not None
    assert 0.0 < told < began


def test_the_pace_of_a_queue_is_what_has_left_it_over_the_time_that_took() -> None:
    """Two a second; an eighth of forty places takes 2.5 s; while nothing moves it takes longer and longer."""
    pace = QueuePace()
    assert pace.retry_after_s(40, 0.0) is None
    for now in range(10):
        pace.admitted(2, float(now))
    assert pace.retry_after_s(40, 10.0) == pytest.approx(RETRY_SHARE * 40 / 2)
    assert pace.retry_after_s(2, 10.0) == pytest.approx(0.5), "at least for one place"
    assert pace.retry_after_s(40, 30.0) == pytest.approx(RETRY_SHARE * 40 * 30 / 20)
    pace.idle()
    assert pace.retry_after_s(40, 30.0) is None


def reasons(bench: Bench) -> dict[str, str]:
    return {event.request_id: event.reason for event in bench.events if isinstance(event, Ended)}


def test_what_can_no_longer_end_before_its_deadline_is_not_begun_with() -> None:
    """20 tokens at half a second each are 10 s of prefill: with 30 s left it is begun with up to 20 s from now, and not later."""
    for runs_for, reason in ((12, "length"), (40, "too_late")):
        rates = EngineRates(prefill_tokens_per_s=2.0)
        bench = Bench(max_running=1, total_pages=200, rates=rates)
        bench.submit("runs", [1], max_tokens=runs_for // 2)
        bench.step()
        bench.submit("due", range(20), max_tokens=1, time_left_s=30.0)
        bench.submit("not due", [3], max_tokens=1)
        bench.run()
        assert reasons(bench)["due"] == reason
        assert reasons(bench)["not due"] == "length"
        assert ("due" in bench.admitted()) == (reason == "length")


def test_what_is_cached_need_not_be_computed_before_a_deadline() -> None:
    rates = EngineRates(prefill_tokens_per_s=2.0)
    bench = Bench(max_running=1, total_pages=200, rates=rates)
    bench.submit("before", range(20), max_tokens=1)
    bench.run()
    bench.submit("due", range(20), max_tokens=1, time_left_s=8.0)
    bench.submit("new", range(20, 40), max_tokens=1, time_left_s=8.0)
    bench.run()
    assert (reasons(bench)["due"], reasons(bench)["new"]) == ("length", "too_late")


def test_an_answer_as_half_as_long_as_usual_must_fit_before_a_deadline() -> None:
    """Answers of 20 tokens, a step of a second: half of that is waited for, unless the caller allows less."""
    rates = EngineRates(decode_step_ms=1000.0)
    bench = Bench(max_running=1, total_pages=400, rates=rates)
    bench.submit("before", [1], max_tokens=20)
    bench.run()
    bench.submit("fits", [2], max_tokens=30, time_left_s=16.0)
    bench.submit("late", [3], max_tokens=30, time_left_s=8.0)
    bench.submit("short", [4], max_tokens=2, time_left_s=8.0)
    bench.step()
    assert "late" in reasons(bench)
    assert "fits" not in reasons(bench)
    assert "short" not in reasons(bench)


def test_whichever_ends_first_of_a_timeout_and_a_deadline_is_what_is_told() -> None:
    bench = Bench(max_running=1, total_pages=200)
    bench.submit("runs", [1], max_tokens=30)
    bench.step()
    bench.submit("impatient", [2], queue_timeout_s=5.0, time_left_s=9.0)
    bench.submit("due", [3], queue_timeout_s=9.0, time_left_s=5.0)
    bench.run()
    assert reasons(bench) == {"runs": "length", "impatient": "queue_timeout", "due": "too_late"}
