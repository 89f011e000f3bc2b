"""LoRA adapters in a replay: who waits for one that is not in memory, who makes room, and what our router hears of it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from prefixmesh.config import EngineConfig
from prefixmesh.errors import ConfigError
from prefixmesh.sim.replay import replay
from prefixmesh.sim.replay_figures import ReplayFigures
from prefixmesh.sim.replay_spec import ReplaySpec
from prefixmesh.sim.timing import TimingModel
from prefixmesh.sim.workload import Workload, WorkloadRequest

LOAD_MS = 400.0
TIMING = TimingModel(step_ms=1.0, prefill_ms_per_token=0.1, adapter_load_ms=LOAD_MS)
PROMPT_MS = 1.0 + 10 * 0.1
ONE = ReplaySpec(workers=1, timing=TIMING, device_tokens=10_000, max_resident_adapters=1)
TWO_WORKERS = replace(ONE, workers=2)


def asked(*requests: tuple[int, str], output: int = 1, rest: Sequence[WorkloadRequest] = ()) -> Workload:
    """Prompts of ten tokens that share nothing, each at a time in ms with an adapter."""
    made = [
        WorkloadRequest(
            arrival_ms=at, input_length=10, output_length=output, block_ids=(number,), adapter=name
        )
        for number, (at, name) in enumerate(requests)
    ]
    return Workload(name="adapters", block_size=10, requests=[*made, *rest])


def waited(workload: Workload, spec: ReplaySpec, policy: str = "round_robin") -> list[float]:
    """Milliseconds to the first token, in the order of ends."""
    return [round(value, 3) for value in figures(workload, spec, policy).log.ttft_ms.tolist()]


def figures(workload: Workload, spec: ReplaySpec, policy: str = "round_robin") -> ReplayFigures:
    return replay(workload, spec, policy)


def test_first_request_for_an_adapter_waits_for_it_and_the_next_finds_it() -> None:
    workload = asked((0, "a"), (1000, "a"))
    assert waited(workload, ONE) == [LOAD_MS + PROMPT_MS, PROMPT_MS]
    assert figures(workload, ONE).adapter_wait_share == 0.5


def test_who_waits_for_an_adapter_stands_beside_the_queue() -> None:
    """The one without an adapter came later and is computed at once."""
    base = WorkloadRequest(arrival_ms=1, input_length=10, output_length=1, block_ids=(9,))
    assert waited(asked((0, "a"), rest=[base]), ONE) == [PROMPT_MS, LOAD_MS + PROMPT_MS]


def test_least_recently_used_makes_room() -> None:
    turns = [(1000 * turn, name) for turn, name in enumerate("abacab")]
    loads = {
        places: 6 * figures(asked(*turns), replace(ONE, max_resident_adapters=places)).adapter_wait_share
        for places in (1, 2, 3)
    }
    # With two places c takes that of b, which a has been used after.
    assert loads == pytest.approx({1: 6, 2: 4, 3: 3})


def test_adapter_that_is_used_keeps_its_place_until_the_answer_ends() -> None:
    workload = asked((0, "a"), (450, "b"), output=201)
    first, second = waited(workload, ONE)
    ends_at = first + 200 * 1.0
    assert (first, second) == (LOAD_MS + PROMPT_MS, ends_at - 450 + LOAD_MS + PROMPT_MS)


def test_adapters_are_loaded_one_after_the_other() -> None:
    two = replace(ONE, max_resident_adapters=2)
    assert waited(asked((0, "a"), (0, "b")), two) == [LOAD_MS + PROMPT_MS, 2 * LOAD_MS + PROMPT_MS]


def test_our_router_hears_of_what_is_in_memory_and_rules_of_others_do_not() -> None:
    """Three adapters in turn on two workers of two places, nothing else to tell them apart by: whoever does not know loads again and
    again."""
    spec = replace(TWO_WORKERS, max_resident_adapters=2)
    workload = asked(*((1500 * turn, "abc"[turn % 3]) for turn in range(24)))
    assert 24 * figures(workload, spec, "cost").adapter_wait_share == pytest.approx(3)
    assert 24 * figures(workload, spec, "round_robin").adapter_wait_share > 20


def test_without_a_number_of_places_nothing_is_loaded() -> None:
    named = asked((0, "a"), (0, "b"), (10, "c"))
    plain = asked((0, ""), (0, ""), (10, ""))
    spec = replace(TWO_WORKERS, max_resident_adapters=0)
    for policy in ("cost", "backlog"):
        assert figures(named, spec, policy) == figures(plain, TWO_WORKERS, policy)
        assert figures(named, TWO_WORKERS, policy) != figures(plain, TWO_WORKERS, policy)


def test_ceiling_loads_nothing() -> None:
    assert figures(asked((0, "a"), (0, "b")), ONE, "one_pooled_cache").adapter_wait_share == 0.0


def test_places_are_as_many_as_an_engines() -> None:
    assert ReplaySpec().max_resident_adapters == EngineConfig().max_resident_adapters


@pytest.mark.parametrize("places", [-1, 1025])
def test_more_places_than_names_are_refused(places: int) -> None:
    with pytest.raises(ConfigError, match=rf"max_resident_adapters must be from 0 to 1024, got {places}"):
        replace(ONE, max_resident_adapters=places)


def test_more_adapters_than_a_worker_knows_are_refused_at_once() -> None:
    many = asked(*((0, f"adapter-{number}") for number in range(1025)))
    with pytest.raises(
        ConfigError, match="adapter: a worker knows at most 1024 by name, the workload has 1025"
    ):
        replay(many, ONE, "cost")
    assert replay(many, replace(ONE, max_resident_adapters=0), "round_robin").requests == 1025
