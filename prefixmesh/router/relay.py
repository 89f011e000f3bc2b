"""Carries a request to a worker and its answer back, and tries another worker while nothing has been answered.

The decision, the reservation and the ticket are made anew for each attempt. Once a message has come from a worker, nothing is
tried again: what was answered stays answered, and the stream ends in ``Finished`` or in an error, never silently.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

import grpc.aio

from prefixmesh.errors import (
    AuthenticationError,
    DeadlineError,
    PrefixmeshError,
    UnavailableError,
)
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.ids import RequestId
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.frame_stream import pass_frames
from prefixmesh.router.passage import Passage
from prefixmesh.router.placement import Placement
from prefixmesh.router.prepare import PreparedRequest, RequestPreparer
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.running import RunningRequest
from prefixmesh.router.workers import WorkerPool
from prefixmesh.rpc.status import from_rpc_error
from prefixmesh.text.prompts import PromptBuilder
from prefixmesh.ticket import TICKET_METADATA, Ticket, sign

_log = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 2
"""One retry: a request that found its worker dead is tried once more, and a fleet in trouble is not flooded."""


class Relay:
    """Sends prepared requests through the fleet."""

    def __init__(
        self,
        *,
        core: RouterCore,
        pool: WorkerPool,
        secret: FleetSecret,
        preparer: RequestPreparer,
        prompts: PromptBuilder,
        model: str,
        router_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``router_id`` is what this router calls itself to workers; ``clock`` the one that the core's other news come by."""
        self._router_id = router_id
        self._clock = clock
        self._core = core
        self._pool = pool
        self._secret = secret
        self._preparer = preparer
        self._prompts = prompts
        self._model = model

    async def stream(
        self, prepared: PreparedRequest, request: RunningRequest, time_left_s: Callable[[], float | None]
    ) -> AsyncGenerator[bytes]:
        """The answer's frames; closing the generator cancels the worker's call and settles at once.

        Raises the error that the caller's call ends with: the worker's own, UnavailableError when no worker is ready or the
        chosen one died, DeadlineError when ``time_left_s`` has run out.
        """
        excluded: set[Endpoint] = set()
        failure: UnavailableError | None = None
        for attempts_left in reversed(range(MAX_ATTEMPTS)):
            placement = self._route(prepared, excluded, failure, _name_of_attempt(request, attempts_left))
            has_begun = False
            try:
                async with aclosing(self._attempt(prepared, placement, request, time_left_s)) as frames:
                    async for frame in frames:
                        has_begun = True
                        yield frame
                return
            except (UnavailableError, AuthenticationError) as error:
                request.check()
                failure = _as_unavailable(error, placement)
                if has_begun or not attempts_left:
                    raise failure from error
                _log.warning(
                    "request_retried request_id=%s worker=%s", request.request_id, placement.endpoint
                )
                await self._before_retry(error, placement, excluded)

    def _route(
        self,
        prepared: PreparedRequest,
        excluded: set[Endpoint],
        failure: UnavailableError | None,
        name: RequestId,
    ) -> Placement:
        """A decision; where there is no other worker to try, the ``failure`` of the one that was tried says more."""
        try:
            return self._core.route(prepared.route, self._clock(), excluded, request_id=name)
        except UnavailableError as error:
            raise failure or error from None

    async def _attempt(
        self,
        prepared: PreparedRequest,
        placement: Placement,
        request: RunningRequest,
        time_left_s: Callable[[], float | None],
    ) -> AsyncGenerator[bytes]:
        passage = Passage(
            core=self._core,
            clock=self._clock,
            placement=placement,
            prepared=prepared,
            preparer=self._preparer,
            prompts=self._prompts,
            request_id=request.request_id,
            model=self._model,
        )
        outcome, call = "cancelled", None
        try:
            timeout_s = time_left_s()
            if timeout_s is not None and timeout_s <= 0:
                raise DeadlineError("the deadline passed before the request was sent to a worker")
            link = self._pool.link(placement.endpoint)
            with link.generate(prepared.wire, self._ticket(prepared, placement, request), timeout_s) as call:
                request.on_stop(call.cancel)
                async with aclosing(pass_frames(call.read, passage.on_frame, self._clock)) as frames:
                    async for frame in frames:
                        yield frame
            if not passage.is_finished:
                raise UnavailableError(f"worker {placement.entry.name} ended the stream before the answer")
            outcome = "finished"
        except grpc.aio.AioRpcError as error:
            ours = self._error_of(error, placement)
            outcome = ours.reason
            raise ours from error
        except asyncio.CancelledError:
            request.check()  # a stopped request's call raises this too
            if call is not None and call.given_up:
                raise UnavailableError(call.given_up) from None
            raise
        finally:
            passage.close()
            _log_end(request, placement, passage, outcome)

    def _ticket(
        self, prepared: PreparedRequest, placement: Placement, request: RunningRequest
    ) -> tuple[tuple[str, str | bytes], ...]:
        ticket = Ticket(
            request_id=placement.request_id,
            tenant=request.tenant,
            namespace=prepared.namespace,
            incarnation=placement.incarnation,
            adapter_digest=prepared.route.adapter_digest,
            router_id=self._router_id,
        )
        return ((TICKET_METADATA, sign(ticket, self._secret)),)

    def _error_of(self, error: grpc.aio.AioRpcError, placement: Placement) -> PrefixmeshError:
        ours = from_rpc_error(error)
        if isinstance(ours, UnavailableError) and self._is_known(placement):
            self._pool.link(placement.endpoint).suspect(str(ours))
        return ours

    async def _before_retry(
        self, error: PrefixmeshError, placement: Placement, excluded: set[Endpoint]
    ) -> None:
        if isinstance(error, UnavailableError) or not self._is_known(placement):
            excluded.add(placement.endpoint)
            return
        # The caller's credentials were checked here; a worker that refuses our ticket is in another life by now.
        try:
            await self._pool.link(placement.endpoint).describe()
        except PrefixmeshError:
            excluded.add(placement.endpoint)

    def _is_known(self, placement: Placement) -> bool:
        return self._core.registry.get(placement.endpoint) is placement.entry


def _name_of_attempt(request: RunningRequest, attempts_left: int) -> RequestId:
    """The first attempt has the request's own name, so that the logs of router and worker have one; a worker that was tried before may
    still know that one."""
    attempt = MAX_ATTEMPTS - attempts_left
    return request.request_id if attempt == 1 else RequestId(f"{request.request_id}.{attempt}")


def _log_end(request: RunningRequest, placement: Placement, passage: Passage, outcome: str) -> None:
    _log.info(
        "request_ended request_id=%s worker=%s outcome=%s prompt_tokens=%d predicted_tokens=%d cached_tokens=%d",
        request.request_id,
        placement.endpoint,
        outcome,
        placement.request.prompt_tokens,
        placement.predicted_cached_tokens,
        passage.cached_tokens,
    )


def _as_unavailable(error: PrefixmeshError, placement: Placement) -> UnavailableError:
    """What a caller is told when the worker failed it: the worker's trouble with the router is not the caller's credentials."""
    return UnavailableError(f"worker {placement.entry.name} failed this request: {error}")
