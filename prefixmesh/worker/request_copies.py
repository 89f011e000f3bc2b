"""A request whose ticket names workers that hold its prefix: brought from them first, and computed from there. A thin shell.

What does not come is computed; a copy that fails is no error of the request's. An abort, like a caller that leaves, ends the wait at once.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.owners import NOBODY
from prefixmesh.errors import CancelledError
from prefixmesh.ids import RequestId
from prefixmesh.kv_source import KvSource
from prefixmesh.ticket import Ticket
from prefixmesh.tokens import TOKEN_BYTES
from prefixmesh.worker.kv_copies.copier import Brought, KvCopier
from prefixmesh.worker.prefix_messages import PrefixName

_log = logging.getLogger(__name__)

NOTHING: Final = Brought(0, 0)


class Wanted(NamedTuple):
    """What to bring, and from whom."""

    prefix: PrefixName
    sources: Sequence[KvSource]
    owner: str
    """Who pays for what comes."""


class RequestCopies:
    """One event loop owns it."""

    def __init__(self, copier: KvCopier, page_size: int) -> None:
        self._copier = copier
        self._page_size = page_size
        self._waiting: dict[RequestId, asyncio.Task[Brought]] = {}

    async def bring(self, ticket: Ticket | None, tokens: bytes, time_left_s: float | None) -> Brought:
        """Bring what the ticket's sources have of a prompt's packed tokens, if that is worth it. Raises CancelledError for a request that is
        aborted meanwhile, and UnavailableError once this worker's engine is gone."""
        wanted = None if ticket is None else wanted_of(ticket, tokens, self._page_size)
        if ticket is None or wanted is None:
            return NOTHING
        bringing = self._copier.bring(wanted.prefix, wanted.sources, wanted.owner, wait_s=time_left_s)
        task = asyncio.create_task(bringing)
        self._waiting[ticket.request_id] = task
        try:
            brought = await task
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if task.cancelled() and this is not None and not this.cancelling():
                raise CancelledError("the request was aborted") from None
            raise
        finally:
            del self._waiting[ticket.request_id]
        if brought.problem:
            _log.info(
                "kv_copy_incomplete id=%s copied_tokens=%d problem=%r",
                ticket.request_id,
                brought.copied,
                brought.problem,
            )
        return brought

    def abort(self, request_id: RequestId) -> None:
        """End a request that waits here; others are left alone."""
        task = self._waiting.get(request_id)
        if task is not None:
            task.cancel()


def wanted_of(ticket: Ticket, tokens: bytes, page_size: int) -> Wanted | None:
    """What of a prompt is to be brought: under the key of the ticket's best source, whole pages up to the end of what any source with that key
    is believed to have, and never the last token, which is computed. None where nothing is."""
    if not ticket.sources:
        return None
    boundary = ticket.sources[0].boundary_tokens
    key = RadixKey(ticket.namespace, tokens)
    if boundary:
        public = next((one for one in ticket.public if one.boundary_tokens == boundary), None)
        if public is None:
            return None
        key = public.key(ticket.namespace, tokens)
    sources = [one for one in ticket.sources if one.boundary_tokens == boundary]
    held = max(one.tokens for one in sources)
    size = min(held, len(tokens) // TOKEN_BYTES - 1) // page_size * page_size
    if size <= 0:
        return None
    cut = tokens[: size * TOKEN_BYTES]
    if size <= boundary:  # all of it is public: one copy serves every tenant, and none of them pays for it
        return Wanted(PrefixName(key.namespace, cut), sources, NOBODY)
    return Wanted(PrefixName(key.namespace, cut, key.boundary_tokens, key.tail), sources, ticket.tenant)
