"""The error tree on the wire, where the other end is not ours."""

import grpc
import grpc.aio
import pytest

from prefixmesh.errors import (
    AuthenticationError,
    InternalError,
    InvalidRequestError,
    PrefixmeshError,
    UnavailableError,
    UnsupportedError,
)
from prefixmesh.rpc.status import from_rpc_error


def foreign_error(code: grpc.StatusCode, details: str | None = "as they said") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


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
