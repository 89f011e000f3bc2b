"""Why a prompt's tokens were not found: the cause of each token that a request has to compute.

``classify`` is the rule, a pure function of numbers and names. ``MissFinder`` gathers what it needs when a request is admitted:
the names of the missed blocks, and how far the same tokens are cached in a few other namespaces, by peeks that change nothing.

Causes are told per *block*, because blocks have names and tokens have none: evicted KV is recognised by its block's fingerprint.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.cache.ledger import Lookup, Misses
from prefixmesh.cache.seen_blocks import SeenBlocks
from prefixmesh.errors import InternalError
from prefixmesh.ids import Fingerprint
from prefixmesh.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from prefixmesh.cache.node import TreeNode


def classify(
    *,
    prompt_tokens: int,
    key_tokens: int,
    found_tokens: int,
    block_size: int,
    fingerprints: Sequence[Fingerprint],
    evicted: AbstractSet[Fingerprint],
    other_namespace_tokens: int,
) -> Misses:
    """Tokens per cause; they sum to ``prompt_tokens - found_tokens``. Pure; O(1) unless something was evicted, then
    O(missed blocks).

    ::

        prompt:  | found    | missed                                    | tail                |
                 0      found_tokens                                key_tokens         prompt_tokens
        blocks:  |   whole   |   fingerprints[0]   |  ...  |   piece   |
                             (found_tokens may lie inside the block of fingerprints[0])

    A missed block that was evicted is EVICTED, and so is the piece after it that is too short to have a name. Any other missed
    token is OTHER_NAMESPACE within ``other_namespace_tokens``, else NEVER_SEEN. So a prefix shorter than a block, and one whose
    eviction is forgotten or happened before a flush, are NEVER_SEEN.

    Args:
        prompt_tokens: all tokens that were known when the request arrived.
        key_tokens: those that may be matched: whole pages, and not the last token.
        found_tokens: those that were, on any tier.
        block_size: tokens of a block.
        fingerprints: of the whole blocks from the one that ``found_tokens`` lies in (or at) to the key's end; may be left out
            when ``evicted`` is empty.
        evicted: those of them that were evicted; others do no harm.
        other_namespace_tokens: the longest match of the same tokens in another namespace.
    """
    gone = 0
    elsewhere = max(0, min(other_namespace_tokens, key_tokens) - found_tokens)
    if evicted and fingerprints:
        start = found_tokens
        # Every missed whole block ends a block further on, and what is left after the last one goes with it.
        ends = [*range((start // block_size + 1) * block_size, key_tokens + 1, block_size)]
        ends[-1] = key_tokens
        for fingerprint, end in zip(fingerprints, ends, strict=True):
            if fingerprint in evicted:
                gone += end - start
                if start < other_namespace_tokens:
                    elsewhere -= min(other_namespace_tokens, end) - start
            start = end
    never_seen = key_tokens - found_tokens - gone - elsewhere
    return Misses(never_seen, gone, elsewhere, prompt_tokens - key_tokens)


class MissFinder:
    """Explains what a cache did not find. Reads, and changes nothing; not thread-safe: the engine's loop owns it.

    Args:
        peek: how many tokens of a key are cached on the device; must change nothing (``RadixCache.peek``).
        seen: what the radix tree has told; None for caches that tell nothing (hash, off): there, everything missed but the tail
            is NEVER_SEEN.
    """

    __slots__ = ("_peek", "_seen")

    def __init__(self, peek: Callable[[RadixKey], int], seen: SeenBlocks | None) -> None:
        self._peek = peek
        self._seen = seen

    def explain(
        self,
        key: RadixKey,
        prompt_tokens: int,
        device_tokens: int,
        host_tokens: int = 0,
        last_block: Fingerprint | None = None,
        disk_tokens: int = 0,
    ) -> Lookup:
        """What ``CacheQuery.record`` takes, for a key that has just been matched. O(missed blocks) hashes, and at most
        ``MAX_NAMESPACES_PER_BLOCK`` peeks. Raises InternalError when more was found than asked for.

        Args:
            key: what was matched: whole pages, and at most all but the last token. For one with a boundary, the caller's own
                plain namespace is another namespace like any.
            prompt_tokens: all tokens that were known when the request arrived.
            device_tokens: found on the device, but for ``disk_tokens``.
            host_tokens: found on the host alone.
            disk_tokens: found on the device because they were fetched for this very request.
            last_block: the last whole block that was found (``last_fingerprint`` of the match's node); without it, what was
                found is hashed again.
        """
        key_tokens = len(key.tokens) // TOKEN_BYTES
        found = device_tokens + host_tokens + disk_tokens
        if min(device_tokens, host_tokens, disk_tokens) < 0 or not found <= key_tokens <= prompt_tokens:
            raise InternalError(
                f"found {device_tokens} + {host_tokens} + {disk_tokens} tokens of a key of {key_tokens} in a prompt of "
                f"{prompt_tokens}"
            )
        seen = self._seen
        if seen is None or found == key_tokens:
            misses = Misses(key_tokens - found, tail=prompt_tokens - key_tokens)
            return Lookup(prompt_tokens, device_tokens, host_tokens, misses, disk_tokens)
        fingerprints: list[Fingerprint] = []
        evicted: set[Fingerprint] = set()
        if seen.evicted and self._was_evicted(key, found, seen, last_block):
            fingerprints = missed_fingerprints(key, found, seen.block_size, last_block)
            evicted = seen.evicted.among(fingerprints)
        elsewhere = self._cached_elsewhere(key, seen)
        if not evicted and elsewhere <= found:
            misses = Misses(key_tokens - found, tail=prompt_tokens - key_tokens)
            return Lookup(prompt_tokens, device_tokens, host_tokens, misses, disk_tokens)
        misses = classify(
            prompt_tokens=prompt_tokens,
            key_tokens=key_tokens,
            found_tokens=found,
            block_size=seen.block_size,
            fingerprints=fingerprints,
            evicted=evicted,
            other_namespace_tokens=elsewhere,
        )
        return Lookup(prompt_tokens, device_tokens, host_tokens, misses, disk_tokens)

    def _was_evicted(
        self, key: RadixKey, found: int, seen: SeenBlocks, last_block: Fingerprint | None
    ) -> bool:
        """Whether the first missed block was. If not, none behind it needs a look: those go before it, and are forgotten before
        it. O(block) hashing, when the block before it is known."""
        size = seen.block_size
        first = found // size * size
        block = key.tokens[first * TOKEN_BYTES : (first + size) * TOKEN_BYTES]
        if last_block is not None and first > key.boundary_tokens:
            names = block_fingerprints(last_block.to_bytes(8, "little"), block, size)
        else:
            upto = key._replace(tokens=key.tokens[: first * TOKEN_BYTES] + block)
            names = missed_fingerprints(upto, found, size, last_block)
        return bool(names) and names[0] in seen.evicted

    def _cached_elsewhere(self, key: RadixKey, seen: SeenBlocks) -> int:
        """The longest match of the key's tokens under another namespace; 0 for less than a block."""
        tokens = key.tokens
        block_bytes = seen.block_size * TOKEN_BYTES
        longest = 0
        if len(tokens) < block_bytes:
            return longest
        for namespace in seen.first_blocks.others(tokens[:block_bytes], key.namespace):
            longest = max(longest, self._peek(RadixKey(namespace, tokens)))
            if longest * TOKEN_BYTES == len(tokens):
                break
        return longest


def missed_fingerprints(
    key: RadixKey, found_tokens: int, block_size: int, last_block: Fingerprint | None = None
) -> list[Fingerprint]:
    """Names of the key's whole blocks from the one that ``found_tokens`` lies in (or at). O(their length) when ``last_block``
    names the block before them, else O(length of the key).

    Behind a boundary the chain begins again, from the tail's namespace.
    """
    first = found_tokens // block_size * block_size
    boundary = key.boundary_tokens
    if first >= boundary:
        namespace = key.tail if boundary else key.namespace
        return _chain_from(
            namespace, key.tokens[boundary * TOKEN_BYTES :], first - boundary, block_size, last_block
        )
    public = key.tokens[: boundary * TOKEN_BYTES]
    return [
        *_chain_from(key.namespace, public, first, block_size, last_block),
        *block_fingerprints(key.tail, key.tokens[boundary * TOKEN_BYTES :], block_size),
    ]


def last_fingerprint(node: "TreeNode") -> Fingerprint | None:
    """Name of the last whole block that ends at or above ``node``; None when there is none. O(nodes that the block spans)."""
    at: TreeNode | None = node
    while at is not None:
        if at.hash_value:
            return at.hash_value[-1]
        at = at.parent
    return None


def _chain_from(
    namespace: bytes, tokens: bytes, first: int, block_size: int, last_block: Fingerprint | None
) -> list[Fingerprint]:
    """Names of the whole blocks of ``tokens`` from token ``first`` on; ``last_block`` is the one that ends there, if known."""
    if first and last_block is not None:
        return block_fingerprints(last_block.to_bytes(8, "little"), tokens[first * TOKEN_BYTES :], block_size)
    return block_fingerprints(namespace, tokens, block_size)[first // block_size :]
