"""What the disk tier keeps: runs of a prefix's KV, what they are called, and of what model they are. Pure.

A *unit* is the smallest number of tokens that is whole pages and whole blocks; a *run* is one or more units in a row, and one file. A unit
is found by its name: the namespace in which it lies, and the fingerprint of the block with which it ends, which stands for all tokens
before. A name only proposes: a run's file holds every token from the prefix's start, and they are compared when it is read.
"""

import hashlib
import math
from typing import Final, NamedTuple

import msgspec

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE, block_fingerprints
from prefixmesh.cache.packed_names import pack_names
from prefixmesh.ids import Fingerprint, Namespace
from prefixmesh.tokens import TOKEN_BYTES

MAX_RUN_BLOCKS: Final = 8
"""512 tokens. A file that turns out bad costs no more than that, and yet few are opened for a long prompt."""

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""What KV may be made of."""


class KvLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the KV of a page lies in memory: [num_layers, 2, page_size, num_kv_heads, head_dim] of ``dtype``."""

    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    block_size: int = DEFAULT_BLOCK_SIZE

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """Of one page."""
        return (self.num_layers, 2, self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Of one page."""
        return math.prod(self.page_shape) * DTYPE_BYTES[self.dtype]

    @property
    def unit_tokens(self) -> int:
        """Tokens in a unit."""
        return math.lcm(self.page_size, self.block_size)

    @property
    def run_units(self) -> int:
        """Most units in a run: as many as ``MAX_RUN_BLOCKS`` hold, and one where that holds none."""
        return max(1, MAX_RUN_BLOCKS * self.block_size // self.unit_tokens)


class DiskIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Whose KV it is. What differs in any of it is of no use to this worker."""

    revision: str
    """The model's."""

    layout: KvLayout

    @property
    def digest(self) -> str:
        """Short, for the names of files: so that two models' files of one namespace do not overwrite each other."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=6).hexdigest()


class UnitNames(NamedTuple):
    """The units of one key, from its start on."""

    key: RadixKey
    fingerprints: list[Fingerprint]
    """Of every whole block."""

    names: list[bytes]
    """Of every whole unit."""

    unit_tokens: int
    """Tokens in a unit."""


class KvRun(NamedTuple):
    """Consecutive units of one prefix, all on the same side of a public boundary."""

    namespace: Namespace
    """In which they lie: a tail's behind a boundary."""

    start_tokens: int
    tokens: bytes
    """Packed, from the prefix's start to the run's end."""

    fingerprints: tuple[Fingerprint, ...]
    """Of its blocks."""

    @property
    def end_tokens(self) -> int:
        """Where it ends."""
        return len(self.tokens) // TOKEN_BYTES


def unit_names(key: RadixKey, layout: KvLayout) -> UnitNames:
    """The names of a key's whole units. O(tokens), at the speed of XXH3."""
    boundary = key.boundary_tokens * TOKEN_BYTES
    size = layout.block_size
    if not boundary:
        fingerprints = block_fingerprints(key.namespace, key.tokens, size)
        return UnitNames(key, fingerprints, names_of(key.namespace, fingerprints, layout), layout.unit_tokens)
    public = block_fingerprints(key.namespace, key.tokens[:boundary], size)
    private = block_fingerprints(key.tail, key.tokens[boundary:], size)
    names = names_of(key.namespace, public, layout) + names_of(key.tail, private, layout)
    return UnitNames(key, public + private, names, layout.unit_tokens)


def names_of(namespace: bytes, fingerprints: list[Fingerprint], layout: KvLayout) -> list[bytes]:
    """The names of the whole units among consecutive blocks, the first of which begins a unit. O(blocks)."""
    blocks = layout.unit_tokens // layout.block_size
    return [namespace + pack_names((end,)) for end in fingerprints[blocks - 1 :: blocks]]


def run_of(units: UnitNames, first: int, last: int, layout: KvLayout) -> KvRun:
    """Units ``first`` to ``last - 1`` of a key. O(tokens)."""
    key = units.key
    blocks = layout.unit_tokens // layout.block_size
    start, end = first * layout.unit_tokens, last * layout.unit_tokens
    is_tail = 0 < key.boundary_tokens <= start
    return KvRun(
        namespace=key.tail if is_tail else key.namespace,
        start_tokens=start,
        tokens=key.tokens[: end * TOKEN_BYTES],
        fingerprints=tuple(units.fingerprints[first * blocks : last * blocks]),
    )


def file_stem(run: KvRun, identity: DiskIdentity) -> str:
    """What a run's file is called, without its ending."""
    return f"{run.namespace.hex()}-{run.fingerprints[-1]:016x}-{identity.digest}"
