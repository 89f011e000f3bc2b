"""The policies beside the cost: each does what its name says, and nothing else."""

import random
from collections import Counter

import numpy as np
import pytest

from prefixmesh.router.block_index import Matches
from prefixmesh.router.cost import Demand
from prefixmesh.router.decision import decide
from prefixmesh.router.fleet_columns import FleetColumns
from prefixmesh.router.matched_tokens import SlotRows
from prefixmesh.router.policy import HASH_LOAD_FACTOR, PICKS, PolicyConfig, prefix_key
from prefixmesh.router_config import RoutingPolicy
from tests.support.column_fleet import ColumnFleet, Worker, add_row, column_fleet

RNG_DRAWS = 400


def by(policy: RoutingPolicy) -> PolicyConfig:
    return PolicyConfig(policy=policy)


def draws(fleet: ColumnFleet, policy: RoutingPolicy) -> Counter[int]:
    """Who is taken how often of 400 drawn numbers, the turn standing still."""
    rng = random.Random(7)
    decisions = [fleet.decide(500, by(policy), chance=rng.getrandbits(64)) for _ in range(RNG_DRAWS)]
    return Counter(decision.row for decision in decisions if decision)


def test_round_robin_ignores_everything_but_the_turn() -> None:
    fleet = column_fleet([Worker(in_flight=9), Worker(device=400), Worker(usable=False), Worker()])
    rows = []
    for turn in range(6):
        decision = fleet.decide(500, by("round_robin"), turn=turn)
        assert decision is not None
        rows.append(decision.row)
    assert rows == [0, 1, 3, 0, 1, 3]


def test_random_takes_everyone_alike() -> None:
    taken = draws(column_fleet([Worker(in_flight=9), Worker(device=400), Worker(), Worker()]), "random")
    assert all(70 <= taken[row] <= 130 for row in range(4))


def test_least_loaded_counts_requests_and_nothing_else() -> None:
    fleet = column_fleet([Worker(in_flight=2, device=490), Worker(in_flight=1, waiting_ms=9000.0)])
    assert fleet.takers(500, by("least_loaded")) == {1}
    assert column_fleet([Worker(), Worker(device=400)]).takers(500, by("least_loaded")) == {0, 1}


def test_power_of_two_takes_the_less_busy_of_two_drawn() -> None:
    """The busiest is never taken, as the other of a pair is less busy; the idlest whenever it is drawn, which is every second time."""
    fleet = column_fleet([Worker(in_flight=load) for load in (9, 3, 2, 0)])
    taken = draws(fleet, "power_of_two")
    assert taken[0] == 0
    assert 160 <= taken[3] <= 240
    assert taken[3] > taken[2] > taken[1] > 0
    assert draws(column_fleet([Worker(in_flight=9)]), "power_of_two") == {0: RNG_DRAWS}


def test_longest_match_follows_the_match_into_any_queue() -> None:
    """On whatever tier; equals take turns."""
    fleet = column_fleet([Worker(), Worker(device=64, total=300, in_flight=50), Worker(device=128)])
    assert fleet.takers(500, by("longest_match")) == {1}
    assert column_fleet([Worker(device=64), Worker(in_flight=9, device=64)]).takers(
        500, by("longest_match")
    ) == {0, 1}


def home_of(
    fleet: ColumnFleet, key: int, allowed: "np.ndarray[tuple[int], np.dtype[np.bool_]] | None" = None
) -> int:
    demand = Demand(500, 516, prefix_key=key)
    decision = fleet.decide(500, by("prefix_hash"), demand=demand, allowed=allowed)
    assert decision is not None
    return decision.row


def test_prefix_hash_keeps_a_prefix_at_home_whatever_is_cached() -> None:
    """Prefixes spread over all workers, and each comes back to its own."""
    keys = [random.Random(seed).getrandbits(64) for seed in range(400)]
    fleet = column_fleet([Worker() for _ in range(4)])
    homes = [home_of(fleet, key) for key in keys]
    assert all(70 <= count <= 130 for count in Counter(homes).values())
    assert homes == [home_of(column_fleet([Worker(device=400), *[Worker()] * 3]), key) for key in keys]


def test_prefix_hash_moves_only_the_prefixes_of_a_worker_that_goes() -> None:
    keys = [random.Random(seed).getrandbits(64) for seed in range(100)]
    fleet = column_fleet([Worker() for _ in range(4)])
    without_last = np.array([True, True, True, False])
    for key in keys:
        home = home_of(fleet, key)
        assert home_of(fleet, key, without_last) == home or home == 3


def test_prefix_hash_sends_a_prefix_on_when_its_home_has_its_bound_of_requests() -> None:
    """With 8 requests on 4 workers: 1.25 times the mean of 9, rounded up, is 3."""
    key = 12345
    home = home_of(column_fleet([Worker(in_flight=2)] * 4), key)
    below = column_fleet([Worker(in_flight=2)] * 4)
    assert np.ceil(HASH_LOAD_FACTOR * 9 / 4) == 3
    assert home_of(below, key) == home
    loads = [2, 2, 2, 1]
    full = [Worker(in_flight=3 if row == home else load) for row, load in enumerate(loads)]
    elsewhere = home_of(column_fleet(full), key)
    assert elsewhere != home


def test_prefix_hash_agrees_between_routers_that_met_the_workers_in_another_order() -> None:
    """It goes by addresses, not by rows."""
    addresses = [f"10.0.0.{index}:9000" for index in range(8)]

    def homes(order: list[str]) -> list[str]:
        columns = FleetColumns()
        rows = {add_row(columns, address, Worker()): address for address in order}
        matches = SlotRows().spread(Matches([], []), 64, columns.rows)
        chosen = []
        for key in range(50):
            demand = Demand(500, 516, prefix_key=key * 0x9E3779B97F4A7C15 % 2**64)
            decision = decide(columns, None, matches, demand, by("prefix_hash"), 0)
            assert decision is not None
            chosen.append(rows[decision.row])
        return chosen

    assert homes(addresses) == homes(addresses[::-1])


def test_prefix_key_is_that_of_the_first_blocks() -> None:
    """Prompts with the same first 256 tokens have the same; a prompt without a whole block goes by all of it."""
    assert prefix_key([1, 2, 3, 4, 5, 6], 9) == prefix_key([1, 2, 3, 4, 7], 9) == 4  # type: ignore[list-item]
    assert prefix_key([1, 2], 9) == 2  # type: ignore[list-item]
    assert prefix_key([], 9) == 9


@pytest.mark.parametrize("policy", [name for name in PICKS if name != "cost"])
def test_decision_by_any_policy_carries_what_is_expected_of_the_worker(policy: RoutingPolicy) -> None:
    """So that predictions can be compared."""
    fleet = column_fleet([Worker(device=64 * row, waiting_ms=10.0 * row) for row in range(4)])
    decision = fleet.decide(500, by(policy), turn=2, chance=2**33 + 5)
    assert decision is not None
    assert decision.terms == fleet.terms(500, by(policy))[decision.row]
