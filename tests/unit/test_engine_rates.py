"""What an engine believes of its own speed: the curve that its steps follow, few or many, noisy or not, and never anything impossible."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.worker.engine_rates import LEAST_PREFILL_SHARE, SPREAD_TOKENS, EngineRates, _Line

LINEAR, QUADRATIC = 0.03, 1e-6
"""Milliseconds: at 30,000 tokens a token costs three times as much as at the beginning."""

CHUNK = 512


def true_ms(a: int, b: int) -> float:
    return LINEAR * (b - a) + QUADRATIC * (b * b - a * a)


def prefill(rates: EngineRates, a: int, b: int, slower: float = 1.0, decoding: int = 0) -> None:
    """A step that computes the tokens from ``a`` to ``b`` of a prompt."""
    elapsed_ms = true_ms(a, b) * slower + (rates.decode_step_ms if decoding else 0.0)
    rates.record(
        now=0.0,
        prefill_tokens=b - a,
        prefill_squares=b * b - a * a,
        decoding=decoding,
        elapsed_s=elapsed_ms / 1e3,
    )


def prompt(rates: EngineRates, length: int, slower: float = 1.0, decoding: int = 0) -> None:
    for start in range(0, length, CHUNK):
        prefill(rates, start, min(start + CHUNK, length), slower, decoding)


def told_ms(rates: EngineRates, a: int, b: int) -> float:
    return rates.prefill_ms_per_token * (b - a) + rates.prefill_ms_per_token2 * (b * b - a * a)


def test_curve_is_found_from_prompts_of_all_lengths() -> None:
    rates = EngineRates()
    for length in (1024, 16_384, 4096, 30_000, 512):
        prompt(rates, length)
    assert rates.prefill_ms_per_token == pytest.approx(LINEAR, rel=0.02)
    assert rates.prefill_ms_per_token2 == pytest.approx(QUADRATIC, rel=0.02)


def test_curve_is_found_through_noise_and_beside_decoding() -> None:
    rng = random.Random(1)
    rates = EngineRates(decode_step_ms=9.0)
    for _ in range(30):
        prompt(rates, rng.choice((512, 2048, 8192, 24_000)), slower=rng.uniform(0.8, 1.2), decoding=8)
    for a, b in ((0, 1024), (8000, 9000), (0, 24_000)):
        assert told_ms(rates, a, b) == pytest.approx(true_ms(a, b), rel=0.25)


def test_short_prompts_alone_tell_no_growth_and_their_own_time_rightly() -> None:
    """Chunks that are all alike could be explained by either part; the plain one is believed."""
    rates = EngineRates()
    for _ in range(100):
        prefill(rates, 0, CHUNK)
    assert rates.prefill_ms_per_token2 == 0.0
    assert told_ms(rates, 0, CHUNK) == pytest.approx(true_ms(0, CHUNK))


def test_one_long_prompt_is_enough_to_see_growth() -> None:
    rates = EngineRates(prefill_tokens_per_s=1e3 * CHUNK / true_ms(0, CHUNK))
    prompt(rates, 16_384)
    assert told_ms(rates, 0, 16_384) == pytest.approx(true_ms(0, 16_384), rel=0.1)


def test_chunks_that_are_nearly_alike_show_no_growth_however_they_differ_in_time() -> None:
    """What twenty tokens more seem to cost must not be drawn out to thousands."""
    rates = EngineRates()
    for index in range(60):
        prefill(rates, 0, CHUNK - 20 * (index % 2), slower=1.0 - 0.2 * (index % 2))
    assert told_ms(rates, 0, 16_384) / 16_384 < 1.3 * told_ms(rates, 0, CHUNK) / CHUNK


def test_line_that_would_begin_below_nothing_begins_at_nothing_and_keeps_its_mean() -> None:
    line = _Line(SPREAD_TOKENS)
    for context, cost in ((1_000.0, 0.01), (10_000.0, 0.02), (40_000.0, 2.0)):
        line.add(1.0, context, cost)
    assert line.start == 0.0
    assert line.at(17_000.0) == pytest.approx(2.03 / 3)


def test_profile_counts_until_there_is_traffic_and_gives_way_to_it() -> None:
    rates = EngineRates(prefill_tokens_per_s=1000.0)
    assert rates.prefill_ms_per_token == pytest.approx(1.0)
    assert rates.prefill_tokens_per_s == pytest.approx(1000.0)
    for _ in range(200):
        prefill(rates, 0, CHUNK)
    assert told_ms(rates, 0, CHUNK) == pytest.approx(true_ms(0, CHUNK), rel=0.1)


def test_one_step_that_stood_still_changes_little_and_a_slower_machine_is_believed() -> None:
    rates = EngineRates()
    for _ in range(50):
        prefill(rates, 0, CHUNK)
    before = told_ms(rates, 0, CHUNK)
    prefill(rates, 0, CHUNK, slower=1000.0)
    assert told_ms(rates, 0, CHUNK) < 1.15 * before
    for _ in range(300):
        prefill(rates, 0, CHUNK, slower=10.0)
    assert told_ms(rates, 0, CHUNK) == pytest.approx(10 * before, rel=0.05)


def test_decode_steps_are_a_moving_average_and_a_mixed_step_is_shared_out() -> None:
    rates = EngineRates()
    rates.record(now=0.0, prefill_tokens=0, decoding=4, elapsed_s=0.010)
    rates.record(now=0.0, prefill_tokens=0, decoding=4, elapsed_s=0.020)
    assert rates.decode_step_ms == pytest.approx(11.0)
    usual_ms = rates.step_ms  # all of them carried on as many answers: what each adds cannot be told
    assert 10.0 < usual_ms < 20.0
    rates.record(now=0.0, prefill_tokens=200, decoding=4, elapsed_s=(usual_ms + 200.0) / 1e3)
    assert rates.prefill_ms_per_token == pytest.approx(1.0)
    rates.record(now=0.0, prefill_tokens=200, decoding=4, elapsed_s=0.001)
    assert rates.decode_step_ms == pytest.approx(11.0)


STEP_MS, ANSWER_MS, TOKEN_MS = 9.6, 0.2, 0.0323
"""Of a GPU: reading the weights is a third of a step that prefills 512 tokens."""


def step(rates: EngineRates, tokens: int, decoding: int, context: int = 2048) -> None:
    elapsed_ms = STEP_MS + decoding * ANSWER_MS + tokens * TOKEN_MS
    squares = (context + tokens) ** 2 - context**2 if tokens else 0
    rates.record(
        now=0.0, prefill_tokens=tokens, prefill_squares=squares, decoding=decoding, elapsed_s=elapsed_ms / 1e3
    )


def gpu(chunk_tokens: int = 0) -> EngineRates:
    """As it profiles itself at its start: 512 tokens, and a decode step of one."""
    alone_s = (STEP_MS + 512 * TOKEN_MS) / 1e3
    return EngineRates(
        prefill_tokens_per_s=512 / alone_s, decode_step_ms=STEP_MS + ANSWER_MS, chunk_tokens=chunk_tokens
    )


@pytest.mark.parametrize("tokens", [128, 256, 2048])
def test_an_idle_engine_measures_the_same_speed_as_its_busy_equal(tokens: int) -> None:
    """One computes prompts alone and answers them alone, the other never stops to decode for eight to sixteen."""
    idle, busy = gpu(), gpu()
    for round_number in range(100):
        step(idle, tokens, 0)
        step(busy, tokens, 8 + round_number % 9)
        for _ in range(4):
            step(idle, 0, 1)
            step(busy, 0, 8 + round_number % 9)
    assert told_ms(idle, 0, 2048) == pytest.approx(told_ms(busy, 0, 2048), rel=0.08)
    assert told_ms(busy, 0, 2048) == pytest.approx(2048 * TOKEN_MS, rel=0.08)


def test_what_a_step_costs_by_itself_is_told_from_what_each_answer_adds() -> None:
    rates = EngineRates()
    for number in range(200):
        step(rates, 0, 1 + number % 16)
    assert rates.step_ms == pytest.approx(STEP_MS, rel=0.02)


def test_a_prompt_of_many_chunks_pays_for_as_many_steps() -> None:
    rates = gpu(chunk_tokens=512)
    for _ in range(50):
        step(rates, 512, 0)
        step(rates, 0, 1)
    assert rates.prefill_ms(0, 4096) == pytest.approx(8 * STEP_MS + 4096 * TOKEN_MS, rel=0.05)
    assert told_ms(rates, 0, 4096) == pytest.approx(rates.prefill_ms(0, 4096))
    assert rates.prefill_tokens_per_s == pytest.approx(512 / (STEP_MS + 512 * TOKEN_MS) * 1e3, rel=0.05)


def test_prefills_beside_decoding_that_is_slow_are_never_taken_for_free() -> None:
    rates = EngineRates(decode_step_ms=50.0)
    for _ in range(20):
        rates.record(now=0.0, prefill_tokens=500, decoding=0, elapsed_s=0.020)
    assert rates.prefill_ms_per_token == pytest.approx(20.0 * LEAST_PREFILL_SHARE / 500)


def test_first_step_sets_a_rate_however_short_it_is_and_a_clock_that_stood_still_none() -> None:
    rates = EngineRates()
    rates.record(now=0.0, prefill_tokens=1, decoding=0, elapsed_s=0.0)
    assert rates.prefill_tokens_per_s == rates.prefill_ms_per_token == 0.0
    rates.record(now=0.0, prefill_tokens=4, decoding=0, elapsed_s=0.004)
    assert rates.prefill_tokens_per_s == pytest.approx(1000.0)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 100_000),
            st.integers(0, 4096),
            st.integers(0, 64),
            st.floats(0.0, 1e4, allow_nan=False, allow_subnormal=False),
        ),
        max_size=60,
    ),
    st.sampled_from((0.0, 1e-3, 1e6)),
)
def test_whatever_steps_there_were_no_rate_is_negative_or_endless(
    steps: list[tuple[int, int, int, float]], profile: float
) -> None:
    rates = EngineRates(prefill_tokens_per_s=profile)
    for start, tokens, decoding, elapsed_s in steps:
        squares = (start + tokens) ** 2 - start**2
        rates.record(
            now=0.0, prefill_tokens=tokens, prefill_squares=squares, decoding=decoding, elapsed_s=elapsed_s
        )
        told = (
            rates.prefill_ms_per_token,
            rates.prefill_ms_per_token2,
            rates.prefill_tokens_per_s,
            rates.decode_step_ms,
            rates.step_ms,
        )
        assert all(math.isfinite(one) and one >= 0.0 for one in told)


def test_the_interval_of_tokens_counts_every_step_that_decodes() -> None:
    """Half of the steps prefill beside it: answers get on by the mean of both, where the decode step is that of the quick ones."""
    rates = EngineRates(decode_step_ms=20.0)
    for _ in range(300):
        rates.record(now=0.0, prefill_tokens=0, decoding=4, elapsed_s=0.02)
        rates.record(now=0.0, prefill_tokens=400, decoding=4, elapsed_s=0.06)
        rates.record(now=0.0, prefill_tokens=400, decoding=0, elapsed_s=5.0)
    assert rates.decode_step_ms == pytest.approx(20.0)
    assert rates.token_interval_ms == pytest.approx(40.0, rel=0.05)


def test_a_standstill_in_a_decode_step_makes_no_slow_engine() -> None:
    """A process that was stopped for ten seconds, and has nothing to do when it goes on, would tell of it until somebody asks it again."""
    rates = EngineRates(decode_step_ms=20.0)
    rates.record(now=0.0, prefill_tokens=0, decoding=4, elapsed_s=10.0)
    assert rates.decode_step_ms < 30.0
    assert rates.token_interval_ms < 30.0


def test_an_engine_that_has_become_slow_is_believed_within_a_few_steps() -> None:
    rates = EngineRates(decode_step_ms=20.0)
    for _ in range(30):
        rates.record(now=0.0, prefill_tokens=0, decoding=4, elapsed_s=0.2)
    assert rates.decode_step_ms > 150.0
    assert rates.token_interval_ms > 80.0
