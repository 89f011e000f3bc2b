"""Streams from workers themselves, for the blocking client: the calls that ``direct.DirectPlan`` wants made.

``DirectCall`` looks like a gRPC call to its reader (``next``, ``cancel``); behind it are the router's answer, one attempt or several,
and the proxy where that is the way. One thread reads a call; any may cancel it.
"""

import threading
import time
from typing import Any, Final

import grpc

from prefixmesh.client.answer_builder import AnswerBuilder
from prefixmesh.client.direct import DirectPlan, RouteMemory
from prefixmesh.client.direct_failures import note_early_end, note_failure, note_route_failure
from prefixmesh.client.target import Target, TimeLeft
from prefixmesh.client.worker_channels import WorkerChannels
from prefixmesh.errors import CancelledError, PrefixmeshError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1.inference_pb2_grpc import InferenceStub
from prefixmesh.proto.v1.router_pb2_grpc import RouterStub
from prefixmesh.rpc.channel import WORKER_OPTIONS, open_sync_channel

_make_inference: Any = InferenceStub  # generated without types
_make_router: Any = RouterStub


class Workers:
    """What all direct calls of one client share: connections to workers, and what was learnt of them. Thread-safe by its lock."""

    def __init__(self, target: Target) -> None:
        self.target: Final = target
        self.memory: Final = RouteMemory()
        self.lock: Final = threading.Lock()
        """Held while ``memory`` or the channels are touched, and never while a call waits."""

        self._channels: WorkerChannels[grpc.Channel] = WorkerChannels(
            lambda address: open_sync_channel(address, WORKER_OPTIONS)
        )

    def __repr__(self) -> str:
        return f"Workers({self._channels!r})"

    def plan(self, request: pb.GenerateRequest) -> DirectPlan:
        """The attempts of one request, with what is known now."""
        now = time.monotonic()
        with self.lock:
            return DirectPlan(request, self.memory.avoided(now), knows_route=self.memory.knows_route(now))

    def take(self, address: str) -> grpc.Channel | None:
        """A channel for one stream; None when all places are in use."""
        with self.lock:
            taken = self._channels.take(address)
        if taken is None:
            return None
        if taken.to_close is not None:
            taken.to_close.close()
        return taken.channel

    def release(self, address: str) -> None:
        """The stream has ended."""
        with self.lock:
            self._channels.release(address)

    def close(self) -> None:
        """Close every connection; streams still open are cancelled."""
        with self.lock:
            channels = self._channels.empty()
        for channel in channels:
            channel.close()


class DirectCall:
    """One request on its way to a worker. It is sent at once; errors come when it is read."""

    def __init__(
        self,
        workers: Workers,
        router: grpc.Channel,
        request: pb.GenerateRequest,
        time_left: TimeLeft,
        builder: AnswerBuilder,
    ) -> None:
        self._workers = workers
        self._router = router
        self._request = request
        self._time_left = time_left
        self._builder = builder
        self._plan = workers.plan(request)
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._active: Any = None
        """What ``cancel`` ends: the question to the router, or the stream."""

        self._held = ""
        """The worker whose channel is held for the attempt."""

        self._stream: Any = None
        self._error: PrefixmeshError | None = None
        try:
            self._stream = self._open()
        except PrefixmeshError as error:
            self._error = error

    def __next__(self) -> pb.GenerateResponse:
        """The next response; raises StopIteration at the end, and errors of our tree."""
        if self._error is not None:
            raise self._error
        while True:
            try:
                return self._plan.complete(next(self._stream))
            except StopIteration:
                self._release()
                if self._builder.has_begun or not self._plan.worker:
                    raise
                note_early_end(self._plan, self._builder)
            except grpc.RpcError as failure:
                self._release()
                workers, now = self._workers, time.monotonic()
                with workers.lock:
                    note_failure(failure, self._plan, workers.target, workers.memory, self._builder, now)
            self._stream = self._open()

    def cancel(self) -> None:
        """End whatever is under way."""
        with self._lock:
            self._is_cancelled, active = True, self._active
        if active is not None:
            active.cancel()
        self._release()

    def _open(self) -> Any:
        """The call that answers: to a worker, or to the proxy."""
        question = self._plan.next_question()
        answer = None if question is None else self._ask(question)
        if answer is not None:
            channel = self._workers.take(answer.address)
            if channel is not None:
                self._held = answer.address
                sent = self._plan.routed(answer)
                generate = _make_inference(channel).Generate
                return self._activate(generate(sent, timeout=self._time_left(), metadata=self._plan.ticket()))
            self._plan.use_proxy()
        return self._activate(_make_inference(self._router).Generate(self._request, **self._settings()))

    def _ask(self, question: Any) -> Any:
        """The router's answer; None where the proxy is the way."""
        asking = self._activate(_make_router(self._router).Route.future(question, **self._settings()))
        try:
            return asking.result()
        except grpc.FutureCancelledError as error:
            raise CancelledError("the call was cancelled here") from error
        except grpc.RpcError as failure:
            workers, now = self._workers, time.monotonic()
            with workers.lock:
                note_route_failure(failure, self._plan, workers.target, workers.memory, now)
            return None
        except BaseException:  # Ctrl-C: nobody waits for the answer any more
            asking.cancel()
            raise

    def _activate(self, call: Any) -> Any:
        with self._lock:
            self._active = call
            is_cancelled = self._is_cancelled
        if is_cancelled:
            call.cancel()
        return call

    def _settings(self) -> dict[str, Any]:
        return {"timeout": self._time_left(), "metadata": self._workers.target.metadata}

    def _release(self) -> None:
        with self._lock:
            held, self._held = self._held, ""
        if held:
            self._workers.release(held)
