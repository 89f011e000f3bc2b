"""Load-backs through the whole core: a real tree, scheduler and keeper over a fake model that checks every slot it reads."""

from collections.abc import Mapping

import pytest

from prefixmesh.cache.base import PageIndices
from prefixmesh.cache.tier import Tier
from prefixmesh.worker.engine import READY_WAIT_S
from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.tiers.keeper import STUCK_COPY_S
from prefixmesh.worker.tiers.load_backs import LEAST_LOAD_WAIT_S
from tests.support.fake_model import expected_output
from tests.support.tier_bench import TierBench

PROMPT = list(range(10))


def warm(**settings: object) -> TierBench:
    """``PROMPT`` is on the host alone."""
    bench = TierBench(**settings)  # type: ignore[arg-type]
    bench.serve("warm", PROMPT)
    bench.evict()
    assert bench.cache.evictable_pages == 0
    return bench


def test_what_was_evicted_comes_back_from_the_host_and_is_not_computed() -> None:
    bench = warm()
    computed = sum(len(plan.token_ids) for plan in bench.model.plans)
    admitted = bench.serve("again", [*PROMPT, 7, 8], 3)
    assert (admitted.cached_tokens, admitted.host_tokens) == (10, 10)
    assert sum(len(plan.token_ids) for plan in bench.model.plans) - computed == 2 + 2
    totals = bench.scheduler.ledger.totals()
    assert totals.hit_tokens == (0, 10, 0)
    assert bench.keeper.counts().loaded_back_tokens == 10
    bench.check_at_rest()


def test_part_on_the_device_and_part_on_the_host_make_one_prefix() -> None:
    bench = warm()
    bench.serve("front", PROMPT[:4])
    admitted = bench.serve("again", [*PROMPT, 7])
    # The last token of "front" was computed anew, its first three came from the host.
    assert admitted.cached_tokens == 10
    assert admitted.host_tokens == 10 - 4
    bench.check_at_rest()


def test_what_is_evicted_for_a_load_back_is_counted_like_all_that_gives_way() -> None:
    bench = warm(device_pages=12)
    bench.serve("in its place", range(40, 49))
    before, bench.mover.holds = bench.scheduler.kv.evicted_pages, {"restore"}
    bench.submit("again", [*PROMPT, 7])
    bench.step()
    assert bench.loading() == ["again"]
    assert bench.scheduler.kv.evicted_pages - before == 9 - 1  # twelve pages, of which eleven are wanted
    bench.mover.finish()
    bench.run()
    bench.check_at_rest()


def test_a_step_may_begin_before_the_last_layer_has_come() -> None:
    bench = warm()
    bench.mover.holds = {"restore"}
    bench.submit("again", [*PROMPT, 7], 2)
    bench.step()
    [job] = bench.mover.jobs.values()
    assert bench.loading() == ["again"]
    assert not bench.is_announced("again")
    bench.mover.arrive(job.number)
    bench.step()
    assert bench.output("again") == expected_output([*PROMPT, 7], 1)
    assert bench.admitted("again").host_tokens == 10
    bench.run()
    bench.check_at_rest()


def test_a_load_back_that_is_late_is_read_when_it_has_ended_and_holds_nobody_up() -> None:
    bench = warm(device_pages=32)
    bench.mover.holds = {"restore"}
    bench.submit("again", [*PROMPT, 7], 2)
    bench.submit("other", [40, 41, 42], 8)
    bench.step()
    bench.now += 0.1
    [job] = bench.mover.jobs.values()
    bench.mover.arrive(job.number)
    bench.step(3)
    assert bench.loading() == ["again"]
    bench.mover.holds = set()
    bench.mover.finish()
    bench.run()
    assert bench.output("again") == expected_output([*PROMPT, 7], 2)
    assert bench.admitted("again").host_tokens == 10
    bench.check_at_rest()


def test_while_one_loads_others_are_served() -> None:
    bench = warm(device_pages=32)
    bench.mover.holds = {"restore"}
    bench.submit("again", [*PROMPT, 7], 2)
    bench.submit("other", [40, 41, 42], 4)
    bench.step(8)
    assert bench.output("other") == expected_output([40, 41, 42], 4)
    assert bench.loading() == ["again"]
    bench.mover.holds = set()
    bench.mover.finish()
    bench.run()
    assert bench.output("again") == expected_output([*PROMPT, 7], 2)
    bench.check_at_rest()


def test_who_shares_what_is_loading_waits_for_it_instead_of_loading_it_again() -> None:
    bench = warm(device_pages=64, hold_min_tokens=4)
    bench.mover.holds = {"restore"}
    bench.submit("one", [*PROMPT, 7], 1)
    bench.submit("two", [*PROMPT, 8], 1)
    bench.step(3)
    assert len(bench.mover.of_kind("restore")) == 1
    assert [r.request_id for r in bench.scheduler.running] == ["one"]
    bench.mover.finish()
    bench.run()
    assert (bench.admitted("one").host_tokens, bench.admitted("two").host_tokens) == (10, 0)
    assert bench.admitted("two").cached_tokens == 10
    bench.check_at_rest()


def test_a_prefix_that_another_request_inserts_while_it_is_loading_has_one_owner_per_page() -> None:
    """F53."""
    bench = warm(device_pages=64, hold_min_tokens=100, shares_prefixes=False)
    bench.mover.holds = {"restore"}
    bench.submit("loads", [*PROMPT, 7], 2)
    bench.step()
    request = bench.running("loads")
    bench.submit("computes", [*PROMPT, 8], 2)
    waiting = bench.scheduler._queue.requests()[0]
    waiting.may_load = False
    bench.step(4)
    assert bench.output("computes") == expected_output([*PROMPT, 8], 2)
    assert request.load is not None
    bench.mover.finish()
    bench.run()
    assert bench.output("loads") == expected_output([*PROMPT, 7], 2)
    assert bench.cache.transfers.duplicate_pages == 10
    bench.check_at_rest()


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_request_that_is_cancelled_while_it_loads_leaves_nothing_behind(is_begun: bool) -> None:
    """F20: what has not begun is not begun; what has ends as cached KV."""
    bench = warm()
    bench.mover.holds = {"restore"}
    bench.submit("again", [*PROMPT, 7])
    bench.step()
    [job] = bench.mover.jobs.values()
    if is_begun:
        bench.mover.begun.add(job.number)
    bench.abort("again")
    assert bench.ended("again").reason == "aborted"
    assert not bench.is_announced("again")
    bench.mover.finish()
    bench.run()
    bench.check_at_rest()
    assert bench.cache.evictable_pages == (10 if is_begun else 0)
    assert bench.cache.host_pages == 10
    bench.cache.evict_host(64)
    assert bench.cache.host_pages == 0
    assert bench.scheduler.ledger.totals().requests == 1


def test_a_load_back_that_fails_is_computed_and_not_asked_for_again() -> None:
    bench = warm()
    bench.mover.holds = {"restore"}
    bench.submit("again", [*PROMPT, 7], 2)
    bench.step()
    bench.mover.fail(next(iter(bench.mover.jobs)))
    bench.run()
    assert bench.output("again") == expected_output([*PROMPT, 7], 2)
    assert bench.admitted("again").cached_tokens == 0
    assert len([job for job in bench.mover.started if job.kind == "restore"]) == 1
    counts = bench.keeper.counts()
    assert (counts.failed_copies, counts.recomputed_tokens) == (1, 10)
    totals = bench.scheduler.ledger.totals()
    assert (totals.requests, sum(totals.hit_tokens), totals.miss_tokens.evicted) == (2, 0, 10)
    assert bench.scheduler.preemptions == 0
    bench.check_at_rest()


def begin_beside_another(bench: TierBench) -> int:
    """Its job's number: ``again`` is about to join a step with ``other``, which decodes."""
    bench.mover.holds = {"restore"}
    bench.submit("other", [40, 41, 42], 6)
    bench.step(2)
    bench.submit("again", [*PROMPT, 7], 2)
    bench.step()
    [job] = bench.mover.jobs.values()
    bench.mover.arrive(job.number)
    return job.number


def test_a_step_whose_load_back_does_not_come_is_void_for_all_and_lost_for_nobody() -> None:
    bench = warm(device_pages=64)
    number = begin_beside_another(bench)
    bench.mover.never_comes.add(number)
    before = bench.output("other")
    bench.step()
    assert bench.output("other") == before
    assert bench.loading() == []
    bench.mover.finish(number)
    bench.run()
    assert bench.output("again") == expected_output([*PROMPT, 7], 2)
    assert bench.output("other") == expected_output([40, 41, 42], 6)
    assert bench.ended("other").reason == bench.ended("again").reason == "length"
    assert bench.admitted("again").host_tokens == 0
    bench.check_at_rest()


def test_a_load_back_that_fails_after_it_was_read_counts_for_nothing_and_for_the_others_the_step_counts() -> (
    None
):
    bench = warm(device_pages=64)
    begin_beside_another(bench)
    bench.mover.told = "broken at the end"
    before = bench.output("other")
    bench.step()
    assert len(bench.output("other")) == len(before) + 1
    assert bench.output("again") == []
    bench.run()
    assert bench.output("again") == expected_output([*PROMPT, 7], 2)
    assert bench.output("other") == expected_output([40, 41, 42], 6)
    bench.check_at_rest()


def test_a_load_back_that_takes_too_long_is_waited_for_no_longer() -> None:
    bench = warm()
    bench.mover.holds = {"restore"}
    bench.submit("again", [*PROMPT, 7], 2)
    began = bench.now
    bench.until(lambda: bench.is_announced("again"))
    assert began + LEAST_LOAD_WAIT_S <= bench.now < began + 1.5 * LEAST_LOAD_WAIT_S
    bench.run()
    assert bench.output("again") == expected_output([*PROMPT, 7], 2)
    assert bench.keeper.counts().recomputed_tokens == 10
    bench.check_at_rest()


@pytest.mark.parametrize("stuck", ["restore", "offload"])
def test_behind_a_copy_that_is_stuck_nothing_is_loaded_and_nobody_waits_for_it(stuck: str) -> None:
    bench = warm(device_pages=64)
    bench.mover.holds = {stuck}  # type: ignore[arg-type]
    bench.submit("first", [*PROMPT, 7] if stuck == "restore" else range(20, 24))
    bench.step()
    [job] = bench.mover.jobs.values()
    bench.mover.begun, bench.mover.holds = {job.number}, set()
    bench.until(lambda: bench.output("first"), pause_s=0.1)
    bench.now += STUCK_COPY_S
    bench.step(2)
    bench.evict()
    loads = [job for job in bench.mover.started if job.kind == "restore"]
    bench.submit("next", [*PROMPT, 8])
    bench.step()
    assert bench.output("next") == expected_output([*PROMPT, 8], 1)
    assert [job for job in bench.mover.started if job.kind == "restore"] == loads
    bench.mover.finish()
    bench.step(2)
    bench.evict()
    assert bench.serve("well again", [*PROMPT, 9]).host_tokens == 10
    bench.check_at_rest()


def test_a_flush_makes_what_is_loading_useless_and_it_is_computed() -> None:
    bench = warm(device_pages=32)
    bench.mover.holds = {"restore"}
    bench.submit("again", [*PROMPT, 7], 2)
    bench.step()
    bench.mover.begun |= set(bench.mover.jobs)
    bench.flush()
    bench.step(2)
    assert bench.admitted("again").cached_tokens == 0
    bench.run()
    bench.mover.finish()
    bench.run()
    assert bench.output("again") == expected_output([*PROMPT, 7], 2)
    assert bench.cache.blocks(Tier.HOST) == bench.cache.blocks(Tier.DEVICE)
    bench.check_at_rest()


def test_what_is_computed_faster_than_it_loads_is_not_loaded() -> None:
    slow = EngineRates(prefill_tokens_per_s=100.0)
    fast = EngineRates(prefill_tokens_per_s=1e9)
    assert warm(rates=slow).serve("again", [*PROMPT, 7]).host_tokens == 10
    bench = warm(rates=fast)
    assert bench.serve("again", [*PROMPT, 7]).cached_tokens == 0
    assert bench.keeper.counts().recomputed_tokens == 10
    assert bench.scheduler.ledger.totals().miss_tokens.evicted == 10
    bench.check_at_rest()


def test_what_will_be_loaded_is_not_told_as_work() -> None:
    bench = warm()
    bench.mover.holds = {"restore"}
    bench.submit("again", [*PROMPT, 7, 8])
    assert bench.core.stats().uncached_tokens == 2
    bench.step()
    assert bench.loading() == ["again"]
    assert bench.core.stats().uncached_tokens == 2
    bench.abort("again")
    bench.mover.finish()
    bench.run()
    bench.check_at_rest()


def test_nobody_is_told_that_there_is_no_room_while_copies_lock_the_pages() -> None:
    bench = TierBench(device_pages=12)
    bench.mover.holds = {"offload"}
    bench.serve("warm", PROMPT)
    bench.submit("big", list(range(20, 31)))
    bench.step(20)
    assert bench.scheduler.queued == 1
    bench.mover.finish()
    bench.run()
    assert bench.output("big") == expected_output(list(range(20, 31)), 1)
    bench.mover.finish()
    bench.run()
    bench.check_at_rest()


def test_a_copy_that_is_stuck_for_ever_keeps_nobody_waiting_for_ever() -> None:
    bench = TierBench(device_pages=12)
    bench.mover.holds = {"offload"}
    bench.serve("warm", PROMPT)
    bench.submit("big", list(range(20, 31)))
    began = bench.now
    bench.until(lambda: not bench.scheduler.queued, pause_s=0.5)
    assert bench.ended("big").reason == "no_room"
    assert bench.now >= began + 0.9 * STUCK_COPY_S
    bench.mover.finish()
    bench.run()
    bench.check_at_rest()


def test_a_preempted_request_that_loads_comes_back_and_answers() -> None:
    bench = warm(device_pages=18, schedule_policy="fcfs")
    bench.mover.holds = {"restore"}
    bench.submit("decodes", [40, 41, 42], 8)
    bench.step(2)
    bench.submit("again", [*PROMPT, 7], 2)
    bench.step()
    assert bench.loading() == ["again"]
    bench.step(8)
    assert bench.scheduler.preemptions == 1
    assert len(bench.mover.cancelled) == 1
    bench.mover.finish()
    bench.mover.holds = set()
    bench.run()
    assert bench.output("again") == expected_output([*PROMPT, 7], 2)
    assert bench.output("decodes") == expected_output([40, 41, 42], 8)
    bench.check_at_rest()


def test_a_load_back_that_has_not_the_whole_prompts_pages_beside_it_is_undone() -> None:
    """The cache promises what a floor keeps for another owner in the end: the pages that were taken for the load-back are free again."""
    bench = warm(device_pages=32)
    take = bench.scheduler.kv._take_pages
    refused: list[Mapping[str, int]] = []

    def refuse_once(wanted: Mapping[str, int]) -> PageIndices | None:
        if sum(wanted.values()) == 2 and not refused:
            refused.append(wanted)
            return None
        return take(wanted)

    bench.submit("other", [30, 31, 32], 5)
    bench.step()
    bench.scheduler.kv._take_pages = refuse_once  # type: ignore[method-assign]
    bench.submit("again", [*PROMPT, 7, 8])
    bench.run()
    assert len(refused) == 1
    assert bench.output("again") == expected_output([*PROMPT, 7, 8], 1)
    assert bench.admitted("again").host_tokens == 10
    bench.check_at_rest()


def test_a_refusal_lowers_the_rate_that_it_was_refused_by() -> None:
    bench = TierBench(rates=EngineRates(prefill_tokens_per_s=1e6), keeper={"load_back_ms_per_token": 50.0})
    bench.serve("warm", PROMPT)
    bench.evict()
    before = bench.keeper.rates.load_back_ms_per_token
    bench.serve("again", [*PROMPT, 7])
    assert bench.keeper.rates.load_back_ms_per_token < before
    bench.check_at_rest()


def test_an_engine_with_nothing_but_loads_to_wait_for_waits_for_them_and_does_not_spin() -> None:
    bench = warm()
    bench.mover.holds = {"restore"}
    waits: list[float] = []
    bench.mover.on_wait = waits.append
    bench.submit("again", [*PROMPT, 7])
    bench.step(5)
    assert len(waits) == 5
    assert max(waits) <= READY_WAIT_S
    bench.abort("again")
    bench.run()
    bench.check_at_rest()
