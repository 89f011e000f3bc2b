"""Public prefixes with private tails: in which namespaces a prompt's KV lives when it begins like one that every tenant may share.

An administrator's public pin is computed once for all: its tokens live in the public namespace, on nobody's account. What a tenant
adds behind it lives in a *tail*, the tenant's own namespace for exactly that boundary, below the public node::

    tokens:     | public prefix ............ | the tenant's own ........ |
                0                            boundary_tokens             end
    lives in:   | namespace (public)         | tail_namespace(tenant's namespace, name of the block that ends here)

Several public prefixes may fit one prompt (a pin, and a longer one that came later), and a tenant may have KV behind each of them
and behind none. A prompt takes the one under which most of it is cached, so that a new pin costs nobody what it has. A request
chooses once and keeps the key's boundary and tail for its life: its pages are in the tree under that key.

Nothing here decides a hit. A candidate is compared by fingerprint; should two prefixes have one name, the prompt's own tokens would
be cached in public, where only equal tokens find them.
"""

import math
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE, block_fingerprints
from prefixmesh.cache.namespace import tail_namespace
from prefixmesh.ids import Fingerprint, Namespace
from prefixmesh.tokens import TOKEN_BYTES

MAX_CANDIDATES: Final = 8
"""Public prefixes that are tried for one prompt, the longest ones: each costs a peek. They lie inside each other (a system prompt,
the same with tools, with examples), of which a fleet has two or three."""


class PublicPrefix(NamedTuple):
    """A candidate boundary: up to there, a prompt that begins so may live in public. ``public_boundary`` makes them."""

    namespace: Namespace
    """The public one, of the prompt's adapter and revision."""
    boundary_tokens: int
    """Whole blocks and whole pages, at least one of each."""
    fingerprint: Fingerprint
    """Of the public block that ends at the boundary."""

    def key(self, namespace: Namespace, tokens: bytes) -> RadixKey:
        """The key of packed ``tokens``, which must begin with this prefix (or be its beginning), for a tenant whose plain namespace
        is ``namespace``. O(1)."""
        tail = tail_namespace(namespace, self.fingerprint)
        return RadixKey(self.namespace, tokens, self.boundary_tokens, tail)


def public_boundary(
    namespace: Namespace, tokens: bytes, *, page_size: int, block_size: int = DEFAULT_BLOCK_SIZE
) -> PublicPrefix | None:
    """The candidate that a public pin of packed ``tokens`` gives for a worker of this page size: cut to whole blocks and whole
    pages. None when that leaves nothing. O(length)."""
    unit = math.lcm(page_size, block_size)
    boundary = len(tokens) // TOKEN_BYTES // unit * unit
    if not boundary:
        return None
    names = block_fingerprints(namespace, tokens[: boundary * TOKEN_BYTES], block_size)
    return PublicPrefix(namespace, boundary, names[-1])


def choose_key(
    peek: Callable[[RadixKey], int],
    namespace: Namespace,
    tokens: bytes,
    candidates: Iterable[PublicPrefix],
    *,
    page_size: int,
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> RadixKey:
    """The key under which most of a prompt is cached: behind one of the ``candidates``, or the tenant's plain one. Of equally good
    ones, that with the longest public part, since what is computed for it serves everybody.

    Pure, if ``peek`` is. Without candidates O(1) and no peek; else at most ``MAX_CANDIDATES`` + 1 peeks, and the hashes of the
    prompt's blocks up to the longest boundary (once for each namespace among the candidates: as a rule, one).

    Args:
        peek: tokens of a key that are cached; must change nothing (``RadixCache.peek``, to which the host tier does not count).
        namespace: the tenant's plain one.
        tokens: the whole prompt, packed, its last token too: that it must be computed makes it no less a prompt with this prefix.
            For a match, replace the key's tokens by fewer.
        candidates: from the request's ticket, in any order. One that is no prefix of this prompt, or no whole blocks and pages
            here, is passed over; of more than ``MAX_CANDIDATES``, the shortest ones are.
        page_size: the cache's.
        block_size: the cache's.
    """
    plain = RadixKey(namespace, tokens)
    fitting = _fitting(tokens, candidates, page_size, block_size)
    if not fitting:
        return plain
    whole = len(tokens) // TOKEN_BYTES // page_size * page_size
    best, longest = plain, -1
    for key in (*(prefix.key(namespace, tokens) for prefix in fitting), plain):
        matched = peek(key)
        if matched > longest:
            best, longest = key, matched
        if longest >= whole:
            break  # none can have more
    return best


def key_fingerprints(key: RadixKey, block_size: int = DEFAULT_BLOCK_SIZE) -> list[Fingerprint]:
    """Names of all whole blocks of a key, in order: what a cache tells of when all of it is stored. O(length).

    Behind a boundary the chain begins again, from the tail's namespace.
    """
    if not key.boundary_tokens:
        return block_fingerprints(key.namespace, key.tokens, block_size)
    boundary = key.boundary_tokens * TOKEN_BYTES
    public = block_fingerprints(key.namespace, key.tokens[:boundary], block_size)
    return public + block_fingerprints(key.tail, key.tokens[boundary:], block_size)


def _fitting(
    tokens: bytes, candidates: Iterable[PublicPrefix], page_size: int, block_size: int
) -> list[PublicPrefix]:
    """The candidates that ``tokens`` begin with, the longest first."""
    unit = math.lcm(page_size, block_size)
    length = len(tokens) // TOKEN_BYTES
    cut = [prefix for prefix in candidates if _is_cut(prefix.boundary_tokens, unit, length)]
    cut.sort(key=lambda prefix: -prefix.boundary_tokens)
    fitting: list[PublicPrefix] = []
    names: dict[Namespace, list[Fingerprint]] = {}
    for prefix in cut[:MAX_CANDIDATES]:
        chain = names.get(prefix.namespace)
        if chain is None:  # the longest boundary in this namespace: the others' names are among these
            public = tokens[: prefix.boundary_tokens * TOKEN_BYTES]
            chain = names[prefix.namespace] = block_fingerprints(prefix.namespace, public, block_size)
        if chain[prefix.boundary_tokens // block_size - 1] == prefix.fingerprint:
            fitting.append(prefix)
    return fitting


def _is_cut(boundary_tokens: int, unit: int, length: int) -> bool:
    return 0 < boundary_tokens <= length and not boundary_tokens % unit
