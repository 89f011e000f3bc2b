"""A piece of a workload as the callers of a fault run: what shares there shares here, in an order that is the workload's."""

from random import Random

import pytest

from prefixmesh.sim.fault_fleet import VOCAB
from prefixmesh.sim.fault_plan import read_plan
from prefixmesh.sim.fault_run import FaultRun, run_seed
from prefixmesh.sim.simulated_question import Question
from prefixmesh.sim.trace_traffic import LONGEST_TOKENS, REQUESTS, TracePiece
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
        WorkloadRequest(arrival_ms=n, input_length=180, output_length=5, block_ids=ids)
        for n, ids in enumerate([(1, 2), (1, 3), (4, 5)])
    ]
    run = FaultRun(0, Workload(name="three", block_size=90, requests=requests))
    asked: dict[int, list[int]] = {}

    def come(question: Question, _: object) -> None:
        asked[len(asked)] = unpack(question.prompt).tolist()

    monkeypatch.setattr(run.callers, "come", come)
    run.sim.run_until(20.0)
    first, second, third = (asked[number] for number in range(3))
    assert first[:90] == second[:90] != third[:90]
    assert first[90:] != second[90:]


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


def request(**fields: object) -> WorkloadRequest:
    whole = {"input_length": 64, "output_length": 5, "block_ids": (1, 2, 3, 4), "arrival_ms": 0}
    return WorkloadRequest(**{**whole, **fields})  # type: ignore[arg-type]


def piece_of(*requests: WorkloadRequest, block_size: int = 16) -> TracePiece:
    return TracePiece(Workload(name="w", block_size=block_size, requests=requests), Random(0), VOCAB)


def test_trace_of_one_request_is_a_run() -> None:
    report = run_seed(2, Workload(name="one", block_size=16, requests=[request()]), plan=read_plan("store"))
    assert report.problems == []
    assert report.requests >= 2  # and those that are asked when all is quiet


def test_pause_of_an_hour_leaves_the_rhythm_of_the_rest() -> None:
    at_ms = [0, 1000, 2000, 3000, 3_603_000, 3_604_000, 3_605_000]
    found = list(piece_of(*(request(arrival_ms=one) for one in at_ms)).arrivals(5.0).values())
    assert found == pytest.approx([0.0, 0.2, 0.4, 0.6, 4.6, 4.8, 5.0])
    assert list(piece_of(*(request() for _ in range(3))).arrivals(5.0).values()) == [0.0, 0.0, 0.0]


def test_tenants_and_adapters_share_nothing_and_what_is_theirs_is_shared() -> None:
    whose = [("a", ""), ("a", ""), ("a", "b"), ("ab", ""), ("", "ab"), ("a/b", "")]
    piece = piece_of(*(request(tenant=tenant, adapter=adapter) for tenant, adapter in whose))
    namespaces = [piece.question(number).namespace for number in range(len(whose))]
    assert namespaces[0] == namespaces[1]
    assert len(set(namespaces)) == len(whose) - 1


def test_what_a_trace_pins_is_wished_and_each_prefix_once() -> None:
    pinned = [request(pin_tokens=32, pin_replicas=3), request(pin_tokens=32), request(pin_tokens=16)]
    piece = piece_of(request(), *pinned, request(pin_tokens=48))
    first, second = piece.pins()
    assert (count(first.tokens), first.replicas, count(second.tokens)) == (32, 3, 16)
    assert piece.question(1).prompt.startswith(first.tokens)
    workload = Workload(name="pins", block_size=16, requests=[request(), *pinned])
    run = FaultRun(3, workload, plan=read_plan("refusals"))
    assert {wish.name for wish in run.wishes} == {"pin-0", "pin-1"}
    report = run.run()
    assert report.problems == []
    assert report.pins_held > 0


@pytest.mark.parametrize("block_size", [16, 300, 512, 4096])
def test_prompts_that_share_a_large_block_share_it_when_they_are_short(block_size: int) -> None:
    length = block_size + block_size // 2
    piece = piece_of(*(request(input_length=length, block_ids=(7,)) for _ in range(2)), block_size=block_size)
    one, other = (unpack(piece.question(number).prompt).tolist() for number in range(2))
    common = next(at for at, (mine, theirs) in enumerate(zip(one, other, strict=True)) if mine != theirs)
    assert common >= len(one) // 2
    assert len(one) <= LONGEST_TOKENS
