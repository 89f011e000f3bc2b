"""Brings a prefix's KV from other workers of the fleet into this one's cache. A thin shell: what to do, the pure files beside it say.

Each part is checked, written into the cache, and only then the next one taken; so a copy that ends, however it ends, leaves what came before,
and the next source is asked from there. Nothing is held meanwhile: not here, not in the engine, not at the source.

One copy of a prefix is under way at a time; whoever wants the same waits for it, and the last who leaves ends it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Final, NamedTuple

import msgspec

from prefixmesh.errors import (
    BudgetError,
    InternalError,
    InvalidRequestError,
    PrefixmeshError,
    UnavailableError,
    UnsupportedError,
)
from prefixmesh.ids import Incarnation
from prefixmesh.kv_source import KvSource
from prefixmesh.tokens import TOKEN_BYTES
from prefixmesh.worker.engine_client import EngineClient
from prefixmesh.worker.kv_copies.books import CopyBooks
from prefixmesh.worker.kv_copies.choice import Found, is_worth, order, patience_s
from prefixmesh.worker.kv_copies.parts import check_part
from prefixmesh.worker.kv_copies.transport import CopiedPart, KvTransport, WantedKv
from prefixmesh.worker.prefix_calls import ask
from prefixmesh.worker.prefix_messages import KvWritten, PrefixName, WriteKv
from prefixmesh.worker.unheard import look_at
from prefixmesh.worker.worker_reports import EngineFigures

_log = logging.getLogger(__name__)

MAX_COPIES: Final = 4
"""Under way at once: each has a part or two in memory, and more would only share one engine's turns."""

PART_WAIT_S: Final = 10.0
"""For one part, from a source that may be in a long step: longer, and it is as good as gone."""


class Brought(NamedTuple):
    """What a copy came to."""

    found: int
    """Leading tokens of the prefix that were on the device before."""

    copied: int
    """Behind them, what came from others."""

    problem: str = ""
    """Why that is not all; empty where it is, or where nothing had to come."""


class _Copy:
    """One copy under way, as those who wait for it share it."""

    def __init__(self) -> None:
        self.found = self.copied = 0
        self.flushes = 0
        """Of this worker's cache, before it began."""

        self.problem = ""
        self.waiting = 0
        self.task: asyncio.Task[None] | None = None

    @property
    def end(self) -> int:
        """Leading tokens that are here."""
        return self.found + self.copied

    def brought(self, problem: str = "") -> Brought:
        return Brought(self.found, self.copied, problem or self.problem)


class KvCopier:
    """Copies for one life of one worker. One event loop owns it."""

    def __init__(
        self,
        engine: EngineClient,
        books: CopyBooks,
        stats: EngineFigures,
        transport: KvTransport,
        *,
        model_revision: str,
        incarnation: Incarnation,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._books = books
        self._stats = stats
        self._transport = transport
        self._model_revision = model_revision
        self._incarnation = incarnation
        self._clock = clock
        self._copies: dict[PrefixName, _Copy] = {}
        self._places = asyncio.Semaphore(MAX_COPIES)
        self._is_closed = False

    def __len__(self) -> int:
        """Copies that are under way, or wait for a place."""
        return len(self._copies)

    async def bring(
        self,
        prefix: PrefixName,
        sources: Sequence[KvSource],
        owner: str,
        *,
        must: bool = False,
        wait_s: float | None = None,
    ) -> Brought:
        """Have as much of a prefix (whole pages) on the device as the sources give, on ``owner``'s account.

        Without ``must``, only where copying is quicker than computing, at once or not at all, and no longer than computing would take; with
        it, for as long as parts come. ``wait_s`` bounds the caller's own wait. Whatever goes wrong at a source is told, not raised;
        UnavailableError is this worker's own engine. To cancel this ends the copy, unless others wait for it.
        """
        if self._books.layout is None or self._is_closed:
            return Brought(0, 0, "KV cannot be copied here")
        copy = self._copies.get(prefix)
        if copy is None:
            copy = self._copies[prefix] = _Copy()
            copy.task = asyncio.create_task(self._run(copy, prefix, sources, owner, must=must))
            copy.task.add_done_callback(lambda _: self._forget(prefix, copy))
            copy.task.add_done_callback(look_at)
        elif not must:  # it may be a warming's, which is patient
            limit_s = patience_s(Found(copy.end, 0), _tokens(prefix), self._stats.last)
            wait_s = limit_s if wait_s is None else min(wait_s, limit_s)
        return await self._wait_for(copy, prefix, wait_s)

    async def close(self) -> None:
        """End every copy, and whoever waits for one."""
        self._is_closed = True
        tasks = [copy.task for copy in self._copies.values() if copy.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._transport.close()

    async def _wait_for(self, copy: _Copy, prefix: PrefixName, wait_s: float | None) -> Brought:
        assert copy.task is not None
        copy.waiting += 1
        try:
            # Not awaited itself: to cancel one who waits must not end it for the others.
            await asyncio.wait({copy.task}, timeout=wait_s)
        finally:
            copy.waiting -= 1
            if not copy.waiting and not copy.task.done():
                copy.task.cancel()
                self._forget(prefix, copy)
        if not copy.task.done() or copy.task.cancelled():
            return copy.brought("the worker is stopping" if self._is_closed else "the copy took too long")
        copy.task.result()
        return copy.brought()

    def _forget(self, prefix: PrefixName, copy: _Copy) -> None:
        if self._copies.get(prefix) is copy:
            del self._copies[prefix]

    async def _run(
        self, copy: _Copy, prefix: PrefixName, sources: Sequence[KvSource], owner: str, *, must: bool
    ) -> None:
        if self._places.locked() and not must:
            self._books.unpaid_copies += 1
            copy.problem = f"{MAX_COPIES} copies are under way here, which is the limit"
            return
        async with self._places:
            self._books.copying += 1
            try:
                await self._bring(copy, prefix, order(sources, self._incarnation), owner, must=must)
            except UnavailableError:
                raise
            except PrefixmeshError as error:
                copy.problem = str(error)
            finally:
                self._books.copying -= 1

    async def _bring(
        self, copy: _Copy, prefix: PrefixName, sources: list[KvSource], owner: str, *, must: bool
    ) -> None:
        told = await self._write(WriteKv(question=0, prefix=prefix, start_tokens=0))
        found = Found(told.held_tokens, told.host_tokens)
        copy.found, copy.flushes = found.device_tokens, told.flushes
        size = _tokens(prefix)
        if copy.found >= size or not sources:
            return
        limit_s: float | None = None
        if not must:
            end = min(size, max(source.tokens for source in sources))
            if not is_worth(found, end, self._books.ms_per_token, self._stats.last):
                self._books.unpaid_copies += 1
                copy.problem = "to compute it is quicker"
                return
            limit_s = patience_s(found, end, self._stats.last)
        try:
            async with asyncio.timeout(limit_s):
                await self._from_each(copy, prefix, sources, owner)
        except TimeoutError:
            self._books.failed_copies += 1
            copy.problem = "the copy took longer than to compute it"

    async def _from_each(self, copy: _Copy, prefix: PrefixName, sources: list[KvSource], owner: str) -> None:
        """Ask one source after the other for what is missing by then."""
        for source in sources:
            began, before = self._clock(), copy.copied
            try:
                await self._from(copy, prefix, source, owner)
                copy.problem = "" if copy.end >= _tokens(prefix) else f"{source.address} has no more of it"
            except BudgetError as error:
                copy.problem = str(error)
                return
            except (PrefixmeshError, TimeoutError) as error:
                copy.problem = f"{source.address}: {str(error) or 'no part came in time'}"
            except Exception as error:  # whatever it was: the next source is asked, or the rest computed
                _log.exception("kv_copy_failed source=%s", source.address)
                copy.problem = f"{source.address}: {type(error).__name__}"
            finally:
                self._rate(copy.copied - before, self._clock() - began)
            if not copy.problem:
                return
            self._books.failed_copies += 1
            _log.info(
                "kv_copy_short source=%s copied_tokens=%d problem=%r",
                source.address,
                copy.copied - before,
                copy.problem,
            )

    async def _from(self, copy: _Copy, prefix: PrefixName, source: KvSource, owner: str) -> None:
        wanted = WantedKv(prefix, copy.end, self._model_revision, self._books.digest)
        async with aclosing(self._transport.read(source, wanted)) as parts:
            while True:
                async with asyncio.timeout(PART_WAIT_S):
                    part = await anext(parts, None)
                if part is None:
                    return
                await self._take(copy, prefix, part, owner)

    async def _take(self, copy: _Copy, prefix: PrefixName, part: CopiedPart, owner: str) -> None:
        """Check a part, and write it. Raises InvalidRequestError for one that is not what it should be, BudgetError where there is no room."""
        layout, begin = self._books.layout, copy.end
        assert layout is not None
        check_part(
            layout,
            prefix.tokens,
            begin,
            start=part.start_tokens,
            size=part.tokens,
            kv=part.kv,
            told=part.checksum,
        )
        end = begin + part.tokens
        upto = PrefixName(
            prefix.namespace, prefix.tokens[: end * TOKEN_BYTES], prefix.boundary_tokens, prefix.tail
        )
        command = WriteKv(
            question=0, prefix=upto, start_tokens=begin, kv=part.kv, owner=owner, flushes=copy.flushes
        )
        held = (await self._write(command)).held_tokens
        if held > begin:
            copy.copied += held - begin
            self._books.copied(held - begin, (held - begin) // layout.page_size * layout.page_bytes)
        if held < end:
            raise BudgetError("this worker has no room for it, or gave up meanwhile what came before")

    async def _write(self, command: WriteKv) -> KvWritten:
        """What this worker's own engine says to it. Raises BudgetError where it refuses, and UnavailableError once it is gone."""
        try:
            answer = await ask(
                self._engine, lambda question: msgspec.structs.replace(command, question=question)
            )
        except (InvalidRequestError, UnsupportedError, InternalError) as error:
            raise BudgetError(f"this worker did not take it: {error}") from error
        assert answer.written is not None, "what was not refused is answered"
        return answer.written

    def _rate(self, tokens: int, elapsed_s: float) -> None:
        if self._books.rates is not None:
            self._books.rates.record(tokens, elapsed_s * 1e3)


def _tokens(prefix: PrefixName) -> int:
    return len(prefix.tokens) // TOKEN_BYTES
