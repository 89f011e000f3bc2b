"""The seed of each answer of a call that asks for several.

In one place, because it is a promise: branch *i* of a call with a seed is, token for token, what a call of its own with
``branch_seed(seed, i)`` answers, on every version and machine. ``tests/golden/branch_seeds.json`` holds it.
"""

import hashlib
from typing import Final

from prefixmesh.requests import MAX_SEED

_PERSON: Final = b"branch-seed"
"""Keeps these digests apart from all others of this package."""


def branch_seed(seed: int, branch: int) -> int:
    """The seed that branch ``branch`` of a call with ``seed`` draws with; branch 0 draws with the seed itself.

    The others take the low 63 bits of BLAKE2b-64 over seed and branch (little-endian uint64 each): close seeds, such as 1 and 2 for two
    calls, give branches that have nothing in common. O(1).
    """
    if branch == 0:
        return seed
    data = seed.to_bytes(8, "little") + branch.to_bytes(8, "little")
    digest = hashlib.blake2b(data, digest_size=8, person=_PERSON).digest()
    return int.from_bytes(digest, "little") & MAX_SEED
