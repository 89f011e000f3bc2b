"""One request of the asyncio client on its way: the calls that its ``course`` wants made, one after the other.

It looks like a gRPC call to its reader (``read``, ``cancel``). Behind it are the router's word on where to go, attempts at workers or
at the proxy, and the pauses until a router is back.
"""

import asyncio
import time
from contextlib import suppress
from typing import Any, Final

import grpc
import grpc.aio

from prefixmesh.client.course import Course
from prefixmesh.client.direct import GIVE_BACK_TIMEOUT_S
from prefixmesh.client.direct_aio import AsyncWorkers
from prefixmesh.client.ride import Broken, silent
from prefixmesh.client.target import Target, TimeLeft
from prefixmesh.errors import CancelledError, InternalError, PrefixmeshError
from prefixmesh.proto.v1.inference_pb2_grpc import InferenceStub
from prefixmesh.proto.v1.router_pb2_grpc import RouterStub
from prefixmesh.rpc.idle_watch import IdleWatch

_make_inference: Any = InferenceStub  # generated without types
_make_router: Any = RouterStub


class _SilentError(Exception):
    """The attempt was ended because nothing came."""


class AsyncCall:
    """It is sent at once; errors come when it is read."""

    def __init__(
        self,
        target: Target,
        router: grpc.aio.Channel,
        course: Course,
        time_left: TimeLeft,
        workers: AsyncWorkers | None = None,
        idle_timeout_s: float = 0.0,
    ) -> None:
        """``workers`` where the course has a plan for them, which may then be silent for ``idle_timeout_s`` between tokens; 0: for ever."""
        self._target: Final = target
        self._router = router
        self._course = course
        self._time_left = time_left
        self._workers = workers
        self._idle_timeout_s = idle_timeout_s
        self._is_over = self._is_cancelled = False
        self._error: PrefixmeshError | None = None
        self._held = ""
        """The worker whose channel is held for the attempt."""

        self._watch: IdleWatch | None = None
        """Of the attempt at a worker."""

        self._reading_since_s: float | None = None
        self._giving_back: Any = None
        self._opening: asyncio.Task[Any] | None = None
        self._call: Any = None
        """The attempt that is read; None while it is being opened."""

        if course.plan is None:
            self._call = self._ask_proxy()
        else:
            self._opening = self._begin(0.0)

    async def read(self) -> Any:
        """The next response, or EOF; raises errors of our tree, the same one again when it is called again."""
        if self._error is not None:
            raise self._error
        try:
            return await self._read()
        except PrefixmeshError as error:
            self._error = error
            if not self._is_cancelled:
                self.cancel()
                self._give_back()
            raise

    async def _read(self) -> Any:
        while not self._is_over:
            try:
                if self._call is None:
                    assert self._opening is not None
                    self._call = await self._opening
                response = await self._read_message()
                if response is None:  # so gRPC tells of a message that it could not read
                    raise InternalError("the server sent what is no message of an answer")
                if response is not grpc.aio.EOF:
                    ours = self._course.received(response, time.monotonic())
                    if ours is not None:
                        return ours
                    continue
                broken = self._course.ended()
                self._is_over = broken is None
            except grpc.RpcError as failure:
                plan = self._course.plan
                broken = self._target.judge(failure, plan.worker if plan is not None else "")
            except _SilentError:
                broken = silent(self._held, self._idle_timeout_s)
            except grpc.aio.UsageError as error:  # a channel that was closed while no call was under way
                raise CancelledError("the client was closed") from error
            self._release()
            if broken is not None and self._is_cancelled:
                # It had failed already when it was cancelled, and gRPC tells of the failure.
                raise CancelledError("the call was cancelled here")
            if broken is not None and self._goes_on(broken):
                return self._course.last
        return grpc.aio.EOF

    async def _read_message(self) -> Any:
        watch = self._watch
        if watch is None:
            return await self._call.read()
        self._reading_since_s = asyncio.get_running_loop().time()
        try:
            return await self._call.read()
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if watch.has_ended and not (task is not None and task.cancelling()):
                raise _SilentError from error
            raise
        finally:
            self._reading_since_s = None

    def cancel(self) -> None:
        """End whatever is under way."""
        self._is_cancelled = True
        if self._call is not None:
            self._call.cancel()
        opening = self._opening
        if opening is not None:
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                opening.result().cancel()
            opening.cancel()
        self._release()

    def _goes_on(self, broken: Broken) -> bool:
        """Begin the next attempt, if there must be one; whether there is a last message to be read instead."""
        pause_s = self._course.failed(broken, time.monotonic(), self._time_left.left_s)
        if pause_s is None:
            self._is_over = True
            return self._course.last is not None
        self._call, self._opening = None, self._begin(pause_s)
        return False

    def _begin(self, pause_s: float) -> "asyncio.Task[Any]":
        task = asyncio.ensure_future(self._open(pause_s))
        # Whoever leaves without reading never asks what became of it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _open(self, pause_s: float) -> Any:
        """The call that answers: to a worker, or to the proxy."""
        if pause_s:
            await asyncio.sleep(pause_s)
        while (plan := self._course.plan) is not None:
            assert self._workers is not None
            try:
                ask = _make_router(self._router).Route
                answer = await ask(plan.next_question(), **self._settings())
            except grpc.RpcError as failure:
                broken, now_s = self._target.judge(failure), time.monotonic()
                await asyncio.sleep(self._course.route_failed(broken, now_s, self._time_left.left_s))
                continue
            sent = self._course.routed(answer)
            channel = self._workers.take(answer.address)
            if channel is not None:
                self._held = answer.address
                generate = _make_inference(channel).Generate
                call = generate(sent, timeout=self._time_left(), metadata=plan.ticket())
                self._watch = IdleWatch(self._idle_timeout_s, self._silent_since_s, call.cancel)
                return call
            plan.use_proxy()
        self._give_back()
        return self._ask_proxy()

    def _give_back(self) -> None:
        question = self._course.give_back()
        if question is not None:
            route, metadata = _make_router(self._router).Route, self._target.metadata
            with suppress(grpc.aio.UsageError):  # the client was closed
                # Kept: what nobody holds is cancelled.
                self._giving_back = route(question, timeout=GIVE_BACK_TIMEOUT_S, metadata=metadata)

    def _ask_proxy(self) -> Any:
        return _make_inference(self._router).Generate(self._course.request, **self._settings())

    def _settings(self) -> dict[str, Any]:
        return {"timeout": self._time_left(), "metadata": self._target.metadata}

    def _silent_since_s(self) -> float | None:
        return self._reading_since_s if self._course.owes_token else None

    def _release(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        held, self._held = self._held, ""
        if held and self._workers is not None:
            self._workers.release(held)
