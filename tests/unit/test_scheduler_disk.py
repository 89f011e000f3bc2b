"""Prefixes from the disk through the whole core: a real tree, scheduler and keeper over a fake model that checks every slot it reads."""

import random

import pytest

from prefixmesh.worker import admitter
from prefixmesh.worker.tiers import disk_writes
from prefixmesh.worker.tiers.backups_in_flight import LATE_COPY_S
from prefixmesh.worker.tiers.disk_fetches import LEAST_WAIT_S
from tests.support.disk_bench import DiskBench
from tests.support.fake_model import expected_output

PROMPT = list(range(10))


def kept(**settings: object) -> DiskBench:
    """``PROMPT`` is on the disk alone."""
    bench = DiskBench(**({"device_pages": 64} | settings))  # type: ignore[arg-type]
    bench.serve("warm", PROMPT)
    bench.evict_all()
    assert bench.cache.node_count == 0
    return bench


def computed(bench: DiskBench) -> int:
    return sum(len(plan.token_ids) for plan in bench.model.plans)


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_what_only_the_disk_has_is_read_and_not_computed(page_size: int) -> None:
    bench = kept(page_size=page_size)
    before = computed(bench)
    admitted = bench.serve("again", [*PROMPT, 7, 8], 3)
    found = 10 // max(page_size, 2) * max(page_size, 2)
    assert (admitted.cached_tokens, admitted.host_tokens, admitted.disk_tokens) == (found, 0, found)
    assert computed(bench) - before == 12 - found + 2
    assert bench.scheduler.ledger.totals().hit_tokens == (0, 0, found)
    assert bench.keeper.counts().fetched_tokens == found
    bench.check_at_rest()


def test_a_prompt_as_large_as_the_pool_comes_from_the_disk_and_is_served() -> None:
    bench = kept(device_pages=11)
    assert bench.serve("again", [*PROMPT, 7], 0).disk_tokens == 10
    bench.check_at_rest()


def test_what_came_from_the_disk_is_backed_up_again_and_not_written_twice() -> None:
    bench = kept()
    bench.serve("again", [*PROMPT, 7])
    bench.evict()
    admitted = bench.serve("from the host", [*PROMPT, 7])
    assert (admitted.host_tokens, admitted.disk_tokens) == (10, 0)
    assert len(bench.disk.index) == 1  # the eleventh token is no block
    bench.check_at_rest()


def test_what_came_for_a_request_that_has_gone_is_backed_up_like_all_that_is_cached() -> None:
    bench = kept()
    bench.mover.holds = {"fetch"}
    bench.submit("gone", [*PROMPT, 7])
    bench.step(2)
    bench.abort("gone")
    bench.mover.finish()
    bench.run()
    bench.evict()
    assert bench.serve("again", [*PROMPT, 7]).host_tokens == 10
    bench.check_at_rest()


def test_others_go_on_while_one_is_set_aside() -> None:
    bench = kept()
    bench.disk.holds = {"read"}
    bench.submit("waits", [*PROMPT, 7], 2)
    bench.submit("other", [30, 31, 32], 2)
    bench.step()
    assert bench.keeper.disk is not None
    assert list(bench.keeper.disk.fetches._wants) == ["waits"]  # nothing is kept of who was admitted
    bench.step(3)
    assert bench.aside() == ["waits"]
    assert bench.output("other") == expected_output([30, 31, 32], 2)
    assert not bench.is_announced("waits")
    bench.disk.finish_read()
    bench.run()
    assert bench.output("waits") == expected_output([*PROMPT, 7], 2)
    assert bench.admitted("waits").disk_tokens == 10
    bench.check_at_rest()


def test_a_step_looks_for_so_many_prompts_on_the_disk_and_for_the_others_in_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admitter, "MAX_LOOKED_TOKENS", 20)
    bench = kept()
    bench.disk.holds = {"read"}
    bench.submit("runs", [20, 21, 22], 20)
    bench.step()
    bench.submit("has no room", [30] * 63)
    for number in range(5):
        bench.submit(f"r{number}", [*PROMPT, number])
    aside = [len(bench.aside())]
    for _ in range(4):
        bench.step()
        aside.append(len(bench.aside()))
    assert aside == [0, 1, 3, 5, 5]
    bench.disk.finish_read()
    bench.run()
    assert {bench.admitted(f"r{number}").cached_tokens for number in range(5)} == {10}
    bench.check_at_rest()


@pytest.mark.parametrize("late", [False, True])
def test_nobody_who_runs_gives_way_to_what_is_fetched_for_one_who_waits(late: bool) -> None:
    bench = kept(device_pages=16)
    bench.mover.holds = {"fetch"}
    bench.submit("runs", [20, 21, 22], 9)
    bench.step(2)
    bench.submit("waits", [*PROMPT, 7], 2)
    bench.step(3)
    assert bench.scheduler.kv.free_pages == bench.scheduler.kv.evictable_pages == 0
    if late:
        bench.now += LATE_COPY_S
        bench.step()
    assert bench.scheduler.preemptions == late
    bench.mover.holds = set()
    bench.mover.finish()
    bench.run()
    assert bench.scheduler.preemptions == late
    bench.check_at_rest()


def test_an_engine_with_nothing_else_to_do_waits_for_the_disk_instead_of_turning_round() -> None:
    bench = kept()
    bench.disk.holds = {"read"}
    bench.submit("waits", [*PROMPT, 7])
    bench.step()
    bench.step(3)
    assert bench.disk.waits == 3
    bench.disk.finish_read()
    bench.run()
    bench.check_at_rest()


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "priority"])
def test_several_who_want_the_same_have_it_from_one_read(policy: str) -> None:
    bench = kept(schedule_policy=policy)
    bench.disk.holds = {"read"}
    for number in range(3):
        bench.submit(f"r{number}", [*PROMPT, 7 + number])
    bench.step(2)
    assert len(bench.disk.reads) == 1
    bench.disk.finish_read()
    bench.run()
    assert {bench.admitted(f"r{number}").cached_tokens for number in range(3)} == {10}
    assert bench.keeper.counts().fetched_tokens == 10
    bench.check_at_rest()


@pytest.mark.parametrize("where", ["set aside", "copied"])
@pytest.mark.parametrize("how", ["abort", "timeout", "flush", "failure", "too late"])
def test_whatever_happens_meanwhile_every_request_has_its_end_and_nothing_is_held(
    how: str, where: str
) -> None:
    bench = kept()
    bench.disk.holds = {"read"}
    bench.mover.holds = {"fetch"}
    timeout = {"queue_timeout_s": 0.5} if how == "timeout" else {}
    bench.submit("r", [*PROMPT, 7], 2, **timeout)
    bench.step(2)
    if where == "copied":
        bench.disk.finish_read()
        bench.step(2)
        assert bench.mover.of_kind("fetch")
    bench.mover.holds = set()
    match how:
        case "abort":
            bench.abort("r")
        case "timeout":
            bench.now += 1.0
        case "flush":
            bench.flush()
        case "failure" if where == "copied":
            bench.mover.fail(bench.mover.of_kind("fetch")[0].number)
        case "failure":
            bench.disk.finish_read(size_tokens=0)
        case "too late":
            bench.now += LEAST_WAIT_S
    bench.step(2)
    if how in ("abort", "timeout"):
        assert bench.ended("r").reason == {"abort": "aborted", "timeout": "queue_timeout"}[how]
    while bench.disk.reads:
        bench.disk.finish_read()
    bench.mover.finish()
    bench.run()
    if how in ("failure", "flush", "too late"):
        assert bench.output("r") == expected_output([*PROMPT, 7], 2)
    bench.check_at_rest()


def test_a_place_in_a_full_queue_is_given_up_with_what_was_fetched_for_it() -> None:
    bench = kept(schedule_policy="priority", max_queued_requests=1)
    bench.disk.holds = {"read"}
    bench.submit("low", [*PROMPT, 7])
    bench.step()
    assert bench.aside() == ["low"]
    bench.submit("high", [40, 41], priority=5)
    assert bench.aside() == []
    bench.disk.finish_read()
    bench.run()
    bench.check_at_rest()


def test_a_slow_disk_writes_while_requests_are_served_and_its_pages_stay_on_the_host() -> None:
    bench = DiskBench(device_pages=32, host_pages=12)
    bench.disk.holds = {"write"}
    bench.serve("first", PROMPT)
    assert bench.cache.host_protected_pages == 10
    bench.evict()
    bench.serve("second", [40, 41, 42, 43, 44])  # the host has room for its front alone
    assert bench.serve("third", [*PROMPT, 7]).host_tokens == 10
    bench.disk.holds = set()
    while bench.disk.writes:
        bench.disk.finish_write()
        bench.run()
    assert bench.cache.host_protected_pages == 0
    bench.evict()
    bench.cache.evict_host(12)
    assert bench.serve("again", [*PROMPT, 7]).disk_tokens == 10
    bench.check_at_rest()


@pytest.mark.parametrize("policy", ["lru", "lfu", "priority"])
def test_what_the_disk_brings_does_not_push_out_what_has_just_been_loaded_back(policy: str) -> None:
    bench = kept(device_pages=16, options={"policy": policy})
    bench.serve("on the host", range(40, 50))
    bench.evict()
    bench.mover.holds, bench.disk.holds = {"restore"}, {"read"}
    bench.submit("loads", [*range(40, 50), 7], 2)
    bench.submit("fetches", [*PROMPT, 7], 2)
    bench.step(2)
    assert (bench.loading(), bench.aside()) == (["loads"], ["fetches"])
    bench.mover.holds, bench.disk.holds = set(), set()
    bench.mover.finish()
    bench.disk.finish_read()
    bench.run()
    assert bench.admitted("loads").host_tokens == 10
    assert bench.output("fetches") == expected_output([*PROMPT, 7], 2)
    bench.check_at_rest()


def test_many_prefixes_that_wait_for_the_disk_are_handed_on_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk_writes, "MAX_LOOKS", 2)
    bench = DiskBench(device_pages=64)
    assert bench.keeper.disk is not None
    bench.disk.room = False
    for first in range(10, 20):
        bench.serve(f"r{first}", [first, 7])
    assert len(bench.keeper.disk.writes) == 10
    bench.disk.room = True
    assert bench.core.has_work
    bench.step()
    assert len(bench.disk.index) == 2 * 2  # copies are seen to twice a step
    bench.run()
    assert len(bench.keeper.disk.writes) == 0
    assert len(bench.disk.index) == 10
    bench.check_at_rest()


def test_an_engine_that_is_closed_hands_on_all_that_waits_for_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk_writes, "MAX_LOOKS", 2)
    bench = DiskBench(device_pages=64)
    bench.disk.room = False
    for first in range(10, 15):
        bench.serve(f"r{first}", [first, 7])
    bench.disk.room = True
    bench.core.close()
    assert len(bench.disk.index) == 5


def test_a_closed_engine_closes_its_disk_before_the_host_pages_go() -> None:
    bench = kept()
    bench.core.close()
    assert bench.disk.closed
    assert bench.mover.closed


@pytest.mark.parametrize("seed", range(6))
def test_any_traffic_reads_only_its_own_kv_and_leaves_nothing_held(seed: int) -> None:
    chance = random.Random(seed)
    policy = chance.choice(["lpm", "fcfs", "priority"])
    bench = DiskBench(
        device_pages=24, host_pages=20, page_size=chance.choice([1, 2]), schedule_policy=policy, chunk=6
    )
    for number in range(60):
        base = [chance.randrange(3)] * 2 + list(range(chance.randrange(4, 12)))
        if chance.random() < 0.7:
            bench.submit(f"r{number}", base, chance.randrange(1, 4), priority=chance.randrange(3))
        bench.disk.holds = {kind for kind in ("read", "write") if chance.random() < 0.4}
        bench.mover.holds = {"fetch"} if chance.random() < 0.3 else set()
        bench.step(chance.randrange(3))
        match chance.randrange(8):
            case 0 if bench.disk.reads:
                bench.disk.finish_read(chance.choice([None, 0, 2]))
            case 1 if bench.disk.writes:
                bench.disk.finish_write(chance.choice([None, 0]))
            case 2:
                bench.evict_all()
            case 3:
                bench.abort(f"r{chance.randrange(number + 1)}")
            case 4 if chance.random() < 0.2:
                bench.flush()
            case 5:
                bench.now += chance.choice([0.1, LEAST_WAIT_S])
            case 6 if jobs := bench.mover.of_kind("fetch"):
                bench.mover.fail(jobs[0].number) if chance.random() < 0.5 else bench.mover.finish(
                    jobs[0].number
                )
    bench.disk.holds, bench.mover.holds = set(), set()
    for _ in range(1000):
        while bench.disk.reads:
            bench.disk.finish_read()
        while bench.disk.writes:
            bench.disk.finish_write()
        bench.mover.finish()
        if not bench.core.has_work and not bench.disk.writes:
            break
        bench.step()
    bench.check_at_rest()
    assert bench.keeper.counts().fetched_tokens > 0
