"""What the cache has seen: blocks it had and evicted, and the namespaces in which a prompt's first block is cached.

``MissFinder`` asks it why a token was missed. The radix tree tells it three things: that the first block of a prompt came to be
cached, that blocks have left their last tier by eviction, and that everything was flushed. Telling must cost next to nothing,
because an eviction tells it for every node; so it keeps fingerprints only, and what was evicted longest ago it forgets.

It only explains: nothing here decides what is matched, and a wrong answer (a forgotten block, a collision, a block that two edges
hold because a page is longer than a block) moves a token from one cause of a miss to another.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import xxhash

from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE
from prefixmesh.errors import ConfigError, InvariantError
from prefixmesh.ids import Fingerprint, Namespace

REMEMBERED_BLOCKS: Final = 65_536
"""Evicted blocks that are surely remembered: 4 million tokens in blocks of 64, several times a worker's pool. Whoever comes back
later than that would hardly have been helped by a larger one. With the second generation about 10 MB at most."""

MAX_NAMESPACES_PER_BLOCK: Final = 8
"""Namespaces remembered for one first block, and so the most that a miss looks into. A system prompt that every tenant sends
must not make each request's accounting cost as much as there are tenants."""


class EvictedMemory:
    """The fingerprints of the blocks that were evicted last: two sets, of which the younger one grows.

    When the young set is full it becomes the old one and the old one is forgotten; so between one and two generations are
    remembered, and remembering costs one ``set.update``.
    """

    __slots__ = ("_generation_blocks", "_old", "_young")

    def __init__(self, generation_blocks: int = REMEMBERED_BLOCKS) -> None:
        if generation_blocks < 1:
            raise ConfigError(f"a generation must hold at least one block, got {generation_blocks}")
        self._generation_blocks = generation_blocks
        self._young: set[Fingerprint] = set()
        self._old: set[Fingerprint] = set()

    def note(self, fingerprints: Sequence[Fingerprint]) -> None:
        """Remember evicted blocks. O(len(fingerprints)) at C speed."""
        young = self._young
        young.update(fingerprints)
        if len(young) >= self._generation_blocks:
            self._old = young
            self._young = set()

    def among(self, fingerprints: Sequence[Fingerprint]) -> set[Fingerprint]:
        """Those of ``fingerprints`` that are remembered. O(len(fingerprints)) at C speed."""
        return self._young.intersection(fingerprints) | self._old.intersection(fingerprints)

    def clear(self) -> None:
        """Forget everything."""
        self._young = set()
        self._old = set()

    def __contains__(self, fingerprint: object) -> bool:
        return fingerprint in self._young or fingerprint in self._old

    def __len__(self) -> int:
        """Blocks remembered; one that was evicted in both generations counts twice."""
        return len(self._young) + len(self._old)

    def __repr__(self) -> str:
        return f"EvictedMemory(young={len(self._young)}/{self._generation_blocks}, old={len(self._old)})"

    def check_invariants(self) -> None:
        """The young generation is not full; raises InvariantError. O(1)."""
        if len(self._young) >= self._generation_blocks:
            raise InvariantError(f"EvictedMemory: bound: {self!r}")


class FirstBlocks:
    """In which namespaces a prompt's first block is cached: how equal tokens are found in another namespace without trying all.

    A first block is known by a *neutral* hash, XXH3-64 of its tokens alone. That it collides, or is made to, costs a look into
    a namespace where nothing is found. At most as many entries as the tree holds first blocks (about 250 bytes each): whoever adds one
    removes it.
    """

    __slots__ = ("_holders", "_neutral")

    def __init__(self) -> None:
        self._holders: dict[int, tuple[tuple[Fingerprint, Namespace], ...]] = {}
        """Neutral hash -> who has such a block, the latest last."""
        self._neutral: dict[Fingerprint, int] = {}
        """Fingerprint of each of those blocks -> its neutral hash."""

    def add(self, first_block: bytes, fingerprint: Fingerprint, namespace: Namespace) -> None:
        """The block of these packed tokens, so named in ``namespace``, is cached now; again is no harm. O(1)."""
        self.remove(fingerprint)
        neutral = xxhash.xxh3_64_intdigest(first_block)
        holders = self._holders.get(neutral, ())
        if len(holders) == MAX_NAMESPACES_PER_BLOCK:
            del self._neutral[holders[0][0]]
            holders = holders[1:]
        self._holders[neutral] = (*holders, (fingerprint, namespace))
        self._neutral[fingerprint] = neutral

    def remove(self, fingerprint: Fingerprint) -> None:
        """The block so named is cached no more; unknown ones are ignored. O(1)."""
        neutral = self._neutral.pop(fingerprint, None)
        if neutral is None:
            return
        holders = tuple(holder for holder in self._holders[neutral] if holder[0] != fingerprint)
        if holders:
            self._holders[neutral] = holders
        else:
            del self._holders[neutral]

    def others(self, first_block: bytes, namespace: Namespace) -> list[Namespace]:
        """Namespaces but ``namespace`` in which a block of these tokens is cached, the latest first; at most
        ``MAX_NAMESPACES_PER_BLOCK``. O(1)."""
        holders = self._holders.get(xxhash.xxh3_64_intdigest(first_block), ())
        return [holder for _, holder in reversed(holders) if holder != namespace]

    def clear(self) -> None:
        """Forget everything."""
        self._holders.clear()
        self._neutral.clear()

    def __contains__(self, fingerprint: object) -> bool:
        return fingerprint in self._neutral

    def __len__(self) -> int:
        return len(self._neutral)

    def __repr__(self) -> str:
        return f"FirstBlocks(blocks={len(self._neutral)}, distinct={len(self._holders)})"

    def check_invariants(self, held: AbstractSet[Fingerprint]) -> None:
        """Both tables tell the same, within the bound, and only of blocks that are ``held``; raises InvariantError. O(blocks)."""
        listed = {
            fingerprint: neutral for neutral, holders in self._holders.items() for fingerprint, _ in holders
        }
        if listed != self._neutral or not all(self._holders.values()):
            raise InvariantError(f"FirstBlocks: tables: the holders are not the blocks: {self!r}")
        if any(len(holders) > MAX_NAMESPACES_PER_BLOCK for holders in self._holders.values()):
            raise InvariantError(f"FirstBlocks: bound: too many namespaces for one block: {self!r}")
        gone = listed.keys() - held
        if gone:
            raise InvariantError(f"FirstBlocks: held: {len(gone)} blocks are not in the cache: {self!r}")


class SeenBlocks:
    """What a radix tree tells, in the three calls it makes. Not thread-safe: the tree's loop owns it."""

    __slots__ = ("_note", "block_size", "evicted", "first_blocks")

    def __init__(
        self, block_size: int = DEFAULT_BLOCK_SIZE, generation_blocks: int = REMEMBERED_BLOCKS
    ) -> None:
        if block_size < 1:
            raise ConfigError(f"a block must have at least one token, got {block_size}")
        self.block_size = block_size
        self.evicted = EvictedMemory(generation_blocks)
        self.first_blocks = FirstBlocks()
        self._note = self.evicted.note

    def first_stored(self, namespace: Namespace, first_block: bytes, fingerprint: Fingerprint) -> None:
        """The first block of a prompt came to be cached (on any tier) where it was on none. O(1).

        Args:
            namespace: the root it lies under; never the tail of a public prefix, which begins further on.
            first_block: its packed tokens, ``block_size`` of them.
            fingerprint: its name.
        """
        self.first_blocks.add(first_block, fingerprint, namespace)

    def left(self, start_tokens: int, fingerprints: Sequence[Fingerprint]) -> None:
        """These blocks were evicted from the last tier that held them. O(len(fingerprints)), most of it at C speed.

        Args:
            start_tokens: tokens from the root to where their node begins (or the part of it that was cut off, either will do).
            fingerprints: the blocks that ended in it, in order; none is no harm.
        """
        self._note(fingerprints)
        if start_tokens < self.block_size and fingerprints:
            # Only the first block can end in an edge that begins within it, and it ends there before any other.
            self.first_blocks.remove(fingerprints[0])

    def cleared(self) -> None:
        """The cache was flushed: what is missed next was not evicted, and no other namespace has it. O(blocks)."""
        self.evicted.clear()
        self.first_blocks.clear()

    def check_invariants(self, held: AbstractSet[Fingerprint]) -> None:
        """Its own tables, and that every first block it knows of is among ``held``, the whole blocks that the cache has on
        any tier; raises InvariantError. O(first blocks)."""
        self.evicted.check_invariants()
        self.first_blocks.check_invariants(held)

    def __repr__(self) -> str:
        return f"SeenBlocks(block_size={self.block_size}, {self.evicted!r}, {self.first_blocks!r})"
