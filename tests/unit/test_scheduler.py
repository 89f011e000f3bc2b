"""The scheduler's rules, one by one, over a real cache and a fake model that checks every read."""

import pytest

from prefixmesh import tokens
from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.errors import InvariantError
from prefixmesh.ids import Namespace
from prefixmesh.worker.messages import Admitted, Ended, TokensOut
from prefixmesh.worker.request import Phase
from tests.support.fake_model import FAKE_VOCAB, expected_output
from tests.support.scheduling import NAMESPACE_A, NAMESPACE_B, Bench

X, Y, Z = 41, 42, 43
CACHES = ["radix", "hash", "off"]


def phases(bench: Bench) -> dict[str, Phase]:
    return {request.request_id: request.phase for request in bench.scheduler.running}


def test_the_life_of_two_requests() -> None:
    """Issue 2: the second finds X Y Z; the shared parent has two users, then one, then none; while the second still prefills,
    only the first's leaf may be evicted; at the end leaves go before the parent."""
    bench = Bench(total_pages=16, chunk=2)
    cache = bench.cache
    assert isinstance(cache, RadixCache)
    bench.submit("first", [X, Y, Z, 1, 2, 3], max_tokens=2)
    for _ in range(3):
        bench.step()  # three chunks of two; the last gives the first token
    assert bench.cached("first") == 0
    pages_of_first = bench.scheduler.running[0].page_table[:3].tolist()

    bench.submit("second", [X, Y, Z, 4, 5, 6], max_tokens=2)
    bench.step()  # admits the second, and the first decodes its last token
    assert bench.cached("second") == 3
    second = bench.scheduler.running[-1]
    assert second.page_table[:3].tolist() == pages_of_first, "the KV of X Y Z is not copied"
    assert second.phase is Phase.PREFILLING
    assert bench.ended("first").reason == "length"
    # The first's own tail: 1 2 3 and its first answer token, whose KV is complete. The second holds X Y Z 4 5.
    assert (cache.evictable_pages, cache.protected_pages) == (4, 5)
    assert cache.evict(100) == 4
    assert cache.protected_pages == 5

    bench.run()
    assert bench.output("second") == expected_output([X, Y, Z, 4, 5, 6], 2)
    assert (cache.evictable_pages, cache.protected_pages) == (7, 0)


def test_a_shared_parent_counts_its_users() -> None:
    """Two, then one, then none; what the child protects alone is protected still."""
    bench = Bench(total_pages=32)
    bench.submit("first", [X, Y, Z, 1, 2, 3], max_tokens=4)
    bench.step()
    bench.submit("second", [X, Y, Z, 4, 5, 6], max_tokens=8)
    bench.step()
    match = bench.cache.match_prefix(bench.scheduler.running[0].key(3), bench.now)
    parent = match.last_device_node
    assert parent.lock_ref == 2
    while "first" in phases(bench):
        bench.step()
    assert parent.lock_ref == 1
    bench.run()
    assert parent.lock_ref == 0


def test_when_memory_runs_out_leaves_go_oldest_first_and_the_parent_last() -> None:
    """After both have ended: the first's leaf, then the second's, then the parent."""
    bench = Bench(total_pages=16)
    for name, tail in (("first", [1, 2, 3]), ("second", [4, 5, 6])):
        bench.submit(name, [X, Y, Z, *tail], max_tokens=0)
        bench.run()

    def left(tail: list[int]) -> int:
        return bench.cache.peek(RadixKey(Namespace(NAMESPACE_A), tokens.pack([X, Y, Z, *tail])))

    bench.cache.evict(3)
    assert (left([1, 2, 3]), left([4, 5, 6])) == (3, 6)
    bench.cache.evict(3)
    assert (left([1, 2, 3]), left([4, 5, 6])) == (3, 3)
    bench.cache.evict(3)
    assert left([4, 5, 6]) == 0


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("chunk", [0, 3, 512])
def test_cold_warm_and_together_give_the_same_answers(kind: str, page_size: int, chunk: int) -> None:
    """Whatever the cache, the page size and the chunks: each answer is the undisturbed one."""
    bench = Bench(total_pages=512 // page_size, page_size=page_size, kind=kind, chunk=chunk)  # type: ignore[arg-type]
    prompts = {f"r{i}": [7] * 20 + [i] * (i + 1) for i in range(6)}
    for round_name in ("cold", "warm"):
        for name, prompt in prompts.items():
            bench.submit(f"{round_name}-{name}", prompt, max_tokens=5)
        bench.run()
        for name, prompt in prompts.items():
            assert bench.output(f"{round_name}-{name}") == expected_output(prompt, 5)
    if kind != "off":
        assert sum(bench.cached(f"warm-{name}") for name in prompts) > 16 * 5


@pytest.mark.parametrize("offset", range(17))
def test_a_match_is_whole_pages_and_leaves_the_last_token(offset: int) -> None:
    """F42: divergence at every offset of a page; the match is a multiple of 16 and the answer right."""
    bench = Bench(total_pages=16, page_size=16)
    base = list(range(48))
    bench.submit("base", base, max_tokens=1)
    bench.run()
    prompt = base[: 16 + offset] + [49] * 4
    bench.submit("other", prompt, max_tokens=3)
    bench.run()
    assert bench.cached("other") == (32 if offset == 16 else 16)
    assert bench.output("other") == expected_output(prompt, 3)
    bench.submit("again", base, max_tokens=1)
    bench.run()
    assert bench.cached("again") == 32, "the last token must be computed, so its page is not matched"


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    """All of the answer but its last token, whose KV no step computed."""
    bench = Bench()
    bench.submit("one", [1, 2, 3], max_tokens=5)
    bench.run()
    history = [1, 2, 3, *bench.output("one")]
    bench.submit("two", [*history, 4, 5], max_tokens=1)
    bench.run()
    assert bench.cached("two") == len(history) - 1


def test_a_stop_id_ends_the_answer_and_is_not_part_of_it() -> None:
    output = expected_output([1, 2], 10)
    bench = Bench()
    bench.submit("r", [1, 2], max_tokens=10, stop_token_ids=(output[3],))
    bench.run()
    assert bench.output("r") == output[: output.index(output[3])]
    ended = bench.ended("r")
    assert (ended.reason, ended.completion_tokens) == ("stop", output.index(output[3]))


def test_max_tokens_0_computes_the_prompt_and_answers_nothing() -> None:
    """F58: pages are back or cached, and the next request finds the prompt."""
    bench = Bench(total_pages=8)
    bench.submit("warm", [1, 2, 3, 4], max_tokens=0)
    bench.run()
    ended = bench.ended("warm")
    assert (ended.reason, ended.completion_tokens, bench.output("warm")) == ("length", 0, [])
    assert not any(isinstance(event, TokensOut) for event in bench.events)
    bench.submit("next", [1, 2, 3, 4, 5], max_tokens=1)
    bench.run()
    assert bench.cached("next") == 4


@pytest.mark.parametrize("pool", [20, 1000])
def test_lengths_at_the_edge_are_served_or_refused_with_the_field_and_the_limit(pool: int) -> None:
    """F59: limit-2 to limit+2, whether the model's context or the pool is the limit."""
    bench = Bench(total_pages=pool, context_length=20 if pool > 20 else 1000)
    assert bench.scheduler.token_limit == 20
    for prompt_tokens in range(18, 23):
        for max_tokens in range(4):
            name = f"{prompt_tokens}+{max_tokens}"
            bench.submit(name, [1] * prompt_tokens, max_tokens)
            bench.run()
            if prompt_tokens > 20:
                assert bench.refused(name).field == "prompt"
                assert "at most 20 tokens" in bench.refused(name).problem
            elif prompt_tokens + max_tokens > 20:
                assert bench.refused(name).field == "sampling.max_tokens"
                assert f"at most {20 - prompt_tokens} allowed" in bench.refused(name).problem
            else:
                assert bench.ended(name).completion_tokens == max_tokens


def test_what_can_never_fit_is_refused_and_the_next_is_served() -> None:
    """F40: a request larger than the whole pool harms nobody."""
    bench = Bench(total_pages=8)
    bench.submit("huge", [1] * 9, max_tokens=1)
    bench.submit("good", [1, 2, 3], max_tokens=2)
    bench.run()
    assert bench.refused("huge").field == "prompt"
    assert bench.output("good") == expected_output([1, 2, 3], 2)


@pytest.mark.parametrize(
    ("prompt", "field"), [([], "prompt"), ([FAKE_VOCAB], "tokens.ids"), ([2**32 - 1], "tokens.ids")]
)
def test_prompts_that_the_model_cannot_take_are_refused(prompt: list[int], field: str) -> None:
    """F58: empty, and ids beyond the vocabulary."""
    bench = Bench()
    bench.submit("bad", prompt)
    assert bench.refused("bad").field == field
    assert not bench.scheduler.has_work


def test_a_full_queue_refuses_with_an_empty_field_and_takes_again_later() -> None:
    """The caller did nothing wrong, so no field is named."""
    bench = Bench(max_queued=2, max_running=1)
    for name in ("a", "b", "c"):
        bench.submit(name, [1, 2])
    assert (bench.refused("c").field, "2 requests are waiting" in bench.refused("c").problem) == ("", True)
    bench.run()
    bench.submit("d", [1, 2])
    bench.run()
    assert bench.ended("d").reason == "length"


def test_prompts_are_computed_in_chunks_while_others_decode() -> None:
    """The budget bounds a step's prompt tokens, several prompts share it, and decoding never waits for a prompt; the short one
    does not wait for the long one before it, which gets half of every step."""
    bench = Bench(chunk=4, total_pages=200)
    bench.submit("decoding", [1], max_tokens=30)
    bench.step()
    bench.submit("long", [2] * 10, max_tokens=1)
    bench.submit("other", [3] * 5, max_tokens=1)
    sizes = []
    while len(bench.scheduler.running) + bench.scheduler.queued > 1:
        step = bench.step()
        assert step is not None
        assert step.decoding == 1
        assert step.prefill_tokens <= 4
        sizes.append([part.new_tokens for part in step.parts[1:]])
    assert sizes == [[2, 2], [2, 2], [3, 1], [3]]
    assert bench.output("long") == expected_output([2] * 10, 1)
    assert bench.output("other") == expected_output([3] * 5, 1)


def test_what_is_to_be_computed_is_told_in_tokens_and_in_squares() -> None:
    """Waiting, in the middle of its prompt, and with a part that is cached: each from where it stands to its prompt's end."""
    bench = Bench(chunk=4, max_running=1, total_pages=200)
    bench.submit("a", range(10), max_tokens=1)
    assert (bench.scheduler.uncached_tokens, bench.scheduler.uncached_squares) == (10, 10**2)
    bench.step()
    assert (bench.scheduler.uncached_tokens, bench.scheduler.uncached_squares) == (6, 10**2 - 4**2)
    bench.run()
    bench.submit("b", range(20, 40), max_tokens=30)
    bench.step()
    bench.submit("c", [*range(10), 30, 31])
    assert bench.scheduler.uncached_squares == 20**2 - 4**2 + 12**2 - 10**2
    bench.run()
    assert (bench.scheduler.uncached_tokens, bench.scheduler.uncached_squares) == (0, 0)


def test_others_share_a_long_prompt_while_it_is_still_computed() -> None:
    """Each finished chunk is in the cache at once."""
    bench = Bench(chunk=8, hold_min=1000)
    bench.submit("long", [5] * 30, max_tokens=1)
    bench.step()
    bench.step()
    bench.submit("short", [5] * 12 + [6], max_tokens=1)
    bench.abort("long")
    bench.run()
    assert bench.cached("short") == 12


def test_a_request_waits_for_a_prefix_that_another_is_computing() -> None:
    """So that it is computed once; it starts as soon as the prefix is there."""
    bench = Bench(chunk=16, total_pages=256, hold_min=8)
    prefix = list(range(40))
    for i in range(5):
        bench.submit(f"r{i}", [*prefix, 41 + i], max_tokens=1)
    bench.run()
    assert [bench.cached(f"r{i}") for i in range(5)] == [0, 40, 40, 40, 40]
    assert sum(len(plan.token_ids) for plan in bench.model.plans) == 41 + 4
    for i in range(5):
        assert bench.output(f"r{i}") == expected_output([*prefix, 41 + i], 1)


def test_duplicates_of_two_prefills_at_once_are_freed_and_the_shared_pages_used() -> None:
    """Design rule 7: after the second insert both requests read the same pages, and the pool holds the prefix once."""
    bench = Bench(chunk=512, hold_min=1000)
    prompts = {"a": [1, 2, 3, 4, 5, 6], "b": [1, 2, 3, 4, 7, 8]}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, max_tokens=3)
    bench.step()
    one, other = bench.scheduler.running
    assert one.page_table[:4].tolist() == other.page_table[:4].tolist()
    bench.run()
    for name, prompt in prompts.items():
        assert bench.output(name) == expected_output(prompt, 3)


def test_equal_tokens_of_two_namespaces_are_never_shared() -> None:
    """F48 at this level: warm in its own namespace, cold in the other."""
    bench = Bench()
    bench.submit("a", [1, 2, 3, 4])
    bench.run()
    bench.submit("other", [1, 2, 3, 4], namespace=NAMESPACE_B)
    bench.submit("same", [1, 2, 3, 4])
    bench.run()
    assert (bench.cached("other"), bench.cached("same")) == (0, 3)


def test_a_flush_forgets_and_running_requests_go_on() -> None:
    bench = Bench()
    bench.submit("running", [1, 2, 3], max_tokens=6)
    bench.step()
    bench.scheduler.flush()
    bench.scheduler.check_invariants()
    bench.submit("after", [1, 2, 3], max_tokens=1)
    bench.run()
    assert bench.cached("after") == 0
    assert bench.output("running") == expected_output([1, 2, 3], 6)
    assert bench.scheduler.kv.protected_pages == 0


def test_what_was_computed_before_a_flush_is_not_cached_after_it() -> None:
    """Also when the request shared nothing with the cache by then: its first page was not full, and its weights are forgotten."""
    bench = Bench(page_size=4)
    bench.submit("running", [1, 2, 3], max_tokens=6)
    bench.step()
    bench.scheduler.flush()
    bench.run()
    again = [1, 2, 3, *bench.output("running")]
    for name, cached in (("after", 0), ("and again", 8)):
        bench.submit(name, again, max_tokens=1)
        bench.run()
        assert bench.cached(name) == cached


def test_a_failed_step_ends_its_own_requests_and_leaves_nothing_of_it_in_the_cache() -> None:
    bench = Bench(chunk=2)
    bench.submit("bad", [1, 2, 3, 4, 5], max_tokens=2)
    bench.step()
    step = bench.scheduler.next_step(bench.now)
    assert step is not None
    bench.submit("waiting", [1, 2, 3, 4, 5], max_tokens=2)
    bench.scheduler.fail(step, "planted", bench.now)
    bench.run()
    assert (bench.ended("bad").reason, bench.ended("bad").error) == ("failed", "planted")
    assert bench.cached("waiting") == 2, "the chunk that was complete before the failure, and no more"
    assert bench.output("waiting") == expected_output([1, 2, 3, 4, 5], 2)


def test_one_bad_row_fails_one_request_of_a_batch() -> None:
    bench = Bench()
    bench.submit("good", [1, 2], max_tokens=2)
    bench.submit("bad", [3, 4], max_tokens=2)
    step = bench.scheduler.next_step(bench.now)
    assert step is not None
    bad = [request.request_id for request in step.sampled].index("bad")
    bench.scheduler.complete(step, bench.model.run(step), bench.now, {bad: "not a number"})
    bench.run()
    assert (bench.ended("bad").reason, bench.ended("bad").error) == ("failed", "not a number")
    assert bench.output("good") == expected_output([1, 2], 2)


def test_a_receipt_released_twice_is_counted_and_survived() -> None:
    """F41: an error and a counter, not a dead engine."""
    bench = Bench()
    bench.submit("r", [1, 2, 3], max_tokens=4)
    bench.step()
    receipt = bench.scheduler.running[0].receipt
    assert receipt is not None
    bench.cache.release(receipt)
    bench.run()
    assert bench.ended("r").reason == "length"
    assert bench.scheduler.kv.double_releases >= 1
    assert bench.scheduler.kv.protected_pages == 0


def test_the_times_of_a_request_are_told() -> None:
    """The bench's clock ticks once per call, so spans are exact."""
    bench = Bench(max_running=1)
    bench.submit("r", [1, 2], max_tokens=3)  # arrives at 1
    bench.run()  # admitted at 2; tokens at 3, 5 and 7
    [admitted] = [event for event in bench.events if isinstance(event, Admitted)]
    ended = bench.ended("r")
    assert admitted.queued_ms == 1000.0
    assert (ended.prefill_ms, ended.first_token_ms, ended.decode_ms) == (1000.0, 2000.0, 4000.0)


def test_the_invariants_notice_a_leaked_page() -> None:
    """The check does real work."""
    bench = Bench()
    bench.submit("r", [1, 2, 3], max_tokens=8)
    bench.step()
    bench.allocator.allocate(1)
    with pytest.raises(InvariantError, match="free \\+ evictable"):
        bench.scheduler.check_invariants()


def test_a_state_summary_is_one_line() -> None:
    bench = Bench(total_pages=8)
    bench.submit("r", [1, 2, 3], max_tokens=0)
    bench.run()
    assert repr(bench.scheduler) == (
        "<Scheduler 0 running, 0 queued | 5 free, 3 evictable, 0 protected of 8 pages>"
    )
    assert [type(event) for event in bench.events] == [Admitted, Ended]
