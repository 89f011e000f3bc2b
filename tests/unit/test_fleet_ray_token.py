"""Finding out whether a cluster wants a token, against a server that answers as Ray's do."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from prefixmesh.errors import ConfigError
from prefixmesh.fleet import ray_token
from prefixmesh.fleet.ray_token import AUTH_MODE, prepare_token


class FakeHead(grpc.GenericRpcHandler):
    """Answers the head's or the client server's method, by a code."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self.code = code

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        if handler_call_details.method not in (ray_token._ASK_HEAD, ray_token._ASK_CLIENT_SERVER):
            return None

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if self.code is not grpc.StatusCode.OK:
                context.abort(self.code, "no")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a token, and an environment that says nothing about tokens."""
    monkeypatch.setattr(os, "environ", {**os.environ, "HOME": str(tmp_path)})
    for name in (AUTH_MODE, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        os.environ.pop(name, None)
    return tmp_path


@pytest.fixture
def head() -> Iterator[tuple[FakeHead, str]]:
    """A head that wants no token, and its address."""
    handler = FakeHead(grpc.StatusCode.OK)
    with ThreadPoolExecutor(max_workers=1) as pool:
        server = grpc.server(pool, handlers=[handler])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield handler, f"127.0.0.1:{port}"
        server.stop(grace=None).wait()


def give_token(home: Path) -> None:
    """The user has the token where Ray puts it."""
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("secret")


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_guarded_cluster_is_shown_the_token(home: Path, head: tuple[FakeHead, str], scheme: str) -> None:
    """At the head's port and at the client server's."""
    give_token(home)
    head[0].code = grpc.StatusCode.UNAUTHENTICATED
    prepare_token(scheme + head[1])
    assert os.environ[AUTH_MODE] == "token"


def test_a_guarded_cluster_without_a_token_at_hand_is_told_at_once(
    home: Path, head: tuple[FakeHead, str]
) -> None:
    """With where the token is to be had."""
    head[0].code = grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(
        ConfigError, match=r"wants its token.*~/\.ray/auth_token; copy the file from its head"
    ):
        prepare_token(head[1])


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND]
)
def test_an_open_cluster_is_shown_none(home: Path, head: tuple[FakeHead, str], code: grpc.StatusCode) -> None:
    """A token that the user has for other clusters would make it fail."""
    give_token(home)
    head[0].code = code
    prepare_token(head[1])
    assert AUTH_MODE not in os.environ


def test_what_the_user_has_set_stays(home: Path, head: tuple[FakeHead, str]) -> None:
    """Nobody is asked then."""
    head[0].code = grpc.StatusCode.UNAUTHENTICATED
    os.environ[AUTH_MODE] = "disabled"
    prepare_token(head[1])
    assert os.environ[AUTH_MODE] == "disabled"


def test_auto_is_looked_up_as_ray_does(
    home: Path, head: tuple[FakeHead, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the environment, then in the file that `ray start` leaves; without both, Ray will say that there is no cluster."""
    give_token(home)
    head[0].code = grpc.StatusCode.UNAUTHENTICATED
    monkeypatch.setattr(ray_token, "_CURRENT_CLUSTER", home / "ray_current_cluster")
    prepare_token("auto")
    assert AUTH_MODE not in os.environ
    (home / "ray_current_cluster").write_text(head[1])
    prepare_token("auto")
    assert os.environ.pop(AUTH_MODE) == "token"
    os.environ["RAY_ADDRESS"] = head[1]
    (home / "ray_current_cluster").unlink()
    prepare_token("auto")
    assert os.environ[AUTH_MODE] == "token"
