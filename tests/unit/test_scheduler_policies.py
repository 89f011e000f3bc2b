"""Who goes first, and that nobody waits for ever for it: F56 under every policy, with long queues, and under hold."""

import random
from bisect import bisect_right, insort

import pytest

from tests.support.fake_model import expected_output
from tests.support.scheduling import NAMESPACE_A, NAMESPACE_B, Bench

HOT = [1, 2, 3, 4]


def warm(bench: Bench) -> None:
    """Have ``HOT`` cached."""
    bench.submit("base", HOT, max_tokens=0)
    bench.run()


def most_passed_over(order: list[int]) -> int:
    """The most later arrivals that were admitted before anyone, of requests named by their place in the order of arrival."""
    admitted: list[int] = []
    most = 0
    for number in order:
        most = max(most, len(admitted) - bisect_right(admitted, number))
        insort(admitted, number)
    return most


@pytest.mark.parametrize("bound", [0, 1, 20])
def test_of_a_thousand_nobody_is_passed_over_more_often_than_the_bound(bound: int) -> None:
    """F56, with 1,200 in the queue from the start and hits arriving all the time; and the bound is used."""
    rng = random.Random(56)
    bench = Bench(max_running=2, max_queued=3000, max_passed_over=bound, total_pages=256, check_each=False)
    warm(bench)
    arrivals = 0

    def arrive() -> None:
        nonlocal arrivals
        prompt = [*HOT, rng.randrange(50)] if rng.random() < 0.6 else [9, *rng.choices(range(50), k=3)]
        bench.submit(str(arrivals), prompt, max_tokens=0)
        arrivals += 1

    for _ in range(1200):
        arrive()
    while bench.scheduler.has_work:
        bench.step()
        if arrivals < 1500:
            arrive()
    bench.scheduler.check_invariants()
    order = [int(name) for name in bench.admitted()[1:]]
    assert sorted(order) == list(range(1500))
    assert most_passed_over(order) == bound


def test_the_longest_cached_prefix_is_found_wherever_it_waits() -> None:
    """The last of 1,500; and the next best after it."""
    bench = Bench(max_running=1, max_queued=2000, total_pages=256, check_each=False)
    warm(bench)
    for i in range(1498):
        bench.submit(f"cold{i}", [9, i % 50, i // 50], max_tokens=0)
    bench.submit("two", [*HOT[:2], 40], max_tokens=0)
    bench.submit("four", [*HOT, 40], max_tokens=0)
    for _ in range(3):
        bench.step()
    assert bench.admitted() == ["base", "four", "two", "cold0"]


def test_what_was_evicted_is_no_reason_to_go_first() -> None:
    """What the queue knew of the cache is looked up before it is believed."""
    bench = Bench(max_running=1)
    warm(bench)
    bench.submit("cold", [9, 9], max_tokens=0)
    bench.submit("was hot", [*HOT, 5], max_tokens=0)
    bench.cache.evict(4)
    bench.step()
    assert bench.admitted() == ["base", "cold"]


def test_a_prefix_that_came_after_a_request_counts_for_it() -> None:
    """It was cold when it arrived; another one's answer has made it hot."""
    bench = Bench(max_running=1, max_passed_over=100)
    bench.submit("first", HOT, max_tokens=3)
    bench.submit("cold", [9, 9], max_tokens=0)
    answer = expected_output(HOT, 3)
    bench.submit("next turn", [*HOT, *answer, 8], max_tokens=0)
    bench.run()
    assert bench.admitted() == ["first", "next turn", "cold"]
    assert bench.cached("next turn") == 6


def test_whose_turn_it_is_while_it_is_held_lets_nobody_else_go_first() -> None:
    """Hits go before it as often as they may; then all wait with it for the prefix, which is computed once."""
    bench = Bench(chunk=2, total_pages=400, max_running=100, max_queued=1000, hold_min=4, max_passed_over=3)
    warm(bench)
    slow = [9] * 60
    bench.submit("slow", slow, max_tokens=0)
    bench.step()
    bench.submit("held", [*slow, 8], max_tokens=0)
    for i in range(20):
        bench.submit(f"hot{i}", [*HOT, i], max_tokens=0)
        bench.step()
    assert bench.admitted() == ["base", "slow", "hot0", "hot1", "hot2"]
    bench.run()
    assert bench.admitted()[5] == "held"
    assert bench.cached("held") == 60


def test_higher_priorities_go_first_and_equal_ones_by_what_is_cached() -> None:
    bench = Bench(policy="priority", max_running=1)
    warm(bench)
    for name, prompt, priority in (
        ("low hot", [*HOT, 5], -1),
        ("cold", [9, 9], 0),
        ("hot", [*HOT, 6], 0),
        ("high", [8, 8], 7),
    ):
        bench.submit(name, prompt, max_tokens=0, priority=priority)
    bench.run()
    assert bench.admitted() == ["base", "high", "hot", "cold", "low hot"]


def test_priorities_mean_nothing_to_the_other_policies() -> None:
    bench = Bench(policy="lpm", max_running=1)
    bench.submit("low", [1], max_tokens=0, priority=-5)
    bench.submit("high", [2], max_tokens=0, priority=5)
    bench.run()
    assert bench.admitted() == ["low", "high"]


def test_under_priority_every_so_many_admissions_are_one_of_the_oldest() -> None:
    """Three low ones and an endless stream of high ones: with a bound of 4 every fifth admission is the oldest's."""
    bench = Bench(policy="priority", max_running=1, max_passed_over=4, max_queued=1000)
    for i in range(3):
        bench.submit(f"low{i}", [9, i], max_tokens=0, priority=0)
    for i in range(40):
        bench.submit(f"high{i}", [8, i], max_tokens=0, priority=1)
    for _ in range(20):
        bench.step()
    order = bench.admitted()
    assert [order.index(f"low{i}") for i in range(3)] == [4, 9, 14]


def test_under_priority_the_bound_among_equals_is_kept_too() -> None:
    """A cold request among hits of its own priority, while a lower line is never asked."""
    bench = Bench(policy="priority", max_running=1, max_passed_over=3, max_queued=1000)
    warm(bench)
    bench.submit("cold", [9], max_tokens=0, priority=5)
    bench.submit("low", [7], max_tokens=0, priority=0)
    for i in range(10):
        bench.submit(f"hot{i}", [*HOT, i], max_tokens=0, priority=5)
    for _ in range(5):
        bench.step()
    assert bench.admitted() == ["base", "hot0", "hot1", "hot2", "cold", "hot3"]


def test_the_lowest_priority_gives_way_first_under_priority_alone() -> None:
    """Though it loses more."""
    for policy, victim in (("priority", "low"), ("lpm", "high")):
        bench = Bench(policy=policy, total_pages=20, decode_room=0)  # type: ignore[arg-type]
        bench.submit("low", [1] * 8, max_tokens=10, priority=0)
        bench.submit("high", [2] * 3, max_tokens=10, priority=1, namespace=NAMESPACE_B)
        while len(bench.scheduler.running) == 2 or not bench.admitted()[1:]:
            bench.step()
        assert [r.request_id for r in bench.scheduler.running] == [{"low": "high", "high": "low"}[victim]]
        bench.run()
        assert bench.output("low") == expected_output([1] * 8, 10)


@pytest.mark.parametrize(("policy", "order"), [("lpm", ["small0", "small1", "small2"]), ("fcfs", [])])
def test_one_that_does_not_fit_now_lets_smaller_ones_go_first(policy: str, order: list[str]) -> None:
    """F40: under ``lpm`` and ``priority``, as often as the bound allows; ``fcfs`` keeps the order."""
    bench = Bench(policy=policy, total_pages=40, decode_room=0, max_passed_over=3)  # type: ignore[arg-type]
    bench.submit("running", [1] * 20, max_tokens=20)
    bench.step()
    bench.submit("large", [2] * 30, max_tokens=0)
    for i in range(6):
        bench.submit(f"small{i}", [3 + i], max_tokens=0)
        bench.step()
    assert bench.admitted()[1:] == order
    bench.run()
    assert bench.admitted()[1:][len(order)] == "large"
    assert all(bench.ended(f"small{i}").reason == "length" for i in range(6))


def test_lower_priorities_do_not_take_the_pages_that_a_higher_one_waits_for() -> None:
    bench = Bench(policy="priority", total_pages=40, decode_room=0)
    bench.submit("running", [1] * 20, max_tokens=20)
    bench.step()
    bench.submit("large", [2] * 30, max_tokens=0, priority=1)
    bench.submit("small", [3], max_tokens=0, priority=0)
    bench.submit("equal", [4], max_tokens=0, priority=1)
    bench.step()
    assert bench.admitted() == ["running", "equal"]


def test_a_namespace_does_not_wait_for_anothers_prefill() -> None:
    """Equal tokens, other weights or another tenant: nothing will be offered."""
    bench = Bench(chunk=4, hold_min=4, total_pages=200)
    bench.submit("a", [5] * 30, max_tokens=0, namespace=NAMESPACE_A)
    bench.submit("b", [5] * 20, max_tokens=0, namespace=NAMESPACE_B)
    bench.step()
    assert bench.admitted() == ["a", "b"]
