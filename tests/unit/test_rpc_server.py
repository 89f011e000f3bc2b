"""What a caller sees of a service registered by ``rpc.server``: a proper status for everything that can go wrong."""

import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from prefixmesh import errors
from prefixmesh.errors import InternalError, InvalidRequestError, PrefixmeshError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import inference_pb2_grpc as pb_grpc
from prefixmesh.rpc.channel import MAX_MESSAGE_BYTES, open_channel
from prefixmesh.rpc.server import Send, _guard_sending, _guard_stream, _guard_unary, add_service, make_server
from prefixmesh.rpc.status import AnyContext, from_rpc_error

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"]
GENERATE = "/prefixmesh.v1.Inference/Generate"
TOKENIZE = "/prefixmesh.v1.Inference/Tokenize"
SECRET_TEXT = "the password is swordfish"


class Service:
    """An Inference that fails on demand and notices when its stream is closed."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.hold = False
        self.open_streams = 0
        self.closed = asyncio.Event()

    async def Generate(
        self, request: pb.GenerateRequest, context: AnyContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.open_streams += 1
        try:
            yield pb.GenerateResponse(delta=pb.Delta(text=request.text))
            if self.error is not None:
                raise self.error
            if self.hold:
                await asyncio.Event().wait()
        finally:
            self.open_streams -= 1
            self.closed.set()

    async def Tokenize(self, request: pb.TokenizeRequest, context: AnyContext) -> pb.TokenizeResponse:
        if self.error is not None:
            raise self.error
        return pb.TokenizeResponse(ids=request.text.encode())

    async def Abort(self, request: pb.AbortRequest, context: AnyContext) -> pb.AbortResponse:
        raise NotImplementedError(SECRET_TEXT)

    async def ListModels(self, request: pb.ListModelsRequest, context: AnyContext) -> pb.ListModelsResponse:
        return pb.ListModelsResponse()


class SendingService(Service):
    """The same by a method that is given a ``send`` instead of being a generator."""

    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: AnyContext, send: Send
    ) -> None:
        async with aclosing(super().Generate(request, context)) as messages:  # type: ignore[type-var]
            async for message in messages:
                await send(message.SerializeToString())


STREAMS = pytest.mark.parametrize("kind", [Service, SendingService])


@asynccontextmanager
async def running(service: Service, *, careless: bool = False) -> AsyncIterator[grpc.aio.Channel]:
    """A server and a channel to it; a careless one sends what it should not."""
    server = make_server()
    add_service(server, SERVICE, service)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        address = f"127.0.0.1:{port}"
        no_limit = [("grpc.max_send_message_length", -1)]
        opened = grpc.aio.insecure_channel(address, no_limit) if careless else open_channel(address)
        async with opened as channel:
            yield channel
    finally:
        await server.stop(None)


def stub_of(channel: grpc.aio.Channel) -> Any:
    return pb_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]


async def raw_error(channel: grpc.aio.Channel, method: str, body: bytes) -> grpc.aio.AioRpcError:
    call: Any = channel.unary_unary(method)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(body, timeout=5)
    return caught.value


def test_a_method_that_nobody_or_more_than_one_implements_is_an_error_at_the_start() -> None:
    class Part:
        Generate = Tokenize = Service.Tokenize

    class Rest:
        Abort = ListModels = Service.ListModels

    async def add(*services: object, partial: bool = False) -> None:
        add_service(make_server(), SERVICE, *services, partial=partial)

    asyncio.run(add(Part(), Rest()))
    asyncio.run(add(Part(), partial=True))
    with pytest.raises(InternalError, match=r"Inference\.Abort must be implemented once, is 0 times"):
        asyncio.run(add(Part()))
    with pytest.raises(InternalError, match=r"Inference\.Generate must be implemented once, is 2 times"):
        asyncio.run(add(Part(), Service()))


async def test_malformed_message_is_the_callers_error_and_the_next_call_works() -> None:
    """Bytes that are no message become INVALID_ARGUMENT, not INTERNAL."""
    async with running(Service()) as channel:
        for method in (GENERATE, TOKENIZE):
            error = await raw_error(channel, method, b"\xff\xff\xff\xff\xff")
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "well-formed prefixmesh.v1." in (error.details() or "")
        assert (await stub_of(channel).Tokenize(pb.TokenizeRequest(text="a"))).ids == b"a"


async def test_invalid_utf8_names_the_field() -> None:
    """A string that is not UTF-8 is refused with the path of its field."""
    broken = pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="abcd")])
    ).SerializeToString()
    async with running(Service()) as channel:
        error = await raw_error(channel, GENERATE, broken.replace(b"abcd", b"ab\xff\xfe"))
    mapped = from_rpc_error(error)
    assert isinstance(mapped, InvalidRequestError)
    assert mapped.field == "chat.messages.content"
    assert str(mapped) == "chat.messages.content: must be valid UTF-8"


async def test_a_huge_malformed_message_does_not_stop_the_server_for_long() -> None:
    """Looking for the field at fault is bounded, however many fields precede it."""
    body = pb.GenerateRequest(text="a").SerializeToString() * 2_000_000 + b"\xff"
    loop = asyncio.get_running_loop()
    async with running(Service()) as channel:
        started = loop.time()
        error = await raw_error(channel, TOKENIZE, body)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert loop.time() - started < 2.0


async def test_a_message_above_the_cap_is_refused_and_the_channel_lives() -> None:
    """The status names the real cap (F62)."""
    async with running(Service(), careless=True) as channel:
        error = await raw_error(channel, TOKENIZE, bytes(MAX_MESSAGE_BYTES + 1))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(MAX_MESSAGE_BYTES) in (error.details() or "")
        assert (await stub_of(channel).Tokenize(pb.TokenizeRequest(text="a"))).ids == b"a"


async def test_a_burst_of_calls_is_taken_as_a_whole() -> None:
    """gRPC itself drops none at random: to refuse is each service's own business, in words (F8)."""
    async with running(Service()) as channel:
        stub = stub_of(channel)
        calls = [stub.Tokenize(pb.TokenizeRequest(text=str(number)), timeout=30) for number in range(2000)]
        answers = await asyncio.gather(*calls)
    assert [answer.ids for answer in answers] == [str(number).encode() for number in range(2000)]


ALL_ERRORS = [
    InvalidRequestError("sampling.top_p", "must be at most 1, got 2"),
    *(
        kind("what happened — ☃")
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, PrefixmeshError)
        and kind not in (PrefixmeshError, InvalidRequestError)
    ),
]


@pytest.mark.parametrize("error", ALL_ERRORS, ids=lambda error: type(error).__name__)
@STREAMS
async def test_each_error_of_the_tree_arrives_as_itself(kind: type[Service], error: PrefixmeshError) -> None:
    """Status, type, message and field survive the wire, before and after the first message of a stream."""
    service = kind()
    service.error = error
    async with running(service) as channel:
        stub = stub_of(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.Tokenize(pb.TokenizeRequest(text="a"))
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            [message async for message in stub.Generate(pb.GenerateRequest(text="a"))]
    for caught in (unary.value, stream.value):
        assert caught.code().name == error.status
        mapped = from_rpc_error(caught)
        assert type(mapped) is type(error)
        assert str(mapped) == str(error)
        assert getattr(mapped, "field", None) == getattr(error, "field", None)


@STREAMS
async def test_a_refused_call_sends_no_message(kind: type[Service]) -> None:
    """A caller that reads no messages, for it expects none beside an error, gets the status all the same."""
    service = kind()
    service.error = InvalidRequestError("text", "too long")
    async with running(service) as channel:
        for method in (TOKENIZE, GENERATE):
            body = b"\xff" if method == GENERATE else b""
            start: Any = channel.unary_stream(method)
            assert await start(body, timeout=5).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_refused_call_is_freed_at_once() -> None:
    """What a refused call held, such as its 64 MB, is not kept until the garbage collector happens to run (F63, F64)."""

    class Held:
        """Stands for the memory of a request."""

    left: list[weakref.ref[Held]] = []

    def refuse() -> None:
        held = Held()
        left.append(weakref.ref(held))
        raise InvalidRequestError("text", "too long")

    async def refuse_unary(request: pb.TokenizeRequest, context: AnyContext) -> pb.TokenizeResponse:
        refuse()
        return pb.TokenizeResponse()

    async def refuse_stream(
        request: pb.GenerateRequest, context: AnyContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse()
        refuse()

    service = Service()
    service.Tokenize, service.Generate = refuse_unary, refuse_stream  # type: ignore[method-assign]
    async with running(service) as channel:
        gc.disable()
        try:
            await raw_error(channel, TOKENIZE, b"")
            await raw_error(channel, GENERATE, b"")
            await stub_of(channel).ListModels(pb.ListModelsRequest())  # the server has let go of the others
            assert [ref() for ref in left] == [None, None]
        finally:
            gc.enable()


async def test_a_bug_of_ours_shows_nothing_to_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected exception becomes INTERNAL; its text stays in the log."""
    async with running(Service()) as channel:
        with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub_of(channel).Abort(pb.AbortRequest(request_id="r"))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert SECRET_TEXT not in (caught.value.details() or "")
    assert "handler_failed method=prefixmesh.v1.Inference.Abort error=NotImplementedError" in caplog.text


@STREAMS
async def test_a_leaked_cancellation_still_ends_in_a_status(kind: type[Service]) -> None:
    """A handler that raises asyncio.CancelledError by itself does not leave its caller waiting (F22)."""
    service = kind()
    service.error = asyncio.CancelledError()
    async with running(service) as channel:
        stub = stub_of(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.Tokenize(pb.TokenizeRequest(text="a"), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            [message async for message in stub.Generate(pb.GenerateRequest(text="a"), timeout=5)]
    assert isinstance(from_rpc_error(unary.value), InternalError)
    assert isinstance(from_rpc_error(stream.value), InternalError)


@STREAMS
@pytest.mark.parametrize("way", ["cancel", "deadline", "disconnect"])
async def test_a_callers_leaving_closes_the_stream_behind_it(kind: type[Service], way: str) -> None:
    """Cancel, deadline and disconnect all run the handler's clean-up at once, wherever it waits (F17)."""
    service = kind()
    service.hold = True
    async with running(service) as channel:
        call = stub_of(channel).Generate(
            pb.GenerateRequest(text="a"), timeout=0.2 if way == "deadline" else None
        )
        assert (await call.read()).delta.text == "a"
        if way == "cancel":
            call.cancel()
        elif way == "disconnect":
            await channel.close()
        async with asyncio.timeout(1):
            await service.closed.wait()
        assert service.open_streams == 0
        if way == "deadline":
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert isinstance(from_rpc_error(caught.value), errors.DeadlineError)


class GoneCall:
    """The context of a call that has ended in gRPC's core, of which its handler was not told yet: every operation fails."""

    async def write(self, message: object) -> None:
        raise grpc.aio.InternalError("execute_batch")

    async def abort(self, *status: object) -> None:
        raise grpc.aio.InternalError("execute_batch")

    def cancelled(self) -> bool:
        return False


@STREAMS
async def test_a_caller_that_leaves_in_the_middle_of_a_write_is_no_bug_of_ours(
    kind: type[Service], caplog: pytest.LogCaptureFixture
) -> None:
    """The stream behind it is closed, the handler ends as if cancelled, and no log calls it an error (F71)."""
    service = kind()
    context: Any = GoneCall()
    guard: Any = _guard_sending if kind is SendingService else _guard_stream
    handle: Any = guard(SERVICE.methods_by_name["Generate"], service.Generate)
    with caplog.at_level(logging.INFO), pytest.raises(asyncio.CancelledError):
        await handle(pb.GenerateRequest(text="a").SerializeToString(), context)
    assert service.open_streams == 0
    assert not caplog.records


async def test_a_status_that_nobody_waits_for_any_more_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """The same between a handler's error and its status on the wire."""
    service = Service()
    service.error = errors.DeadlineError("too late")
    context: Any = GoneCall()
    handle: Any = _guard_unary(SERVICE.methods_by_name["Tokenize"], service.Tokenize)
    with caplog.at_level(logging.INFO):
        assert await handle(b"", context) is None
    assert not caplog.records


async def test_a_stream_its_reader_neglects_is_closed_on_cancel() -> None:
    """A handler stuck in flow control, not in its own code, is closed just the same."""
    service = Service()

    async def endless(request: pb.GenerateRequest, context: AnyContext) -> AsyncIterator[pb.GenerateResponse]:
        try:
            while True:
                yield pb.GenerateResponse(delta=pb.Delta(text="x" * 100_000))
        finally:
            service.closed.set()

    service.Generate = endless  # type: ignore[method-assign]
    async with running(service) as channel:
        call = stub_of(channel).Generate(pb.GenerateRequest(text="a"))
        await call.read()
        call.cancel()
        async with asyncio.timeout(1):
            await service.closed.wait()
