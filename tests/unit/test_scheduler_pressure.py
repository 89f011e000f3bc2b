"""The scheduler when something is short: pages, places, patience; and requests that are called off."""

import random

import pytest

from prefixmesh.worker.messages import Admitted, Ended
from prefixmesh.worker.request import Phase, Request
from tests.support.fake_model import expected_output
from tests.support.scheduling import NAMESPACE_B, Bench


def admitted_order(bench: Bench) -> list[str]:
    return [event.request_id for event in bench.events if isinstance(event, Admitted)]


def run_until_preempted(bench: Bench) -> Request:
    """Step until somebody is preempted; who it is."""
    while True:
        before = list(bench.scheduler.running)
        bench.step()
        for request in before:
            if request.phase is Phase.PREEMPTED:
                return request


@pytest.mark.parametrize("page_size", [1, 2])
def test_a_preempted_request_resumes_without_losing_or_repeating_a_token(page_size: int) -> None:
    """F57 and the preemption rule: a pool for two answers at most, four requests, no room kept for growth."""
    bench = Bench(total_pages=24 // page_size, page_size=page_size, decode_room=0)
    prompts = {f"r{i}": [i, i, i] for i in range(4)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, max_tokens=12)
    preempted = set()
    while bench.scheduler.has_work:
        before = set(bench.scheduler.running)
        step = bench.step()
        assert step is not None
        visited = [part.request for part in step.parts]
        assert len(set(visited)) == len(visited), "a request is visited twice in a step"
        preempted |= {r.request_id for r in before if r.phase is Phase.PREEMPTED}
        assert all(r in visited for r in before if r.phase in (Phase.DECODING,))
    assert preempted, "the test must preempt to mean anything"
    for name, prompt in prompts.items():
        assert bench.output(name) == expected_output(prompt, 12)
        assert bench.ended(name).reason == "length"
    assert admitted_order(bench) == list(prompts), "Admitted is told once, at the first admission"


def test_the_request_that_loses_least_is_preempted() -> None:
    """Not the one that computed most by itself."""
    bench = Bench(total_pages=24, decode_room=0, chunk=64)
    bench.submit("much", [1] * 14, max_tokens=8)
    bench.submit("little", [2] * 3, max_tokens=8)
    assert run_until_preempted(bench).request_id == "little"
    assert [request.request_id for request in bench.scheduler.running] == ["much"]
    bench.run()
    assert bench.output("little") == expected_output([2] * 3, 8)


def test_whoever_gave_way_comes_back_before_newcomers() -> None:
    """Also before those that would find room at once: else it starves as long as small ones come."""
    bench = Bench(total_pages=24, decode_room=0, chunk=64)
    bench.submit("much", [1] * 14, max_tokens=8)
    bench.submit("little", [2] * 3, max_tokens=8)
    little = run_until_preempted(bench)
    for number in range(3):
        bench.submit(f"new{number}", [3 + number], max_tokens=1)
    while little.phase is Phase.PREEMPTED:
        assert bench.admitted() == ["much", "little"]
        bench.step()
    bench.run()
    assert bench.admitted() == ["much", "little", "new0", "new1", "new2"]


def test_the_cache_is_evicted_before_anyone_is_preempted() -> None:
    bench = Bench(total_pages=16, decode_room=0)
    bench.submit("old", [9] * 8, max_tokens=0)
    bench.run()
    bench.submit("new", [1, 2, 3], max_tokens=13)
    bench.run()
    assert admitted_order(bench) == ["old", "new"]
    assert bench.output("new") == expected_output([1, 2, 3], 13)


def test_an_admission_leaves_the_running_room_to_grow() -> None:
    """The second request waits although its prompt would fit."""
    bench = Bench(total_pages=16, decode_room=4)
    bench.submit("first", [1] * 8, max_tokens=8)
    bench.step()
    bench.submit("second", [2] * 4, max_tokens=4)
    bench.step()
    assert admitted_order(bench) == ["first"]
    bench.run()
    assert bench.output("second") == expected_output([2] * 4, 4)


def test_lpm_admits_the_longest_cached_prefix_first_and_fcfs_the_oldest() -> None:
    for policy, first in (("lpm", "hit"), ("fcfs", "miss")):
        bench = Bench(policy=policy, max_running=1)  # type: ignore[arg-type]
        bench.submit("base", [1, 2, 3, 4], max_tokens=0)
        bench.run()
        bench.submit("miss", [5, 6, 7], max_tokens=1)
        bench.submit("hit", [1, 2, 3, 4, 5], max_tokens=1)
        bench.run()
        assert admitted_order(bench)[1] == first


def test_a_cold_request_is_passed_over_at_most_so_often() -> None:
    """F56: hits keep arriving, and the cold one starts within the bound."""
    bench = Bench(max_running=1, total_pages=64, max_queued=1000, max_passed_over=5)
    bench.submit("base", [1, 2, 3, 4], max_tokens=0)
    bench.run()
    bench.submit("hot-first", [1, 2, 3, 4, 5], max_tokens=1)
    bench.submit("cold", [9, 9], max_tokens=1)
    for i in range(20):
        bench.submit(f"hot{i}", [1, 2, 3, 4, 5], max_tokens=1)
        bench.step()
    place = admitted_order(bench).index("cold")
    assert place == 5 + 2, "after base, hot-first and the bound"


def test_a_held_request_is_not_held_beyond_the_bound() -> None:
    """Whoever waits for another one's prefix is passed over at most so often, too."""
    bench = Bench(chunk=1, total_pages=400, max_running=1000, max_queued=1000, hold_min=2)
    bench.submit("slow", [1] * 200, max_tokens=1)
    bench.step()
    bench.submit("held", [1] * 150 + [2], max_tokens=1)
    for _ in range(20):
        bench.step()
    assert "held" not in admitted_order(bench)
    bench.run()
    assert bench.output("held") == expected_output([1] * 150 + [2], 1)


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "preempted"])
def test_an_abort_takes_effect_at_once_in_every_state(state: str) -> None:
    """F17: the request is gone before the next step, its pages free or cached, nothing locked."""
    bench = Bench(total_pages=20, chunk=2, decode_room=0)
    bench.submit("target", [1, 1, 1, 1, 1], max_tokens=10)
    if state in ("prefilling", "decoding"):
        bench.step()
    if state == "decoding":
        bench.step()
        bench.step()
    if state == "preempted":
        bench.submit("other", [2] * 9, max_tokens=11)
        request = run_until_preempted(bench)
        assert bench.scheduler.queued == 1
        target = request.request_id
    else:
        target = "target"
        assert [r.phase.value for r in bench.scheduler.running] == ([] if state == "waiting" else [state])
    already = len(bench.output(target))
    bench.abort(target)
    assert bench.ended(target).reason == "aborted"
    bench.run()
    assert len(bench.output(target)) == already, "not a token after the abort"
    kv = bench.scheduler.kv
    assert (kv.protected_pages, kv.free_pages + kv.evictable_pages) == (0, 20)


def test_an_abort_in_the_queue_computes_nothing() -> None:
    """F18: no prefill; and an unknown id, the same id twice, or one that has ended does nothing."""
    bench = Bench()
    bench.submit("r", [1, 2, 3])
    bench.abort("r")
    bench.abort("r")
    bench.abort("never heard of")
    bench.run()
    assert not bench.model.plans
    assert len([event for event in bench.events if isinstance(event, Ended)]) == 1


def test_an_aborted_long_prompt_leaves_right_kv_behind() -> None:
    """F39: chunk 1 of 3 is cached, the abort's other pages serve another request, and the prompt again answers as if cold."""
    bench = Bench(total_pages=16, chunk=4)
    prompt = list(range(12))
    bench.submit("long", prompt, max_tokens=2)
    bench.step()
    bench.abort("long")
    bench.submit("other", [30] * 12, max_tokens=2, namespace=NAMESPACE_B)
    bench.run()
    bench.submit("again", prompt, max_tokens=4)
    bench.run()
    assert bench.output("again") == expected_output(prompt, 4)


def test_random_cancels_leave_every_count_where_it_started() -> None:
    """F12 (scaled down): 300 requests, most of them cancelled at random points."""
    rng = random.Random(12)
    bench = Bench(total_pages=40, chunk=5, decode_room=2, max_queued=1000)
    live: list[str] = []
    for i in range(300):
        name = f"r{i}"
        bench.submit(
            name, [rng.randrange(3) for _ in range(rng.randrange(1, 20))], max_tokens=rng.randrange(0, 15)
        )
        live.append(name)
        for _ in range(rng.randrange(3)):
            bench.step()
        if rng.random() < 0.8:
            bench.abort(live.pop(rng.randrange(len(live))))
    bench.run()
    ends = [event for event in bench.events if isinstance(event, Ended)]
    assert len(ends) == len({event.request_id for event in ends}) == 300
    kv = bench.scheduler.kv
    assert (kv.protected_pages, kv.double_releases, kv.free_pages + kv.evictable_pages) == (0, 0, 40)
    bench.cache.evict(40)
    assert kv.free_pages == 40


def test_throughput_recovers_after_pressure() -> None:
    """F40: once the pressure is gone a batch takes exactly as many steps as before it."""

    def steps_for_a_batch(bench: Bench, name: str) -> int:
        for i in range(3):
            bench.submit(f"{name}{i}", [40 + i, i], max_tokens=4, namespace=name.encode().ljust(16))
        steps = 0
        while bench.scheduler.has_work:
            bench.step()
            steps += 1
        return steps

    bench = Bench(total_pages=30, decode_room=0)
    before = steps_for_a_batch(bench, "before")
    for i in range(12):
        bench.submit(f"heavy{i}", [i] * 8, max_tokens=20)
    bench.run()
    assert steps_for_a_batch(bench, "after") == before


def test_two_requests_with_one_client_id_are_two_requests() -> None:
    """F60: the engine knows only the server's ids; a second live request with the same one is refused, and the first is not
    disturbed."""
    bench = Bench()
    bench.submit("same", [1, 2, 3], max_tokens=3)
    bench.submit("same", [4, 5, 6], max_tokens=3)
    assert bench.refused("same").field == "request_id"
    bench.run()
    assert bench.output("same") == expected_output([1, 2, 3], 3)
