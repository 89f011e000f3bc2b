"""Products with a weight matrix: plain, or with the weight kept in oneDNN's blocked layout on CPUs.

A plain weight is re-packed by oneDNN at every product, which for few rows costs as much as the product itself. Packing it
once, at load, halves the time of a decode step (SmolLM2-135M, one row, bfloat16, one core of an AVX512_BF16 CPU: 1,000 µs a
layer plain, 460 µs packed) and gains 5 to 10 % for long prompts. The price is that the plain layout is gone: only products
can use the weight from then on.
"""

from functools import cache
from typing import Any, Final, Protocol, cast

import torch
from torch.nn import functional

PACK_FOR_ROWS: Final = 512
"""Rows oneDNN chooses the blocked layout for. Measured: a layout chosen for 512 serves 1 to 32 rows as well as one chosen
for 1, in float32 better."""

MIN_PACKED_ROWS: Final = 4
"""Fewer rows are padded to this: oneDNN's kernel for 4 rows is a tenth to a fifth faster than the one for a single row."""


class Linear(Protocol):
    """``y = x @ weight.T + bias`` for ``x`` of shape [rows, in_features]."""

    @property
    def num_bytes(self) -> int:
        """Bytes the weight and the bias take."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] -> [rows, out_features], in the dtype of ``x``."""
        ...


class GatedLinear(Linear, Protocol):
    """Gate and up of a SwiGLU layer, one below the other: ``__call__`` gives both, [rows, 2 * inner]."""

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up``, [rows, inner]."""
        ...


def activate(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of what a ``GatedLinear`` gave: [rows, 2 * inner] -> [rows, inner]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


class PlainLinear:
    """The weight as it was given, [out_features, in_features]; its storage may be shared."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """One product."""
        return functional.linear(x, self.weight, self.bias)


class PlainGated(PlainLinear):
    """A plain gate and up."""

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """One product, then its activation."""
        return activate(self(x))


class PackedLinear:
    """The weight in oneDNN's blocked layout; CPU only. Make one only where ``can_pack`` says so."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self.packed: Any = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_FOR_ROWS)
        self._bias = bias

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias; the blocked layout pads by less than a block."""
        return self._num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """One product; few rows are padded to ``MIN_PACKED_ROWS``."""
        rows = x.shape[0]
        y = torch.ops.mkldnn._linear_pointwise(_padded(x), self.packed, self._bias, "none", [], "")
        return cast(torch.Tensor, y)[:rows]


class PackedGated:
    """Gate and up packed each for itself: the gate's product ends in its activation, the up's in the multiplication with it, so that
    neither is written to memory and read back (1,500 rows: 38.9 ms a layer, both products and ``down`` included, against 42.4)."""

    def __init__(self, weight: torch.Tensor) -> None:
        gate, up = weight.chunk(2)
        self._gate, self._up = PackedLinear(gate), PackedLinear(up)

    @property
    def num_bytes(self) -> int:
        """Bytes of both weights."""
        return self._gate.num_bytes + self._up.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Two products."""
        return torch.cat((self._gate(x), self._up(x)), dim=-1)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Two products; in bfloat16 the gate is not rounded before its activation."""
        rows = x.shape[0]
        x = _padded(x)
        gate = torch.ops.mkldnn._linear_pointwise(x, self._gate.packed, None, "swish", [], "")
        product = torch.ops.mkldnn._linear_pointwise.binary(x, gate, self._up.packed, None, "mul")
        return cast(torch.Tensor, product)[:rows]


def _padded(x: torch.Tensor) -> torch.Tensor:
    rows = x.shape[0]
    return x if rows >= MIN_PACKED_ROWS else functional.pad(x, (0, 0, 0, MIN_PACKED_ROWS - rows))


@cache
def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN packs and multiplies weights of that dtype; tried once with a small product.

    The operators are torch's own (its compiler emits them) but not part of its documented interface, so they are tried
    rather than trusted.
    """
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return False
    weight = torch.eye(32, dtype=dtype)
    x = torch.arange(MIN_PACKED_ROWS * 32, dtype=dtype).reshape(MIN_PACKED_ROWS, 32)
    try:
        gated = PackedGated(torch.cat((weight, weight)))
        found = torch.allclose(gated.gated(x), activate(torch.cat((x, x), dim=-1)), rtol=0.02)
        return found and bool(torch.equal(PackedLinear(weight)(x), x))
    except (RuntimeError, AttributeError):
        return False


def least_rows(device: torch.device, dtype: torch.dtype) -> int:
    """How many rows to give every product of a step at least; 0 where it makes no difference. Fewer are padded product by product,
    which takes as long as a quarter of a small product."""
    return MIN_PACKED_ROWS if can_pack(device, dtype) else 0


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Packed where that works, else plain. The caller gives up ``weight``: drop it, or packing doubles its memory."""
    if can_pack(weight.device, weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def make_gated(weight: torch.Tensor) -> GatedLinear:
    """As ``make_linear``, for a gate and an up, [2 * inner, in_features]."""
    return PackedGated(weight) if can_pack(weight.device, weight.dtype) else PlainGated(weight)
