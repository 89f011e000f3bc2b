"""Backups through the whole core: what is copied to the host and when, and what its locks do to those who need pages."""

import threading
from collections.abc import Sequence

import pytest

from prefixmesh.cache.tier import Tier
from prefixmesh.worker.engine_loop import CommandInbox, run_engine_loop
from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.messages import Event, Shutdown
from prefixmesh.worker.tiers.backups_in_flight import LATE_COPY_S
from prefixmesh.worker.tiers.copies import CopyJob
from tests.support.fake_model import expected_output
from tests.support.tier_bench import TierBench

PROMPT = list(range(10))
WAIT_S = 30.0


def offloaded(bench: TierBench) -> list[int]:
    """Pages of each backup so far, in order."""
    return [len(job.device_pages) for job in bench.mover.started if job.kind == "offload"]


def test_a_long_prompt_is_backed_up_chunk_by_chunk_while_it_is_computed() -> None:
    bench = TierBench(chunk=4)
    bench.submit("long", PROMPT, 1)
    sizes = []
    for _ in range(3):
        bench.step()
        sizes.append(sum(offloaded(bench)))
    assert sizes == [4, 8, 10]
    bench.run()
    assert bench.cache.blocks(Tier.HOST) == bench.cache.blocks(Tier.DEVICE)
    bench.check_at_rest()


def test_what_stands_below_a_backup_in_flight_waits_for_it_and_nothing_is_copied_twice() -> None:
    bench = TierBench(chunk=4, device_pages=64)
    bench.mover.holds = {"offload"}
    bench.submit("long", PROMPT, 2)
    bench.step(6)
    assert offloaded(bench) == [4]
    for _ in range(4):
        bench.mover.finish()
        bench.run()
    assert sum(offloaded(bench)) == 11
    assert bench.cache.transfers.duplicate_pages == 0
    bench.check_at_rest()


def test_selectively_only_what_was_asked_for_twice_is_backed_up() -> None:
    bench = TierBench(device_pages=64, write_policy="write_through_selective")
    bench.serve("first", [*PROMPT, 20])
    bench.serve("second", [*PROMPT, 21])
    assert offloaded(bench) == []
    bench.serve("third", [*PROMPT, 22])
    assert offloaded(bench) == [10]
    bench.serve("fourth", [*PROMPT, 23])
    assert offloaded(bench) == [10]
    bench.check_at_rest()


def test_backups_in_flight_lock_no_more_than_their_share_of_the_device() -> None:
    bench = TierBench(device_pages=64, host_pages=64)
    bench.mover.holds = {"offload"}
    for i in range(6):
        bench.serve(f"r{i}", [8 * i + j for j in range(4)])
    assert sum(len(job.device_pages) for job in bench.mover.jobs.values()) == 8
    bench.mover.holds = set()
    bench.mover.finish()
    bench.run()
    assert sum(offloaded(bench)) == 24
    bench.check_at_rest()


def test_a_full_queue_drops_with_a_count_and_the_next_match_asks_again() -> None:
    bench = TierBench(device_pages=64, keeper={"max_queued_backups": 1})
    bench.mover.holds = {"offload"}
    for i in range(4):
        bench.serve(f"r{i}", [10 * i + j for j in range(10)])
    assert bench.keeper.counts().dropped_tokens == 20
    bench.mover.holds = set()
    bench.mover.finish()
    bench.run()
    assert bench.keeper.counts().backed_up_tokens == 20
    bench.serve("again", [*range(30, 40), 5])
    assert bench.keeper.counts().backed_up_tokens == 30  # the newest token finds a full queue again
    bench.check_at_rest()


def test_what_a_host_without_free_pages_could_have_is_not_copied_and_not_dropped() -> None:
    """It is saved when it has to leave the device: see ``test_tier_rescues``."""
    bench = TierBench(device_pages=32, host_pages=8)
    bench.serve("long", PROMPT)
    counts = bench.keeper.counts()
    assert (counts.backed_up_tokens, counts.dropped_tokens) == (0, 0)
    bench.check_at_rest()


def test_a_backup_that_fails_gives_its_pages_back_and_the_next_match_asks_again() -> None:
    bench = TierBench(device_pages=32)
    bench.mover.holds = {"offload"}
    bench.serve("first", PROMPT)
    bench.mover.fail(next(iter(bench.mover.jobs)))
    bench.run()
    assert bench.keeper.counts().failed_copies == 1
    assert bench.host.free_pages == bench.host.total_pages
    bench.mover.holds = set()
    bench.serve("again", [*PROMPT, 11])
    bench.evict()
    assert bench.serve("third", [*PROMPT, 12]).host_tokens == 10
    bench.check_at_rest()


@pytest.mark.parametrize("ends_well", [False, True])
def test_an_abort_or_a_flush_while_a_backup_is_in_flight_leaves_nothing_behind(ends_well: bool) -> None:
    bench = TierBench(chunk=4)
    bench.mover.holds = {"offload"}
    bench.submit("long", PROMPT, 3)
    bench.step(2)
    bench.abort("long")
    bench.flush()
    for number in list(bench.mover.jobs):
        if ends_well:
            bench.mover.finish(number)
        else:
            bench.mover.fail(number)
    bench.run()
    assert not bench.cache.blocks(Tier.HOST)
    bench.check_at_rest()


def test_what_an_abort_leaves_in_the_cache_is_backed_up_though_nobody_is_served() -> None:
    bench = TierBench(chunk=4, device_pages=64)
    bench.submit("long", PROMPT, 30)
    bench.step(6)
    bench.abort("long")
    assert bench.core.has_work
    bench.run()
    assert bench.cache.blocks(Tier.HOST) == bench.cache.blocks(Tier.DEVICE)
    bench.check_at_rest()


def decoding_beside_a_backup(bench: TierBench) -> None:
    """``grows`` needs a page with its next token; all others belong to a backup in flight."""
    bench.mover.holds = {"offload"}
    bench.serve("warm", list(range(20, 28)))
    bench.submit("grows", [1, 2, 3], 6)
    bench.step(2)


def test_who_needs_a_page_that_a_backup_is_about_to_free_sits_a_step_out_and_nobody_is_preempted() -> None:
    bench = TierBench(device_pages=12)
    decoding_beside_a_backup(bench)
    bench.until(lambda: len(bench.output("grows")) >= 2)
    before = bench.output("grows")
    bench.step(3)
    assert bench.output("grows") == before
    bench.mover.holds = set()
    bench.mover.finish()
    bench.run()
    assert bench.output("grows") == expected_output([1, 2, 3], 6)
    assert bench.scheduler.preemptions == 0
    bench.check_at_rest()


def test_who_sits_out_waits_no_longer_than_a_copy_may_be_late() -> None:
    bench = TierBench(device_pages=12)
    decoding_beside_a_backup(bench)
    began = bench.now
    bench.until(lambda: bench.scheduler.preemptions)
    assert bench.now - began < 2 * LATE_COPY_S
    bench.mover.holds = set()
    bench.mover.finish()
    bench.run()
    assert bench.output("grows") == expected_output([1, 2, 3], 6)
    bench.check_at_rest()


def crowd(bench: TierBench) -> None:
    """Two answers that grow until one must give way."""
    bench.submit("one", [1, 2, 3, 4], 12)
    bench.submit("two", [11, 12, 13, 14], 12)


def test_a_preempted_request_goes_to_the_host_and_is_not_computed_again() -> None:
    slow = EngineRates(prefill_tokens_per_s=10.0)
    bench = TierBench(device_pages=20, rates=slow)
    crowd(bench)
    bench.run()
    assert bench.scheduler.preemptions >= 1
    for name, prompt in (("one", [1, 2, 3, 4]), ("two", [11, 12, 13, 14])):
        assert bench.output(name) == expected_output(prompt, 12)
    counts = bench.keeper.counts()
    assert counts.loaded_back_tokens > 0
    assert counts.recomputed_tokens == 0
    computed = sum(len(plan.token_ids) for plan in bench.model.plans)
    assert computed <= 2 * (4 + 11) + 2 * bench.scheduler.preemptions
    bench.check_at_rest()


def test_a_preempted_request_is_computed_again_where_that_is_faster() -> None:
    fast = EngineRates(prefill_tokens_per_s=1e9)
    bench = TierBench(device_pages=20, rates=fast, write_policy="write_through_selective")
    crowd(bench)
    bench.until(lambda: bench.scheduler.preemptions)
    assert offloaded(bench) == []
    bench.run()
    assert bench.output("two") == expected_output([11, 12, 13, 14], 12)
    bench.check_at_rest()


def test_an_idle_worker_completes_its_backups() -> None:
    """F54: nobody asks for anything any more, and the loop sleeps until the copy wakes it."""
    bench = TierBench()
    bench.mover.holds = {"offload"}
    bench.serve("only", PROMPT)
    [job] = bench.mover.jobs.values()
    inbox, done = CommandInbox(), threading.Event()
    collect = bench.keeper.collect

    def noted(now: float) -> list[object]:
        ended = collect(now)
        if not bench.keeper.is_copying:
            done.set()
        return ended  # type: ignore[return-value]

    bench.keeper.collect = noted  # type: ignore[assignment,method-assign]
    events: list[Event] = []

    def send(more: Sequence[Event]) -> None:
        events.extend(more)

    thread = threading.Thread(target=run_engine_loop, args=(bench.core, inbox, send, lambda: bench.now))
    thread.start()
    try:
        assert not done.wait(0.05)
        bench.mover.finish(job.number)
        inbox.wake()
        assert done.wait(WAIT_S)
    finally:
        inbox.put(Shutdown())
        thread.join(WAIT_S)
    assert events, "what came to the host is told at once"
    bench.check_at_rest()


def test_numbers_of_jobs_are_never_used_again() -> None:
    bench = TierBench(chunk=4)
    bench.serve("long", PROMPT)
    bench.evict()
    bench.serve("again", [*PROMPT, 7])
    jobs: list[CopyJob] = bench.mover.started
    assert len({job.number for job in jobs}) == len(jobs) >= 4
