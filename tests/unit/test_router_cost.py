"""The cost, term by term, and what must hold of it whatever the workers are like."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.router.cost import (
    ADAPTER_CHAIN,
    EVICTED_USE,
    CandidateTerms,
    Demand,
    decode_work_ms,
)
from prefixmesh.router.fleet_columns import ANSWER_TOKENS
from prefixmesh.router.measured_rates import PRIOR_ADAPTER_LOAD_MS, PRIOR_LOAD_BACK_SHARE
from prefixmesh.router.placement import PrefillCurve
from prefixmesh.router.policy import PolicyConfig
from tests.support.column_fleet import COST, DECODE_MS, PREFILL_MS, Worker, column_fleet

LAMBDA = COST.spill_weight
ROOMY = (100_000, 0)
"""A host tier with room for everything."""


def terms_of(worker: Worker, prompt_tokens: int, demand: Demand | None = None) -> CandidateTerms:
    """The only worker's terms."""
    return column_fleet([worker]).terms(prompt_tokens, demand=demand)[0]


def test_prefill_follows_the_measured_curve_from_what_is_cached_to_the_end() -> None:
    """first * (L - h) + second * (L**2 - h**2): late tokens attend to more."""
    terms = terms_of(Worker(device=600, linear=0.5, quadratic=1e-4), 1000)
    assert terms.prefill_ms == pytest.approx(0.5 * 400 + 1e-4 * (1000**2 - 600**2))


def test_what_counts_as_cached_is_what_a_worker_will_find() -> None:
    """Never the last token; whole units of the cache; nothing without a cache; as far as the view is trusted."""
    assert terms_of(Worker(device=1000), 1000).counted_tokens == 999
    assert terms_of(Worker(device=1000, match_unit=16), 1000).counted_tokens == 992
    assert terms_of(Worker(device=1000, match_unit=0), 1000).counted_tokens == 0
    assert terms_of(Worker(device=800, trust=0.5), 1000).counted_tokens == 400
    assert terms_of(Worker(device=800, trust=0.5), 1000).device_tokens == 800
    assert terms_of(Worker(device=800, trust=0.0), 1000).counted_tokens == 0


def test_wait_is_the_prefill_before_and_the_steps_until_a_place_is_free() -> None:
    """Four answers of 64 tokens on four places: one ends every sixteen steps."""
    assert terms_of(Worker(waiting_ms=70.0), 100).wait_ms == 70.0
    assert terms_of(Worker(in_flight=3, places=4), 100).wait_ms == 0.0
    full = terms_of(Worker(in_flight=4, places=4, waiting_ms=70.0), 100)
    assert full.wait_ms == pytest.approx(70.0 + ANSWER_TOKENS * DECODE_MS / 4)


def test_lack_of_pages_makes_a_request_wait_for_running_ones_to_end() -> None:
    """Of 9,500 tokens in use 564 must be given back, at the pace of an answer's length for all of them."""
    tight = terms_of(Worker(in_flight=9, pool=(10_000, 100, 400)), 1000)
    lacking = 1000 + ANSWER_TOKENS - 500
    assert tight.wait_ms == pytest.approx(ANSWER_TOKENS * DECODE_MS * lacking / 9500)
    assert terms_of(Worker(in_flight=9, pool=(10_000, 100, 4000)), 1000).wait_ms == 0.0


def test_host_part_is_loaded_back_where_that_is_cheaper_than_to_compute_it() -> None:
    """It then counts as cached and costs its load; elsewhere it counts for nothing."""
    cheap = terms_of(Worker(device=100, total=900, load_back=0.1), 1000)
    assert (cheap.counted_tokens, cheap.host_tokens) == (900, 800)
    assert cheap.load_back_ms == pytest.approx(80.0)
    assert cheap.prefill_ms == pytest.approx(50.0)
    dear = terms_of(Worker(device=100, total=900, load_back=0.6), 1000)
    assert (dear.counted_tokens, dear.host_tokens, dear.load_back_ms) == (100, 800, 0.0)
    far = terms_of(Worker(device=100, total=900, load_back=0.6, quadratic=1e-3), 1000)
    assert far.load_back_ms == pytest.approx(480.0), "late tokens are dearer to compute"
    untold = terms_of(Worker(total=900, linear=0.01), 1000)
    assert untold.load_back_ms == pytest.approx(900 * 0.01 * PRIOR_LOAD_BACK_SHARE)
    assert untold.counted_tokens == 900, "nor may a host tier be left out because nobody has used it yet"


def test_adapter_that_is_not_resident_costs_its_load_and_the_loads_that_follow() -> None:
    """Where nobody has measured, by the prior; where it is resident, nothing."""
    absent, resident = np.array([True]), np.array([False])
    told = terms_of(Worker(adapter_load=40.0), 100, Demand(100, 100, not_resident=absent))
    assert (told.adapter_load_ms, told.eviction_ms) == (40.0, ADAPTER_CHAIN * 40.0)
    assert (
        terms_of(Worker(), 100, Demand(100, 100, not_resident=absent)).adapter_load_ms
        == PRIOR_ADAPTER_LOAD_MS
    )
    there = terms_of(Worker(), 100, Demand(100, 100, not_resident=resident))
    assert (there.adapter_load_ms, there.eviction_ms) == (0.0, 0.0)


def test_recompute_is_the_prefill_beyond_the_least_that_would_do() -> None:
    """The holder need not compute anything twice; the other computes 600 tokens that are there already."""
    holder, other = column_fleet([Worker(device=600), Worker()]).terms(1000)
    assert holder.recompute_ms == 0.0
    assert other.recompute_ms == pytest.approx(600 * PREFILL_MS)


def test_eviction_is_the_useful_part_of_what_goes_to_make_room() -> None:
    """What is free is taken first; no more goes than is evictable."""
    full = terms_of(Worker(pool=(10_000, 100, 5000)), 1000)
    assert full.eviction_ms == pytest.approx((1000 + ANSWER_TOKENS - 100) * PREFILL_MS * EVICTED_USE)
    assert terms_of(Worker(pool=(10_000, 100, 200)), 1000).eviction_ms == pytest.approx(
        200 * PREFILL_MS * EVICTED_USE
    )
    assert terms_of(Worker(pool=(10_000, 2000, 5000)), 1000).eviction_ms == 0.0
    assert terms_of(Worker(), 1000).eviction_ms == 0.0, "a pool that nobody has told of is no reason to wait"
    kept, lost = column_fleet(
        [Worker(device=900, pool=(10_000, 0, 9000)), Worker(pool=(10_000, 0, 9000))]
    ).terms(1000)
    assert kept.eviction_ms < lost.eviction_ms, "what is cached needs no room"


def test_what_is_demoted_costs_its_load_back_and_not_its_prefill() -> None:
    """Where that is less; and by what is assumed where nobody has measured it."""
    pool, gone = (10_000, 0, 9000), 1000 + ANSWER_TOKENS
    for rates, each_ms in (
        ({"load_back": 0.1}, 0.1),
        ({"load_back": 2.0}, PREFILL_MS),
        ({}, PREFILL_MS * PRIOR_LOAD_BACK_SHARE),
    ):
        kept = terms_of(Worker(pool=pool, host=ROOMY, **rates), 1000)  # type: ignore[arg-type]
        assert kept.eviction_ms == pytest.approx(gone * each_ms * EVICTED_USE)
    kept, lost = column_fleet([Worker(pool=pool, host=ROOMY), Worker(pool=pool)]).terms(1000)
    assert lost.eviction_ms == pytest.approx(gone * PREFILL_MS * EVICTED_USE)
    assert kept.total_ms < lost.total_ms


def test_what_is_loaded_back_takes_room_on_the_device_and_none_on_the_host() -> None:
    """As much goes to make room for it, and as many pages lack, as if it were computed; it is on the host already."""
    pool = (10_000, 0, 9000)
    loads = terms_of(Worker(total=640, pool=pool, host=ROOMY, load_back=0.1), 1000)
    computes = terms_of(Worker(pool=pool, host=ROOMY, load_back=0.1), 1000)
    assert loads.counted_tokens == 640
    assert loads.eviction_ms == computes.eviction_ms
    full = (0, 9000)
    loads = terms_of(Worker(total=640, pool=pool, host=full, load_back=0.1), 1000)
    computes = terms_of(Worker(pool=pool, host=full, load_back=0.1), 1000)
    assert computes.eviction_ms - loads.eviction_ms == pytest.approx(640 * PREFILL_MS * EVICTED_USE)
    tight = {"in_flight": 9, "pool": (10_000, 100, 400), "host": ROOMY, "load_back": 0.1}
    loads, computes = (terms_of(Worker(total=total, **tight), 1000) for total in (640, 0))  # type: ignore[arg-type]
    assert loads.wait_ms == computes.wait_ms > 0.0


def test_what_a_full_host_gives_up_for_it_is_gone() -> None:
    """The host has a copy of what the device holds, so that a new prompt takes room on both; what is free there goes first, and no more can
    go than is evictable. So a worker that has room on its host is taken before one that has none, and an empty one before both."""
    pool, gone = (10_000, 0, 9000), 1000 + ANSWER_TOKENS

    def eviction_ms(free: int, evictable: int) -> float:
        worker = Worker(pool=pool, host=(free, evictable), load_back=0.1)
        return terms_of(worker, 1000).eviction_ms / EVICTED_USE

    demoted_ms = gone * 0.1
    assert eviction_ms(gone, 9000) == pytest.approx(demoted_ms)
    assert eviction_ms(gone - 300, 9000) == pytest.approx(demoted_ms + 300 * PREFILL_MS)
    assert eviction_ms(0, 9000) == pytest.approx(demoted_ms + gone * PREFILL_MS)
    assert eviction_ms(0, 200) == pytest.approx(demoted_ms + 200 * PREFILL_MS)
    full, roomy = (Worker(pool=pool, host=host, load_back=0.1) for host in ((0, 9000), ROOMY))
    assert column_fleet([full, roomy]).takers(1000) == {1}
    assert column_fleet([full, Worker(pool=(10_000, 10_000, 0), host=ROOMY)]).takers(1000) == {1}


def test_crowding_is_what_answers_that_run_together_take_from_each_other() -> None:
    """By their number, or by their expected work where that is more; once for every branch."""
    assert terms_of(Worker(in_flight=3), 100).crowding_ms == pytest.approx(3 * 2 * ANSWER_TOKENS * PREFILL_MS)
    assert terms_of(Worker(in_flight=3, decode_work_ms=500.0), 100).crowding_ms == 1000.0
    four = terms_of(Worker(in_flight=3), 100, Demand(100, 100, branches=4))
    assert four.crowding_ms == pytest.approx(4 * 3 * 2 * ANSWER_TOKENS * PREFILL_MS)


@pytest.mark.parametrize("weight", [0.0, 0.5, 3.0])
def test_total_is_the_own_first_token_and_the_weighted_work_for_others(weight: float) -> None:
    """In milliseconds, term by term, for every worker."""
    workers = [
        Worker(device=100, total=640, in_flight=7, places=4, waiting_ms=50.0, pool=(10_000, 10, 9000)),
        Worker(in_flight=2, linear=0.3, quadratic=1e-5, pool=(10_000, 10, 5)),
    ]
    demand = Demand(1000, 1000, not_resident=np.array([False, True]))
    for terms in column_fleet(workers).terms(1000, PolicyConfig(spill_weight=weight), demand):
        own = terms.wait_ms + terms.prefill_ms + terms.load_back_ms + terms.adapter_load_ms
        assert terms.first_token_ms == pytest.approx(own)
        added = terms.recompute_ms + terms.eviction_ms + terms.crowding_ms
        assert terms.total_ms == pytest.approx(own + weight * added)


def test_reservations_claim_what_the_cost_counts() -> None:
    """The work that is booked for a request is the work that its decision counted."""
    fleet = column_fleet([Worker(device=600, quadratic=1e-4)])
    (terms,) = fleet.terms(1000)
    curve = PrefillCurve(PREFILL_MS, 1e-4)
    assert curve.cost_ms(600, 1000) == pytest.approx(terms.prefill_ms)
    assert curve.cost_ms(1000, 1000) == 0.0
    assert decode_work_ms(fleet.columns, 0, None, 1) == ANSWER_TOKENS * PREFILL_MS
    assert decode_work_ms(fleet.columns, 0, 10_000, 2) == 2 * ANSWER_TOKENS * PREFILL_MS
    assert decode_work_ms(fleet.columns, 0, 3, 1) == 3 * PREFILL_MS, "a short limit is believed"


rates = st.sampled_from([0.0, 0.02, 0.5, 3.0])
few_tokens = st.integers(0, 1500)


@st.composite
def workers(draw: st.DrawFn) -> Worker:
    device = draw(few_tokens)
    free, evictable = draw(few_tokens), draw(few_tokens)
    return Worker(
        device=device,
        total=device + draw(few_tokens),
        in_flight=draw(st.integers(0, 20)),
        waiting_ms=draw(st.sampled_from([0.0, 1.0, 700.0])),
        decode_work_ms=draw(st.sampled_from([0.0, 1.0, 900.0])),
        linear=draw(rates),
        quadratic=draw(st.sampled_from([0.0, 1e-5, 1e-3])),
        decode_step=draw(st.sampled_from([0.0, 8.0])),
        load_back=draw(rates),
        places=draw(st.sampled_from([0, 4, 64])),
        match_unit=draw(st.sampled_from([0, 1, 16, 256])),
        pool=draw(st.sampled_from([None, (free + evictable + 3000, free, evictable)])),
        trust=draw(st.sampled_from([0.0, 0.5, 1.0])),
    )


fleets = st.lists(workers(), min_size=1, max_size=5)
prompts = st.integers(1, 2500)
checked = settings(derandomize=True, max_examples=30, deadline=None)


def changed(worker: Worker, **fields: object) -> Worker:
    values = {name: getattr(worker, name) for name in Worker.__slots__}
    return Worker(**(values | fields))


def no_more(less: float, more: float) -> bool:
    return less <= more + 1e-9 * abs(more)


@checked
@given(fleets, prompts, st.integers(0, 700), st.integers(0, 700))
def test_more_match_never_costs_more(fleet: list[Worker], tokens: int, on_device: int, on_host: int) -> None:
    """Whatever the tier, the worker that holds more of a prompt is not dearer for it."""
    first = fleet[0]
    assert first.total is not None
    richer = changed(first, device=first.device + on_device, total=first.total + on_device + on_host)
    before = column_fleet(fleet).terms(tokens)[0]
    after = column_fleet([richer, *fleet[1:]]).terms(tokens)[0]
    assert no_more(after.total_ms, before.total_ms)
    assert no_more(after.first_token_ms, before.first_token_ms)


@checked
@given(fleets, prompts, st.integers(0, 5), st.sampled_from([0.0, 10.0]), st.sampled_from([0.0, 10.0]))
def test_more_load_never_costs_less(
    fleet: list[Worker], tokens: int, requests: int, waiting_ms: float, decode_work_ms: float
) -> None:
    """Requests, prefill and decoding accepted make a worker dearer, or leave it as it is."""
    first = fleet[0]
    busier = changed(
        first,
        in_flight=first.in_flight + requests,
        waiting_ms=first.waiting_ms + waiting_ms,
        decode_work_ms=first.decode_work_ms + decode_work_ms,
    )
    before = column_fleet(fleet).terms(tokens)[0]
    after = column_fleet([busier, *fleet[1:]]).terms(tokens)[0]
    assert no_more(before.total_ms, after.total_ms)
    if waiting_ms:
        assert after.wait_ms > before.wait_ms


@checked
@given(fleets, prompts, st.randoms(use_true_random=False))
def test_permuting_workers_permutes_their_costs(
    fleet: list[Worker], tokens: int, chance: random.Random
) -> None:
    """A row is a place, not a rank: nobody is dearer for where its row lies."""
    order = list(range(len(fleet)))
    chance.shuffle(order)
    straight = column_fleet(fleet).terms(tokens)
    for terms, index in zip(column_fleet([fleet[i] for i in order]).terms(tokens), order, strict=True):
        assert terms[1:] == pytest.approx(straight[index][1:])


@checked
@given(fleets, prompts)
def test_no_term_is_negative_or_no_number(fleet: list[Worker], tokens: int) -> None:
    """Whatever was measured or not."""
    for terms in column_fleet(fleet).terms(tokens):
        assert all(0.0 <= value < 1e12 for value in terms), terms
