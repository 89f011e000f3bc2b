"""The error tree on the wire, where the other end is not ours."""

from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from prefixmesh.cli.failure import as_failure
from prefixmesh.errors import (
    AuthenticationError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PrefixmeshError,
    QueueTimeoutError,
    UnavailableError,
    UnsupportedError,
)
from prefixmesh.rpc.status import end_call, from_rpc_error


def foreign_error(
    code: grpc.StatusCode, details: str | None = "as they said", trailer: bytes = b""
) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", trailer)) if trailer else grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details=details)


async def over_the_wire(error: PrefixmeshError) -> PrefixmeshError:
    """What a caller makes of the status that a server ends its call with."""
    sent: list[Any] = []

    class Context:
        async def abort(self, *said: Any) -> None:
            sent.extend(said)

    context: Any = Context()
    await end_call(context, error)
    code, message, trailer = sent
    return from_rpc_error(
        grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailer), details=message)
    )


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, UnavailableError),
        (grpc.StatusCode.UNAUTHENTICATED, AuthenticationError),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError),
        (grpc.StatusCode.DATA_LOSS, InternalError),
        (grpc.StatusCode.UNIMPLEMENTED, UnsupportedError),
    ],
)
def test_a_status_of_foreign_origin_is_mapped_by_its_code(
    code: grpc.StatusCode, kind: type[PrefixmeshError]
) -> None:
    """A status without our details, such as gRPC's own for a refused connection, has a place in the tree."""
    error = from_rpc_error(foreign_error(code))
    assert type(error) is kind
    assert "as they said" in str(error)


def test_a_status_without_text_is_named_by_its_code() -> None:
    """An error is never empty."""
    assert str(from_rpc_error(foreign_error(grpc.StatusCode.UNAVAILABLE, None))) == "UNAVAILABLE"


@pytest.mark.parametrize("kind", [OverloadedError, QueueTimeoutError])
@pytest.mark.parametrize("retry_after_s", [None, 0.0, 0.25, 90.0])
async def test_when_to_come_back_travels_with_a_refusal(
    kind: type[OverloadedError], retry_after_s: float | None
) -> None:
    """Nobody knows, at once, and later are three different answers."""
    error = await over_the_wire(kind("full", retry_after_s))
    assert type(error) is kind
    assert str(error) == "full"
    assert error.retry_after_s == retry_after_s


async def test_only_a_refusal_says_when_to_come_back() -> None:
    """An error of another kind keeps its own details."""
    error = await over_the_wire(InvalidRequestError("sampling.top_p", "too large"))
    assert isinstance(error, InvalidRequestError)
    assert (error.field, error.problem) == ("sampling.top_p", "too large")


@pytest.mark.parametrize(("said_s", "retry_after_s"), [(3, 3.0), (-3, 0.0)])
def test_a_foreign_servers_retry_info_is_read(said_s: int, retry_after_s: float) -> None:
    """A proxy in between may refuse by itself; a time in the past means now."""
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=said_s)))
    trailer = status_pb2.Status(code=8, details=[detail]).SerializeToString()
    error = from_rpc_error(foreign_error(grpc.StatusCode.RESOURCE_EXHAUSTED, trailer=trailer))
    assert isinstance(error, OverloadedError)
    assert error.retry_after_s == retry_after_s


def test_details_that_are_none_are_left_out() -> None:
    """What a peer packs wrongly breaks nothing."""
    detail = any_pb2.Any(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff\xff\xff")
    trailer = status_pb2.Status(code=8, details=[detail]).SerializeToString()
    error = from_rpc_error(foreign_error(grpc.StatusCode.RESOURCE_EXHAUSTED, trailer=trailer))
    assert isinstance(error, OverloadedError)
    assert error.retry_after_s is None


def test_the_command_line_says_when_to_try_again() -> None:
    """In seconds, and nothing where nobody knows."""
    assert as_failure(OverloadedError("full", 1.26)).message == "full; try again in 1.3 s"
    assert as_failure(OverloadedError("full")).message == "full"
