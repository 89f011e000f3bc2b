"""Packed and plain products are the same product."""

import pytest
import torch

from prefixmesh.worker.model.linear import (
    PackedGated,
    PackedLinear,
    PlainGated,
    PlainLinear,
    activate,
    can_pack,
    make_gated,
    make_linear,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 33, 600])
def test_packed_equals_plain_for_any_number_of_rows(dtype: torch.dtype, tolerance: float, rows: int) -> None:
    """Padding of few rows is never seen, and no row depends on how many others there are (to rounding)."""
    if not can_pack(CPU, dtype):
        pytest.skip(f"oneDNN does not pack {dtype} here")
    rng = torch.Generator().manual_seed(rows)
    weight, bias = torch.randn(96, 80, generator=rng).to(dtype), torch.randn(96, generator=rng).to(dtype)
    x = torch.randn(rows, 80, generator=rng).to(dtype)
    for given in (None, bias):
        with torch.inference_mode():
            packed, plain = PackedLinear(weight, given), PlainLinear(weight, given)
            assert packed(x).shape == (rows, 96)
            torch.testing.assert_close(packed(x), plain(x), atol=tolerance, rtol=0)
            assert packed.num_bytes == plain.num_bytes


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.5)])
@pytest.mark.parametrize("rows", [0, 1, 3, 33])
def test_a_packed_gate_and_up_is_the_plain_one(dtype: torch.dtype, tolerance: float, rows: int) -> None:
    """With the activation in the product, and without, as adapters need it; values of some 80, so 0.5 is bfloat16's rounding."""
    if not can_pack(CPU, dtype):
        pytest.skip(f"oneDNN does not pack {dtype} here")
    rng = torch.Generator().manual_seed(rows)
    weight = torch.randn(96, 80, generator=rng).to(dtype)
    x = torch.randn(rows, 80, generator=rng).to(dtype)
    with torch.inference_mode():
        packed, plain = PackedGated(weight), PlainGated(weight)
        assert packed.gated(x).shape == (rows, 48)
        assert packed.num_bytes == plain.num_bytes
        torch.testing.assert_close(packed(x), plain(x), atol=tolerance, rtol=0)
        exact = activate(x.double() @ weight.double().T)
        torch.testing.assert_close(packed.gated(x).double(), exact, atol=tolerance, rtol=0.01)


def test_what_cannot_be_packed_stays_plain() -> None:
    """Other devices and dtypes get plain weights."""
    assert not can_pack(CPU, torch.float64)
    assert not can_pack(torch.device("meta"), torch.float32)
    assert isinstance(make_linear(torch.eye(4, dtype=torch.float64)), PlainLinear)
    assert isinstance(make_gated(torch.eye(4, dtype=torch.float64)), PlainGated)
