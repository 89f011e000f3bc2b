"""Workloads from a seed: the lengths that they state, who shares what with whom, and what waits for what."""

from collections import Counter, defaultdict
from itertools import pairwise
from random import Random
from statistics import median

import pytest

from prefixmesh.errors import ConfigError
from prefixmesh.sim.workload import Workload, WorkloadRequest
from prefixmesh.sim.workloads.catalogue import GENERATORS, make_workload
from prefixmesh.sim.workloads.draft import Draft
from prefixmesh.sim.workloads.draws import Draws, Popularity

SMALL = 400


def made(name: str, seed: int = 0, **settings: int) -> Workload:
    return make_workload(name, Random(seed).random, **({"requests": SMALL} | settings))


def shared_blocks(one: WorkloadRequest, other: WorkloadRequest) -> int:
    equal = [a == b for a, b in zip(one.block_ids, other.block_ids, strict=False)]
    return equal.index(False) if False in equal else len(equal)


def chains(workload: Workload) -> list[list[WorkloadRequest]]:
    """What follows what, each chain from its open arrival on."""
    chain_of: dict[int, list[WorkloadRequest]] = {}
    for number, request in enumerate(workload.requests):
        chain = [] if request.after is None else chain_of[request.after]
        chain.append(request)
        chain_of[number] = chain
    return list({id(chain): chain for chain in chain_of.values()}.values())


@pytest.mark.parametrize("name", GENERATORS)
def test_seed_names_a_workload(name: str) -> None:
    workload = made(name)
    assert made(name) == workload
    assert name == workload.name
    assert SMALL <= len(workload.requests) < SMALL + 40
    if name != "bursts":
        assert made(name, seed=1) != workload


@pytest.mark.parametrize("name", GENERATORS)
def test_ids_say_what_stands_before_them(name: str) -> None:
    """Equal ids mean equal prefixes: an id has one predecessor, wherever it stands."""
    before: dict[int, int | None] = {}
    for request in made(name).requests:
        last = None
        for one in (*request.block_ids[: request.input_length // 64], *request.answer_ids):
            assert before.setdefault(one, last) == last
            last = one


def test_customer_service_has_the_lengths_it_states() -> None:
    workload = made("customer-service", concurrent=7)
    assert {one.output_length for one in workload.requests} == {180}
    lengths = Counter(one.input_length for one in workload.requests)
    assert set(lengths) == {2048 + 60 + 240 * turn for turn in range(12)}
    assert lengths[2108] == lengths[2108 + 240 * 5] > lengths[2108 + 240 * 11] > 0


def test_customers_at_a_time_are_so_many_and_each_place_goes_on_without_a_pause() -> None:
    workload = made("customer-service", concurrent=7)
    lanes = chains(workload)
    assert len(lanes) == 7
    assert all(one.pause_ms == 0 for one in workload.requests)
    assert sum(len(lane) for lane in lanes) == len(workload.requests)


def test_turn_begins_with_the_last_prompt_and_its_answer() -> None:
    for lane in chains(made("customer-service", concurrent=7)):
        for last, following in pairwise(lane):
            if following.input_length > last.input_length:
                assert following.block_ids[: len(last.block_ids)] == last.block_ids
                left = (*last.block_ids, *last.answer_ids)
                assert following.block_ids[: len(left)] == left
            else:  # the next customer
                assert shared_blocks(last, following) in {0, 2048 // 64}


def test_policies_are_shared_by_many_conversations() -> None:
    firsts = [one for one in made("customer-service", concurrent=7).requests if one.input_length == 2108]
    assert len({one.block_ids[0] for one in firsts}) == 8
    assert all(one.pin_tokens == 2048 for one in firsts)


def test_agents_read_each_result_after_the_tools_time() -> None:
    tasks = chains(made("agents"))
    for task in tasks:
        assert 4 <= len(task) <= 20
        for last, following in pairwise(task):
            assert 100 + 120 <= following.input_length - last.input_length <= 2000 + 120
            assert 200 <= following.pause_ms <= 4000
            assert following.block_ids[: len(last.block_ids)] == last.block_ids
    assert len({task[0].block_ids[0] for task in tasks}) == 4


def test_branches_of_a_fork_come_at_once_with_one_prompt() -> None:
    by_arrival = defaultdict(list)
    for request in made("fork").requests:
        by_arrival[request.arrival_ms].append(request)
    assert {len(branches) % 8 for branches in by_arrival.values()} == {0}
    for branches in by_arrival.values():
        assert len({one.block_ids for one in branches}) == len(branches) // 8
        assert len({one.answer_ids for one in branches}) == len(branches)


def test_levels_of_a_tree_go_on_from_the_best_of_the_last_level() -> None:
    workload = made("tree-of-thought")
    sizes = Counter(one.input_length for one in workload.requests)
    trees = sizes[1600] // 4
    assert sizes == {1600: 4 * trees, 1750: 8 * trees, 1900: 8 * trees}
    for number, request in enumerate(workload.requests):
        if request.after is not None:
            last = workload.requests[request.after]
            assert request.input_length == last.input_length + 150
            assert number - request.after <= 8


def test_popular_documents_stand_first_more_often() -> None:
    workload = made("rag", requests=2000)
    assert {one.input_length for one in workload.requests} == {400 + 4 * 1000 + 60}
    # The seventh block is the instructions' end and the first document's beginning.
    firsts = Counter(one.block_ids[6] for one in workload.requests).most_common()
    assert firsts[0][1] > 5 * median(count for _, count in firsts)


def test_tenants_have_an_adapter_each_and_share_nothing() -> None:
    first_blocks = defaultdict(set)
    for request in made("lora-tenants").requests:
        assert request.adapter == request.tenant.replace("tenant", "adapter")
        first_blocks[request.block_ids[0]].add(request.tenant)
    assert all(len(tenants) == 1 for tenants in first_blocks.values())
    assert len(first_blocks) > 20


def test_chats_pause_and_are_mostly_short() -> None:
    talks = chains(made("chat", requests=2000))
    pauses = [one.pause_ms for talk in talks for one in talk[1:]]
    assert sum(pauses) / len(pauses) == pytest.approx(20_000, rel=0.15)
    turns = Counter(len(talk) for talk in talks)
    assert turns[1] > turns[5] > 0
    assert max(turns) <= 10


def test_unique_prompts_share_nothing() -> None:
    ids = [one for request in made("all-unique").requests for one in request.block_ids]
    assert len(ids) == len(set(ids))


def test_hot_prefix_stands_before_every_prompt() -> None:
    first, *others = made("hot-prefix").requests
    assert {shared_blocks(first, other) for other in others} == {4000 // 64}


def test_each_burst_has_a_prefix_of_its_own() -> None:
    requests = made("bursts").requests
    assert set(Counter(one.arrival_ms for one in requests).values()) == {32}
    assert len({one.block_ids[0] for one in requests}) == len(requests) // 32


def test_blocks_do_not_care_where_pieces_end() -> None:
    draft = Draft("made up", 10)
    first, second, third = draft.piece(7), draft.piece(7), draft.piece(30)
    draft.ask([first, second], draft.piece(6), arrival_ms=0)
    draft.ask([first, second, third], draft.piece(1), arrival_ms=1)
    draft.ask([second, first, third], draft.piece(1), arrival_ms=2)
    one, longer, other = draft.done().requests
    assert (len(one.block_ids), len(one.answer_ids)) == (1, 1)
    assert shared_blocks(one, longer) == 1
    assert one.answer_ids[0] != longer.block_ids[1]
    assert shared_blocks(one, other) == shared_blocks(longer, other) == 0


def test_names_and_settings_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no workload is called 'chess'; there are: customer-service, "):
        made("chess")
    with pytest.raises(ConfigError, match="requests must be from 1 to 4000000, got 0"):
        made("chat", requests=0)
    with pytest.raises(ConfigError, match="block_size must be from 1 to 65536, got 70000"):
        made("chat", block_size=70_000)


def test_draws_have_the_means_that_they_are_asked_for() -> None:
    draws, times = Draws(Random(0).random), range(4000)
    assert {draws.whole(2, 4) for _ in times} == {2, 3, 4}
    assert sum(draws.exponential(5.0) for _ in times) / len(times) == pytest.approx(5.0, rel=0.05)
    lengths = [draws.log_normal(100, 0.5, 300) for _ in times]
    assert median(lengths) == pytest.approx(100, rel=0.05)
    assert max(lengths) == 300


@pytest.mark.parametrize("extreme", [0.0, 1.0 - 2**-53])
def test_draws_bear_the_least_and_the_most_that_chance_can_give(extreme: float) -> None:
    draws = Draws(lambda: extreme)
    assert draws.whole(1, 3) in {1, 3}
    assert draws.exponential(1.0) >= 0.0
    assert 1 <= draws.log_normal(10, 1.0, 1000) <= 1000
    assert draws.pick(Popularity(5, 1.0)) in {0, 4}
