"""Which worker takes a request: the cost in milliseconds, and the policies beside it."""

from collections import Counter

import pytest

from prefixmesh.router.cost import (
    PRIOR_DECODE_STEP_MS,
    PRIOR_PREFILL_TOKENS_PER_S,
    Candidate,
    Rates,
    RequestSize,
    estimate,
    expected_output,
    fill_rates,
    prefill_ms,
)
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.policy import PolicyConfig, choose

RATES = Rates(2000.0, 30.0)
DECODING, WAITING = "decoding", "waiting"


def worker(
    name: str,
    *,
    load: int = 0,
    matched: int = 0,
    size: int = 200,
    state: str = WAITING,
    rates: Rates = RATES,
    places: int = 0,
) -> Candidate:
    """A worker with ``load`` requests of ``size`` uncached tokens each, all waiting for prefill or all decoding."""
    waiting_ms = prefill_ms(load * size, rates) if state == WAITING else 0.0
    return Candidate(Endpoint(name), matched, load, waiting_ms, waiting_ms, rates, places)


def pick(candidates: list[Candidate], prompt_tokens: int, *, config: PolicyConfig | None = None) -> set[str]:
    """Everyone who is chosen in any turn."""
    size = RequestSize(prompt_tokens, 16)
    decisions = [choose(candidates, size, config or PolicyConfig(), turn) for turn in range(12)]
    return {decision.endpoint for decision in decisions if decision}


@pytest.mark.parametrize("state", [WAITING, DECODING])
def test_long_prefix_wins_over_a_little_more_load(state: str) -> None:
    """F4: loads [10, 9, 30] of equal requests, a long prefix on worker 0 → worker 0, not 1."""
    loads = [
        worker("0", load=10, matched=4096, state=state),
        worker("1", load=9, state=state),
        worker("2", load=30, state=state),
    ]
    assert pick(loads, 4296) == {"0"}


@pytest.mark.parametrize("state", [WAITING, DECODING])
def test_match_decides_between_idle_workers(state: str) -> None:
    """F4: loads [0, 0, 9], prefix on 1 → 1, always."""
    loads = [worker("0"), worker("1", matched=64), worker("2", load=9, state=state)]
    assert pick(loads, 200) == {"1"}


@pytest.mark.parametrize("state", [WAITING, DECODING])
def test_short_prefix_does_not_win_over_a_queue(state: str) -> None:
    """F4: loads [10, 1] and a prompt of 200 tokens fully cached on the first → the second."""
    loads = [worker("0", load=10, matched=199, state=state), worker("1", load=1, state=state)]
    assert pick(loads, 200) == {"1"}


def test_requests_are_not_the_unit_of_load() -> None:
    """F5: one request of 60k tokens on A, three tiny ones on B → the next goes to B."""
    assert pick([worker("a", load=1, size=60_000), worker("b", load=3, size=10)], 500) == {"b"}


def test_no_load_is_too_small_to_count() -> None:
    """Of workers that hold the same, the less busy one is chosen: there is no threshold."""
    assert pick([worker("a", load=3, state=DECODING), worker("b", load=2, state=DECODING)], 10) == {"b"}
    assert pick([worker("a", load=90, state=DECODING), worker("b", load=60, state=DECODING)], 10) == {"b"}


def test_equals_take_turns() -> None:
    """Ties spread evenly, also where measured rates differ by a few percent."""
    fleet = [worker(name, rates=Rates(2000.0 + 30.0 * i, 30.0)) for i, name in enumerate("abcd")]
    turn, taken = 0, Counter[str]()
    for _ in range(40):
        decision = choose(fleet, RequestSize(500, 16), PolicyConfig(), turn)
        assert decision is not None
        turn += decision.was_tie
        taken[decision.endpoint] += 1
    assert set(taken.values()) == {10}


def test_slow_worker_is_left_out() -> None:
    """F10: a worker ten times slower gets the request only when the others' queues cost as much."""
    slow, fast = Rates(200.0, 300.0), Rates(2000.0, 30.0)
    assert pick([worker("slow", rates=slow), worker("fast", load=3, rates=fast)], 500) == {"fast"}
    assert pick([worker("slow", rates=slow), worker("fast", load=80, rates=fast)], 500) == {"slow"}


def test_full_batch_makes_a_request_wait() -> None:
    """Where all places are taken, waiting for one is part of the time to the first token."""
    full = worker("full", load=4, places=4, state=DECODING)
    roomy = worker("roomy", load=4, places=8, state=DECODING)
    assert pick([full, roomy], 100) == {"roomy"}
    cost = estimate(full, RequestSize(100, 64), 1.0)
    assert cost.wait_ms == pytest.approx(64 * 30.0 / 4)


def test_spill_weight_keeps_a_prefix_together() -> None:
    """With weight 0 a request thinks of itself alone and leaves the holder's queue early; with weight 1 it stays longer."""
    fleet = [worker("holder", load=22, matched=4096), worker("idle")]
    assert pick(fleet, 4296, config=PolicyConfig(spill_weight=0.0)) == {"idle"}
    assert pick(fleet, 4296, config=PolicyConfig(spill_weight=1.0)) == {"holder"}


def test_cost_terms_add_up() -> None:
    """The total is the own time to the first token plus the weighted work for others, in milliseconds."""
    cost = estimate(worker("a", load=2, matched=64, size=100), RequestSize(164, 16), 2.0)
    assert (cost.wait_ms, cost.prefill_ms, cost.first_token_ms) == (100.0, 50.0, 150.0)
    assert cost.total_ms == pytest.approx(150.0 + 2.0 * (50.0 + cost.crowding_ms))


def test_unmeasured_rates_are_taken_from_the_fleet_then_from_priors() -> None:
    """A worker that has measured nothing yet is assumed to be like the others."""
    assert fill_rates([Rates(0.0, 0.0)]) == [Rates(PRIOR_PREFILL_TOKENS_PER_S, PRIOR_DECODE_STEP_MS)]
    assert fill_rates([Rates(0.0, 0.0), Rates(100.0, 0.0), Rates(300.0, 7.0)]) == [
        Rates(200.0, 7.0),
        Rates(100.0, 7.0),
        Rates(300.0, 7.0),
    ]


def test_expected_output_is_bounded_by_the_caller() -> None:
    """A short limit is believed; a long or missing one is not."""
    assert (expected_output(3), expected_output(100_000), expected_output(0)) == (3, expected_output(None), 0)


def test_round_robin_ignores_everything_but_the_turn() -> None:
    """For comparison: everyone takes turns."""
    fleet = [worker("a", load=9), worker("b", matched=100)]
    assert pick(fleet, 200, config=PolicyConfig(policy="round_robin")) == {"a", "b"}


def test_least_loaded_ignores_caches() -> None:
    """For comparison: fewest requests, then least work; equals take turns."""
    config = PolicyConfig(policy="least_loaded")
    assert pick([worker("a", load=2, matched=190), worker("b", load=1)], 200, config=config) == {"b"}
    assert pick([worker("a"), worker("b")], 200, config=config) == {"a", "b"}


def test_no_candidate_gives_no_decision() -> None:
    """None, not an error: the caller knows why nobody is ready."""
    assert choose([], RequestSize(1, 1), PolicyConfig(), 0) is None


def test_rates_that_wobble_do_not_send_a_request_to_the_busier_of_equals() -> None:
    """Two workers hold nothing; the one that decodes already seems 8 % faster: the idle one takes the request."""
    busy = worker("busy", load=1, state=DECODING, rates=Rates(RATES.prefill_tokens_per_s * 1.08, 30.0))
    assert pick([busy, worker("idle")], 1400) == {"idle"}
    much_faster = worker("busy", load=1, state=DECODING, rates=Rates(RATES.prefill_tokens_per_s * 2, 30.0))
    assert pick([much_faster, worker("idle")], 1400) == {"busy"}
