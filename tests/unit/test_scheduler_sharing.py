"""What several requests share is computed once, whoever of them starts, is called off or gives way meanwhile."""

import pytest

from tests.support.fake_model import expected_output
from tests.support.scheduling import Bench

PREFIX = [i % 50 for i in range(60)]


@pytest.mark.parametrize("branches", [2, 8])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [0, 7, 512])
@pytest.mark.parametrize("prompt_tokens", [5, 33, 60])
def test_the_branches_of_one_prompt_compute_it_once(
    branches: int, page_size: int, chunk: int, prompt_tokens: int
) -> None:
    """All but what a match cannot give: the last page that is not whole, and always the last token."""
    bench = Bench(total_pages=640 // page_size, page_size=page_size, chunk=chunk)
    prompt = PREFIX[:prompt_tokens]
    for i in range(branches):
        bench.submit(f"call/{i}", prompt, max_tokens=4)
    bench.run()
    never_matched = prompt_tokens - (prompt_tokens - 1) // page_size * page_size
    prefilled = bench.computed_tokens() - branches * 3
    assert prefilled == prompt_tokens + (branches - 1) * never_matched
    for i in range(branches):
        assert bench.output(f"call/{i}") == expected_output(prompt, 4)


def test_branches_in_a_pool_too_small_for_all_are_all_served() -> None:
    """They take turns, give way and come back; none starves, and the prompt they share is lost by none of them."""
    bench = Bench(total_pages=60, decode_room=0, max_running=8)
    for i in range(6):
        bench.submit(f"call/{i}", PREFIX[:20], max_tokens=12, stop_token_ids=(i,))
    bench.run(1000)
    for i in range(6):
        output = expected_output(PREFIX[:20], 12)
        assert bench.output(f"call/{i}") == (output[: output.index(i)] if i in output else output)


def test_a_chain_of_relatives_computes_each_part_once() -> None:
    """The second shares 30 tokens with the first, the third those and 20 more with the second, the fourth 10 of it all."""
    bench = Bench(chunk=8, total_pages=300, hold_min=1)
    prompts = {
        "first": PREFIX,
        "second": [*PREFIX[:30], *[40] * 20, 1],
        "third": [*PREFIX[:30], *[40] * 20, 2],
        "fourth": [*PREFIX[:10], *[41] * 9],
    }
    for name, prompt in prompts.items():
        bench.submit(name, prompt, max_tokens=1)
    bench.run()
    assert bench.computed_tokens() == 60 + 21 + 1 + 9
    for name, prompt in prompts.items():
        assert bench.output(name) == expected_output(prompt, 1)


def test_several_prefills_at_once_each_hold_their_own_relatives() -> None:
    """Two families whose first members prefill together; a stranger between them is not held."""
    bench = Bench(chunk=16, total_pages=400, hold_min=4)
    left, right = [1] * 40, [2] * 30
    for i in range(3):
        bench.submit(f"left{i}", [*left, i], max_tokens=1)
        bench.submit(f"right{i}", [*right, i], max_tokens=1)
    bench.submit("stranger", [3], max_tokens=1)
    bench.step()
    assert set(bench.admitted()) == {"left0", "right0", "stranger"}
    bench.run()
    assert bench.computed_tokens() == 41 + 31 + 2 + 2 + 1


def test_when_the_one_they_wait_for_is_called_off_the_next_goes_on_where_it_was() -> None:
    """Nothing is computed twice; the others wait for the new one."""
    bench = Bench(chunk=10, total_pages=300)
    for i in range(4):
        bench.submit(f"r{i}", [*PREFIX, i], max_tokens=1)
    bench.step()
    bench.step()
    assert [r.request_id for r in bench.scheduler.running] == ["r0"]
    bench.abort("r0")
    bench.step()
    assert [r.request_id for r in bench.scheduler.running] == ["r1"]
    bench.run()
    assert [bench.cached(f"r{i}") for i in range(1, 4)] == [20, 60, 60]
    assert bench.computed_tokens() == 61 + 1 + 1


def test_when_the_one_they_wait_for_fails_the_next_takes_over() -> None:
    bench = Bench(chunk=10, total_pages=300)
    for i in range(3):
        bench.submit(f"r{i}", [*PREFIX, i], max_tokens=1)
    bench.step()
    step = bench.scheduler.next_step(bench.now)
    assert step is not None
    bench.scheduler.fail(step, "planted", bench.now)
    bench.run()
    assert [bench.cached(f"r{i}") for i in (1, 2)] == [10, 60]


def test_when_the_one_they_wait_for_gives_way_it_comes_back_before_them() -> None:
    """Its pages are taken by the one that decodes, which takes some of the prefix again before there is room for the third; but
    nobody starts the prefix beside the one that comes back."""
    bench = Bench(chunk=4, total_pages=48, decode_room=0, hold_min=4)
    bench.submit("decodes", [9] * 4, max_tokens=20)
    bench.step()
    bench.submit("holder", PREFIX[:36], max_tokens=1)
    for i in range(2):
        bench.submit(f"held{i}", [*PREFIX[:35], 40 + i], max_tokens=1)
    while bench.scheduler.queued < 3:
        bench.step()
    assert [r.request_id for r in bench.scheduler.running] == ["decodes"]
    bench.run()
    assert bench.admitted() == ["decodes", "holder", "held0", "held1"]
    assert bench.output("holder") == expected_output(PREFIX[:36], 1)
    assert 16 < bench.cached("held0") <= bench.cached("held1") == 35


def test_nobody_waits_for_what_a_flush_has_made_worthless() -> None:
    """F33: what is computed before a flush is of forgotten weights and never matched, so it is not waited for."""
    bench = Bench(chunk=8, total_pages=300)
    bench.submit("before", PREFIX, max_tokens=1)
    bench.step()
    bench.submit("after", [*PREFIX[:40], 1], max_tokens=1)
    bench.step()
    assert bench.admitted() == ["before"], "it is worth waiting for until then"
    bench.scheduler.flush()
    bench.step()
    assert bench.admitted() == ["before", "after"]
    bench.run()
    assert bench.cached("after") == 0


def test_nobody_waits_for_a_prompt_that_does_not_get_on() -> None:
    """The one with the prefix stands behind the first prompt and short ones that keep coming: computing it oneself is sooner."""
    bench = Bench(chunk=8, total_pages=600, hold_min=8, max_running=20)
    bench.submit("first", [9] * 200, max_tokens=0)
    bench.submit("slow", PREFIX, max_tokens=0)
    bench.step()
    bench.submit("relative", [*PREFIX[:20], 1], max_tokens=0)
    bench.step()
    assert bench.admitted() == ["first", "slow"], "it is worth waiting for while it gets on"
    for i in range(2):
        bench.submit(f"short{i}", [40 + i] * 4, max_tokens=0)
        bench.step()
    assert bench.admitted()[:4] == ["first", "slow", "short0", "relative"]
    bench.run()
    assert bench.ended("slow").reason == "length"


def test_resuming_relatives_compute_their_prefix_once_too() -> None:
    """Both gave way and their prefix was evicted: the second waits for the first to compute it again."""
    bench = Bench(chunk=6, total_pages=100, hold_min=4)
    for i in range(2):
        bench.submit(f"r{i}", [*PREFIX[:24], i], max_tokens=8)
    while len(bench.scheduler.running) < 2 or bench.scheduler.queued:
        bench.step()
    bench.step()
    for request in list(bench.scheduler.running):
        bench.scheduler._preempt(request, bench.now)
    bench.cache.evict(100)
    before = bench.computed_tokens()
    while any(r.computed < r.length - 1 for r in bench.scheduler.running) or bench.scheduler.queued:
        bench.step()
    assert bench.computed_tokens() - before < 24 * 2, "the prefix was computed twice"
    bench.run()
    for i in range(2):
        assert bench.output(f"r{i}") == expected_output([*PREFIX[:24], i], 8)


def test_with_the_cache_off_nobody_waits() -> None:
    bench = Bench(kind="off", chunk=8, total_pages=400)
    for i in range(3):
        bench.submit(f"r{i}", PREFIX[:4], max_tokens=1)
    bench.step()
    assert len(bench.admitted()) == 2, "as many as get any of the step"
    bench.run()
    assert bench.computed_tokens() == 12
