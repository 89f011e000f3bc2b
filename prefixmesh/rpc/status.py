"""The error tree on the wire: each error becomes a gRPC status with a ``google.rpc.ErrorInfo``, and comes back as itself.

Who is refused for want of room is told with ``google.rpc.RetryInfo`` when to come back, where the server knows.
"""

import logging
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from prefixmesh import errors
from prefixmesh.errors import InvalidRequestError, OverloadedError, PrefixmeshError
from prefixmesh.rpc.channel import MAX_MESSAGE_BYTES

_log = logging.getLogger(__name__)

ERROR_DOMAIN: Final = "prefixmesh"
_MAX_MESSAGE_CHARS: Final = 1000
"""Status messages travel as a header; a caller's own text quoted in one must not overflow it."""

_TOO_LARGE: Final = "larger than max"
"""In gRPC's own words for a message above the cap, whose status would read as "try again later", which never helps."""

_NS_PER_S: Final = 1e9

AnyContext: TypeAlias = "grpc.aio.ServicerContext[object, object]"

_BY_REASON: Final[dict[str, type[PrefixmeshError]]] = {
    kind.reason: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, PrefixmeshError) and kind is not PrefixmeshError
}
_BY_STATUS: Final[dict[str, type[PrefixmeshError]]] = {
    "UNAUTHENTICATED": errors.AuthenticationError,
    "PERMISSION_DENIED": errors.AccessDeniedError,
    "NOT_FOUND": errors.NotFoundError,
    "RESOURCE_EXHAUSTED": errors.OverloadedError,
    "UNAVAILABLE": errors.UnavailableError,
    "DEADLINE_EXCEEDED": errors.DeadlineError,
    "CANCELLED": errors.CancelledError,
    "UNIMPLEMENTED": errors.UnsupportedError,
}


async def end_call(context: AnyContext, error: PrefixmeshError) -> None:
    """End the call with the status that ``error`` stands for; its handler has only to return.

    gRPC's own ``context.abort`` raises an error that the call's state keeps, whose traceback holds the handler's frames, which
    hold the call: a cycle that keeps every refused request, of up to 64 MB, until the collector happens to run. So that error
    ends here, and without what it holds; gRPC raises it again by itself.
    """
    code = grpc.StatusCode[error.status]
    message = str(error)[:_MAX_MESSAGE_CHARS]
    status = status_pb2.Status(
        code=code.value[0], message=message, details=[_packed(one) for one in _details_of(error)]
    )
    trailer = (("grpc-status-details-bin", status.SerializeToString()),)
    try:
        await context.abort(code, message, trailer)
    except grpc.aio.AbortError as aborted:
        aborted.__traceback__ = aborted.__context__ = None
    except grpc.aio.InternalError:
        # The caller left, or its deadline passed, while the status was on its way: there is nobody to be told.
        _log.debug("status_not_sent code=%s", code.name)


def from_rpc_error(error: grpc.RpcError) -> PrefixmeshError:
    """The error of our tree that a failed call stands for; statuses of foreign origin are mapped by their code."""
    call: Any = error  # every RpcError that a call raises is also that call
    code: grpc.StatusCode = call.code()
    message: str = call.details() or code.name
    details = _details(error)
    info = _error_info(details)
    if info is not None and info.reason in _BY_REASON:
        kind = _BY_REASON[info.reason]
        if kind is InvalidRequestError:
            field = info.metadata.get("field", "request")
            return InvalidRequestError(field, message.removeprefix(f"{field}: "))
        return _made(kind, message, details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in message:
        return InvalidRequestError(
            "request", f"a message carries at most {MAX_MESSAGE_BYTES} bytes ({message})"
        )
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequestError("request", message)
    return _made(_BY_STATUS.get(code.name, errors.InternalError), message, details)


def is_told(error: grpc.RpcError) -> bool:
    """Whether a server of ours has said what a failed call stands for; else it is what gRPC itself met, such as a broken connection."""
    return _error_info(_details(error)) is not None


def _details_of(error: PrefixmeshError) -> Iterable[Message]:
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)
    if isinstance(error, InvalidRequestError):
        info.metadata["field"] = error.field
    yield info
    if isinstance(error, OverloadedError) and error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * _NS_PER_S))
        yield retry


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _made(kind: type[PrefixmeshError], message: str, details: Iterable[any_pb2.Any]) -> PrefixmeshError:
    return kind(message, _retry_after_s(details)) if issubclass(kind, OverloadedError) else kind(message)


def _details(error: Any) -> Iterable[any_pb2.Any]:
    trailer = error.trailing_metadata() or ()
    for key, value in trailer:
        if key == "grpc-status-details-bin":
            try:
                return tuple(status_pb2.Status.FromString(value).details)
            except DecodeError:
                return ()  # a peer's own idea of details
    return ()


def _error_info(details: Iterable[any_pb2.Any]) -> error_details_pb2.ErrorInfo | None:
    info = error_details_pb2.ErrorInfo()
    for detail in details:
        if _unpacks(detail, info) and info.domain == ERROR_DOMAIN:
            return info
    return None


def _retry_after_s(details: Iterable[any_pb2.Any]) -> float | None:
    retry = error_details_pb2.RetryInfo()
    for detail in details:
        if _unpacks(detail, retry):
            return max(0.0, float(retry.retry_delay.ToNanoseconds()) / _NS_PER_S)
    return None


def _unpacks(detail: any_pb2.Any, message: Message) -> bool:
    try:
        return detail.Unpack(message)
    except DecodeError:
        return False
