"""Packed fingerprints: little-endian uint64 ``bytes``, the one form in which names of blocks travel between processes.

The same idea as ``prefixmesh.tokens``: 8 bytes a name, packed and unpacked at C speed, whatever the machine's own byte order.
"""

import struct
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
    size, rest = divmod(len(packed), NAME_BYTES)
    if rest:
        raise ValueError(f"packed names are {NAME_BYTES} bytes each, got {len(packed)} bytes")
    # In one call: every block that a worker tells of passes here, in its front and in each router.
    return struct.unpack(f"<{size}Q", packed)
