"""``prefixmesh bench serve --calibrate``: from what a caller measures to a worker's timing model; and what ``--compare`` takes."""

import numpy as np
import pytest

from prefixmesh.bench.serve_calibrate import DecodePoint, Points, PrefillPoint, fit
from prefixmesh.bench.serve_pair import PairSpec
from prefixmesh.cli.bench_serve_pair import caches_of, small_service
from prefixmesh.errors import ConfigError
from prefixmesh.sim.replay_profiles import PROFILES
from prefixmesh.sim.timing import TimingModel

REAL = TimingModel(
    step_ms=30.0,
    prefill_ms_per_token=0.9,
    prefill_ms_per_token2=1e-4,
    decode_ms_per_sequence=2.0,
    decode_ms_per_kv_token=0.01,
)


def points_of(timing: TimingModel, noise: float = 0.0) -> Points:
    rng = np.random.default_rng(3)

    def measured(milliseconds: float) -> float:
        return milliseconds * (1.0 + noise * float(rng.normal()))

    return Points(
        prefill=[
            PrefillPoint(tokens, measured(timing.step_ms + timing.prefill_ms(tokens)))
            for tokens in (128, 512, 1024)
        ],
        decode=[
            DecodePoint(sequences, kv, measured(timing.decode_step_ms(sequences, int(kv))))
            for sequences, kv in ((1, 140.0), (1, 1036.0), (4, 560.0))
        ],
    )


def test_the_timing_model_that_made_the_points_is_found_again() -> None:
    found = fit(points_of(REAL))
    for name in ("step_ms", "prefill_ms_per_token", "prefill_ms_per_token2", "decode_ms_per_sequence"):
        assert getattr(found, name) == pytest.approx(getattr(REAL, name), rel=1e-6)
    assert found.decode_ms_per_kv_token == pytest.approx(0.01, rel=1e-6)


def test_what_would_be_negative_is_none_and_the_rest_still_fits() -> None:
    """A machine on which a second sequence costs nothing, measured with noise that says it saves something."""
    points = points_of(REAL)
    points.decode = [DecodePoint(1, 140.0, 35.0), DecodePoint(1, 1036.0, 34.0), DecodePoint(4, 560.0, 33.5)]
    found = fit(points)
    assert (found.decode_ms_per_sequence, found.decode_ms_per_kv_token) == (0.0, 0.0)
    assert found.step_ms == pytest.approx(34.17, abs=0.01)


def test_noise_of_some_per_cent_moves_predictions_by_some_per_cent() -> None:
    found = fit(points_of(REAL, noise=0.02))
    for tokens in (200, 700, 1000):
        assert found.prefill_ms(tokens) == pytest.approx(REAL.prefill_ms(tokens), rel=0.15)


def test_the_profile_of_a_cpu_gives_back_what_it_was_made_from() -> None:
    timing = PROFILES["cpu-smollm2"].timing
    assert 3 * timing.step_ms + timing.prefill_ms(1500) == pytest.approx(1442, rel=0.01)
    assert timing.step_ms + timing.prefill_ms(100, before=1400) == pytest.approx(148, rel=0.01)
    assert timing.decode_step_ms(1, 1500) == pytest.approx(33, rel=0.01)
    assert timing.decode_step_ms(64, 64 * 1400) == pytest.approx(166, rel=0.01)


def test_caches_to_compare() -> None:
    assert caches_of("cache=off,hash,radix,off") == ("off", "hash", "radix")
    for odd in ("off,hash", "cache=", "cache=lru", "policy=cost"):
        with pytest.raises(ConfigError, match="compare must be cache= and some of"):
            caches_of(odd)
    with pytest.raises(ConfigError, match="workers must be from 1 to"):
        PairSpec(workers=0)


def test_the_small_service_is_small() -> None:
    workload = small_service(0, None)
    assert 24 <= len(workload.requests) <= 28
    assert max(one.input_length + one.output_length for one in workload.requests) < 1024
