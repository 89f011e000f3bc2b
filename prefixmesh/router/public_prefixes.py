"""The public prefixes of a fleet: which prompts begin like one that every tenant may share. Pure.

An administrator's public pins stand here by the adapter whose KV they are (``cache.public`` says what comes of it on a worker). Whoever
keeps the pins calls ``set`` with those that there are now; whoever prepares a request asks ``fitting``. Prompts are compared by their
tokens: two that only share a name are never taken for each other.

A boundary that a longer pin has taken the place of stays a candidate for as long as that pin covers it, so that tenants do not lose at
once what they have behind it: it is public still. One that no pin covers is gone at once.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.cache.namespace import tail_namespace
from prefixmesh.cache.public import MAX_CANDIDATES, PublicPrefix, public_boundary
from prefixmesh.ids import Fingerprint, Namespace
from prefixmesh.router.pins.wishes import PinVersion
from prefixmesh.tokens import TOKEN_BYTES

MAX_FORMER: Final = 2
"""Former boundaries that are kept within one pin, the latest ones. Each costs a request that begins so a walk and the names of its tail.
A tenant that was away for longer than three versions of a prompt computes what is its own once."""


class KnownPrefix(NamedTuple):
    """A boundary at which prompts may leave the public namespace."""

    prefix: PublicPrefix
    """As tickets carry it."""

    tokens: bytes
    """Packed, up to the boundary."""

    fingerprints: Sequence[Fingerprint]
    """Of its blocks."""

    def chain(self, namespace: Namespace, tokens: bytes, block_size: int) -> Sequence[Fingerprint]:
        """Names of the whole blocks of packed ``tokens``, which begin with this prefix or are its beginning, as a worker tells of them
        when they are cached behind it for a tenant whose plain namespace is ``namespace``. O(length of the tail)."""
        if len(tokens) <= len(self.tokens):
            return self.fingerprints[: len(tokens) // TOKEN_BYTES // block_size]
        tail = tail_namespace(namespace, self.prefix.fingerprint)
        return [*self.fingerprints, *block_fingerprints(tail, tokens[len(self.tokens) :], block_size)]


class PublicPrefixes:
    """Public prefixes by adapter. Not thread-safe to ``set``; ``fitting`` may be asked from any thread."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._told: tuple[tuple[PinVersion, ...], int] = ((), 1)
        self._pinned: list[tuple[str, KnownPrefix]] = []
        self._former: list[tuple[str, KnownPrefix]] = []
        # By adapter digest and first block, the longest first. Replaced as a whole.
        self._fitting: dict[tuple[str, bytes], tuple[KnownPrefix, ...]] = {}

    def __len__(self) -> int:
        """Boundaries, former ones too."""
        return len(self._pinned) + len(self._former)

    def __repr__(self) -> str:
        return f"<PublicPrefixes {len(self._pinned)} pinned, {len(self._former)} former>"

    def set(self, versions: Iterable[PinVersion], page_size: int) -> bool:
        """These are all public pins from now on; True when that is news. O(1) for the same ones again, else O(their tokens).

        Args:
            versions: in their public namespaces, without a boundary of their own. One that is shorter than a block and a page is none.
            page_size: the largest of the fleet's workers, a power of two: where one of them could not divide, nobody does.
        """
        told = tuple(versions), max(1, page_size)
        if told == self._told:
            return False
        self._told = told
        pinned = [
            (version.adapter_digest, known)
            for version in told[0]
            if (known := self._known(version, told[1])) is not None
        ]
        current = {_place(one) for one in pinned}
        gone = [one for one in (*self._pinned, *self._former) if _place(one) not in current]
        self._pinned = list({_place(one): one for one in pinned}.values())
        self._former = self._still_covered(gone, *told)
        self._fitting = self._by_first_block()
        return True

    def fitting(self, adapter_digest: str, tokens: bytes) -> tuple[KnownPrefix, ...]:
        """Those that packed ``tokens`` begin with, the longest first, at most ``MAX_CANDIDATES``. O(1) where there are none, else one
        comparison for each that begins alike."""
        if not self._fitting:
            return ()
        alike = self._fitting.get((adapter_digest, tokens[: self._block_bytes]))
        if alike is None:
            return ()
        return tuple(one for one in alike if tokens.startswith(one.tokens))[:MAX_CANDIDATES]

    def _known(self, version: PinVersion, page_size: int) -> KnownPrefix | None:
        namespace, size = version.namespace, self._block_size
        prefix = public_boundary(namespace, version.tokens, page_size=page_size, block_size=size)
        if prefix is None:
            return None
        tokens = version.tokens[: prefix.boundary_tokens * TOKEN_BYTES]
        return KnownPrefix(prefix, tokens, tuple(block_fingerprints(namespace, tokens, size)))

    def _still_covered(
        self, gone: Iterable[tuple[str, KnownPrefix]], versions: Sequence[PinVersion], page_size: int
    ) -> list[tuple[str, KnownPrefix]]:
        """Of boundaries that are no pin's any more, the latest ones that lie within a pin and where every worker can divide."""
        kept: list[tuple[str, KnownPrefix]] = []
        within: Counter[int] = Counter()
        for digest, known in gone:
            if known.prefix.boundary_tokens % page_size:
                continue
            for number, version in enumerate(versions):
                is_alike = (version.adapter_digest, version.namespace) == (digest, known.prefix.namespace)
                if is_alike and version.tokens.startswith(known.tokens) and within[number] < MAX_FORMER:
                    within[number] += 1
                    kept.append((digest, known))
                    break
        return kept

    def _by_first_block(self) -> dict[tuple[str, bytes], tuple[KnownPrefix, ...]]:
        groups: dict[tuple[str, bytes], list[KnownPrefix]] = {}
        for digest, known in (*self._pinned, *self._former):
            groups.setdefault((digest, known.tokens[: self._block_bytes]), []).append(known)
        return {
            name: tuple(sorted(group, key=lambda known: -len(known.tokens))) for name, group in groups.items()
        }


def _place(one: tuple[str, KnownPrefix]) -> tuple[str, PublicPrefix]:
    digest, known = one
    return digest, known.prefix
