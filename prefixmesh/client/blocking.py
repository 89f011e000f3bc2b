"""The client for ordinary (blocking) code. May be shared by threads; each ``Stream`` belongs to one.

Only the transport is here: what is sent and what comes back is in ``calls`` and ``answer``.
"""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from prefixmesh.client import calls
from prefixmesh.client.answer import Answer, Started, TextDelta
from prefixmesh.client.answer_builder import AnswerBuilder
from prefixmesh.client.call_blocking import Call
from prefixmesh.client.calls import GenerateOptions, ServedModel
from prefixmesh.client.checks import PromptLike, check_idle_timeout
from prefixmesh.client.course import Course, begin_course
from prefixmesh.client.direct_blocking import Workers
from prefixmesh.client.fork import ContinuationLike, plan_forks
from prefixmesh.client.ride import Ride, RouterMemory
from prefixmesh.client.target import TimeLeft, make_target
from prefixmesh.errors import CancelledError, InvalidRequestError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1.inference_pb2_grpc import InferenceStub
from prefixmesh.router_config import DEFAULT_STREAM_IDLE_S
from prefixmesh.rpc.channel import open_sync_channel

_ResponseT = TypeVar("_ResponseT")
_make_stub: Any = InferenceStub  # generated without types


class Client:
    """Calls a router or a worker; the same calls work on both.

    ``generate`` (an answer), ``stream`` (an answer as it comes), ``fork`` (several ways to go on from one context), ``abort``, ``tokenize``, ``list_models``, ``close``. Every call
    raises errors of ``prefixmesh.errors``, and InvalidRequestError before anything is sent.
    """

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
        """Take a target; connects on first use.

        ``address`` is ``host:port``, by default the router of the fleet that ``prefixmesh up`` remembers. ``tenant`` is believed
        only by servers without API keys. ``timeout_s`` bounds each call that names no timeout of its own; None is no bound.
        ``direct`` asks the router only where a request goes and streams from that worker itself, so that tokens do not cross the router;
        a worker that cannot be reached from here is reached through the router by itself.

        A router that dies after it has answered this client is waited for until the call's deadline, and without one for half a minute;
        a stream that breaks off, because the router or a worker that it came from directly has died, goes on elsewhere from the tokens that
        were told. ``Answer.interruptions`` tells how often. With ``resume=False`` both end in UnavailableError at once. A worker that is read
        directly and says nothing for ``stream_idle_timeout_s`` after its first token counts as dead (0: it may be silent for ever); through
        the router, that is the router's to say.
        """
        self._target = make_target(address, api_key, tenant, timeout_s)
        self._workers = Workers(check_idle_timeout(stream_idle_timeout_s)) if direct else None
        self._resumes = resume
        self._router_memory = RouterMemory()
        self._channel = open_sync_channel(self._target.address)
        self._stub = _make_stub(self._channel)
        self._is_closed = False

    def __repr__(self) -> str:
        return f"Client({self._target.address}{', closed' if self._is_closed else ''})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where calls go."""
        return self._target.address

    def close(self) -> None:
        """Close the connection; streams still open are cancelled. May be called twice."""
        self._is_closed = True
        self._channel.close()
        if self._workers is not None:
            self._workers.close()

    def generate(
        self, prompt: PromptLike, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Answer:
        """The whole answer to ``prompt``. An interrupt (Ctrl-C) cancels the computation at the server."""
        with self.stream(prompt, timeout_s=timeout_s, **options) as stream:
            return stream.collect()

    def stream(
        self, prompt: PromptLike, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> "Stream":
        """The answer to ``prompt`` as it comes. Use it in a ``with``: leaving early cancels the computation."""
        request = calls.build_generate(prompt, **options)
        time_left = TimeLeft(self._target.timeout_s(timeout_s), time.monotonic)
        self._check_open()
        builder, course = self._begin(request, time.monotonic())
        call = Call(
            self._target, self._channel, course, time_left, self._workers, is_closed=lambda: self._is_closed
        )
        return Stream(call, builder)

    def fork(
        self,
        context: PromptLike,
        continuations: Sequence[ContinuationLike],
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Answer]:
        """An answer to each of ``continuations`` of one ``context``, in their order, at the same time; the context is computed once.

        A fork is what ``generate`` would answer to context and continuation as one prompt: text goes on after text, a message, several or
        a user's text after a chat, ids after ids. The first is sent alone and the others once its first token is there, so that all
        find the context in the cache where the first one lies. On a worker that is certain, as far as its cache has room. A router
        knows by then which worker has the context, and sends a fork elsewhere only where waiting there would cost more than to
        compute the context anew; what must stay on one worker whatever happens is ``branches`` of one prompt.

        ``timeout_s`` bounds all together. An error of one fork is the call's, and ends the others. ``resumed_output`` is refused.
        """
        first, *rest = plan_forks(context, continuations, options)
        time_left = TimeLeft(self._target.timeout_s(timeout_s), time.monotonic)
        with ExitStack() as stack:
            streams = [stack.enter_context(self.stream(first, timeout_s=time_left(), **options))]
            next(streams[0], None)
            for prompt in rest:
                stream = self.stream(prompt, timeout_s=time_left(), **options)
                streams.append(stack.enter_context(stream))
            return _collect(streams)

    def abort(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """Stop a request of the same tenant by the id its ``Started`` carried; unknown and ended ids are no error."""
        self._call(self._stub.Abort, calls.build_abort(request_id), timeout_s)

    def tokenize(
        self, prompt: PromptLike, *, model: str = "", timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """Token ids of text or chat messages, exactly as ``generate`` would see them."""
        return calls.read_tokenize(
            self._call(self._stub.Tokenize, calls.build_tokenize(prompt, model), timeout_s)
        )

    def list_models(self, *, timeout_s: float | None = None) -> tuple[ServedModel, ...]:
        """What is served there, and its limits."""
        return calls.read_models(self._call(self._stub.ListModels, pb.ListModelsRequest(), timeout_s))

    def _call(
        self, method: Callable[..., _ResponseT], request: object, timeout_s: float | None
    ) -> _ResponseT:
        time_left = TimeLeft(self._target.timeout_s(timeout_s), time.monotonic)
        ride = self._ride()
        self._check_open()
        while True:
            if self._is_closed:
                raise CancelledError("the client was closed")
            try:
                response = method(request, timeout=time_left(), metadata=self._target.metadata)
            except grpc.RpcError as failure:
                if self._is_closed:
                    raise CancelledError("the client was closed") from failure
                broken = self._target.judge(failure)
                time.sleep(ride.broke(broken, time.monotonic(), time_left.left_s))
            except ValueError as error:  # gRPC's, for a channel that another thread has just closed
                if not self._is_closed:
                    raise
                raise CancelledError("the client was closed") from error
            else:
                ride.answered()
                return response

    def _begin(self, request: pb.GenerateRequest, now_s: float) -> tuple[AnswerBuilder, Course]:
        builder, ride, workers = calls.begin_answer(request, now_s), self._ride(), self._workers
        if workers is None:
            return builder, begin_course(request, builder, ride, None, resumes=self._resumes, now_s=now_s)
        with workers.lock:
            course = begin_course(request, builder, ride, workers.memory, resumes=self._resumes, now_s=now_s)
        return builder, course

    def _ride(self) -> Ride:
        return Ride(self._router_memory, rides=self._resumes, draw=random.random)

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidRequestError("client", "is closed")


class Stream:
    """One answer as it comes: iterate over its ``TextDelta``s, then read ``answer``."""

    def __init__(self, call: Call, builder: AnswerBuilder) -> None:
        self._call = call
        self._builder = builder

    def __repr__(self) -> str:
        return f"Stream({self._builder})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TextDelta:
        while (response := self._receive()) is not None:
            delta = self._builder.add(response, time.monotonic())
            if delta is not None:
                return delta
        raise StopIteration

    @property
    def started(self) -> Started | None:
        """Where and how the answer is computed; None until the server has said so."""
        return self._builder.started

    @property
    def answer(self) -> Answer:
        """The finished answer; raises InvalidRequestError before the stream was read to its end."""
        return self._builder.finished_answer()

    def collect(self) -> Answer:
        """Read what is left and return the finished answer."""
        for _ in self:
            pass
        return self.answer

    def cancel(self) -> None:
        """Stop the computation; reading on raises CancelledError. Does nothing once the answer is finished."""
        self._call.cancel()

    def _receive(self) -> pb.GenerateResponse | None:
        """The next response; None at a good end."""
        try:
            return next(self._call)
        except StopIteration:
            self._builder.end()
            return None


def _collect(streams: Sequence[Stream]) -> list[Answer]:
    """Read several streams at the same time, a thread for each; the first error ends all of them."""
    with ThreadPoolExecutor(len(streams), thread_name_prefix="prefixmesh-fork") as threads:
        reading = [threads.submit(stream.collect) for stream in streams]
        try:
            ended, _ = wait(reading, return_when=FIRST_EXCEPTION)
            for one in ended:
                one.result()
            return [one.result() for one in reading]
        finally:
            for stream in streams:
                stream.cancel()
