"""Where weights come from: tensors by their Hugging Face names, read piece by piece into memory the caller owns.

Both kinds of model files answer to the same names and the same (half-split) rotary convention, so that one assembler
serves both.
"""

from collections.abc import Iterator, Mapping
from typing import Final, Protocol

import torch

PIECE_ELEMENTS: Final = 2**20
"""Elements converted at once: at most 4 MiB of float32 on the side, however large the tensor."""


class TensorSource(Protocol):
    """A model's tensors, not yet read."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor by its Hugging Face name."""
        ...

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Read a tensor into ``out`` (same shape, any float dtype, any device). ModelFileError when it cannot be read."""
        ...


def row_pieces(shape: tuple[int, ...], rows_multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Half-open row ranges that cover dimension 0 in pieces of about ``PIECE_ELEMENTS``, each but the last a whole multiple
    of ``rows_multiple`` rows."""
    rows = shape[0]
    elements_per_row = 1
    for size in shape[1:]:
        elements_per_row *= size
    step = max(1, PIECE_ELEMENTS // max(1, elements_per_row) // rows_multiple) * rows_multiple
    for start in range(0, rows, step):
        yield start, min(start + step, rows)
