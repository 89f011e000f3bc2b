"""Who pays and who gives way: what the scheduler tells the cache of a request's owner and priority, and what becomes of
requests that others' floors leave no room for."""

import pytest

from prefixmesh import tokens
from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.owners import Quota
from prefixmesh.cache.radix_cache import RadixOptions
from prefixmesh.ids import Namespace
from prefixmesh.worker.messages import Admitted
from tests.support.fake_model import expected_output
from tests.support.scheduling import NAMESPACE_A, NAMESPACE_B, Bench

MAX_STEPS = 50
"""More than any of these requests takes: whoever needs more spins."""


def bench_with_floor(total_pages: int, floor_pages: int) -> Bench:
    """``a`` is sure of so many pages."""
    return Bench(
        total_pages=total_pages,
        decode_room=0,
        options=RadixOptions(quotas={"a": Quota(floor_pages=floor_pages)}),
    )


def fill(bench: Bench, prompt: list[int], owner: str, namespace: bytes = NAMESPACE_A) -> None:
    """Have a prompt cached on an owner's account."""
    bench.submit(f"fill-{owner}-{len(bench.events)}", prompt, max_tokens=0, owner=owner, namespace=namespace)
    bench.run(MAX_STEPS)


def cached(bench: Bench, prompt: list[int]) -> int:
    return bench.cache.peek(RadixKey(Namespace(NAMESPACE_A), tokens.pack(prompt)))


def test_what_a_request_adds_is_on_its_owners_account() -> None:
    """Prompt and answer: others cannot have it below the owner's floor, the owner itself can."""
    bench = bench_with_floor(total_pages=16, floor_pages=6)
    bench.submit("r", [1, 2, 3, 4], max_tokens=4, owner="a")
    bench.run()
    assert [bench.cache.evictable_for(owner) for owner in ("a", "b", "")] == [7, 1, 1]
    kv = bench.scheduler.kv
    assert (kv.free_pages, kv.evictable_pages, kv.protected_pages) == (9, 1, 6)


def test_a_flood_of_one_owner_leaves_another_its_floor() -> None:
    """And uses all the rest."""
    bench = bench_with_floor(total_pages=16, floor_pages=4)
    fill(bench, [1, 2, 3, 4], "a")
    for i in range(8):
        bench.submit(f"flood{i}", [10 + i] * 5, max_tokens=3, owner="b", namespace=NAMESPACE_B)
    bench.run()
    assert cached(bench, [1, 2, 3, 4]) == 4
    for i in range(8):
        assert bench.output(f"flood{i}") == expected_output([10 + i] * 5, 3)


def test_without_room_beside_a_floor_a_request_is_refused_and_others_are_served() -> None:
    """It would wait for ever; the floor's owner has room, and so has whoever needs less."""
    bench = bench_with_floor(total_pages=10, floor_pages=8)
    fill(bench, [1] * 8, "a")
    bench.submit("large", [2] * 5, max_tokens=0, owner="b")
    bench.submit("small", [3] * 2, max_tokens=0, owner="b")
    bench.submit("own", [4] * 9, max_tokens=0, owner="a")
    bench.run(MAX_STEPS)
    assert bench.ended("large").reason == "no_room"
    assert "no room for this request" in bench.ended("large").error
    assert [bench.ended(name).reason for name in ("small", "own")] == ["length", "length"]


def sheltered_below_another(total_pages: int) -> Bench:
    """``b`` pays for the first four tokens, ``a`` for the four behind them, which its floor keeps: so the first four cannot go
    either, and ``evictable_for`` counts them all the same."""
    bench = bench_with_floor(total_pages, floor_pages=4)
    fill(bench, [1, 2, 3, 4], "b")
    fill(bench, [1, 2, 3, 4, 5, 6, 7, 8], "a")
    assert bench.cache.evictable_for("c") == 4
    return bench


def test_room_that_was_promised_and_is_not_there_is_no_error() -> None:
    """Nobody runs who could give any back: the request is refused, and the next is served."""
    bench = sheltered_below_another(10)
    bench.submit("c", [9] * 6, max_tokens=0, owner="c")
    bench.submit("d", [9] * 2, max_tokens=0, owner="c")
    bench.run(MAX_STEPS)
    assert bench.ended("c").reason == "no_room"
    assert bench.ended("d").reason == "length"
    assert cached(bench, [1, 2, 3, 4, 5, 6, 7, 8]) == 8


def test_who_was_promised_too_much_waits_while_others_run() -> None:
    """It is back in the queue, owning nothing, and is served when the running one's pages can be had."""
    bench = sheltered_below_another(16)
    bench.submit("runs", [7, 7], max_tokens=4, owner="b", namespace=NAMESPACE_B)
    bench.step()
    bench.submit("c", [9] * 6, max_tokens=0, owner="c", namespace=NAMESPACE_B)
    bench.step()
    kv = bench.scheduler.kv
    assert bench.scheduler.queued == 1
    assert kv.free_pages < 6 <= kv.obtainable_pages("c"), "so much was promised"
    bench.run(MAX_STEPS)
    assert bench.ended("c").reason == "length"


def test_a_decoding_request_alone_that_gets_no_further_ends() -> None:
    """It is preempted by itself, cannot come back, and is told so; what it answered until then is right."""
    bench = bench_with_floor(total_pages=12, floor_pages=8)
    fill(bench, [1] * 8, "a")
    bench.submit("b", [2, 2], max_tokens=9, owner="b")
    bench.run(MAX_STEPS)
    assert bench.ended("b").reason == "no_room"
    answer = bench.output("b")
    assert answer == expected_output([2, 2], len(answer))
    assert len(answer) == 3
    assert sum(isinstance(e, Admitted) and e.request_id == "b" for e in bench.events) == 1


def test_when_several_grow_each_owner_gives_up_its_own() -> None:
    """One page is free and some of a's may go, for a alone: b, which comes first, takes the free one."""
    bench = bench_with_floor(total_pages=11, floor_pages=11)
    fill(bench, [1] * 4, "a")
    bench.submit("b", [2, 2], max_tokens=3, owner="b", namespace=NAMESPACE_B)
    bench.submit("a", [3, 3], max_tokens=3, owner="a")
    for _ in range(3):
        step = bench.step()
        assert step is not None
        assert [part.request.request_id for part in step.parts] == ["b", "a"], "nobody is preempted"
    assert not bench.scheduler.has_work
    assert cached(bench, [1] * 4) == 3


@pytest.mark.parametrize(("policy", "stays"), [("lru", "low"), ("priority", "high")])
def test_a_requests_priority_counts_when_the_policy_says_so(policy: str, stays: str) -> None:
    """What was used later with a lower priority goes first, or else last."""
    bench = Bench(options=RadixOptions(policy=policy))  # type: ignore[arg-type]
    prompts = {"high": [1, 2, 3], "low": [4, 5, 6]}
    for name, priority in (("high", 5), ("low", 1)):
        bench.submit(name, prompts[name], max_tokens=0, priority=priority)
        bench.run()
    bench.cache.evict(3)
    assert [name for name in prompts if cached(bench, prompts[name])] == [stays]
    other = "low" if stays == "high" else "high"
    assert cached(bench, prompts[other]) == 0


def test_a_match_raises_a_prefixs_priority() -> None:
    """Whoever shares a prefix at a higher priority keeps it for all."""
    bench = Bench(options=RadixOptions(policy="priority"))
    for name, prompt, priority in (("one", [1, 2, 3], 0), ("other", [4, 5, 6], 1), ("again", [1, 2, 3], 2)):
        bench.submit(name, prompt, max_tokens=0, priority=priority)
        bench.run()
    bench.cache.evict(3)
    assert (cached(bench, [1, 2, 3]), cached(bench, [4, 5, 6])) == (3, 0)
