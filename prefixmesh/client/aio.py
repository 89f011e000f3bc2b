"""The client for asyncio code. One event loop per client.

Only the transport is here: what is sent and what comes back is in ``calls`` and ``answer``.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
import grpc.aio

from prefixmesh.client import calls
from prefixmesh.client.answer import Answer, Started, TextDelta
from prefixmesh.client.answer_builder import AnswerBuilder
from prefixmesh.client.call_aio import AsyncCall
from prefixmesh.client.calls import GenerateOptions, ServedModel
from prefixmesh.client.checks import PromptLike, check_idle_timeout
from prefixmesh.client.course import begin_course
from prefixmesh.client.direct_aio import AsyncWorkers
from prefixmesh.client.fork import ContinuationLike, plan_forks
from prefixmesh.client.ride import Ride, RouterMemory
from prefixmesh.client.target import TimeLeft, make_target
from prefixmesh.errors import CancelledError, InvalidRequestError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1.inference_pb2_grpc import InferenceStub
from prefixmesh.router_config import DEFAULT_STREAM_IDLE_S
from prefixmesh.rpc.channel import open_channel

_ResponseT = TypeVar("_ResponseT")
_make_stub: Any = InferenceStub  # generated without types


class AsyncClient:
    """``Client`` for asyncio: the same calls, results and errors, awaited. Cancelling the task that waits cancels the call."""

    def __init__(
        self,
        address: str | None = None,
        *,
        api_key: str | None = None,
        tenant: str | None = None,
        timeout_s: float | None = None,
        direct: bool = False,
        resume: bool = True,
        stream_idle_timeout_s: float = DEFAULT_STREAM_IDLE_S,
    ) -> None:
        """Take a target as ``Client`` does; connects on first use, to the event loop that runs then."""
        self._target = make_target(address, api_key, tenant, timeout_s)
        self._idle_timeout_s = check_idle_timeout(stream_idle_timeout_s)
        self._workers = AsyncWorkers() if direct else None
        self._resumes = resume
        self._router_memory = RouterMemory()
        self._channel: grpc.aio.Channel | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"AsyncClient({self._target.address}{', closed' if self._is_closed else ''})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def address(self) -> str:
        """Where calls go."""
        return self._target.address

    async def close(self) -> None:
        """Close the connection; streams still open are cancelled. May be called twice."""
        self._is_closed = True
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
        if self._workers is not None:
            await self._workers.close()

    async def generate(
        self, prompt: PromptLike, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Answer:
        """The whole answer to ``prompt``."""
        async with self.stream(prompt, timeout_s=timeout_s, **options) as stream:
            return await stream.collect()

    def stream(
        self, prompt: PromptLike, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> "AsyncStream":
        """The answer to ``prompt`` as it comes. Use it in an ``async with``: leaving early cancels the computation."""
        request = calls.build_generate(prompt, **options)
        time_left = TimeLeft(self._target.timeout_s(timeout_s), time.monotonic)
        channel, now_s = self._open_channel(), time.monotonic()
        builder, workers = calls.begin_answer(request, now_s), self._workers
        memory = None if workers is None else workers.memory
        course = begin_course(request, builder, self._ride(), memory, resumes=self._resumes, now_s=now_s)
        call = AsyncCall(self._target, channel, course, time_left, workers, self._idle_timeout_s)
        return AsyncStream(call, builder)

    async def fork(
        self,
        context: PromptLike,
        continuations: Sequence[ContinuationLike],
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Answer]:
        """An answer to each of ``continuations`` of one ``context``, in their order, at the same time; see ``Client.fork``."""
        first, *rest = plan_forks(context, continuations, options)
        time_left = TimeLeft(self._target.timeout_s(timeout_s), time.monotonic)
        async with AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(self.stream(first, timeout_s=time_left(), **options))]
            await anext(streams[0], None)
            for prompt in rest:
                stream = self.stream(prompt, timeout_s=time_left(), **options)
                streams.append(await stack.enter_async_context(stream))
            return await _collect(streams)

    async def abort(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """Stop a request of the same tenant by the id its ``Started`` carried; unknown and ended ids are no error."""
        await self._call(self._stub().Abort, calls.build_abort(request_id), timeout_s)

    async def tokenize(
        self, prompt: PromptLike, *, model: str = "", timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """Token ids of text or chat messages, exactly as ``generate`` would see them."""
        request = calls.build_tokenize(prompt, model)
        return calls.read_tokenize(await self._call(self._stub().Tokenize, request, timeout_s))

    async def list_models(self, *, timeout_s: float | None = None) -> tuple[ServedModel, ...]:
        """What is served there, and its limits."""
        return calls.read_models(await self._call(self._stub().ListModels, pb.ListModelsRequest(), timeout_s))

    async def _call(
        self, method: Callable[..., Awaitable[_ResponseT]], request: object, timeout_s: float | None
    ) -> _ResponseT:
        time_left = TimeLeft(self._target.timeout_s(timeout_s), time.monotonic)
        ride = self._ride()
        while True:
            try:
                response = await method(request, timeout=time_left(), metadata=self._target.metadata)
            except grpc.RpcError as failure:
                broken = self._target.judge(failure)
                await asyncio.sleep(ride.broke(broken, time.monotonic(), time_left.left_s))
            except asyncio.CancelledError as error:
                raise _cancellation(error) from error
            except grpc.aio.UsageError as error:  # a channel that was closed during a pause
                raise CancelledError("the client was closed") from error
            else:
                ride.answered()
                return response

    def _ride(self) -> Ride:
        return Ride(self._router_memory, rides=self._resumes, draw=random.random)

    def _stub(self) -> Any:
        return _make_stub(self._open_channel())

    def _open_channel(self) -> grpc.aio.Channel:
        """This client's channel, which is opened at the first call: only then an event loop surely runs."""
        if self._is_closed:
            raise InvalidRequestError("client", "is closed")
        if self._channel is None:
            self._channel = open_channel(self._target.address)
        return self._channel


class AsyncStream:
    """One answer as it comes: iterate over its ``TextDelta``s, then read ``answer``."""

    def __init__(self, call: AsyncCall, builder: AnswerBuilder) -> None:
        self._call = call
        self._builder = builder

    def __repr__(self) -> str:
        return f"AsyncStream({self._builder})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        while (response := await self._receive()) is not None:
            delta = self._builder.add(response, time.monotonic())
            if delta is not None:
                return delta
        raise StopAsyncIteration

    @property
    def started(self) -> Started | None:
        """Where and how the answer is computed; None until the server has said so."""
        return self._builder.started

    @property
    def answer(self) -> Answer:
        """The finished answer; raises InvalidRequestError before the stream was read to its end."""
        return self._builder.finished_answer()

    async def collect(self) -> Answer:
        """Read what is left and return the finished answer."""
        async for _ in self:
            pass
        return self.answer

    def cancel(self) -> None:
        """Stop the computation; reading on raises CancelledError. Does nothing once the answer is finished."""
        self._call.cancel()

    async def _receive(self) -> pb.GenerateResponse | None:
        """The next response; None at a good end."""
        try:
            response = await self._call.read()
        except asyncio.CancelledError as error:
            raise _cancellation(error) from error
        if response is grpc.aio.EOF:
            self._builder.end()
            return None
        message: pb.GenerateResponse = response
        return message


async def _collect(streams: Sequence[AsyncStream]) -> list[Answer]:
    """Read several streams at the same time; the first error ends all of them."""
    reading = [asyncio.create_task(stream.collect()) for stream in streams]
    try:
        return await asyncio.gather(*reading)
    finally:
        for one in reading:
            one.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


def _cancellation(error: asyncio.CancelledError) -> BaseException:
    """What a CancelledError out of gRPC means: the task's own, or only that the call was cancelled by ``cancel`` or ``close``.

    The second must not pass for the first: a task that nobody cancelled would end without a word.
    """
    task = asyncio.current_task()
    return error if task is None or task.cancelling() else CancelledError("the call was cancelled here")
