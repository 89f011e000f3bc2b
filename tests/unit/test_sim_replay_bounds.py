"""What a replay refuses before it begins, or when it has gone on for too long: by the field, the number and the limit."""

from dataclasses import replace

import pytest

from prefixmesh.errors import ConfigError
from prefixmesh.sim.replay import replay
from prefixmesh.sim.replay_fleet import MAX_SIMULATED_S
from prefixmesh.sim.replay_spec import ReplaySpec
from prefixmesh.sim.timing import TimingModel
from prefixmesh.sim.workload import Workload, WorkloadRequest

WEEK_MS = round(1e3 * MAX_SIMULATED_S)
INSTANT = ReplaySpec(workers=1, timing=TimingModel(step_ms=0.0, prefill_ms_per_token=0.0))


def of(*requests: WorkloadRequest) -> Workload:
    return Workload(name="bounds", block_size=64, requests=requests)


def request(
    *, at: int | None = 0, after: int | None = None, pause: int = 0, answer: int = 1
) -> WorkloadRequest:
    return WorkloadRequest(
        arrival_ms=at, after=after, pause_ms=pause, input_length=10, output_length=answer, block_ids=()
    )


@pytest.mark.parametrize("policy", ["cost", "round_robin"])
def test_workers_that_take_no_time_are_workers(policy: str) -> None:
    assert replay(of(request(), request(at=5)), INSTANT, policy).ttft_ms.p99 == 0.0


def test_arrival_after_a_week_is_refused_unless_it_is_brought_nearer() -> None:
    late = of(request(), request(at=2 * WEEK_MS))
    with pytest.raises(
        ConfigError, match=r"request 1 comes after 1\.2096e\+06 s by the workload and speed 1,"
    ):
        replay(late, INSTANT, "cost")
    assert replay(late, replace(INSTANT, speed=1e6), "cost").requests == 2
    assert replay(late, replace(INSTANT, concurrency=2), "cost").requests == 2


def test_pauses_that_sum_to_more_than_a_week_are_refused() -> None:
    half = WEEK_MS // 2 + 1
    turns = of(request(), request(at=None, after=0, pause=half), request(at=None, after=1, pause=half))
    with pytest.raises(
        ConfigError, match=r"request 2 comes after 604800 s .* a replay lasts at most 604,800 s"
    ):
        replay(turns, INSTANT, "cost")


def test_answer_that_takes_more_than_a_week_is_refused() -> None:
    slow = replace(INSTANT, timing=TimingModel(step_ms=1e7, prefill_ms_per_token=0.0))
    with pytest.raises(ConfigError, match=r"request 0 .* takes 1e\+09 ms alone by the profile"):
        replay(of(request(answer=100)), slow, "cost")


def test_requests_that_wait_for_more_than_a_week_are_given_up() -> None:
    """Each takes four days, one at a time."""
    spec = replace(INSTANT, timing=TimingModel(step_ms=4 * 86_400e3, prefill_ms_per_token=0.0), max_running=1)
    with pytest.raises(ConfigError, match="after them 1 of 3 requests have no answer"):
        replay(of(request(), request(), request()), spec, "round_robin")
