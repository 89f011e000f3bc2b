"""Whether a Ray cluster wants to be shown a token, asked before Ray is loaded.

Ray guards its ports with a token when it is started where there is one, but whoever joins must say so beforehand (``RAY_AUTH_MODE``,
read when Ray is loaded): without it a guarded cluster refuses the connection after half a minute of trying, and with it an
unguarded one fails later still. One unauthenticated call tells which it is.
"""

import os
from pathlib import Path
from typing import Final

import grpc

from prefixmesh.errors import ConfigError

AUTH_MODE: Final = "RAY_AUTH_MODE"
_TOKEN_VARIABLES: Final = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_TOKEN_FILE: Final = Path("~/.ray/auth_token")
_CURRENT_CLUSTER: Final = Path("/tmp/ray/ray_current_cluster")  # noqa: S108 - where `ray start` puts it
_ASK_TIMEOUT_S: Final = 5.0

_CLIENT_SCHEME: Final = "ray://"
_ASK_HEAD: Final = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_ASK_CLIENT_SERVER: Final = "/ray.rpc.RayletDriver/ClusterInfo"


def prepare_token(address: str) -> None:
    """Have Ray show its token to the cluster at ``address`` if that wants one; leaves ``RAY_AUTH_MODE`` alone when it is set.

    Raises ConfigError when the cluster wants a token and this user has none. One call over the network.
    """
    if AUTH_MODE in os.environ or not _wants_token(find_cluster(address)):
        return
    if not _TOKEN_FILE.expanduser().exists() and not any(name in os.environ for name in _TOKEN_VARIABLES):
        raise ConfigError(
            f"the Ray cluster at {address} wants its token, and there is none in {_TOKEN_FILE}; copy the file from its head"
        )
    os.environ[AUTH_MODE] = "token"


def find_cluster(address: str) -> str:
    """The address behind ``auto``, as Ray looks it up; empty when there is no cluster. Other addresses stay as they are."""
    if address != "auto":
        return address
    try:
        return os.environ.get("RAY_ADDRESS") or _CURRENT_CLUSTER.read_text().strip()
    except OSError:
        return ""


def _wants_token(address: str) -> bool:
    """Only a clear refusal counts: whatever else is wrong, Ray will tell."""
    target = address.removeprefix(_CLIENT_SCHEME)
    method = _ASK_CLIENT_SERVER if address.startswith(_CLIENT_SCHEME) else _ASK_HEAD
    if not target:
        return False
    with grpc.insecure_channel(target, options=(("grpc.enable_http_proxy", 0),)) as channel:
        try:
            ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
            ask(b"", timeout=_ASK_TIMEOUT_S)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code is grpc.StatusCode.UNAUTHENTICATED
    return False
