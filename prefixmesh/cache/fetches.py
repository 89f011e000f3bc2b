"""Copies with one end in the tree: KV that comes from a disk or another worker, and host copies that are read for one."""

from prefixmesh.cache.base import InsertResult, MatchResult, RadixKey
from prefixmesh.cache.copies import Fetch, HostRead
from prefixmesh.cache.copy_book import MAX_COPIES, CopyBook
from prefixmesh.cache.node import TreeNode, end_of, nodes_from, pack_pages, unpack_pages
from prefixmesh.cache.walk import key_to
from prefixmesh.errors import InternalError
from prefixmesh.tokens import TOKEN_BYTES


class Fetches(CopyBook):
    """``begin_fetch``, then ``finish_fetch`` or ``fail_fetch``; ``begin_read``, then ``end_read``."""

    def begin_fetch(self, key: RadixKey, match: MatchResult, tokens: int, owner: str = "") -> Fetch | None:
        """Take device pages for the ``tokens`` of ``key`` right beyond its match on the device, cut to the key and to whole pages;
        None when that is nothing, or when too few pages can be had. What the host has of them is not looked at. To be called in the
        step that matched. O(depth + pages).

        Raises InternalError for a key whose boundary no insert could take.
        """
        parent = match.last_device_node
        tokens = min(tokens, len(key.tokens) // TOKEN_BYTES - match.matched_tokens)
        pages = tokens * TOKEN_BYTES // self._page_bytes
        if pages < 1 or not self._is_on_device(parent) or end_of(parent) != match.matched_tokens:
            return None  # too little; or the match is not of this step
        end = match.matched_tokens * TOKEN_BYTES + pages * self._page_bytes
        if not self._tree.can_hold(key):
            raise InternalError(
                f"a fetch over a boundary at {key.boundary_tokens} tokens, where no page or block ends"
            )
        if len(self.in_flight) >= MAX_COPIES:
            self.without_room += 1
            return None
        device_lock = self._accounts.lock(parent)
        device_pages = self._make_room(pages, owner)
        if device_pages is None:
            self._accounts.release(device_lock)
            self.without_room += 1
            return None
        copy = Fetch(
            parent,
            match.matched_tokens,
            key=key._replace(tokens=key.tokens[:end]),
            owner=owner,
            life=self._accounts.root,
            device_pages=device_pages,
            device_lock=device_lock,
        )
        self._begin(copy)
        return copy

    def finish_fetch(self, copy: Fetch, now: float) -> InsertResult | None:
        """The bytes are there: as an insert of what was computed, behind the match that it began at; pages for what somebody else has
        inserted meanwhile are freed. None, and all are, after a flush. Match again to use them. O(length of the key)."""
        parent = self._end(copy, Fetch)
        result: InsertResult | None = None
        if copy.life is self._accounts.root:
            before = [at.pages for at in reversed(nodes_from(parent, 0))]
            pages = unpack_pages(b"".join([*before, pack_pages(copy.device_pages)]))
            result = self._tree.insert(copy.key, pages, now, owner=copy.owner)
            self.duplicate_pages += int((result.device_indices != pages).sum())
        else:
            self._free_spare(self._accounts.allocator.free, [pack_pages(copy.device_pages)])
        self._unlock(copy)
        return result

    def fail_fetch(self, copy: Fetch) -> None:
        """As ``fail_restore``."""
        self._fail_on_device(copy, Fetch)

    def begin_read(self, node: TreeNode) -> HostRead | None:
        """Keep the host's copies of the whole path to ``node`` as they are while somebody reads them; None when the host has not all of
        it. O(depth + length of the path)."""
        if not node.host_pages or node.payer is self._accounts.gone:
            return None
        if len(self.in_flight) >= MAX_COPIES:
            self.without_room += 1
            return None
        path = nodes_from(node, 0)
        copy = HostRead(
            node,
            key=key_to(node, self._page_bytes),
            host_pages=unpack_pages(b"".join([at.host_pages for at in reversed(path)])),
            host_lock=self._host.lock(node),
        )
        self._begin(copy)
        return copy

    def end_read(self, copy: HostRead) -> None:
        """They have been read, or will not be. O(depth)."""
        self._end(copy, HostRead)
        self._unlock(copy)
