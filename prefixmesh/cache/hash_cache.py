"""The fixed-block prefix cache: the baseline that the radix cache is measured against.

A prompt is cut into blocks of 16 tokens, each known by the fingerprint of the whole prefix up to its end, and one table maps
(namespace, fingerprint) to blocks. A fingerprint only proposes: a block is a hit when its tokens are equal *and* it follows the
block that was hit before it, so a collision costs a miss and never a wrong answer. What is
shared beyond the last whole block is computed again: a prompt sharing 1,490 tokens finds 1,488.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from prefixmesh.cache.accounting import PageAccounts
from prefixmesh.cache.base import InsertResult, MatchResult, PageIndices, RadixKey
from prefixmesh.cache.drawing import draw
from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.cache.invariants import broken_rule, check_accounts, owned_pages, summary
from prefixmesh.cache.node import NO_PAGES, TreeNode, end_of, nodes_below, pack_pages, unpack_pages
from prefixmesh.cache.owners import NOBODY
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.receipts import LockReceipt
from prefixmesh.errors import ConfigError, InternalError
from prefixmesh.ids import Fingerprint
from prefixmesh.tokens import TOKEN_BYTES

HASH_BLOCK_SIZE: Final = 16
"""Tokens in a block: what block-hashing servers use by default, so that the comparison is a fair one."""

_BLOCK_BYTES: Final = HASH_BLOCK_SIZE * TOKEN_BYTES

FingerprintsOf = Callable[[bytes, bytes, int], list[Fingerprint]]
"""``(namespace, packed tokens, block size) -> fingerprints``."""


class HashCache:
    """Prefix cache of whole 16-token blocks. Implements ``PrefixCache``; not thread-safe.

    Blocks are nodes chained by ``parent``; locks, order and flush are the radix cache's own.
    """

    def __init__(
        self, allocator: PageAllocator, page_size: int, fingerprints_of: FingerprintsOf = block_fingerprints
    ) -> None:
        if page_size < 1 or HASH_BLOCK_SIZE % page_size:
            raise ConfigError(f"page_size must divide {HASH_BLOCK_SIZE} for the hash cache, got {page_size}")
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._block_pages = HASH_BLOCK_SIZE // page_size
        self._fingerprints_of = fingerprints_of
        self._accounts = PageAccounts(allocator)
        self._blocks: dict[bytes, TreeNode] = {}
        """Namespace and fingerprint -> block. As many entries as blocks: bounded by the pool."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._page_size

    @property
    def evictable_pages(self) -> int:
        """Cached pages that nothing locks. O(1)."""
        return self._accounts.evictable_pages

    def evictable_for(self, owner: str) -> int:
        """The same: owners have no quotas here. O(1)."""
        return self._accounts.evictable_pages

    @property
    def protected_pages(self) -> int:
        """Pages that a lock protects, those cut off by a flush and still read among them. O(1)."""
        return self._accounts.protected_pages

    @property
    def double_releases(self) -> int:
        """Receipts that somebody tried to release again."""
        return self._accounts.double_releases

    @property
    def node_count(self) -> int:
        """Blocks in the cache. O(1)."""
        return self._accounts.node_count

    def match_prefix(self, key: RadixKey, now: float, priority: int = 0) -> MatchResult:
        """Longest run of cached blocks that ``key`` begins with; counts as a use of it, whatever its priority. O(length)."""
        chain = self._chain(key, self._names(key))
        node = chain[-1] if chain else self._accounts.root
        self._accounts.touch(node, now, 1)
        indices = np.concatenate([block.value for block in chain]) if chain else NO_PAGES
        return MatchResult(indices, len(chain) * HASH_BLOCK_SIZE, node, node, 0)

    def peek(self, key: RadixKey) -> int:
        """Tokens that ``match_prefix`` would match; changes nothing. O(length)."""
        return len(self._chain(key, self._names(key))) * HASH_BLOCK_SIZE

    def insert(
        self, key: RadixKey, pages: PageIndices, now: float, *, priority: int = 0, owner: str = NOBODY
    ) -> InsertResult:
        """Cache ``key`` cut to whole blocks; see ``PrefixCache.insert`` for who owns which page afterwards. O(length).

        Where a block's name is taken by other tokens, it and all after it are not kept. Raises InternalError, changing
        nothing, when ``pages`` is shorter than the key's blocks or a duplicate is free already.
        """
        names = self._names(key)
        if len(pages) < len(names) * self._block_pages:
            raise InternalError(f"insert of {len(names)} blocks of tokens with {len(pages)} pages of KV")
        cut_off = self._accounts.detached_end(pages)
        if cut_off is not None:
            return InsertResult(0, 0, NO_PAGES, cut_off)
        chain = self._chain(key, names)
        cached = len(chain)
        self._free_duplicates(chain, pages)
        node = chain[-1] if chain else self._accounts.root
        for index in range(cached, len(names)):
            if names[index] in self._blocks:
                break
            node = self._append(node, key, names[index], index, pages, now)
            chain.append(node)
        self._accounts.touch(node, now, 0)
        indices = np.concatenate([block.value for block in chain]) if chain else NO_PAGES
        return InsertResult(cached * HASH_BLOCK_SIZE, len(chain) * HASH_BLOCK_SIZE, indices, node)

    def lock(self, node: TreeNode) -> LockReceipt:
        """Protect ``node`` and the blocks before it until the receipt is released. O(blocks)."""
        return self._accounts.lock(node)

    def release(self, receipt: LockReceipt) -> None:
        """Undo one lock; raises DoubleReleaseError, changing nothing, the second time. O(blocks)."""
        self._accounts.release(receipt)

    def evict(self, pages: int, owner: str = NOBODY) -> int:
        """Free at least ``pages`` pages, in whole blocks, or all that is unlocked when that is less; returns how many.

        The last block of the least recently used chain goes first. O(blocks dropped).
        """
        accounts = self._accounts
        accounts.serial += 1
        given_up: list[bytes] = []
        freed = 0
        while freed < pages:
            victim = accounts.lines.next_victim(owner, pages, pages - freed, accounts.serial)
            if victim is None:
                break
            node, _ = victim
            del self._blocks[node.edge]
            given_up.append(accounts.drop(node))
            freed += self._block_pages
        accounts.allocator.free(unpack_pages(b"".join(given_up)))
        return freed

    def flush(self) -> None:
        """Forget everything: unlocked pages are free at once, locked ones when their receipts are released. O(blocks)."""
        self._accounts.detach_all()
        self._blocks.clear()

    def owned_pages(self) -> PageIndices:
        """Every page this cache owns, in no order. O(pages)."""
        return owned_pages(self._accounts)

    def check_invariants(self) -> None:
        """Recompute every count from nothing; raises InvariantError with the chains drawn. O(blocks)."""
        accounts = self._accounts
        check_accounts("HashCache", accounts, self._page_bytes)
        nodes = {node.edge: node for _, node in nodes_below(accounts.root)}
        if nodes != self._blocks:
            raise broken_rule("HashCache", "table", "the table is not the blocks in the chains", accounts)
        if any(len(node.key) != _BLOCK_BYTES for node in nodes.values()):
            raise broken_rule("HashCache", "blocks", "a block is not 16 tokens", accounts)

    def render(self) -> str:
        """The chains as text: lengths, pages, locks. Tokens are not shown."""
        return draw(self._accounts)

    def __repr__(self) -> str:
        return f"HashCache(page_size={self._page_size}, {summary(self._accounts)})"

    def _names(self, key: RadixKey) -> list[bytes]:
        """What the table knows each whole block of ``key`` by: the namespace it lies in, then the fingerprint.

        Raises InternalError for a boundary that is not at whole blocks.
        """
        boundary = key.boundary_tokens * TOKEN_BYTES
        if not boundary:
            return self._names_in(key.namespace, key.tokens)
        if boundary % _BLOCK_BYTES or len(key.tail) != len(key.namespace):
            raise InternalError(
                f"a boundary at {key.boundary_tokens} tokens is not at whole blocks of {HASH_BLOCK_SIZE}"
            )
        names = self._names_in(key.namespace, key.tokens[:boundary])
        return names + self._names_in(key.tail, key.tokens[boundary:])

    def _names_in(self, namespace: bytes, tokens: bytes) -> list[bytes]:
        prints = self._fingerprints_of(namespace, tokens, HASH_BLOCK_SIZE)
        return [namespace + fingerprint.to_bytes(8, "little") for fingerprint in prints]

    def _chain(self, key: RadixKey, names: list[bytes]) -> list[TreeNode]:
        """The cached blocks that ``key`` begins with; changes nothing."""
        chain: list[TreeNode] = []
        previous = self._accounts.root
        for index, name in enumerate(names):
            block = self._blocks.get(name)
            if block is None or block.parent is not previous or block.key != _block_tokens(key, index):
                break
            chain.append(block)
            previous = block
        return chain

    def _append(
        self, parent: TreeNode, key: RadixKey, name: bytes, index: int, pages: PageIndices, now: float
    ) -> TreeNode:
        """A new block behind ``parent``, holding the caller's pages of block ``index`` of ``key``."""
        first = index * self._block_pages
        packed = pack_pages(pages[first : first + self._block_pages])
        payer = self._accounts.lines.payer(NOBODY)
        node = TreeNode(parent, name, _block_tokens(key, index), packed, now, payer, end_of(parent))
        self._accounts.adopt(node)
        self._blocks[name] = node
        return node

    def _free_duplicates(self, chain: list[TreeNode], pages: PageIndices) -> None:
        """Give back those of the caller's ``pages`` whose blocks are cached in other pages already."""
        if not chain:
            return
        indices = np.concatenate([block.value for block in chain])
        mine = pages[: len(indices)]
        self._accounts.allocator.free(np.asarray(mine[mine != indices], dtype=np.int32))


def _block_tokens(key: RadixKey, index: int) -> bytes:
    return key.tokens[index * _BLOCK_BYTES : (index + 1) * _BLOCK_BYTES]
