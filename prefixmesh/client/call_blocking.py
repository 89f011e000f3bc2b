"""One request of the blocking client on its way: the calls that its ``course`` wants made, one after the other.

It looks like a gRPC call to its reader (``next``, ``cancel``). Behind it are the router's word on where to go, attempts at workers or at
the proxy, and the pauses until a router is back. One thread reads a call; any may cancel it.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Final

import grpc

from prefixmesh.client.course import Course
from prefixmesh.client.direct import GIVE_BACK_TIMEOUT_S
from prefixmesh.client.direct_blocking import Workers
from prefixmesh.client.ride import Broken, silent
from prefixmesh.client.target import Target, TimeLeft
from prefixmesh.errors import CancelledError, PrefixmeshError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1.inference_pb2_grpc import InferenceStub
from prefixmesh.proto.v1.router_pb2_grpc import RouterStub

_make_inference: Any = InferenceStub  # generated without types
_make_router: Any = RouterStub
_CANCELLED: Final = "the call was cancelled here"


class Call:
    """It is sent at once; errors come when it is read."""

    def __init__(
        self,
        target: Target,
        router: grpc.Channel,
        course: Course,
        time_left: TimeLeft,
        workers: Workers | None = None,
        is_closed: Callable[[], bool] = lambda: False,
    ) -> None:
        """``workers`` where the course has a plan for them; ``is_closed`` is whether the client has closed its connections."""
        self._target: Final = target
        self._router = router
        self._course = course
        self._time_left = time_left
        self._workers = workers
        self._memory_lock: Final[AbstractContextManager[Any]] = (
            nullcontext() if workers is None else workers.lock
        )
        self._is_closed = is_closed
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._is_over = False
        self._active: Any = None
        """What ``cancel`` ends: the question to the router, or the stream."""

        self._held = ""
        """The worker whose channel is held for the attempt."""

        self._reading_since_s: float | None = None
        self._silent: Any = None
        """The attempt that was ended because nothing came."""

        self._giving_back: Any = None
        self._stream: Any = None
        """The attempt that is read; None before it is opened."""

        self._error: PrefixmeshError | None = None
        self._failure: BaseException | None = None
        try:
            self._stream = self._open()
        except (grpc.RpcError, PrefixmeshError) as failure:
            self._failure = failure  # for the reader, who may wait

    def __next__(self) -> pb.GenerateResponse:
        """The next response; raises StopIteration at the end, and errors of our tree, the same one again when it is called again."""
        if self._error is not None:
            raise self._error
        try:
            return self._read()
        except PrefixmeshError as error:
            self._error = error
            if not self._cancelled.is_set() and not self._is_closed():
                self.cancel()
                self._give_back()
            raise

    def _read(self) -> pb.GenerateResponse:
        while not self._is_over:
            try:
                ours = self._next()
            except grpc.RpcError as failure:
                broken: Broken | None = self._judge(failure)
            except StopIteration:
                broken = self._course.ended()
                self._is_over = broken is None
            else:
                if ours is not None:
                    return ours
                continue
            self._release()
            if broken is not None and self._goes_on(broken):
                assert self._course.last is not None
                return self._course.last
        raise StopIteration

    def cancel(self) -> None:
        """End whatever is under way."""
        with self._lock:
            self._cancelled.set()
            active = self._active
        if active is not None:
            active.cancel()
        self._release()

    def _next(self) -> pb.GenerateResponse | None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if self._stream is None:
            try:
                self._stream = self._open()
            except ValueError as error:  # gRPC's, for a channel that another thread has just closed
                if not self._is_closed():
                    raise
                raise CancelledError("the client was closed") from error
        self._reading_since_s = time.monotonic()
        try:
            response = next(self._stream)
        finally:
            self._reading_since_s = None
        return self._course.received(response, time.monotonic())

    def silent_since_s(self) -> float | None:
        """See ``idle_thread.WatchedCall``; any thread."""
        return self._reading_since_s if self._course.owes_token else None

    def end_silent(self, since_s: float) -> None:
        """See ``idle_thread.WatchedCall``; any thread."""
        stream = self._stream  # before it is seen that its reader still waits: what the reader goes on to must not be ended for it
        if self._reading_since_s == since_s:
            self._silent = stream
            stream.cancel()

    def _judge(self, failure: grpc.RpcError, *, of_router: bool = False) -> Broken:
        if self._cancelled.is_set() or self._is_closed():
            raise CancelledError(_CANCELLED) from failure
        plan = self._course.plan
        if self._silent is not None and self._silent is self._stream and self._workers is not None:
            return silent(self._held, self._workers.idle.timeout_s)
        return self._target.judge(failure, "" if plan is None or of_router else plan.worker)

    def _goes_on(self, broken: Broken) -> bool:
        """Prepare the next attempt, if there must be one, and wait as long as it says; whether there is a last message to be read instead."""
        with self._memory_lock:
            pause_s = self._course.failed(broken, time.monotonic(), self._time_left.left_s)
        if pause_s is None:
            self._is_over = True
            return self._course.last is not None
        self._stream = None
        self._wait(pause_s)
        return False

    def _open(self) -> Any:
        """The call that answers: to a worker, or to the proxy."""
        if self._is_closed():
            raise CancelledError("the client was closed")
        while (plan := self._course.plan) is not None:
            answer = self._ask(plan.next_question())
            if answer is None:
                continue
            sent = self._course.routed(answer)
            channel = self._hold(answer.address)
            if channel is not None:
                generate = _make_inference(channel).Generate
                assert self._workers is not None
                self._workers.idle.watch(self)
                return self._activate(generate(sent, timeout=self._time_left(), metadata=plan.ticket()))
            plan.use_proxy()
        self._give_back()
        ask = _make_inference(self._router).Generate
        return self._activate(ask(self._course.request, **self._settings()))

    def _give_back(self) -> None:
        question = self._course.give_back()
        if question is not None:
            route, metadata = _make_router(self._router).Route, self._target.metadata
            with suppress(ValueError):  # the client was closed
                # Kept: what nobody holds is cancelled.
                self._giving_back = route.future(question, timeout=GIVE_BACK_TIMEOUT_S, metadata=metadata)

    def _ask(self, question: Any) -> Any:
        """The router's answer; None where the course must be asked what to do now."""
        asking = self._activate(_make_router(self._router).Route.future(question, **self._settings()))
        try:
            return asking.result()
        except grpc.FutureCancelledError as error:
            raise CancelledError(_CANCELLED) from error
        except grpc.RpcError as failure:
            broken = self._judge(failure, of_router=True)
            with self._memory_lock:
                pause_s = self._course.route_failed(broken, time.monotonic(), self._time_left.left_s)
            self._wait(pause_s)
            return None
        except BaseException:  # Ctrl-C: nobody waits for the answer any more
            asking.cancel()
            raise

    def _wait(self, pause_s: float) -> None:
        if self._cancelled.wait(pause_s):
            raise CancelledError(_CANCELLED)

    def _hold(self, address: str) -> grpc.Channel | None:
        """A worker's channel for the attempt, unless the call was cancelled meanwhile: then nobody would give it back."""
        assert self._workers is not None
        channel = self._workers.take(address)
        if channel is None:
            return None
        with self._lock:
            self._held = address
        if self._cancelled.is_set():
            self._release()
            raise CancelledError(_CANCELLED)
        return channel

    def _activate(self, call: Any) -> Any:
        with self._lock:
            self._active = call
            is_cancelled = self._cancelled.is_set()
        if is_cancelled:
            call.cancel()
        return call

    def _settings(self) -> dict[str, Any]:
        return {"timeout": self._time_left(), "metadata": self._target.metadata}

    def _release(self) -> None:
        with self._lock:
            held, self._held = self._held, ""
        if held and self._workers is not None:
            self._workers.idle.forget(self)
            self._workers.release(held)
