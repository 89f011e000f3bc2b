"""What a call's failure means to a client, by its status and by who sent it."""

from typing import Any

import grpc
import pytest

from prefixmesh.client.ride import Failure
from prefixmesh.client.target import make_target

TOLD = (("grpc-status-details-bin", b""),)


class _Failed(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str = "", trailer: Any = ()) -> None:
        super().__init__()
        self._code, self._details, self._trailer = code, details, trailer

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailer


def test_a_message_that_cannot_be_read_here_would_be_no_better_the_next_time() -> None:
    target = make_target("127.0.0.1:1", None, None, None)
    failed = _Failed(grpc.StatusCode.INTERNAL, "Exception deserializing response!")
    assert target.judge(failed).failure is Failure.CALLERS


@pytest.mark.parametrize(
    ("code", "trailer", "expected"),
    [
        ("UNAVAILABLE", (), Failure.DIED),
        ("CANCELLED", (), Failure.DIED),
        ("INTERNAL", (), Failure.DIED),  # a stream that was reset on its way
        ("INTERNAL", TOLD, Failure.CALLERS),  # a bug of ours, which another try would meet again
        ("UNAVAILABLE", TOLD, Failure.REFUSED),
        ("DEADLINE_EXCEEDED", (), Failure.CALLERS),
        ("UNIMPLEMENTED", (), Failure.UNREACHED),
    ],
)
def test_what_a_failure_means_follows_from_its_status_and_who_has_sent_it(
    code: str, trailer: Any, expected: Failure
) -> None:
    target = make_target("127.0.0.1:1", None, None, None)
    assert target.judge(_Failed(grpc.StatusCode[code], trailer=trailer)).failure is expected
