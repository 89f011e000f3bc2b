"""What the engine does with KV that another worker asks for, or sends: one part between two steps. Pure but for who copies bytes.

Nothing of a copy stays under way in the tree. To read is a match, and the bytes of some of its pages. To write is a match, pages that are
evicted for whoever pays, their bytes, and an insert, in one breath; so what came before a source died is simply cached, and a copy that goes on
begins where the match ends. What is written is locked by nobody: it takes no page that a running request could not have back at once. Either
is a use of the prefix and no hit: of those it has as many as prompts have found it, in however many parts it was copied.

Parts wait in a short queue, and ``turn`` sees to one of them a step, so a stream of parts never keeps answers waiting for more than one.
"""

import logging
from collections import deque
from typing import Final, Protocol

import numpy as np

from prefixmesh.cache.base import MatchResult, PageIndices, RadixKey
from prefixmesh.cache.node import NO_PAGES, TreeNode
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.errors import DeviceLostError, InvalidRequestError
from prefixmesh.tokens import TOKEN_BYTES
from prefixmesh.worker.kv_copies.layout import CopyLayout
from prefixmesh.worker.prefix_messages import KvRead, KvWritten, PrefixAnswer, ReadKv, WriteKv

logger = logging.getLogger(__name__)

MAX_WAITING_PARTS: Final = 32
"""Each may have 8 MiB. A front asks for one at a time in each of its streams, of which it has fewer."""


class PageBytes(Protocol):
    """Who copies bytes (``kv_copies.page_store``)."""

    @property
    def layout(self) -> CopyLayout:
        """Of what is read and written."""
        ...

    def read(self, device: PageIndices, host: PageIndices) -> bytes:
        """The bytes of these pages, the device's and then the host's."""
        ...

    def write(self, device: PageIndices, kv: memoryview) -> None:
        """Overwrite these pages of the device."""
        ...


class PageTaker(Protocol):
    """Who has pages to give (``KvManager``)."""

    @property
    def flushes(self) -> int:
        """How often the cache was emptied."""
        ...

    def take_pages(self, count: int, owner: str) -> PageIndices | None:
        """So many pages, evicting what ``owner`` may evict; None, and nothing evicted, when not all can be had."""
        ...

    def give_back(self, pages: PageIndices) -> None:
        """Pages that were taken and not used."""
        ...


class BackupQueue(Protocol):
    """Who backs up what is cached (``Keeper``)."""

    def inserted(self, node: TreeNode) -> None:
        """The KV on the path to ``node`` is complete on the device."""
        ...


class KvDesk:
    """See the module. ``check_invariants`` of the cache holds after every call."""

    def __init__(
        self, cache: RadixCache, pages: PageTaker, store: PageBytes, backups: BackupQueue | None = None
    ) -> None:
        self._cache = cache
        self._pages = pages
        self._store = store
        self._backups = backups
        self._page_size = cache.page_size
        self._waiting: deque[ReadKv | WriteKv] = deque()

    @property
    def has_work(self) -> bool:
        """Whether a part waits for its turn."""
        return bool(self._waiting)

    def take(self, command: ReadKv | WriteKv, now: float) -> PrefixAnswer | None:
        """Answer at once what moves no bytes; the rest waits for its ``turn``."""
        if isinstance(command, WriteKv) and not command.kv:
            return self._tell(command, now)
        if len(self._waiting) >= MAX_WAITING_PARTS:
            problem = f"{MAX_WAITING_PARTS} parts of KV wait here, which is the limit"
            return PrefixAnswer(question=command.question, error="over_budget", problem=problem)
        self._waiting.append(command)
        return None

    def turn(self, now: float) -> PrefixAnswer:
        """Read or write the part that has waited longest; some milliseconds. Whatever fails is answered, and changes nothing."""
        command = self._waiting.popleft()
        try:
            if isinstance(command, ReadKv):
                return PrefixAnswer(question=command.question, read=self._read(command, now))
            return PrefixAnswer(question=command.question, written=self._write(command, now))
        except InvalidRequestError as error:
            return PrefixAnswer(
                question=command.question, error="invalid", field=error.field, problem=error.problem
            )
        except DeviceLostError:
            raise
        except Exception as error:  # one copy's error is that copy's: whoever wanted it computes
            logger.exception("engine.kv_part_failed")
            return PrefixAnswer(question=command.question, error="failed", problem=type(error).__name__)

    def _tell(self, command: WriteKv, now: float) -> PrefixAnswer:
        key = command.prefix.key()
        if not self._cache.can_hold(key):
            problem = "is not at whole pages and blocks here"
            return PrefixAnswer(
                question=command.question, error="invalid", field="boundary_tokens", problem=problem
            )
        found = self._cache.peek_tiers(key)
        written = KvWritten(held_tokens=found.device, host_tokens=found.host, flushes=self._pages.flushes)
        return PrefixAnswer(question=command.question, written=written)

    def _read(self, command: ReadKv, now: float) -> KvRead:
        key = command.prefix.key()
        start = self._whole(command.start_tokens, "start_tokens")
        match = self._cache.match_prefix(key, now, hits=0)
        host = _host_indices(match)
        device_pages, pages = len(match.device_indices), len(match.device_indices) + len(host)
        end = min(pages, start + max(1, command.max_bytes // self._store.layout.page_bytes))
        kv = b""
        if start < end:
            beyond = max(0, start - device_pages), max(0, end - device_pages)
            kv = self._store.read(match.device_indices[start:end], host[beyond[0] : beyond[1]])
        return KvRead(held_tokens=pages * self._page_size, kv=kv)

    def _write(self, command: WriteKv, now: float) -> KvWritten:
        key = command.prefix.key()
        start = self._whole(command.start_tokens, "start_tokens")
        end = self._whole(len(key.tokens) // TOKEN_BYTES, "prefix.token_ids")
        page_bytes = self._store.layout.page_bytes
        if len(command.kv) != (end - start) * page_bytes:
            raise InvalidRequestError(
                "kv", f"must be {(end - start) * page_bytes} bytes, got {len(command.kv)}"
            )
        if not self._cache.can_hold(key):
            raise InvalidRequestError("boundary_tokens", "is not at whole pages and blocks here")
        match = self._cache.match_prefix(key, now, hits=0)
        found = len(match.device_indices)
        if start <= found < end and command.flushes == self._pages.flushes:
            kv = memoryview(command.kv)[(found - start) * page_bytes :]
            if self._add(key, match, end - found, kv, command.owner, now):
                found = end
        return KvWritten(held_tokens=found * self._page_size, flushes=self._pages.flushes)

    def _add(
        self, key: RadixKey, match: MatchResult, count: int, kv: memoryview, owner: str, now: float
    ) -> bool:
        """Put the KV behind a match into the cache; False when no pages for it can be had."""
        # What is found must not be evicted for what comes behind it.
        receipt = self._cache.lock(match.last_device_node)
        try:
            fresh = self._pages.take_pages(count, owner)
            if fresh is None:
                return False
            try:
                self._store.write(fresh, kv)
                whole = np.concatenate((match.device_indices, fresh))
                result = self._cache.insert(key, whole, now, owner=owner)
            except BaseException:
                self._pages.give_back(fresh)
                raise
        finally:
            self._cache.release(receipt)
        if self._backups is not None:
            self._backups.inserted(result.last_device_node)
        return True

    def _whole(self, tokens: int, field: str) -> int:
        """So many tokens in pages."""
        if tokens < 0 or tokens % self._page_size:
            raise InvalidRequestError(field, f"must be whole pages of {self._page_size} tokens, got {tokens}")
        return tokens // self._page_size


def _host_indices(match: MatchResult) -> PageIndices:
    """The host pages of what a match found beyond the device, in order. O(depth + pages)."""
    runs: list[PageIndices] = []
    node: TreeNode | None = match.last_host_node
    while node is not None and node is not match.last_device_node:
        runs.append(node.host_value)
        node = node.parent
    return np.concatenate(runs[::-1]) if runs else NO_PAGES
