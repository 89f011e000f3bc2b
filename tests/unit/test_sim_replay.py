"""A workload replayed through a fleet: every policy answers everything, shares follow from caches, and published figures come out."""

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from prefixmesh.errors import ConfigError
from prefixmesh.ids import Fingerprint
from prefixmesh.sim.replay import replay
from prefixmesh.sim.replay_cache import BlockCache, Change
from prefixmesh.sim.replay_figures import Objective, Percentiles
from prefixmesh.sim.replay_profiles import PROFILES, read_profile
from prefixmesh.sim.replay_spec import CEILINGS, POLICIES, ReplaySpec
from prefixmesh.sim.rivals.catalogue import RULES
from prefixmesh.sim.rivals.view import RivalView
from prefixmesh.sim.timing import TimingModel
from prefixmesh.sim.workload import Workload, WorkloadRequest
from prefixmesh.sim.workload_file import read_workload
from prefixmesh.sim.workloads.catalogue import make_workload

QUICK = TimingModel(step_ms=1.0, prefill_ms_per_token=0.02, decode_ms_per_sequence=0.05)
SMALL = ReplaySpec(workers=4, device_tokens=40_000, timing=QUICK)
DRAIN = PROFILES["drain-8"].timing


def chats(requests: int = 300) -> Workload:
    return make_workload("chat", Random(0).random, requests=requests)


def in_a_row(prompts: Sequence[tuple[int, ...]], every_ms: int = 1000) -> Workload:
    """Prompts of whole blocks of ten tokens, one after the other."""
    requests = [
        WorkloadRequest(arrival_ms=every_ms * n, input_length=10 * len(ids), output_length=1, block_ids=ids)
        for n, ids in enumerate(prompts)
    ]
    return Workload(name="in a row", block_size=10, requests=requests)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_answers_every_request(policy: str) -> None:
    """A view of ours that differed from a cache would raise."""
    workload = chats(150)
    figures = replay(workload, SMALL, policy)
    assert figures.requests == len(workload.requests)
    assert figures.prompt_tokens == workload.prompt_tokens
    assert 0.0 < figures.cached_share < 1.0
    assert 0.0 < figures.ttft_ms.p50 <= figures.ttft_ms.p90 <= figures.ttft_ms.p99
    assert figures.max_over_mean >= 1.0
    assert figures.tokens_per_s > 0.0


@pytest.mark.parametrize("policy", ["cost", "random", "match_gate"])
def test_seed_is_a_run(policy: str) -> None:
    assert replay(chats(100), SMALL, policy) == replay(chats(100), SMALL, policy)


def test_log_digest_is_of_every_request_and_not_of_this_machine() -> None:
    one, again, other = (replay(chats(100), replace(SMALL, seed=seed), "random") for seed in (0, 0, 1))
    assert one.log_digest == again.log_digest
    assert one.log_digest != other.log_digest
    assert len(one.log) == one.requests
    assert replay(chats(100), SMALL, "cost").decision_us is not None
    assert replay(chats(100), SMALL, "match_gate").decision_us is None


def test_several_routers_of_ours_share_the_requests_and_each_view_is_the_caches() -> None:
    """A view that differed would raise; what the others have sent is known late, so decisions are others."""
    one, three = (replay(chats(150), replace(SMALL, routers=routers), "cost") for routers in (1, 3))
    assert one.requests == three.requests
    assert one.log_digest != three.log_digest
    assert three.cached_share > 0.8 * one.cached_share


def test_kinds_of_caches_differ_as_they_should() -> None:
    """Blocks of 4 tokens, so that a table of 16 shares less than a tree, and routers know blocks of 64."""
    workload = make_workload("chat", Random(0).random, requests=150, block_size=4)
    radix, table, off = (
        replay(workload, replace(SMALL, cache=cache), "cost") for cache in ("radix", "hash", "off")
    )
    assert off.cached_share == 0.0
    assert 0.1 < table.cached_share < radix.cached_share
    assert off.ttft_ms.p99 > radix.ttft_ms.p99


def test_answers_that_run_take_room_and_who_has_none_waits() -> None:
    """Three requests of 80 tokens with their answers, in a cache for two of them."""
    requests = [
        WorkloadRequest(arrival_ms=0, input_length=40, output_length=41, block_ids=(n, n + 1, n + 2, n + 3))
        for n in (10, 20, 30)
    ]
    workload = Workload(name="three", block_size=10, requests=requests)
    fits, waits = (
        replay(workload, ReplaySpec(workers=1, device_tokens=tokens, timing=QUICK), "round_robin")
        for tokens in (240, 160)
    )
    assert fits.ttft_ms.p99 == fits.ttft_ms.p50
    assert waits.ttft_ms.p99 > waits.ttft_ms.p50 + 40.0
    few = ReplaySpec(workers=1, device_tokens=240, timing=QUICK, max_running=2)
    assert replay(workload, few, "round_robin").ttft_ms == waits.ttft_ms


def test_goodput_counts_whoever_met_the_objective() -> None:
    workload = in_a_row([(1,), (1, 2, 3, 4, 5, 6, 7, 8), (1,)])
    timing = TimingModel(step_ms=1.0, prefill_ms_per_token=1.0)
    spec = ReplaySpec(workers=1, timing=timing, objective=Objective(ttft_ms=20.0))
    figures = replay(workload, spec, "round_robin")
    assert figures.goodput_share == 2 / 3
    assert figures.goodput_per_s == pytest.approx(2 / figures.lasted_s)
    chat = replay(chats(60), replace(SMALL, objective=Objective(token_ms=1.07)), "cost")
    assert 0.0 < chat.goodput_share < 1.0
    assert replay(chats(60), SMALL, "cost").goodput_share == 1.0


def test_who_takes_just_as_long_as_the_objective_has_met_it() -> None:
    """Of times that differ in their last bits, as 1.012 s less 1 s does from 12 ms."""
    workload = in_a_row([(1,), (2, 3), (4, 5)])
    timing = TimingModel(step_ms=10.0, prefill_ms_per_token=0.1)
    spec = ReplaySpec(workers=1, timing=timing, objective=Objective(ttft_ms=12.0))
    assert replay(workload, spec, "round_robin").goodput_share == 1.0
    late = replace(spec, objective=Objective(ttft_ms=11.999))
    assert replay(workload, late, "round_robin").goodput_share == 1 / 3


def test_closed_loop_keeps_so_many_conversations_under_way() -> None:
    """Ten conversations of one request of a second each, two at a time."""
    workload = in_a_row([(n,) for n in range(10)], every_ms=10**6)
    timing = TimingModel(step_ms=0.0, prefill_ms_per_token=2000.0)
    spec = ReplaySpec(workers=2, timing=timing, concurrency=2)
    assert replay(workload, spec, "least_loaded").lasted_s == pytest.approx(100.0, abs=11.0)
    assert replay(workload, replace(spec, concurrency=1), "least_loaded").lasted_s == pytest.approx(200.0)


def test_ours_follows_caches_with_a_host_tier_too() -> None:
    spec = ReplaySpec(
        workers=4,
        device_tokens=6_000,
        host_tokens=40_000,
        timing=TimingModel(step_ms=1.0, prefill_ms_per_token=0.02, load_back_ms_per_token=0.002),
    )
    figures = replay(chats(150), spec, "cost")
    assert figures.host_share > 0.02
    assert figures.cached_share > replay(chats(150), replace(spec, host_tokens=0), "cost").cached_share


def test_what_is_cached_is_what_an_lru_cache_a_worker_would_find() -> None:
    """Requests that wait for nobody, in turn to two workers of six blocks: counted here by hand."""
    rng = Random(0)
    prompts = [_path(rng) for _ in range(200)]
    caches = [OrderedDict[int, None](), OrderedDict[int, None]()]
    found = 0
    for number, ids in enumerate(prompts):
        cache = caches[number % 2]
        held = next((depth for depth, one in enumerate(ids) if one not in cache), len(ids))
        found += 10 * held
        for one in reversed(ids):
            cache[one] = None
            cache.move_to_end(one)
        while len(cache) > 6:
            cache.popitem(last=False)
    workload = in_a_row(prompts)
    spec = ReplaySpec(workers=2, device_tokens=60, timing=DRAIN, at_once=True)
    figures = replay(workload, spec, "round_robin")
    assert figures.cached_share * workload.prompt_tokens == pytest.approx(found)
    assert figures.host_share == 0.0


def test_pooled_cache_has_the_room_of_all_and_an_infinite_one_all_there_is() -> None:
    prompts = [(one, one + 1) for one in (10, 20, 30, 40, 50, 10, 20, 30)]
    spec = ReplaySpec(workers=2, device_tokens=40, timing=DRAIN)
    assert replay(in_a_row(prompts), spec, "one_infinite_cache").cached_share == 3 / 8
    assert replay(in_a_row(prompts), spec, "one_pooled_cache").cached_share == 0.0
    assert replay(in_a_row(prompts[:4] + prompts[:1]), spec, "one_pooled_cache").cached_share == 1 / 5


@pytest.mark.parametrize("ceiling", CEILINGS)
def test_ceiling_is_the_same_whatever_workers_keep(ceiling: str) -> None:
    """Of blocks of 4 tokens, so that a table of 16 would share less."""
    workload = make_workload("chat", Random(0).random, requests=60, block_size=4)
    radix, table, off = (
        replay(workload, replace(SMALL, cache=cache), ceiling) for cache in ("radix", "hash", "off")
    )
    assert radix == table == off
    assert radix.cached_share > 0.1


def test_no_policy_passes_the_ceiling() -> None:
    tried = ("cost", "match_gate", "random", *CEILINGS)
    shares = {policy: replay(chats(150), SMALL, policy).cached_share for policy in tried}
    assert shares["random"] < shares["cost"] <= shares["one_infinite_cache"]
    assert shares["match_gate"] <= shares["one_infinite_cache"]
    assert shares["one_pooled_cache"] <= shares["one_infinite_cache"]


def test_follower_comes_when_the_one_before_it_has_ended_and_it_has_paused() -> None:
    first = WorkloadRequest(arrival_ms=0, input_length=100, output_length=11, block_ids=(1,))
    second = WorkloadRequest(after=0, pause_ms=5000, input_length=100, output_length=1, block_ids=(1,))
    workload = Workload(name="two", block_size=64, requests=[first, second])
    timing = TimingModel(step_ms=1.0, prefill_ms_per_token=0.1)
    figures = replay(workload, ReplaySpec(workers=1, timing=timing), "cost")
    took_s = 1e-3 * (11.0 + 10 * 1.0 + 5000 + 1.0 + 36 * 0.1)
    assert figures.lasted_s == pytest.approx(took_s)
    assert figures.cached_share == 64 / 200


def test_answer_goes_on_from_whole_blocks_where_the_rest_of_its_prompt_has_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rest's name is of other tokens than the block that the answer fills up."""
    used: list[tuple[int, ...]] = []
    leave = BlockCache.leave

    def leaving(cache: BlockCache, names: Sequence[int], locked: int) -> tuple[int, list[Change]]:
        used.append(tuple(names))
        return leave(cache, [Fingerprint(name) for name in names], locked)

    monkeypatch.setattr(BlockCache, "leave", leaving)
    request = WorkloadRequest(
        arrival_ms=0, input_length=100, output_length=40, block_ids=(1, 2), answer_ids=(3,)
    )
    replay(Workload(name="one", block_size=64, requests=[request]), SMALL, "round_robin")
    (whole, rest), (begun, filled) = used
    assert begun == whole
    assert filled not in {whole, rest}


def test_speed_brings_requests_sooner() -> None:
    workload = in_a_row([(1,), (2,), (3,)], every_ms=10_000)
    slow, fast = (
        replay(workload, ReplaySpec(workers=1, timing=DRAIN, speed=speed), "cost") for speed in (1.0, 10.0)
    )
    assert slow.lasted_s == pytest.approx(20.0, abs=0.01)
    assert fast.lasted_s == pytest.approx(2.0, abs=0.01)


def test_copies_tell_on_how_many_workers_a_block_is() -> None:
    workload = in_a_row([(1, 2), (1, 2), (1, 3)])
    spec = ReplaySpec(workers=3, device_tokens=1000, timing=DRAIN)
    assert replay(workload, spec, "round_robin").copies == 6 / 3
    assert replay(workload, spec, "longest_match").copies == 1.0


def test_rule_is_shown_who_waits_as_active_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of four blocks at one moment: the first is computed, the second waits, and the third sees both."""
    seen: list[RivalView] = []

    def look(view: RivalView) -> int:
        seen.append(view)
        return 0

    monkeypatch.setitem(RULES, "round_robin", look)
    replay(in_a_row([(1, 2, 3, 4), (5, 6, 7, 8), (9,)], every_ms=0), replace(SMALL, workers=1), "round_robin")
    assert [view.active_blocks for view in seen] == [[0.0], [4.0], [8.0]]
    assert [view.kv_use for view in seen] == [[0.0], [4 / 4000], [4 / 4000]]


def test_progress_is_told_now_and_then() -> None:
    told: list[int] = []
    replay(chats(), SMALL, "round_robin", told.append)
    assert 20 < len(told) <= 101
    assert told == sorted(told)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"workers": 0}, "workers must be from 1 to 4096, got 0"),
        ({"device_tokens": 0}, "device_tokens must be from 1"),
        ({"host_tokens": -1}, "host_tokens must be from 0 to"),
        ({"speed": 0.0}, "speed must be a number above 0"),
        ({"speed": float("nan")}, "speed must be a number above 0"),
        ({"speed": float("inf")}, "speed must be a number above 0"),
        ({"spill_weight": -1.0}, "spill_weight must be from 0 to 1e\\+06"),
        ({"spill_weight": 1e308}, "spill_weight must be from 0 to 1e\\+06"),
        ({"spill_weight": float("nan")}, "spill_weight must be from 0 to 1e\\+06"),
    ],
)
def test_what_cannot_be_a_fleet_is_refused(fields: dict[str, int], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ReplaySpec(**fields)  # type: ignore[arg-type]


def test_policy_that_is_none_and_a_cache_too_small_for_a_request_are_refused() -> None:
    with pytest.raises(ConfigError, match="no policy is called 'best'; there are: cost, "):
        replay(chats(), SMALL, "best")
    largest = max(one.input_length + one.output_length for one in chats().requests)
    with pytest.raises(
        ConfigError,
        match=f"must hold the largest request, {largest} tokens in blocks of 64, got {largest - 1}",
    ):
        replay(chats(), ReplaySpec(device_tokens=largest - 1), "cost")


def test_room_for_a_named_rest_is_asked_for_where_there_is_one() -> None:
    """13 tokens and 8 of an answer that goes on from the rest: its block and the rest's. A table of 16 has no rests."""
    asked = WorkloadRequest(arrival_ms=0, input_length=13, output_length=8, block_ids=(1, 2), answer_ids=(3,))
    workload = Workload(name="one", block_size=10, requests=[asked])
    spec = ReplaySpec(workers=1, device_tokens=40, timing=QUICK)
    assert replay(workload, spec, "cost").requests == 1
    with pytest.raises(ConfigError, match=r"21 tokens in blocks of 10, got 39: that takes 40"):
        replay(workload, replace(spec, device_tokens=39), "cost")
    fine = Workload(name="one", block_size=1, requests=[_one_by_one(asked)])
    assert replay(fine, replace(spec, device_tokens=32, cache="hash"), "cost").requests == 1


def _one_by_one(request: WorkloadRequest) -> WorkloadRequest:
    whole = request.input_length
    return WorkloadRequest(
        arrival_ms=0,
        input_length=whole,
        output_length=request.output_length,
        block_ids=tuple(range(whole)),
        answer_ids=tuple(range(whole, whole + request.output_length)),
    )


def test_profile_of_a_file_is_read_and_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"source": "measured", "timing": {"step_ms": 2, "prefill_ms_per_token": 0.5}}')
    profile = read_profile(str(path))
    assert (profile.source, profile.timing) == (
        "measured",
        TimingModel(step_ms=2.0, prefill_ms_per_token=0.5),
    )
    assert read_profile("h100-8b") is PROFILES["h100-8b"]
    with pytest.raises(ConfigError, match="'h200' is neither a file nor one of h100-8b"):
        read_profile("h200")
    for bad in ("{}", "nonsense", '{"source": "x", "timing": {"step_ms": -1, "prefill_ms_per_token": 1}}'):
        path.write_text(bad)
        with pytest.raises(ConfigError, match=r"profile .*mine\.json: "):
            read_profile(str(path))


def test_profile_with_a_time_that_is_misspelt_is_refused_and_its_form_is_told(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        '{"source": "x", "timing": {"step_ms": 2, "prefill_ms_per_token": 1, "decode_ms": 3}, "measured": {}}'
    )
    with pytest.raises(ConfigError, match="timing has no 'decode_ms'; there are: step_ms, prefill_ms_per_"):
        read_profile(str(path))
    path.write_text('{"step_ms": 2, "prefill_ms_per_token": 1}')
    with pytest.raises(ConfigError, match=r'`source`; one is \{"source": .*"timing": \{"step_ms": '):
        read_profile(str(path))


def test_percentiles_of_nothing_are_nothing() -> None:
    assert not Percentiles.of([]).is_known
    assert Percentiles.of([]).as_json() == {"p50": None, "p90": None, "p99": None}
    assert Percentiles.of([1.0, 3.0]).p50 == 2.0


def _path(rng: Random) -> tuple[int, ...]:
    """A walk down a tree of which each node has three children; an id is a node."""
    ids, node = [], 0
    for _ in range(rng.randrange(1, 5)):
        node = 3 * node + rng.randrange(1, 4)
        ids.append(node)
    return tuple(ids)


@pytest.mark.slow
@pytest.mark.skipif(
    "PREFIXMESH_TRACE" not in os.environ, reason="PREFIXMESH_TRACE names no trace in the Mooncake format"
)
@pytest.mark.parametrize(
    ("policy", "shares", "loads"),
    [
        ("round_robin", (6.20, 9.96, 13.71), (1.04, 1.04, 1.04)),
        ("backlog", (14.89, 29.35, 33.23), (1.03, 1.07, 1.11)),
        ("one_pooled_cache", (17.83, 33.60, 37.25), None),
        ("one_infinite_cache", (37.36, 37.36, 37.36), None),
    ],
)
def test_figures_of_the_conversation_trace_come_out(
    policy: str, shares: tuple[float, ...], loads: tuple[float, ...] | None
) -> None:
    """Counted apart from this code: LRU a worker, at once, eight workers that compute 8 tokens a millisecond."""
    workload = read_workload(Path(os.environ["PREFIXMESH_TRACE"]))
    assert len(workload.requests) == 12_031
    for place, device_tokens in enumerate((500_000, 2_000_000, 8_000_000)):
        spec = ReplaySpec(device_tokens=device_tokens, timing=DRAIN, at_once=True)
        figures = replay(workload, spec, policy)
        assert round(100 * figures.cached_share, 2) == shares[place]
        if loads is not None:
            assert round(figures.max_over_mean, 2) == loads[place]
