"""What load-backs are weighed by: the rates that copies show, and the decision."""

import pytest

from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.tiers.load_back_rates import (
    FIXED_MS,
    GUESSED_BYTES_PER_S,
    LEAST_RATED_TOKENS,
    MOST_OFF,
    LoadBackRates,
)
from prefixmesh.worker.tiers.load_backs import is_worth_loading

TOKENS = 1000


def measured(ms_per_token: float) -> LoadBackRates:
    return LoadBackRates(token_bytes=1000.0, ms_per_token=ms_per_token)


def test_before_any_copy_a_guess_stands_and_nothing_is_told() -> None:
    rates = LoadBackRates(token_bytes=GUESSED_BYTES_PER_S / 1000)
    assert rates.restore_ms(1) == pytest.approx(FIXED_MS + 1.0)
    assert rates.load_back_ms_per_token == 0.0


def test_backups_stand_for_load_backs_until_the_first_of_them_has_ended() -> None:
    rates = LoadBackRates(token_bytes=1000.0)
    rates.offloaded(TOKENS, 2.0)
    assert rates.restore_ms(TOKENS) == pytest.approx(FIXED_MS + 2000)
    assert rates.load_back_ms_per_token == 0.0
    rates.restored(TOKENS, 1.0)
    assert rates.load_back_ms_per_token == pytest.approx(1.0)
    rates.offloaded(TOKENS, 5.0)
    assert rates.load_back_ms_per_token == pytest.approx(1.0)


def test_a_profile_stands_from_the_start() -> None:
    rates = measured(0.5)
    rates.offloaded(TOKENS, 5.0)
    assert rates.load_back_ms_per_token == 0.5


def test_one_slow_copy_is_not_believed_and_many_are() -> None:
    rates = measured(1.0)
    rates.restored(TOKENS, 1000.0)
    assert rates.load_back_ms_per_token <= MOST_OFF
    for _ in range(50):
        rates.restored(TOKENS, 10.0)
    assert rates.load_back_ms_per_token == pytest.approx(10.0, rel=0.05)


def test_short_copies_rate_nothing() -> None:
    rates = measured(1.0)
    rates.restored(LEAST_RATED_TOKENS - 1, 1.0)
    assert rates.load_back_ms_per_token == 1.0


def test_a_rate_that_was_measured_too_high_is_tried_again_after_some_refusals() -> None:
    rates = measured(0.1)
    for _ in range(100):
        rates.offloaded(TOKENS, 0.1)
        rates.restored(TOKENS, 10.0)
    engine = EngineRates(prefill_tokens_per_s=1000.0)
    refusals = 0
    while not is_worth_loading(rates, engine, 0, TOKENS, 0.0):
        rates.refused()
        refusals += 1
    assert 10 < refusals < 200
    for _ in range(10_000):
        rates.refused()
    assert rates.restore_ms(TOKENS) >= rates.offload_ms(TOKENS)


def test_what_others_load_before_it_counts() -> None:
    engine, rates = EngineRates(prefill_tokens_per_s=1000.0), measured(0.1)
    assert is_worth_loading(rates, engine, 0, TOKENS, 0.0)
    assert not is_worth_loading(rates, engine, 0, TOKENS, 950.0)


def test_the_longer_the_context_the_more_a_load_back_is_worth() -> None:
    engine = EngineRates(prefill_tokens_per_s=10_000.0)
    for _ in range(50):
        engine.record(now=0.0, prefill_tokens=1000, prefill_squares=1000**2, decoding=0, elapsed_s=0.1)
        engine.record(now=0.0, prefill_tokens=1000, prefill_squares=19_000 * 1000, decoding=0, elapsed_s=0.5)
    rates = measured(0.2)
    assert not is_worth_loading(rates, engine, 0, 500, 0.0)
    assert is_worth_loading(rates, engine, 20_000, 500, 0.0)


def test_nothing_is_not_worth_loading_and_an_engine_that_was_never_measured_loads() -> None:
    assert not is_worth_loading(measured(0.1), EngineRates(), 0, 0, 0.0)
    assert is_worth_loading(measured(1e9), EngineRates(), 0, 1, 0.0)
