"""Streams from workers themselves, for the asyncio client: the calls that ``direct.DirectPlan`` wants made.

``AsyncDirectCall`` looks like a gRPC call to its reader (``read``, ``cancel``); behind it are the router's answer, one attempt or
several, and the proxy where that is the way.
"""

import asyncio
import time
from typing import Any, Final

import grpc
import grpc.aio

from prefixmesh.client.answer_builder import AnswerBuilder
from prefixmesh.client.direct import DirectPlan, RouteMemory
from prefixmesh.client.direct_failures import note_early_end, note_failure, note_route_failure
from prefixmesh.client.target import Target, TimeLeft
from prefixmesh.client.worker_channels import WorkerChannels
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1.inference_pb2_grpc import InferenceStub
from prefixmesh.proto.v1.router_pb2_grpc import RouterStub
from prefixmesh.rpc.channel import WORKER_OPTIONS, open_channel

_make_inference: Any = InferenceStub  # generated without types
_make_router: Any = RouterStub


class AsyncWorkers:
    """What all direct calls of one client share: connections to workers, and what was learnt of them."""

    def __init__(self, target: Target) -> None:
        self.target: Final = target
        self.memory: Final = RouteMemory()
        self._channels: WorkerChannels[grpc.aio.Channel] = WorkerChannels(
            lambda address: open_channel(address, WORKER_OPTIONS)
        )
        self._closing: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"AsyncWorkers({self._channels!r})"

    def take(self, address: str) -> grpc.aio.Channel | None:
        """A channel for one stream; None when all places are in use."""
        taken = self._channels.take(address)
        if taken is None:
            return None
        if taken.to_close is not None:
            task = asyncio.ensure_future(taken.to_close.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return taken.channel

    def release(self, address: str) -> None:
        """The stream has ended."""
        self._channels.release(address)

    async def close(self) -> None:
        """Close every connection; streams still open are cancelled."""
        await asyncio.gather(*(channel.close() for channel in self._channels.empty()), *self._closing)


class AsyncDirectCall:
    """One request on its way to a worker. It is sent at once; errors come when it is read."""

    def __init__(
        self,
        workers: AsyncWorkers,
        router: grpc.aio.Channel,
        request: pb.GenerateRequest,
        time_left: TimeLeft,
        builder: AnswerBuilder,
    ) -> None:
        now = time.monotonic()
        memory = workers.memory
        self._workers = workers
        self._router = router
        self._request = request
        self._time_left = time_left
        self._builder = builder
        self._plan = DirectPlan(request, memory.avoided(now), knows_route=memory.knows_route(now))
        self._held = ""
        """The worker whose channel is held for the attempt."""

        self._opening: asyncio.Task[Any] = self._begin()

    async def read(self) -> Any:
        """The next response, or EOF; raises errors of our tree."""
        while True:
            call = await self._opening
            try:
                response = await call.read()
            except grpc.RpcError as failure:
                self._release()
                workers = self._workers
                note_failure(
                    failure, self._plan, workers.target, workers.memory, self._builder, time.monotonic()
                )
            else:
                if response is not grpc.aio.EOF:
                    return self._plan.complete(response)
                self._release()
                if self._builder.has_begun or not self._plan.worker:
                    return response
                note_early_end(self._plan, self._builder)
            self._opening = self._begin()

    def cancel(self) -> None:
        """End whatever is under way."""
        if self._opening.done() and not self._opening.cancelled() and self._opening.exception() is None:
            self._opening.result().cancel()
        self._opening.cancel()
        self._release()

    def _begin(self) -> "asyncio.Task[Any]":
        task = asyncio.ensure_future(self._open())
        # Whoever leaves without reading never asks what became of it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _open(self) -> Any:
        """The call that answers: to a worker, or to the proxy."""
        question = self._plan.next_question()
        if question is not None:
            try:
                answer = await _make_router(self._router).Route(question, **self._settings())
            except grpc.RpcError as failure:
                workers = self._workers
                note_route_failure(failure, self._plan, workers.target, workers.memory, time.monotonic())
            else:
                channel = self._workers.take(answer.address)
                if channel is not None:
                    self._held = answer.address
                    sent = self._plan.routed(answer)
                    generate = _make_inference(channel).Generate
                    return generate(sent, timeout=self._time_left(), metadata=self._plan.ticket())
                self._plan.use_proxy()
        return _make_inference(self._router).Generate(self._request, **self._settings())

    def _settings(self) -> dict[str, Any]:
        return {"timeout": self._time_left(), "metadata": self._workers.target.metadata}

    def _release(self) -> None:
        held, self._held = self._held, ""
        if held:
            self._workers.release(held)
