"""Packed fingerprints: little-endian uint64 ``bytes``, the one form in which names of blocks travel between processes.

The same idea as ``prefixmesh.tokens``: 8 bytes a name, packed and unpacked at C speed, whatever the machine's own byte order.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import Final

from prefixmesh.ids import Fingerprint

NAME_BYTES: Final = 8


def pack_names(names: Sequence[Fingerprint]) -> bytes:
    """Pack names; O(n). Raises OverflowError for one outside 0..2**64-1."""
    packed = array("Q", names)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_names(packed: bytes) -> tuple[Fingerprint, ...]:
    """The names; O(n). Raises ValueError unless they are whole."""
    names = array("Q")
    names.frombytes(packed)
    if sys.byteorder == "big":
        names.byteswap()
    return tuple(map(Fingerprint, names))
