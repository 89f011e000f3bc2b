"""Registers a service so that nothing a caller sends, and no bug of ours, leaves a call without a proper status.

The generated registration parses requests inside gRPC, where a malformed message becomes an opaque INTERNAL. Here requests
arrive as bytes: they are parsed under our own error mapping, and every handler's errors end in ``rpc.status``.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from inspect import iscoroutinefunction
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from prefixmesh.errors import InternalError, InvalidRequestError, PrefixmeshError
from prefixmesh.rpc import status
from prefixmesh.rpc.arenas import keep_one_arena
from prefixmesh.rpc.channel import SERVER_OPTIONS
from prefixmesh.rpc.status import AnyContext
from prefixmesh.rpc.wire_check import MAX_FIELDS, SMALL_BYTES, find_crowded, find_invalid_utf8

_log = logging.getLogger(__name__)

UnaryMethod = Callable[[Any, AnyContext], Awaitable[Message]]
StreamMethod = Callable[[Any, AnyContext], AsyncIterator[Message | bytes]]
Send = Callable[[bytes], Awaitable[object]]
"""Gives a serialised message to the caller; returns once there is room for another."""

SendingMethod = Callable[[Any, AnyContext, Send], Awaitable[None]]


def make_server() -> grpc.aio.Server:
    """A server with this fleet's settings; nothing is bound yet. It also settles how this process keeps the memory of messages."""
    keep_one_arena()
    return grpc.aio.server(options=SERVER_OPTIONS)


def add_service(
    server: grpc.aio.Server, descriptor: ServiceDescriptor, *implementations: object, partial: bool = False
) -> None:
    """Serve every method of ``descriptor`` by the method of the same name on the one of ``implementations`` that has it.

    A unary method is ``async def Name(request, context) -> Message``; a server-streaming one is an async generator over
    messages (or serialised bytes), or ``async def Name(request, context, send) -> None``, which costs less for each message. All may raise any PrefixmeshError. A method that nobody has, or two have, is a bug: InternalError
    at once. ``partial`` is for stand-ins: of what nobody has there, gRPC answers UNIMPLEMENTED, as it does for a method of a later version.
    """
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in descriptor.methods:
        found = [getattr(one, method.name) for one in implementations if hasattr(one, method.name)]
        if partial and not found:
            continue
        if len(found) != 1:
            raise InternalError(f"{method.full_name} must be implemented once, is {len(found)} times")
        (function,) = found
        if method.server_streaming:
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(
                _guard_sending(method, function)
                if iscoroutinefunction(function)
                else _guard_stream(method, function),
                request_deserializer=None,
                response_serializer=_serialize,
            )
        else:
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                _guard_unary(method, function), request_deserializer=None, response_serializer=_serialize
            )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(descriptor.full_name, handlers),))


def _guard_unary(
    method: MethodDescriptor, function: UnaryMethod
) -> Callable[[bytes, AnyContext], Awaitable[Message | None]]:
    parse = _parser(method)

    async def handle(data: bytes, context: AnyContext) -> Message | None:
        try:
            return await function(parse(data), context)
        except (PrefixmeshError, asyncio.CancelledError, Exception) as error:
            if not await _end_call(method, error, context):
                raise
            return None  # the call has ended: gRPC sends nothing more

    return handle


def _guard_stream(
    method: MethodDescriptor, function: StreamMethod
) -> Callable[[bytes, AnyContext], Awaitable[None]]:
    parse = _parser(method)

    # It writes to the context rather than being a generator itself: gRPC drops a generator of a cancelled call unclosed,
    # and the work behind it would go on until the collector finds it. Here the cancellation lands in this frame.
    async def handle(data: bytes, context: AnyContext) -> None:
        try:
            messages = cast(AsyncGenerator[Message | bytes], function(parse(data), context))
            async with aclosing(messages):
                async for message in messages:
                    await _write(context, message)
        except _CallerGoneError as error:
            # What gRPC is about to do itself, and takes for the end of the call: it says nothing to nobody.
            raise asyncio.CancelledError from error
        except (PrefixmeshError, asyncio.CancelledError, Exception) as error:
            if not await _end_call(method, error, context):
                raise

    return handle


def _guard_sending(
    method: MethodDescriptor, function: SendingMethod
) -> Callable[[bytes, AnyContext], Awaitable[None]]:
    parse = _parser(method)

    async def handle(data: bytes, context: AnyContext) -> None:
        try:
            # gRPC's own: nothing stands between the method and each message.
            await function(parse(data), context, context.write)
        except grpc.aio.InternalError as error:
            raise asyncio.CancelledError from error  # the caller is gone, as below: only writing raises this
        except (PrefixmeshError, asyncio.CancelledError, Exception) as error:
            if not await _end_call(method, error, context):
                raise

    return handle


class _CallerGoneError(Exception):
    """A call ended under its handler."""


async def _write(context: AnyContext, message: Message | bytes) -> None:
    """Send; raises _CallerGoneError in the moment between the caller's leaving and gRPC's cancelling the handler for it."""
    try:
        await context.write(message)
    except grpc.aio.InternalError as error:
        raise _CallerGoneError from error


async def _end_call(method: MethodDescriptor, error: BaseException, context: AnyContext) -> bool:
    """Give the call the status of ``error``; False for what gRPC itself asked for, a cancellation or an abort."""
    if isinstance(error, grpc.aio.AbortError):
        return False
    if isinstance(error, PrefixmeshError):
        await status.end_call(context, error)
        return True
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and (context.cancelled() or (task and task.cancelling())):
        return False
    # A bug of ours, or a CancelledError that leaked out of a library: the caller gets a status, the log the trace.
    _log.error("handler_failed method=%s error=%s", method.full_name, type(error).__name__, exc_info=error)
    await status.end_call(context, InternalError("internal error; the server's log has the details"))
    return True


def _parser(method: MethodDescriptor) -> Callable[[bytes], Message]:
    """From bytes to what ``method`` is asked; what is found out once is found out here."""
    descriptor = method.input_type
    from_string = GetMessageClass(descriptor).FromString

    def parse(data: bytes) -> Message:
        crowded = find_crowded(descriptor, data) if len(data) > SMALL_BYTES else None
        if crowded is not None:
            raise InvalidRequestError(
                crowded or "request", f"at most {MAX_FIELDS} fields and list entries allowed in one message"
            )
        try:
            return from_string(data)
        except DecodeError as error:
            raise _malformed(descriptor, data) from error

    return parse


def _malformed(descriptor: Descriptor, data: bytes) -> InvalidRequestError:
    field = find_invalid_utf8(descriptor, data)
    if field is not None:
        return InvalidRequestError(field, "must be valid UTF-8")
    return InvalidRequestError(
        "request", f"is not a well-formed {descriptor.full_name} message ({len(data)} bytes)"
    )


def _serialize(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
