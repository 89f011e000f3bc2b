"""How far predictions were off: mean with sign, mean size, and what is newer counts more."""

import pytest

from prefixmesh.router.forecast_error import MEMORY, ForecastError


def test_bias_keeps_the_sign_and_size_does_not() -> None:
    error = ForecastError()
    for came_true in (90.0, 110.0, 130.0):
        error.add(100.0, came_true)
    assert error.bias == pytest.approx(10.0)
    assert error.size == pytest.approx((10 + 10 + 30) / 3)
    assert error.count == 3


def test_what_a_worker_was_is_forgotten() -> None:
    error = ForecastError()
    for _ in range(1000):
        error.add(0.0, 500.0)
    for _ in range(10 * MEMORY):
        error.add(0.0, 0.0)
    assert error.size < 0.1
    assert repr(error).startswith("ForecastError(1640 compared")
