"""Carries a request to a worker and its answer back, over as many attempts as it takes and may have.

A thin shell around ``attempts``, which says what comes next: to whom it is sent, whether it waits, when it ends. Each attempt is one loop
that reads from the worker and writes to the caller (``frame_stream``), with ``passage`` in between. What the caller is told ends in
``Finished`` or in an error, never silently, and whatever happens, the worker's call is ended and everything is given back.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import grpc.aio
from google.protobuf.message import DecodeError

from prefixmesh.errors import (
    AuthenticationError,
    CancelledError,
    DeadlineError,
    PrefixmeshError,
    UnavailableError,
)
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.history import NO_HISTORY, History
from prefixmesh.router.attempts import (
    Attempts,
    End,
    Prepare,
    Send,
    Step,
    Wait,
)
from prefixmesh.router.failure_kind import FailureKind, is_workers_fault, kind_of
from prefixmesh.router.frame_stream import FrameStream
from prefixmesh.router.frame_stream import Send as SendFrame
from prefixmesh.router.passage import Passage
from prefixmesh.router.placement import OnRouted, Placement
from prefixmesh.router.prepare import PreparedRequest, RequestPreparer
from prefixmesh.router.request_numbers import SeenRequest
from prefixmesh.router.request_recorder import RequestRecorder
from prefixmesh.router.retry_budget import RetryBudget
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.running import RunningRequest
from prefixmesh.router.worker_aborts import WorkerAborts
from prefixmesh.router.worker_call import WorkerCall
from prefixmesh.router.workers import WorkerPool
from prefixmesh.router_config import DEFAULT_STREAM_IDLE_S
from prefixmesh.rpc.idle_watch import IdleWatch
from prefixmesh.rpc.status import from_rpc_error, is_told
from prefixmesh.text.prompts import PromptBuilder
from prefixmesh.ticket import TICKET_METADATA, Ticket, sign
from prefixmesh.tokens import count

_log = logging.getLogger(__name__)


class _Failure(NamedTuple):
    """How an attempt ended that did not end well."""

    kind: FailureKind
    error: PrefixmeshError
    is_broken: bool = False
    """Whether the connection itself failed, or the worker says that it takes nothing: it is asked anew who is there."""

    is_silent: bool = False
    """Whether the worker may not have noticed that nobody waits any more."""

    was_put_out: bool = False
    """Whether the link gave the worker up, with whatever ran there."""


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
        aborts: WorkerAborts,
        history: History = NO_HISTORY,
        idle_timeout_s: float = DEFAULT_STREAM_IDLE_S,
        on_routed: OnRouted | None = None,
        recorder: RequestRecorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``router_id`` is what this router calls itself to workers; ``clock`` the one that the core's other news come by, and the event
        loop's."""
        self._core = core
        self._pool = pool
        self._secret = secret
        self._preparer = preparer
        self._prompts = prompts
        self._model = model
        self._router_id = router_id
        self._aborts = aborts
        self._history = history
        self._idle_timeout_s = idle_timeout_s
        self._on_routed = on_routed
        self._recorder = recorder
        self._clock = clock
        self._budget = RetryBudget()

    async def carry(
        self,
        prepared: PreparedRequest,
        request: RunningRequest,
        send: SendFrame,
        deadline: float | None,
        prepare_anew: Callable[[], Awaitable[PreparedRequest]],
    ) -> None:
        """Have the request answered, frame by frame to ``send``. Cancelled, it ends the worker's call and settles at once.

        ``deadline`` is by the relay's clock; ``prepare_anew`` is asked when the request's adapter has changed. Raises the error that the
        caller's call ends with: the worker's own, UnavailableError when no worker is ready or those that were tried died, DeadlineError.
        """
        waiting = _PlaceWait(request)
        attempts = Attempts(
            self._core,
            self._budget,
            prepared.route,
            request.request_id,
            deadline=deadline,
            on_place=waiting.wake,
            history=self._history,
            resumed=[count(one) for one in prepared.resumed],
        )
        passage = Passage(
            attempts,
            prepared,
            preparer=self._preparer,
            prompts=self._prompts,
            clock=self._clock,
            model=self._model,
            policy=self._core.policy,
            notes_tokens=self._history.is_on,
        )
        arrived_s = self._clock()
        failure: PrefixmeshError | None = None
        step: Step | None = None
        try:
            step = attempts.begin(self._clock())
            while step is not None:
                match step:
                    case Send():
                        step = await self._attempt(step, attempts, passage, request, send, deadline)
                    case Wait():
                        await waiting.wait(None if deadline is None else deadline - self._clock())
                        step = attempts.place_held(self._clock())
                    case Prepare():
                        passage.prepared = await prepare_anew()
                        step = attempts.prepared(passage.prepared.route, self._clock())
                    case End(error=error):
                        raise error
        except PrefixmeshError as error:
            failure = error
            raise
        finally:
            attempts.close(self._clock(), failure)
            _log_end(attempts, passage)
            self._record(passage, request, arrived_s)
            # An error holds this frame, and would be held by it: a refused request must not wait for the collector.
            step = failure = None

    def _record(self, passage: Passage, request: RunningRequest, arrived_s: float) -> None:
        """Have a request recorded that is over, however it ended."""
        if self._recorder is None or not self._recorder.is_on or passage.placement is None:
            return
        route = passage.prepared.route
        try:
            answers = passage.answers
        except DecodeError:  # a worker's text that was passed on unread, and is none
            return
        self._recorder.ended(
            SeenRequest(arrived_s, request.tenant, route.adapter, route.prompt_tokens, answers)
        )

    async def _attempt(
        self,
        step: Send,
        attempts: Attempts,
        passage: Passage,
        request: RunningRequest,
        send: SendFrame,
        deadline: float | None,
    ) -> Step | None:
        """One attempt from its decision to its end; None when the answer is whole."""
        placement = step.placement
        passage.sent(placement)
        if self._on_routed is not None and not step.goes_on:
            self._on_routed(placement, passage.prepared.namespace, passage.prepared.prompt.tokens)
        wire = passage.request_to_go_on() if step.goes_on else passage.prepared.wire
        on_frame = passage.on_later_frame if step.goes_on else passage.on_first_frame
        timeout_s = None if deadline is None else max(0.0, deadline - self._clock())
        link = self._pool.link(placement.endpoint)
        with link.generate(wire, self._ticket(passage.prepared, placement, request), timeout_s) as call:
            request.on_stop(call.cancel)
            stream = FrameStream(call.read, on_frame, send, self._clock)
            failure = await self._run(stream, call, attempts, passage, request)
        if failure is None:
            link.note_success()
            return None
        _log.log(
            logging.WARNING if is_workers_fault(failure.kind) else logging.DEBUG,
            "attempt_failed request_id=%s attempt=%d worker=%s kind=%s has_token=%s problem=%r",
            attempts.request_id,
            attempts.number,
            placement.endpoint,
            failure.kind.value,
            attempts.has_token,
            str(failure.error),
        )
        await self._learn_from(failure, placement, request)
        if passage.is_whole:
            await send(passage.whole_end())
            return None
        return attempts.failed(
            failure.kind,
            failure.error,
            self._clock(),
            sent_tokens=passage.sent_tokens,
            was_put_out=failure.was_put_out,
        )

    async def _run(
        self,
        stream: FrameStream,
        call: WorkerCall,
        attempts: Attempts,
        passage: Passage,
        request: RunningRequest,
    ) -> _Failure | None:
        """Pass the stream on; how it failed, None when the answer is whole. Raises what is not the worker's failure."""
        watch = IdleWatch(
            self._idle_timeout_s, lambda: stream.reads_since if passage.owes_news else None, call.cancel
        )
        try:
            await stream.run()
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise  # the caller has left
            if passage.is_finished:
                return None
            request.check()
            # Whoever else cancels the worker's call is told by its reader as either of the two errors.
            if watch.has_ended:
                problem = f"it has said nothing for {self._idle_timeout_s:g} s"
                return _Failure(FailureKind.DIED, UnavailableError(problem), is_silent=True)
            if call.given_up:
                return _Failure(FailureKind.DIED, UnavailableError(call.given_up), was_put_out=True)
            if isinstance(error, asyncio.CancelledError):
                raise
            return _failure_of(error, was_accepted=attempts.was_accepted)
        except DecodeError as error:
            return _Failure(
                FailureKind.DIED, UnavailableError(f"it sent what is no message of an answer ({error})")
            )
        finally:
            watch.stop()
        if passage.is_finished:
            return None
        return _Failure(FailureKind.DIED, UnavailableError("it ended the stream before the answer"))

    async def _learn_from(self, failure: _Failure, placement: Placement, request: RunningRequest) -> None:
        """Let the worker's link know, and the worker that may not have noticed."""
        if failure.is_silent:
            self._aborts.send(placement, request.tenant)
        if self._core.registry.get(placement.endpoint) is not placement.entry or not placement.tells_of_now:
            return  # it was removed meanwhile, or has come back: a slow caller finds out late what ended long ago
        link = self._pool.link(placement.endpoint)
        link.note_failure(failure.kind, str(failure.error))
        if failure.is_broken:
            link.suspect(str(failure.error))
        elif isinstance(failure.error, AuthenticationError):
            # A worker that refuses our ticket is in another life by now.
            try:
                await link.describe()
            except PrefixmeshError as error:
                _log.debug("describe_failed worker=%s problem=%r", placement.endpoint, str(error))

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
            sources=placement.sources,
            public=prepared.route.candidates,
        )
        return ((TICKET_METADATA, sign(ticket, self._secret)),)


class _PlaceWait:
    """A request's wait for a retry's place."""

    __slots__ = ("_request", "_woken")

    def __init__(self, request: RunningRequest) -> None:
        self._request = request
        self._woken: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """The place is there."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def wait(self, timeout_s: float | None) -> None:
        """Return once woken, which cannot have been before. Raises DeadlineError, and why the request was stopped."""
        self._woken = asyncio.get_running_loop().create_future()
        self._request.on_stop(self._woken.cancel)
        try:
            async with asyncio.timeout(timeout_s):
                await self._woken
        except TimeoutError as error:
            raise DeadlineError("the deadline passed while the request waited to be tried again") from error
        except asyncio.CancelledError:
            self._request.check()
            raise


def _is_cancelled() -> bool:
    """Whether it is this task that was cancelled, and not something that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _failure_of(error: grpc.aio.AioRpcError, *, was_accepted: bool) -> _Failure:
    ours, told = from_rpc_error(error), is_told(error)
    kind = kind_of(ours, is_told=told, was_accepted=was_accepted)
    is_broken = isinstance(ours, UnavailableError) or (isinstance(ours, CancelledError) and not told)
    return _Failure(kind, ours, is_broken=is_broken)


def _log_end(attempts: Attempts, passage: Passage) -> None:
    """One line for a request. Of one that ended well the worker's log has a line, too, and the history all there is to know: a line here
    costs as much as a third of the decision, and is left to those who look for something."""
    level = logging.DEBUG if passage.is_finished and attempts.number == 1 else logging.INFO
    placement = passage.placement
    if placement is None or not _log.isEnabledFor(level):
        return  # where it was never sent, its caller is told why
    _log.log(
        level,
        "request_ended request_id=%s worker=%s outcome=%s attempts=%d prompt_tokens=%d predicted_tokens=%d cached_tokens=%d",
        attempts.request_id,
        placement.endpoint,
        attempts.outcome,
        attempts.number,
        placement.request.prompt_tokens,
        placement.predicted_cached_tokens,
        passage.cached_tokens,
    )
