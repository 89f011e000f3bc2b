"""A piece of a workload as the callers of a fault run: what shares there shares here, in an order that is the workload's."""

from random import Random

import pytest

from prefixmesh.sim.fault_run import FaultRun, run_seed
from prefixmesh.sim.simulated_question import Question
from prefixmesh.sim.trace_traffic import LONGEST_TOKENS, REQUESTS
from prefixmesh.sim.workload import Workload, WorkloadRequest
from prefixmesh.sim.workloads.catalogue import make_workload
from prefixmesh.tokens import count, unpack


def made(name: str, requests: int = 60, **settings: int) -> Workload:
    return make_workload(name, Random(0).random, requests=requests, **settings)


@pytest.mark.parametrize(("name", "block_size"), [("agents", 64), ("customer-service", 4), ("rag", 512)])
def test_pieces_of_workloads_are_asked_and_nothing_is_broken(name: str, block_size: int) -> None:
    report = run_seed(1, made(name, block_size=block_size))
    assert report.problems == []
    assert 5 < report.requests <= REQUESTS + 2
    assert report.finished > report.requests // 3


def test_prompts_share_as_many_tokens_as_the_workload_says(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [
        WorkloadRequest(arrival_ms=n, input_length=200, output_length=5, block_ids=ids)
        for n, ids in enumerate([(1, 2), (1, 3), (4, 5)])
    ]
    run = FaultRun(0, Workload(name="three", block_size=100, requests=requests))
    asked: dict[int, list[int]] = {}

    def come(question: Question, _: object) -> None:
        asked[len(asked)] = unpack(question.prompt).tolist()

    monkeypatch.setattr(run.callers, "come", come)
    run.sim.run_until(20.0)
    first, second, third = (asked[number] for number in range(3))
    assert first[:100] == second[:100] != third[:100]
    assert first[100:] != second[100:]


def test_long_prompts_are_made_short_enough_for_the_smallest_pool() -> None:
    for name, block_size in (("agents", 64), ("agents", 4), ("rag", 512)):
        run = FaultRun(3, made(name, block_size=block_size))
        lengths = [count(run.traffic.question().prompt) for _ in range(20)]
        assert 0 < min(lengths) <= max(lengths) <= LONGEST_TOKENS + 1, (name, block_size)


def test_seeds_take_other_pieces_and_one_seed_the_same() -> None:
    workload = made("agents")
    one, again, other = (run_seed(seed, workload) for seed in (1, 1, 2))
    assert one.log_digest == again.log_digest
    assert one.log_digest != other.log_digest


def test_follower_whose_first_is_not_in_the_piece_is_left_out() -> None:
    requests = [WorkloadRequest(arrival_ms=0, input_length=8, output_length=1, block_ids=())]
    requests += [WorkloadRequest(after=0, input_length=8, output_length=1, block_ids=()) for _ in range(3)]
    run = FaultRun(5, Workload(name="chain", block_size=16, requests=requests))
    report = run.run()
    assert report.problems == []
    assert report.requests >= 1 + len(run.last)
