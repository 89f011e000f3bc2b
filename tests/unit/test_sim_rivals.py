"""Rules of other routers: each takes the worker that its published description says."""

from typing import Any

import pytest

from prefixmesh.sim.rivals.catalogue import RULES
from prefixmesh.sim.rivals.view import RivalView


def seen(**columns: Any) -> RivalView:
    """Three idle, empty workers and a prompt of ten blocks, but for ``columns``."""
    nothing = (0, 0, 0)
    defaults: dict[str, Any] = dict.fromkeys(RivalView._fields, nothing)
    held = columns.get("held_blocks", columns.get("device_blocks", nothing))
    defaults |= {
        "block_tokens": 8,
        "prompt_tokens": 80,
        "prompt_blocks": 10,
        "turn": 0,
        "chance": 0.0,
        "held_blocks": held,
    }
    return RivalView(**(defaults | columns))


def takers(rule: str, **columns: Any) -> set[int]:
    """Everyone who is taken in any turn."""
    return {RULES[rule](seen(turn=turn, **columns)) for turn in range(6)}


@pytest.mark.parametrize("rule", sorted(set(RULES) - {"random", "backlog"}))
def test_equals_take_turns(rule: str) -> None:
    assert takers(rule) == {0, 1, 2}


def test_round_robin_looks_at_nothing_but_the_turn() -> None:
    assert takers("round_robin", in_flight=(9, 0, 0), held_blocks=(0, 10, 0)) == {0, 1, 2}


def test_random_goes_by_chance_alone() -> None:
    assert [RULES["random"](seen(chance=chance)) for chance in (0.0, 0.34, 0.99)] == [0, 1, 2]


def test_least_loaded_takes_the_fewest_requests() -> None:
    assert takers("least_loaded", in_flight=(2, 1, 3), held_blocks=(10, 0, 10)) == {1}


@pytest.mark.parametrize(("held", "taken"), [((2, 0, 0), {1}), ((3, 0, 0), {0}), ((3, 0, 5), {2})])
def test_gate_takes_the_longest_match_from_three_tenths_on(held: tuple[int, ...], taken: set[int]) -> None:
    assert takers("match_gate", held_blocks=held, in_flight=(5, 1, 5)) == taken


@pytest.mark.parametrize(
    ("in_flight", "taken"),
    [((64, 0, 1), {0}), ((65, 0, 1), {1}), ((195, 130, 131), {0}), ((196, 130, 131), {1})],
)
def test_gate_yields_to_imbalance_by_both_measures_only(in_flight: tuple[int, ...], taken: set[int]) -> None:
    assert takers("match_gate", held_blocks=(10, 0, 0), in_flight=in_flight) == taken


def test_gate_takes_the_least_busy_of_those_that_match_equally() -> None:
    assert takers("match_gate", held_blocks=(8, 8, 1), in_flight=(3, 2, 0)) == {1}


def test_matched_blocks_outweigh_as_many_that_wait() -> None:
    assert takers("block_cost", device_blocks=(8, 0, 0), prefill_blocks=(7.5, 0, 9)) == {0}
    assert takers("block_cost", device_blocks=(8, 0, 0), prefill_blocks=(8.5, 0, 9)) == {1}


def test_blocks_that_are_active_count_as_those_that_wait() -> None:
    assert takers("block_cost", device_blocks=(8, 0, 0), active_blocks=(8.5, 0, 9)) == {1}


def test_block_on_the_host_is_a_credit_of_three_quarters() -> None:
    held = {"device_blocks": (0, 6, 0), "held_blocks": (8, 6, 0)}
    assert takers("block_cost", **held) == {0, 1}
    assert takers("block_cost", **held, prefill_blocks=(0, 0.1, 0)) == {0}
    assert takers("block_cost", **held, prefill_blocks=(0.1, 0, 0)) == {1}


def test_scores_weigh_queue_two_use_two_prefix_three() -> None:
    assert takers("weighted_scores", held_blocks=(7, 0, 0), queued=(1, 0, 0)) == {0}
    assert takers("weighted_scores", held_blocks=(6, 0, 0), queued=(1, 0, 0)) == {1, 2}
    assert takers("weighted_scores", held_blocks=(6, 0, 0), kv_use=(0.8, 0, 0)) == {0}
    assert takers("weighted_scores", held_blocks=(6, 0, 0), kv_use=(0.95, 0, 0)) == {1, 2}


def test_queues_are_scaled_by_the_longest_and_the_shortest() -> None:
    """However short the longest is, it scores nothing."""
    for longest in (1, 100):
        assert takers("weighted_scores", held_blocks=(6, 0, 0), queued=(longest, 0, 0)) == {1, 2}
    assert takers("weighted_scores", held_blocks=(6, 0, 0), queued=(100, 100, 100)) == {0}


def test_backlog_takes_least_to_be_computed_before_the_first_token_and_the_first_of_equals() -> None:
    assert takers("backlog", held_blocks=(8, 0, 0), prefill_blocks=(7.5, 0, 0)) == {0}
    assert takers("backlog", held_blocks=(8, 0, 0), prefill_blocks=(8.5, 0, 0)) == {1}
    assert takers("backlog") == {0}


def test_backlog_counts_the_rest_of_a_prompt_by_its_tokens() -> None:
    """Ten blocks of which the last has one token: who holds all of it saves one token more than who holds nine."""
    waits = (1.5 / 8, 0, 0)
    assert takers("backlog", prompt_tokens=73, held_blocks=(10, 9, 9), prefill_blocks=waits) == {1}
    assert takers("backlog", prompt_tokens=80, held_blocks=(10, 9, 9), prefill_blocks=waits) == {0}
