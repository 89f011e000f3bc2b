"""How KV lies in the parts in which workers copy it, and the name of that. Pure.

A part is pages one after the other, each [layers, 2 (keys, values), page_size, kv_heads, head_dim] of one type, little-endian: as a page lies
in the host's memory (``tiers.host_pool``). Workers whose layouts have equal digests read each other's parts; all others cannot, and say so
before a byte is sent. A rank of a tensor-parallel worker holds its own heads, so rank and size are part of it.
"""

import hashlib
import math
from typing import Final

import msgspec

LAYOUT_VERSION: Final = 1
"""Of the order of the bytes, and of the digest: another one is another layout."""

ELEMENT_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""What KV may be made of."""

_DIGEST_BYTES: Final = 16


class CopyLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of one worker's KV, whose model the revision names beside it."""

    dtype: str
    layers: int
    kv_heads: int
    """Of this rank."""

    head_dim: int
    page_size: int
    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """Of one page."""
        return (self.layers, 2, self.page_size, self.kv_heads, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Of one page."""
        return math.prod(self.page_shape) * ELEMENT_BYTES[self.dtype]

    @property
    def digest(self) -> str:
        """Its name, in hexadecimal. O(1), some microseconds."""
        told = msgspec.json.encode((LAYOUT_VERSION, self))
        return hashlib.blake2b(told, digest_size=_DIGEST_BYTES).hexdigest()
