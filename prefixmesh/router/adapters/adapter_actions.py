"""Has workers load and forget what the adapter controller orders, each a call over the connection that the router has anyway.

How often and how many at once is the controller's business. Each order ends in one call of ``on_ended``, however it ends, and not before the
worker was asked what it has by then: so the controller need not guess.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

from prefixmesh.errors import (
    BudgetError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    PrefixmeshError,
    UnavailableError,
    UnsupportedError,
)
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.router.adapters.config import AdapterControllerConfig
from prefixmesh.router.adapters.orders import Ended, Load, Order, Unload
from prefixmesh.router.worker_link import WorkerLink
from prefixmesh.router.workers import LOOKUP_TIMEOUT_S, WorkerPool

_log = logging.getLogger(__name__)

_REFUSALS: Final = (InvalidRequestError, BudgetError, UnsupportedError)
"""With these the same call ends alike until somebody mends something there."""

_FAILURE: Final = "the call failed; the router's log has the reason"


class AdapterActions:
    """Performs orders. Call ``close`` at the end: what is under way is given up."""

    def __init__(
        self, pool: WorkerPool, config: AdapterControllerConfig, on_ended: Callable[[Order, Ended], None]
    ) -> None:
        self._pool = pool
        self._config = config
        self._on_ended = on_ended
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, orders: Iterable[Order]) -> None:
        """Begin to carry these out. O(1) for each; nobody waits."""
        for order in orders:
            task = asyncio.create_task(self._perform(order))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Give up what is under way; workers end what they have begun."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _perform(self, order: Order) -> None:
        try:
            ended = await self._carry_out(order)
        except PrefixmeshError as error:
            ended = Ended(str(error), is_refused=isinstance(error, _REFUSALS))
        except Exception:  # a bug of ours: the controller must hear of an end
            _log.exception("adapter_order_failed endpoint=%s", order.endpoint)
            ended = Ended(_FAILURE)
        _log_end(order, ended)
        self._on_ended(order, ended)

    async def _carry_out(self, order: Order) -> Ended:
        link = self._pool.find_link(order.endpoint)
        if link is None:
            raise UnavailableError("it is no worker of this fleet any more")
        try:
            if isinstance(order, Load):
                return Ended(digest=await self._load(link, order))
            await self._unload(link, order)
            return Ended()
        finally:
            with suppress(PrefixmeshError):  # its link asks again anyway
                await link.describe(LOOKUP_TIMEOUT_S)

    async def _load(self, link: WorkerLink, order: Load) -> str:
        request = pb.LoadAdapterRequest(name=order.name, path=order.path, pinned=order.pinned)

        async def call(stub: Any, settings: Any) -> pb.LoadAdapterResponse:
            answer: pb.LoadAdapterResponse = await stub.LoadAdapter(request, **settings)
            return answer

        answer = await link.control(call, self._config.load_timeout_s)
        return answer.adapter.digest

    async def _unload(self, link: WorkerLink, order: Unload) -> None:
        request = pb.UnloadAdapterRequest(name=order.name)

        async def call(stub: Any, settings: Any) -> pb.UnloadAdapterResponse:
            answer: pb.UnloadAdapterResponse = await stub.UnloadAdapter(request, **settings)
            return answer

        # Not there, or requests that run on by it: the name means nothing any more.
        with suppress(NotFoundError, DeadlineError):
            await link.control(call, self._config.unload_timeout_s)


def _log_end(order: Order, ended: Ended) -> None:
    deed = "load" if isinstance(order, Load) else "unload"
    if ended.problem:
        _log.warning(
            "adapter_%s_failed endpoint=%s name=%s generation=%d problem=%r",
            deed,
            order.endpoint,
            order.name,
            order.generation,
            ended.problem,
        )
    else:
        _log.info(
            "adapter_%sed endpoint=%s name=%s generation=%d digest=%s",
            deed,
            order.endpoint,
            order.name,
            order.generation,
            ended.digest,
        )
