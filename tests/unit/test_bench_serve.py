"""``prefixmesh bench serve``'s pure parts: prompts from blocks, figures from answers."""

import json
import math
from random import Random

import pytest

from prefixmesh.bench.serve_drive import ServeSpec
from prefixmesh.bench.serve_figures import Served, figures_of
from prefixmesh.bench.serve_prompts import FIRST_ID, PromptMaker, first_of, shortened
from prefixmesh.cli.bench_serve_table import about, print_figures
from prefixmesh.client import CachedTokens
from prefixmesh.errors import ConfigError
from prefixmesh.sim.replay_figures import NO_OBJECTIVE, Objective, ReplayFigures
from prefixmesh.sim.workload import Workload, WorkloadRequest
from prefixmesh.sim.workloads.catalogue import GENERATORS, make_workload
from prefixmesh.tokens import pack, unpack

BLOCK = 4
IDS = 300


def asks(
    blocks: tuple[int, ...], length: int, output: int = 0, answer: tuple[int, ...] = ()
) -> WorkloadRequest:
    return WorkloadRequest(
        arrival_ms=0, input_length=length, output_length=output, block_ids=blocks, answer_ids=answer
    )


def ids_of(maker: PromptMaker, number: int, request: WorkloadRequest) -> list[int]:
    found: list[int] = unpack(maker.prompt(number, request)).tolist()
    return found


def test_equal_blocks_are_equal_tokens_and_others_are_not() -> None:
    maker = PromptMaker(BLOCK, 0, IDS)
    one, other = ids_of(maker, 0, asks((1, 2), 8)), ids_of(maker, 1, asks((1, 3), 8))
    assert len(one) == len(other) == 8
    assert one[:BLOCK] == other[:BLOCK]
    assert one[BLOCK:] != other[BLOCK:]
    assert all(FIRST_ID <= one < IDS for one in (*one, *other))
    assert ids_of(PromptMaker(BLOCK, 0, IDS), 7, asks((1, 2), 8)) == one
    assert ids_of(PromptMaker(BLOCK, 1, IDS), 0, asks((1, 2), 8)) != one


def test_a_rest_without_a_name_is_shared_by_nobody_and_one_with_a_name_is() -> None:
    maker = PromptMaker(64, 0)
    first, second = (ids_of(maker, number, asks((5,), 90)) for number in range(2))
    assert first[:64] == second[:64]
    assert first[64:] != second[64:]
    named = [ids_of(maker, number, asks((5, 6), 90)) for number in range(2)]
    assert named[0] == named[1]


def test_the_next_turn_begins_with_what_was_answered() -> None:
    """Prompt of a block and a half, an answer that fills the second and a third: both are there in the next prompt, to the token."""
    maker = PromptMaker(BLOCK, 0, IDS)
    request = asks((1, 2), 6, output=7, answer=(8, 9))
    prompt = maker.prompt(0, request)
    answer = list(range(200, 207))
    maker.answered(request, prompt, pack(answer))
    turn = ids_of(maker, 1, asks((1, 8, 9, 10), 16))
    assert turn[:12] == [*unpack(prompt).tolist(), *answer][:12]


def test_a_block_that_was_asked_for_before_its_answer_stays_what_it_was() -> None:
    maker = PromptMaker(BLOCK, 0, IDS)
    early = ids_of(maker, 0, asks((1, 8), 8))
    request = asks((1,), 4, output=4, answer=(8,))
    maker.answered(request, maker.prompt(1, request), pack([200] * 4))
    assert ids_of(maker, 2, asks((1, 8), 8)) == early


def test_an_answer_that_broke_off_leaves_whole_blocks_only_and_old_ones_go() -> None:
    maker = PromptMaker(BLOCK, 0, IDS, most_answer_blocks=1)
    request = asks((1,), 4, output=8, answer=(8, 9))
    maker.answered(request, maker.prompt(0, request), pack([200] * 5))
    assert ids_of(maker, 1, asks((1, 8), 8))[4:] == [200] * 4
    maker.answered(asks((1,), 4, output=4, answer=(7,)), maker.prompt(2, request), pack([201] * 4))
    assert ids_of(maker, 3, asks((1, 8), 8))[4:] != [200] * 4


def test_the_largest_ids_of_a_workload_are_told_apart() -> None:
    maker = PromptMaker(64, 0)
    blocks = ids_of(maker, 0, asks((2**53, 2**53 - 1, 0), 192))
    assert len({tuple(blocks[start : start + 64]) for start in (0, 64, 128)}) == 3
    with pytest.raises(ConfigError, match="ids must be from"):
        PromptMaker(64, 0, FIRST_ID)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_shortened_workload_shares_as_much(name: str) -> None:
    """A workload checks itself, so that it is one; shares stay, lengths shrink by the block's."""
    workload = make_workload(name, Random(1).random, requests=60)
    short = shortened(workload, 8)
    assert [one.block_ids for one in short.requests] == [one.block_ids for one in workload.requests]
    assert short.prompt_tokens == pytest.approx(workload.prompt_tokens / 8, rel=0.1)
    assert first_of(short, 7).requests == short.requests[:7]


def served(number: int, worker: str = "a", **fields: object) -> Served:
    told: dict[str, object] = {
        "prompt_tokens": 100, "output_tokens": 11, "first_s": number + 0.5, "cached": CachedTokens(device=25)
    }  # fmt: skip
    return Served(number, float(number), number + 1.5, worker=worker, **(told | fields))  # type: ignore[arg-type]


def test_figures_are_those_of_a_replay_by_its_names() -> None:
    run = [
        served(0, policy="cost"),
        served(1, "b", prompt_tokens=300, cached=CachedTokens(host=30, peer=45)),
        Served(2, 2.0, 9.0, "UNAVAILABLE"),
        served(3, output_tokens=1, first_s=8.0),
    ]
    figures = figures_of(run, Objective(ttft_ms=1000.0), workers=4)
    assert (figures.requests, figures.errors, figures.workers, figures.policy) == (
        4,
        {"UNAVAILABLE": 1},
        2,
        "cost",
    )
    assert (figures.device_share, figures.host_share, figures.peer_share) == (0.1, 0.06, 0.09)
    assert figures.cached_share == pytest.approx(0.25)
    assert figures.ttft_ms.p50 == 500.0
    assert figures.token_ms.p50 == pytest.approx(100.0)  # a second for ten tokens after the first
    assert figures.goodput_share == 0.5
    assert figures.max_over_mean == pytest.approx(300 / 125)
    assert figures.prompt_tokens_by_worker == (200, 300, 0, 0)
    assert figures.lasted_s == 9.0
    assert figures.output_tokens == 23
    names = {name for name in ReplayFigures.__dataclass_fields__ if name not in ("log",)}
    assert names <= {*figures.as_json(), "token_ms", "output_tokens"}


@pytest.mark.parametrize("run", [[], [Served(0, 0.0, 1.0, "UNAVAILABLE")]])
def test_nothing_that_was_answered_has_figures_too(run: list[Served]) -> None:
    figures = figures_of(run, NO_OBJECTIVE)
    told = figures.as_json()
    assert figures.goodput_share == 0.0
    assert all(math.isfinite(value) for value in told.values() if isinstance(value, float))
    assert told["ttft_ms"] == {"p50": None, "p90": None, "p99": None}
    json.dumps(told, allow_nan=False)


def test_what_was_not_answered_is_told_by_a_dash_and_not_as_nothing_waited(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {"cost": figures_of([Served(0, 0.0, 1.0, "UNAVAILABLE")], NO_OBJECTIVE)}
    print_figures(
        make_workload("chat", Random(0).random, requests=4), {"concurrency": 0, "speed": 1.0}, found
    )
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("cost"))
    assert row.split() == ["cost", "1", "1", "0.00%", "–", "–", "–", "–", "–", "0.0", "1.00", "0.0%"]


def test_a_pace_that_nobody_would_go_by_is_refused() -> None:
    ServeSpec(address=None, speed=2.0)
    ServeSpec(address=None, concurrency=2)
    with pytest.raises(ConfigError, match="speed cannot be with concurrency"):
        ServeSpec(address=None, speed=2.0, concurrency=2)


def test_name_of_a_workload_does_not_steer_the_terminal() -> None:
    hostile = Workload(name="a\x1b[31m\x07\nb", block_size=BLOCK, requests=[asks((0,), 4)])
    assert about(hostile, {"concurrency": 1}).startswith("a[31m b: 1 requests")
