"""A whole fleet in simulated time: the real router core before simulated workers, driven by a trace."""

from dataclasses import replace
from pathlib import Path

import pytest

from prefixmesh.cache.namespace import public_namespace
from prefixmesh.client.direct import RouteMemory
from prefixmesh.config import EngineConfig
from prefixmesh.errors import ConfigError
from prefixmesh.ids import Namespace
from prefixmesh.router.pins.wishes import PinVersion
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.router.worker_entry import WorkerErrors
from prefixmesh.sim.fake_engine import ModelIdentity
from prefixmesh.sim.fake_model import expected_answer
from prefixmesh.sim.fleet_run import TENANT, FleetSpec, SimulatedFleet, run_trace
from prefixmesh.sim.network import LinkQuality
from prefixmesh.sim.simulated_client import SimulatedClient
from prefixmesh.sim.simulated_link import DESCRIBE_TIMEOUT_S
from prefixmesh.sim.simulated_router import STREAM_IDLE_S, Answered, Question
from prefixmesh.sim.timing import TimingModel
from prefixmesh.sim.traces import TraceRequest, read_trace
from prefixmesh.tokens import pack

SAMPLE = Path(__file__).parents[1] / "golden" / "trace_sample.jsonl"
SMALL = FleetSpec(
    workers=3,
    engine=EngineConfig(page_size=16, max_total_tokens=20_000, chunked_prefill_size=512),
    timing=TimingModel(step_ms=5.0, prefill_ms_per_token=0.1, decode_ms_per_sequence=0.5),
    identity=ModelIdentity(vocab_size=256, context_length=1 << 14),
)
COST = PolicyConfig()


def conversations(count: int, turns: int) -> list[TraceRequest]:
    """So many that take turns, each of whose prompts begins with its last one."""
    return [
        TraceRequest(
            timestamp_ms=200 * (turn * count + number),
            input_length=512 * (turn + 1),
            output_length=4,
            hash_ids=tuple(100 * number + block for block in range(turn + 1)),
        )
        for turn in range(turns)
        for number in range(count)
    ]


def ask(
    fleet: SimulatedFleet, when: float, prompt: list[int], max_tokens: int = 4, tenant: Namespace = TENANT
) -> None:
    fleet.ask_at(when, lambda: Question(namespace=tenant, prompt=pack(prompt), max_tokens=max_tokens))


def test_every_request_of_a_trace_is_answered_and_counted() -> None:
    requests = read_trace(SAMPLE)
    figures = run_trace(requests, SMALL, COST)
    assert (figures.requests, figures.failed) == (5, 0)
    assert figures.prompt_tokens == sum(request.input_length for request in requests)
    assert 1200 // 16 * 16 <= figures.cached_tokens < figures.prompt_tokens
    p50, p90, p99 = figures.first_token_ms
    assert 0 < p50 <= p90 <= p99
    assert figures.max_over_mean >= 1.0
    assert 0 < figures.busy_share <= 1
    assert figures.lasted_s >= 2.6


def test_answers_longer_than_the_longest_silence_are_no_silence() -> None:
    """Of a trace's answers only the first token and the end are told of; what is between takes as long as it takes."""
    slow = replace(SMALL, timing=replace(SMALL.timing, step_ms=500.0))
    requests = [replace(request, output_length=150) for request in conversations(2, 1)]
    figures = run_trace(requests, slow, COST)
    assert figures.lasted_s > 1.2 * STREAM_IDLE_S
    assert (figures.requests, figures.failed) == (2, 0)


def test_cost_finds_what_round_robin_scatters() -> None:
    requests = conversations(4, 5)
    ours, scattered = (run_trace(requests, SMALL, PolicyConfig(policy=p)) for p in ("cost", "round_robin"))
    assert ours.cached_share == pytest.approx(0.65, abs=0.05)
    assert scattered.cached_share < 0.5 * ours.cached_share


def test_host_tiers_keep_what_devices_have_no_room_for() -> None:
    """And the router sends requests to where the host has their prefix."""
    requests = conversations(10, 4)
    tight = replace(SMALL.engine, max_total_tokens=4096)
    timing = replace(SMALL.timing, load_back_ms_per_token=0.01, offload_ms_per_token=0.01)
    device_alone = replace(SMALL, engine=tight, timing=timing)
    tiered = replace(SMALL, engine=replace(tight, hicache_ratio=8.0), timing=timing)
    alone, both = (run_trace(requests, spec, COST) for spec in (device_alone, tiered))
    assert alone.host_tokens == 0
    assert both.host_tokens > 0.3 * both.cached_tokens
    assert both.cached_share > 1.5 * alone.cached_share
    assert both.cached_share == pytest.approx(0.6, abs=0.05)


def test_one_seed_is_one_run() -> None:
    shaky = replace(SMALL, quality=LinkQuality(jitter_s=0.05), routers=2)
    requests = conversations(3, 3)
    assert run_trace(requests, shaky, COST) == run_trace(requests, shaky, COST)
    assert run_trace(requests, shaky, COST) != run_trace(requests, replace(shaky, seed=1), COST)


def test_first_tokens_come_when_a_router_has_predicted_once_workers_have_measured_themselves() -> None:
    """From timing through the engine's rates, reports and columns to the cost's own terms: all mean one curve."""
    steep = TimingModel(step_ms=2.0, prefill_ms_per_token=0.05, prefill_ms_per_token2=5e-5)
    fleet = SimulatedFleet(replace(SMALL, workers=1, timing=steep), COST)
    lengths = [200, 3000, 800, 1500, 400, 2500, 1000, 4000] * 4
    for number, length in enumerate(lengths):
        ask(fleet, fleet.sim.now + 5.0 * number, [number, *([7] * (length - 1))])
    fleet.run()
    (entry,) = fleet.routers[0].core.registry
    entry.errors = WorkerErrors()
    for number, length in enumerate((2000, 3500)):
        # Not in the very moment of an end, of which the worker's next report tells.
        ask(fleet, fleet.sim.now + 1.0 + 5.0 * number, [100 + number, *([7] * (length - 1))])
    fleet.run()
    true_ms = steep.prefill_ms(2000) / 2 + steep.prefill_ms(3500) / 2
    assert entry.errors.first_token_ms.count == 2
    assert entry.errors.first_token_ms.size < 0.05 * true_ms


def test_two_routers_see_each_others_load_through_the_workers() -> None:
    fleet = SimulatedFleet(replace(SMALL, routers=2), COST)
    began = fleet.sim.now
    for number in range(6):
        ask(fleet, began + 0.3 * number, [number * 7 + place % 11 for place in range(600)], 1000)
    fleet.sim.run_until(began + 2.5)
    for worker in fleet.workers.values():
        assert worker.life is not None
        there = len(worker.life.engine.scheduler.running)
        assert there == 2
        for router in fleet.routers:
            entry = router.core.registry.get(worker.name)  # type: ignore[arg-type]
            assert entry is not None
            assert entry.load.in_flight <= there
            assert entry.load.total.in_flight == there
    fleet.run()
    fleet.sim.run_for(1.0)
    for router in fleet.routers:
        assert {entry.load.total.in_flight for entry in router.core.registry} == {0}
        router.core.check_invariants()


def test_a_crash_fails_what_ran_there_and_the_worker_is_used_again_when_it_is_back() -> None:
    fleet = SimulatedFleet(replace(SMALL, workers=1), COST)
    began, (worker,) = fleet.sim.now, fleet.workers.values()
    fleet.sim.call_at(began + 1.0, worker.crash)
    fleet.sim.call_at(began + 2.0, worker.start)
    for at in (0.9, 1.5, 3.0):
        ask(fleet, began + at, list(range(200)), 50)
    fleet.run()
    ends: list[Answered] = sorted(fleet.answered, key=lambda one: one.asked_at)
    assert [one.error for one in ends] == ["UNAVAILABLE", "UNAVAILABLE", ""]
    assert ends[2].cached_tokens == 0
    assert fleet.figures(began).failed == 2
    fleet.routers[0].core.check_invariants()


def test_an_answer_that_is_late_gives_up_no_call() -> None:
    """As with real links: a worker that stands still when it is asked anew who it is has its calls still when it goes on."""
    fleet = SimulatedFleet(replace(SMALL, workers=1), COST)
    began, (worker,) = fleet.sim.now, fleet.workers.values()
    (link,) = fleet.routers[0].life.links.values()  # type: ignore[union-attr]
    ask(fleet, began + 0.5, list(range(200)), 50)
    fleet.sim.call_at(began + 0.55, worker.stall)
    fleet.sim.call_at(began + 0.56, link.suspect, "a call said so")
    fleet.sim.call_at(began + 0.56 + 2 * DESCRIBE_TIMEOUT_S, worker.go_on)
    fleet.run()
    assert [(one.error, one.tokens) for one in fleet.answered] == [("", 50)]


def test_what_cannot_be_a_fleet_is_refused() -> None:
    with pytest.raises(ConfigError, match="routers must be at least 1, got 0"):
        FleetSpec(routers=0)
    with pytest.raises(ConfigError, match="speed must be above 0"):
        FleetSpec(speed=0.0)


def public_fleet() -> tuple[SimulatedFleet, list[int]]:
    """Two workers, and a prompt of two blocks that is public."""
    fleet = SimulatedFleet(replace(SMALL, workers=2), COST)
    pinned = list(range(128))
    namespace = public_namespace(b"k" * 32, adapter_digest="", model_revision="r")
    version = PinVersion(generation=1, namespace=namespace, tokens=pack(pinned), fingerprints=())
    for router in fleet.routers:
        router.public.set([version], SMALL.engine.page_size)
    return fleet, pinned


def test_public_prefixes_reach_simulated_workers_by_their_tickets() -> None:
    """Another tenant finds what is public, its own tail again, and answers what it would without any pin."""
    fleet, pinned = public_fleet()
    other = Namespace(b"another one, too")
    prompt = [*pinned, *range(40)]
    for number, tenant in enumerate((TENANT, other, other)):
        ask(fleet, fleet.sim.now + 5.0 * number, prompt, 3, tenant)
    fleet.run()
    assert [one.cached_tokens for one in fleet.answered] == [0, 128, 160]


@pytest.mark.parametrize("is_direct", [False, True], ids=["carried", "direct"])
@pytest.mark.parametrize("length", [128, 168])
def test_a_callers_answer_is_its_own_whatever_is_public(is_direct: bool, length: int) -> None:
    """Whichever way its tokens come, and where the prompt is just what is public: the fake model's answer tells whose KV was read."""
    fleet, pinned = public_fleet()
    prompt = [*pinned, *range(40)][:length]
    for number, tenant in enumerate((TENANT, Namespace(b"another one, too")) * 2):
        client = SimulatedClient(
            fleet.sim,
            fleet.network,
            f"client-{number}",
            fleet.routers[0],
            Question(namespace=tenant, prompt=pack(prompt), max_tokens=20),
            30.0,
            lambda _: None,
            memory=RouteMemory() if is_direct else None,
        )
        client.begin()
        fleet.sim.run_for(5.0)
        assert client.error is None
        assert client.tokens == expected_answer(tenant, prompt, 20, SMALL.identity.vocab_size)
