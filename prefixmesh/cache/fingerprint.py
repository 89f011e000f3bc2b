"""Fingerprints: the names of blocks, by which a router finds who may hold a prefix.

A block's fingerprint is XXH3-64 over the previous block's fingerprint (the namespace, for the first) and the block's packed
tokens, so it names the whole prefix up to the block's end. Two equal ones mean "probably the same": they may route a request,
only equal tokens in an equal namespace may hit. Same bytes in every process and on every machine.
"""

from typing import Any, Final

import xxhash

from prefixmesh.ids import Fingerprint
from prefixmesh.tokens import TOKEN_BYTES

DEFAULT_BLOCK_SIZE: Final = 64
"""Tokens in a block: 64 keeps a 4,096-token prompt at 64 look-ups and loses at most 63 tokens of a match."""

FINGERPRINT_VERSION: Final = 1


def block_fingerprints(
    namespace: bytes, packed: bytes, block_size: int = DEFAULT_BLOCK_SIZE
) -> list[Fingerprint]:
    """Fingerprints of every whole block of ``packed`` from its start; O(len(packed)).

    Args:
        namespace: the 16-byte namespace the tokens live in.
        packed: packed tokens; a short last block has no name and is left out.
        block_size: tokens in a block.
    """
    step = block_size * TOKEN_BYTES
    digest = xxhash.xxh3_64_intdigest
    # A list of ints that are Fingerprints by type alone: calling a NewType costs as much as the hash.
    fingerprints: list[Any] = []
    previous = namespace
    for start in range(0, len(packed) - step + 1, step):
        value = digest(previous + packed[start : start + step])
        fingerprints.append(value)
        previous = value.to_bytes(8, "little")
    return fingerprints
