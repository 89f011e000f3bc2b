"""Where requests go: the field's cases of balance and affinity, ties, filters, sessions."""

import math
from collections import Counter
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import ConfigError
from prefixmesh.ids import Namespace
from prefixmesh.router.block_index import BlockIndex
from prefixmesh.router.cost import Demand
from prefixmesh.router.decision import decide, explain
from prefixmesh.router.fleet_columns import FleetColumns
from prefixmesh.router.matched_tokens import MatchedTokens, SlotRows
from prefixmesh.router.policy import TIE_SHARE, PolicyConfig
from prefixmesh.router_config import MAX_SPILL_WEIGHT, RouterConfig, RoutingPolicy
from prefixmesh.tokens import pack
from tests.support.column_fleet import COST, PREFILL_MS, Worker, add_row, burst, column_fleet

IDLE = Worker()
NAMESPACE = Namespace(b"n" * 16)


def loaded(requests: int, state: str, *, size: int = 200, device: int = 0) -> Worker:
    """A worker with so many requests of ``size`` tokens, all waiting for prefill or all decoding."""
    waiting_ms = requests * size * PREFILL_MS if state == "waiting" else 0.0
    return Worker(in_flight=requests, waiting_ms=waiting_ms, device=device)


@pytest.mark.parametrize("state", ["waiting", "decoding"])
def test_long_prefix_wins_over_a_little_more_load(state: str) -> None:
    """F4: loads [10, 9, 30] of equal requests, a long prefix on worker 0 → worker 0, not 1."""
    fleet = column_fleet([loaded(10, state, device=4096), loaded(9, state), loaded(30, state)])
    assert fleet.takers(4296) == {0}


@pytest.mark.parametrize("state", ["waiting", "decoding"])
@pytest.mark.parametrize("held", [64, 199])
def test_match_decides_between_idle_workers(state: str, held: int) -> None:
    """F4: loads [0, 0, 9], prefix on 1 → 1, always."""
    fleet = column_fleet([IDLE, Worker(device=held), loaded(9, state)])
    assert fleet.takers(200) == {1}


@pytest.mark.parametrize("state", ["waiting", "decoding"])
def test_short_prefix_does_not_win_over_a_queue(state: str) -> None:
    """F4: loads [10, 1] and a prompt of 200 tokens fully cached on the first → the second."""
    assert column_fleet([loaded(10, state, device=200), loaded(1, state)]).takers(200) == {1}


def test_requests_are_not_the_unit_of_load() -> None:
    """F5: one request of 60k tokens on A, three tiny ones on B → the next goes to B."""
    assert column_fleet([loaded(1, "waiting", size=60_000), loaded(3, "waiting", size=10)]).takers(500) == {1}


@pytest.mark.parametrize("linear", [0.02, 0.5, 2.0])
@pytest.mark.parametrize("bend", [0.0, 1e-5, 1e-4, 4e-4])
@pytest.mark.parametrize("prefix_tokens", [4000, 4096])
def test_burst_with_one_new_prefix_is_neither_scattered_nor_piled_up(
    linear: float, bend: float, prefix_tokens: int
) -> None:
    """F6: 32 at once with one new 4k prefix and tails of 200, 4 empty workers → computed on at most 2, nobody gets over 60 %.

    On fast and slow machines, whether a prompt's late tokens cost as much as its first or, at the end of it, several times that.
    """
    empty = [Worker(linear=linear, quadratic=bend * linear) for _ in range(4)]
    for max_tokens in (1, 16, None):
        taken = burst(empty, requests=32, prefix_tokens=prefix_tokens, tail_tokens=200, max_tokens=max_tokens)
        assert len(taken) <= 2
        assert max(taken.values()) <= 0.6 * 32


def test_burst_of_unmeasured_workers_settles_too() -> None:
    """F6 before anything was measured: by the priors."""
    taken = burst([Worker(linear=0.0, decode_step=0.0)] * 4, requests=32, prefix_tokens=4096, tail_tokens=200)
    assert len(taken) == 2
    assert max(taken.values()) <= 0.6 * 32


def test_true_prefix_decides() -> None:
    """F7: one worker holds P, another Q; Q+P → the second, with Q matched; P in the middle counts for nothing."""
    p, q = list(range(1000, 1640)), list(range(5000, 5640))
    columns, rows, index = FleetColumns(), SlotRows(), BlockIndex(1000)
    for held in (p, q):
        slot = index.open_slot()
        rows.bind(slot, add_row(columns, f"w{slot}:1", IDLE))
        index.stored(slot, Tier.DEVICE, block_fingerprints(NAMESPACE, pack(held)))
    matches = rows.spread(index.find_matches(block_fingerprints(NAMESPACE, pack(q + p))), 64, columns.rows)
    decision = decide(columns, None, matches, Demand(1280, 1300), COST, 0)
    assert decision is not None
    assert (decision.row, decision.terms.counted_tokens) == (1, 640)


def test_no_load_is_too_small_to_count() -> None:
    """Of workers that hold the same, the less busy one is chosen: there is no threshold."""
    assert column_fleet([loaded(3, "decoding"), loaded(2, "decoding")]).takers(10) == {1}
    assert column_fleet([loaded(90, "decoding"), loaded(60, "decoding")]).takers(10) == {1}


def test_longest_match_is_what_falls_out_when_load_is_equal() -> None:
    """With equal load, also a small difference in what is held decides."""
    fleet = [loaded(4, "decoding", device=held) for held in (640, 704, 64, 0)]
    assert column_fleet(fleet).takers(4096) == {1}


def test_ties_spread_evenly() -> None:
    """Equals take turns, also where measured rates differ by a few percent."""
    fleet = column_fleet([Worker(linear=0.5 + 0.01 * i) for i in range(4)])
    turn, taken = 0, Counter[int]()
    for _ in range(40):
        decision = fleet.decide(500, turn=turn)
        assert decision is not None
        turn += decision.was_tie
        taken[decision.row] += 1
    assert set(taken.values()) == {10}


def test_rates_that_wobble_do_not_send_a_request_to_the_busier_of_equals() -> None:
    """The one that decodes already seems 8 % faster: the idle one takes the request. Twice as fast is no wobble."""
    busy = Worker(in_flight=1, linear=PREFILL_MS / 1.08)
    assert column_fleet([busy, IDLE]).takers(1400) == {1}
    assert column_fleet([Worker(in_flight=1, linear=PREFILL_MS / 2), IDLE]).takers(1400) == {0}


def test_slow_worker_is_taken_only_when_others_queue_for_as_long() -> None:
    """F10 at one moment: ten times slower."""
    slow = Worker(linear=5.0)
    assert column_fleet([slow, Worker(in_flight=3)]).takers(500) == {1}
    assert column_fleet([slow, Worker(in_flight=80, waiting_ms=9000.0)]).takers(500) == {0}


@pytest.mark.parametrize("weight", [-1.0, 2 * MAX_SPILL_WEIGHT, 1e308, math.inf, math.nan])
def test_weight_that_makes_costs_no_numbers_is_refused(weight: float) -> None:
    """With the largest that may be, who is not able is not taken, however much waits everywhere."""
    busy = Worker(in_flight=2**20, waiting_ms=1e12, decode_work_ms=1e12, linear=1e9)
    fleet = column_fleet([busy, replace(busy, usable=False)])
    assert fleet.takers(100_000, PolicyConfig(spill_weight=MAX_SPILL_WEIGHT)) == {0}
    with pytest.raises(ConfigError, match="spill_weight must be from 0 to"):
        RouterConfig(workers=("w:1",), spill_weight=weight)


def test_spill_weight_keeps_a_prefix_together() -> None:
    """With weight 0 a request thinks of itself alone and leaves the holder's queue early; with the default it stays longer."""
    fleet = column_fleet([Worker(device=4096, waiting_ms=2200.0), IDLE])
    assert fleet.takers(4296, PolicyConfig(spill_weight=0.0)) == {1}
    assert fleet.takers(4296) == {0}


def test_host_match_is_worth_less_than_a_device_match_and_more_than_none() -> None:
    """Between idle workers: the device's holder, then the host's, then anyone."""
    device, host = Worker(device=640), Worker(total=640, load_back=0.05)
    assert column_fleet([IDLE, host, device]).takers(700) == {2}
    assert column_fleet([IDLE, host, IDLE]).takers(700) == {1}


def test_match_in_a_view_that_is_not_trusted_counts_less() -> None:
    """The stale holder of more loses to the exact holder of less."""
    assert column_fleet([Worker(device=900, trust=0.3), Worker(device=500)]).takers(1000) == {1}
    assert column_fleet([Worker(device=900, trust=0.9), Worker(device=500)]).takers(1000) == {0}


def test_who_is_not_usable_not_allowed_or_too_small_is_not_taken() -> None:
    """Filters come before the cost, whatever it would have been; without anyone left there is no decision."""
    draining, short = Worker(device=900, usable=False), Worker(device=800, context_length=1000)
    small = Worker(device=700, pool=(1000, 1000, 0))
    fleet = column_fleet([draining, short, small, Worker(device=10), IDLE])
    demand = Demand(1000, 1016)
    assert fleet.takers(1000, demand=demand) == {3}
    assert [terms.row for terms in fleet.terms(1000, demand=demand)] == [3, 4]
    others = np.array([True, True, True, False, True])
    excluded = fleet.decide(1000, demand=demand, allowed=others)
    assert excluded is not None
    assert excluded.row == 4
    assert fleet.decide(1000, demand=demand, allowed=np.zeros(5, dtype=np.bool_)) is None
    assert fleet.decide(1000, demand=Demand(1000, 2_000_000)) is None
    assert column_fleet([]).decide(1000) is None


@pytest.mark.parametrize("policy", get_args(RoutingPolicy))
def test_filters_hold_for_every_policy(policy: RoutingPolicy) -> None:
    """The only worker that can take a request takes it."""
    fleet = column_fleet([Worker(usable=False), Worker(context_length=10), Worker(in_flight=99)])
    assert fleet.takers(500, PolicyConfig(policy=policy)) == {2}


def test_adapter_that_is_there_is_no_tie_with_one_that_is_not() -> None:
    """However cheap the load: the worker that has the adapter takes the request, until its queue costs more."""
    here = np.array([True, False, True])
    demand = Demand(2000, 2016, not_resident=here)
    assert column_fleet([Worker(adapter_load=1.0)] * 3).takers(2000, demand=demand) == {1}
    cheap = Worker(adapter_load=1.0)
    queue = Worker(adapter_load=1.0, in_flight=5, waiting_ms=5000.0)
    assert column_fleet([cheap, queue, cheap]).takers(2000, demand=demand) == {0, 2}


def test_session_goes_back_where_it_was_among_workers_that_differ_little() -> None:
    """Affinity settles what would be a tie, and never a real difference, however much it is set to."""
    at_second = Demand(1000, 1016, home_row=1)
    fond = PolicyConfig(affinity_ms=1e9)
    assert column_fleet([IDLE, IDLE, IDLE]).takers(1000, COST, at_second) == {0, 1, 2}, "off by default"
    assert column_fleet([IDLE, IDLE, IDLE]).takers(1000, fond, at_second) == {1}
    assert column_fleet([IDLE, Worker(linear=PREFILL_MS * 1.05)]).takers(1000, fond, at_second) == {1}
    assert column_fleet([IDLE, Worker(in_flight=4)]).takers(1000, fond, at_second) == {0}
    assert column_fleet([Worker(device=500), IDLE]).takers(1000, fond, at_second) == {0}
    assert column_fleet([IDLE, Worker(usable=False)]).takers(1000, fond, at_second) == {0}
    wanted_little = PolicyConfig(affinity_ms=1.0)
    slower = column_fleet([IDLE, Worker(linear=PREFILL_MS * 1.05)])
    assert slower.takers(1000, wanted_little, at_second) == {0, 1}, (
        "less than the difference: the turn decides"
    )


def test_explanation_shows_what_the_session_is_worth() -> None:
    """It is taken off the total of the session's worker, and is bounded by what does not tell workers apart."""
    fleet = column_fleet([IDLE, IDLE])
    demand = Demand(1000, 1016, home_row=1)
    first, home = fleet.terms(1000, PolicyConfig(affinity_ms=1e9), demand)
    assert (first.affinity_ms, home.affinity_ms > 0.0) == (0.0, True)
    assert home.total_ms == pytest.approx(first.total_ms - home.affinity_ms)
    assert home.affinity_ms <= TIE_SHARE * (1.0 + COST.spill_weight) * first.total_ms


def test_decision_carries_the_terms_that_explanation_shows() -> None:
    """What was decided by is what is told."""
    fleet = column_fleet([loaded(3, "waiting"), Worker(device=640, in_flight=1), IDLE])
    decision = fleet.decide(700)
    assert decision is not None
    assert decision.terms == fleet.terms(700)[decision.row]


def test_a_fleet_of_nobody_is_decided_and_explained_without_anybody() -> None:
    nothing, demand = MatchedTokens(np.zeros(0), np.zeros(0)), Demand(100, 200)
    assert decide(FleetColumns(), None, nothing, demand, PolicyConfig(), 0) is None
    assert not explain(FleetColumns(), None, nothing, demand, PolicyConfig())


def test_tie_goes_to_the_shortest_wait_and_not_to_the_fewest_requests() -> None:
    """What does not matter beside a prompt of 5,000 tokens still decides between equals, and by work."""
    busy = [loaded(1, "waiting", size=60), loaded(3, "waiting", size=10)]
    assert column_fleet(busy).takers(5000) == {1}
    assert column_fleet([*busy, loaded(2, "waiting", size=15)]).takers(5000) == {2}, (
        "of equal waits the fewest"
    )


def test_margin_of_a_tie_is_of_the_requests_own_prefill_and_not_of_what_it_waits_for() -> None:
    """Behind queues of seconds a cost that is a tenth higher is a real difference."""
    queues = [loaded(2, "waiting", size=10_000), loaded(2, "waiting", size=10_400)]
    assert column_fleet(queues).takers(500) == {0}
