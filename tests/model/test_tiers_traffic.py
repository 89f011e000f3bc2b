"""The scheduler, the keeper of the host tier and the cache under random traffic, with copies that are slow, fail, and end in any order.

The fake model's KV is numbers that stand for whole prefixes: one wrong page is a wrong answer, and every token of every answer is compared.
Pools have 64 pages, so that everything is evicted, brought back and preempted all the time.
"""

import random
from collections import Counter

import pytest

from prefixmesh.sim.copy_troubles import CopyTrouble, no_troubles
from tests.support.tier_traffic import ALL_ODDS, NAMESPACES, VOCAB, TierEngine, TierTraffic

QUICKLY = CopyTrouble()
SLOWLY = CopyTrouble(slow_s=0.5)
PAGE_SIZES = (1, 4, 16)
RATIOS = (0.5, 2.0, 4.0)
POLICIES = ("lpm", "fcfs", "priority")
WRITES = ("write_through", "write_through", "write_through_selective")


def traffic(number: int, *, flushes: bool = True) -> TierTraffic:
    """One of all combinations of what can be set, by its number."""
    engine = TierEngine(
        seed=number,
        page_size=PAGE_SIZES[number % 3],
        host_ratio=RATIOS[number // 3 % 3],
        odds=ALL_ODDS[number % 5],
        schedule_policy=POLICIES[number % 7 % 3],
        hicache_write_policy=WRITES[number % 11 % 3],
    )
    return TierTraffic(engine, number, flushes=flushes)


def run(numbers: range, steps: int, check_every: int) -> Counter[str]:
    """All hold; what has happened."""
    done = Counter[str]()
    for number in numbers:
        some = traffic(number)
        some.run(steps, check_every=check_every)
        stats = some.engine.core.stats()
        done += some.engine.check_ends() + some.done
        done.update(preemptions=stats.preemptions, loaded_back=stats.tiers.loaded_back_tokens)
        done.update(backed_up=stats.tiers.backed_up_tokens, failed=stats.tiers.failed_copies)
    return done


@pytest.mark.parametrize("first", range(0, 15, 5))
def test_no_answer_is_wrong_and_nothing_is_left_of_a_few_hundred_steps(first: int) -> None:
    assert run(range(first, first + 5), 40, check_every=4)["length"] > 0


@pytest.mark.slow
def test_no_answer_is_wrong_and_nothing_is_left_of_ten_thousand_steps() -> None:
    """F12, F50, F52: never a wrong number, no step over a second, all counts back to zero at rest."""
    done = run(range(100, 145), 225, check_every=10)
    # Else nothing was tried.
    assert done["length"] > 1000
    assert done["aborted"] > 200
    assert min(done["flushes"], done["preemptions"], done["failed"]) > 20
    assert min(done["loaded_back"], done["backed_up"]) > 5000


@pytest.mark.deep
@pytest.mark.parametrize("number", range(200, 215))
def test_no_answer_is_wrong_and_nothing_is_left_of_ten_thousand_steps_of_one_pool(number: int) -> None:
    assert run(range(number, number + 1), 10_000, check_every=1)["length"] > 300


@pytest.mark.deep
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_no_answer_is_wrong_and_nothing_is_left_of_a_thousand_short_runs(first: int) -> None:
    run(range(first, first + 100), 150, check_every=3)


@pytest.mark.slow
def test_a_thousand_requests_cancelled_anywhere_leave_nothing() -> None:
    """F12, F51."""
    cancelled = 0
    for number in range(5):
        some = traffic(300 + number)
        rng = some._rng
        while sum(asked.aborted for asked in some.engine.asked.values()) < 200:
            some._turn()
            for name, asked in list(some.engine.asked.items())[-6:]:
                if asked.end is None and rng.random() < 0.7:
                    some.engine.abort(name)
            for _ in range(rng.randrange(4)):
                some.engine.step()
            if rng.random() < 0.3:
                some.engine.forget(rng.randint(1, 64))
        some.engine.rest()
        some.engine.check_rest()
        cancelled += some.engine.check_ends()["aborted"]
    assert cancelled > 900


PROMPT = [place * 7 % 31 for place in range(40)]
"""All of it but its end is whole pages of any of the sizes below."""


def warm(engine: TierEngine, prompt: list[int] = PROMPT) -> None:
    """Leave a prompt on the host alone."""
    engine.ask_now(prompt, 1)
    engine.pause(60.0)
    engine.forget()
    assert engine.cache.host_pages >= len(prompt) // engine.cache.page_size - 1
    assert engine.scheduler.kv.evictable_pages == 0


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("after", range(0, 60, 5))
def test_cancel_at_any_moment_of_a_load_back_leaves_nothing_locked(page_size: int, after: int) -> None:
    """F17, F19, F20: cancelled before it is admitted, before its copy begins, in the middle of it, while it decodes."""
    engine = TierEngine(page_size=page_size, chunked_prefill_size=8)
    warm(engine)
    name = engine.ask(PROMPT, 10)
    end = engine.time.now() + after * 0.001
    while engine.time.now() < end and engine.core.has_work:
        engine.step()
    engine.abort(name)
    engine.check()
    engine.step()
    engine.step()
    assert not engine.scheduler.has_work
    engine.pause(60.0)
    engine.check_rest()
    assert engine.core.stats().tiers.host_evictable_pages == engine.cache.host_pages > 0
    again = engine.ask_now(PROMPT)
    assert again.answer == again.expected
    assert again.admitted is not None
    assert again.admitted.cached_tokens >= len(PROMPT) - 2 * page_size


def test_a_request_larger_than_the_pool_is_refused_and_the_next_is_served_from_the_host() -> None:
    """F40: the host makes the pool no larger."""
    engine = TierEngine(host_ratio=4.0)
    warm(engine)
    name = engine.ask([1] * 60, 10)
    refused = engine.asked.pop(name).end
    assert getattr(refused, "field", "") == "sampling.max_tokens"
    served = engine.ask_now(PROMPT)
    assert served.admitted is not None
    assert served.admitted.host_tokens > 30
    engine.rest()
    engine.check_rest()


@pytest.mark.parametrize("prompts", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_cold_warm_and_restored_answer_alike(prompts: int) -> None:
    """F44: 200 prompts."""
    engine = TierEngine(page_size=4)
    restored = 0
    for number in range(prompts):
        prompt = [(number * place + place) % 29 for place in range(20 + number % 20)]
        namespace = NAMESPACES[number % 2]
        cold = engine.ask_now(prompt, 4, namespace)
        warmed = engine.ask_now(prompt, 4, namespace)
        engine.pause(1.0)
        engine.forget()
        back = engine.ask_now(prompt, 4, namespace)
        for asked in (cold, warmed, back):
            assert asked.answer == asked.expected
            assert asked.admitted is not None
        assert warmed.admitted.cached_tokens == back.admitted.cached_tokens >= 16  # type: ignore[union-attr]
        restored += back.admitted.host_tokens == back.admitted.cached_tokens  # type: ignore[union-attr]
        engine.flush()
    assert restored == prompts
    engine.rest()
    engine.check_rest()


@pytest.mark.slow
def test_hits_of_the_second_hour_are_as_many_as_those_of_the_first() -> None:
    """F51: nothing that loads and cancels leave makes the tiers smaller."""
    some = traffic(6, flushes=False)
    shares = []
    before = some.engine.core.stats().cache
    for _ in range(2):
        some.run(900, check_every=100)
        after = some.engine.core.stats().cache
        found = sum(after.hit_tokens) - sum(before.hit_tokens)
        shares.append(found / (after.prompt_tokens - before.prompt_tokens))
        before = after
    assert shares[1] == pytest.approx(shares[0], abs=0.1)


def test_copy_of_half_a_second_brings_the_right_bytes_though_the_host_evicts_meanwhile() -> None:
    """F52."""
    engine = TierEngine(host_ratio=1.0)
    warm(engine)
    engine.mover.troubles = lambda job: SLOWLY if job.kind == "restore" else QUICKLY
    name = engine.ask(PROMPT, 4)
    engine.step()
    assert engine.core.stats().tiers.copies_in_flight == 1
    for number in range(12):
        engine.ask([number, 30, *([number] * 10)], 1, NAMESPACES[1])
    engine.run()
    asked = engine.asked[name]
    assert asked.answer == asked.expected
    assert asked.admitted is not None
    assert asked.admitted.host_tokens > 30
    assert asked.admitted.load_back_ms > 450.0
    engine.rest()
    engine.check_rest()
    assert engine.cache.host_pages == 64
    assert engine.core.stats().tiers.backed_up_tokens > 100, "nothing came that could have evicted anything"


def test_prefix_that_is_inserted_while_it_is_being_restored_has_one_owner_a_page() -> None:
    """F53: a load-back that takes too long is waited for no longer; its request computes the same prefix, and the copy still comes."""
    engine = TierEngine(pages=128)
    warm(engine)
    engine.mover.troubles = lambda _: CopyTrouble(slow_s=3.0)
    asked = engine.asked[engine.ask(PROMPT, 4)]
    while asked.end is None:
        engine.step()
        engine.check()
    assert asked.answer == asked.expected
    assert engine.time.now() > 1.0
    assert engine.cache.copying_pages > 30
    duplicates = engine.cache.transfers.duplicate_pages
    engine.rest()
    engine.check_rest()
    assert engine.cache.transfers.duplicate_pages > duplicates + 30


def test_backup_is_complete_and_unlocked_after_a_request_and_two_idle_seconds() -> None:
    """F54: nobody comes whose step would see that it has ended."""
    engine = TierEngine()
    engine.ask_now(PROMPT, 5)
    assert not engine.core.has_work or engine.cache.host_pages == 0
    engine.pause(2.0)
    assert engine.cache.host_pages == len(PROMPT) + 4
    engine.check_rest()


@pytest.mark.parametrize("slow_s", [0.0, 0.7, 30.0])
@pytest.mark.parametrize("fails", [False, True])
def test_load_backs_that_fail_or_never_come_cost_a_bounded_wait_and_are_computed(
    slow_s: float, fails: bool
) -> None:
    """F50: with every copy like that. The last two are given up after a second, and stand in nobody's way."""
    engine = TierEngine(pages=128)
    warm(engine)
    trouble = CopyTrouble(slow_s=slow_s, error="broken" if fails else "", fails_after=0.9)
    engine.mover.troubles = lambda _: trouble
    began = engine.time.now()
    asked = engine.ask_now(PROMPT)
    assert asked.answer == asked.expected
    assert engine.time.now() - began < 3.0
    assert asked.admitted is not None
    assert bool(asked.admitted.host_tokens) == (not fails and slow_s < 1.0)
    engine.mover.troubles = no_troubles
    engine.rest()
    engine.check_rest()


def test_flush_while_a_load_back_is_under_way_is_survived() -> None:
    engine = TierEngine()
    warm(engine)
    engine.mover.troubles = lambda _: SLOWLY
    asked = engine.asked[engine.ask(PROMPT, 4)]
    engine.step()
    assert engine.core.stats().tiers.copies_in_flight == 1
    engine.flush()
    engine.check()
    engine.run()
    assert asked.answer == asked.expected
    assert asked.admitted is not None
    assert asked.admitted.cached_tokens == 0
    engine.rest()
    engine.check_rest()


CONVERSATIONS, TURNS, BEGUN, ASKED, ANSWERED = 24, 5, 60, 16, 8
WORKING_SET = CONVERSATIONS * (BEGUN + TURNS * (ASKED + ANSWERED))
NEXT_TO_NONE = 0.003
"""A host tier of a page or a few."""


def share_of_conversations(pool_tokens: int, host_ratio: float) -> float:
    """Of the prompt tokens of conversations that all wait for each other's turns, those that were found."""
    engine = TierEngine(pages=pool_tokens // 4, page_size=4, host_ratio=host_ratio)
    rng = random.Random(0)
    prompts = [[number, *rng.choices(range(VOCAB), k=BEGUN - 1)] for number in range(CONVERSATIONS)]
    for _ in range(TURNS):
        for prompt in prompts:
            prompt += rng.choices(range(VOCAB), k=ASKED)
            prompt += engine.ask_now(prompt, ANSWERED).answer
            engine.pause(0.05)
    engine.check_ends()
    row = engine.core.stats().cache
    return sum(row.hit_tokens) / row.prompt_tokens


@pytest.mark.slow
def test_device_of_a_third_of_the_working_set_with_the_rest_on_the_host_hits_as_an_unbounded_one() -> None:
    """At least 95 % of the share of prompt tokens that an unbounded device finds; without the host far less. Two thirds on the host are
    enough: where room is short, the tiers hold each thing once."""
    unbounded = share_of_conversations(2 * WORKING_SET, NEXT_TO_NONE)
    tiered = share_of_conversations(WORKING_SET // 3, 2.0)
    alone = share_of_conversations(WORKING_SET // 3, NEXT_TO_NONE)
    assert unbounded > 0.6
    assert tiered >= 0.95 * unbounded
    assert alone < 0.3 * unbounded
