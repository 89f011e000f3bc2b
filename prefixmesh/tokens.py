"""Packed token sequences: little-endian uint32 ``bytes``, the one form used on the wire and in trees.

Bytes compare, slice and hash at C speed and cost 4 bytes a token; a list of ints costs eight times that.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

TOKEN_BYTES: Final = 4
_DTYPE: Final = np.dtype("<u4")


def pack(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Pack ids; O(n). Raises OverflowError for an id outside 0..2**32-1."""
    return np.asarray(token_ids, dtype=_DTYPE).tobytes() if len(token_ids) else b""


def unpack(packed: bytes) -> npt.NDArray[np.uint32]:
    """View packed ids as a read-only uint32 array; O(1), no copy."""
    return np.frombuffer(packed, dtype=_DTYPE)


def count(packed: bytes) -> int:
    """Number of tokens in a packed sequence."""
    return len(packed) // TOKEN_BYTES
