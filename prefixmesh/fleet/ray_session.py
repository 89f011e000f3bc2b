"""This process's connection to Ray: a local cluster of its own, or one that exists, with Ray's errors put plainly.

A local Ray is a child of this process and ends with it, also when it is killed (``prefixmesh.fleet.sweeper`` sees to that). It
listens on loopback, and keeps its files in a folder of its own, so that ``ray.init("auto")`` elsewhere does not find it.
"""

import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from prefixmesh.errors import ConfigError, ModelFileError
from prefixmesh.fleet.plan import ClusterView, NodeView
from prefixmesh.fleet.ray_token import prepare_token
from prefixmesh.fleet.sweeper import KEEP

_log = logging.getLogger(__name__)

OBJECT_STORE_BYTES: Final = 80 * 2**20
"""Near the least that Ray accepts: only actors' arguments and answers of a few bytes pass through it."""

REACH_TIMEOUT_S: Final = 5.0
"""Ray itself tries an address for minutes before it gives up."""

_TEMP_ROOT: Final = Path("/tmp")  # noqa: S108 - Ray's sockets lie below it, and a socket's path may have only 107 bytes
_RAY_ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # leave CUDA_VISIBLE_DEVICES alone in actors without GPUs; silences a warning
    "RAY_memory_monitor_refresh_ms": "0",  # Ray's own killer of memory-hungry workers would take a loading model for a leak
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",  # what outlives a killed parent waits a minute for it otherwise
}
_LOCAL_RAY_ENVIRONMENT: Final = {
    # Ray's ports let whoever reaches them run code. On Linux Ray binds them to every interface, and takes no other address from
    # ``ray.init`` for its head; this switch, meant for firewalls of other systems, makes loopback the node's address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}

_SWEEPER_WAIT_S: Final = 10.0
"""It ends in a moment when nothing is left to sweep, and what is left gets some seconds."""

_INTERRUPTED_WAIT_S: Final = 1.0
"""What an interrupted start leaves may end only after this process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RaySession:
    """An open connection."""

    ray: ModuleType
    address: str
    """``HOST:PORT`` of the cluster's head."""

    is_local: bool
    """Whether this process started the cluster."""

    def view(self) -> ClusterView:
        """The living nodes and what they have; one call to the head."""
        alive = [node for node in self.ray.nodes() if node["Alive"]]
        return ClusterView(
            nodes=tuple(
                NodeView(cpus=node["Resources"].get("CPU", 0.0), gpus=node["Resources"].get("GPU", 0.0))
                for node in alive
            ),
            may_grow=not self.is_local,
        )


@contextmanager
def open_session(address: str | None) -> Iterator[RaySession]:
    """Start a local Ray (``address`` None) or join the one at ``address``; leave, and end what was started, on exit.

    Takes about 3 s for a local one. Raises ConfigError when Ray is not installed, cannot be reached, or has another version.
    """
    ray = _load_ray(address)
    if address is not None:
        try:
            yield _opened(ray, _join(ray, address), is_local=False)
        finally:
            ray.shutdown()
        return
    with _swept_folder() as temp_dir:
        try:
            yield _opened(ray, _start_local(ray, temp_dir), is_local=True)
        finally:
            ray.shutdown()


def _opened(ray: ModuleType, address: str, *, is_local: bool) -> RaySession:
    _log.info("ray_session_open address=%s local=%s", address, is_local)
    return RaySession(ray=ray, address=address, is_local=is_local)


@contextmanager
def _swept_folder() -> Iterator[Path]:
    """A folder for Ray's files and sockets that goes, with what still writes there, whatever becomes of this process.

    After an error that is not the user's own doing, which its message explains, it stays for its logs.
    """
    folder = Path(tempfile.mkdtemp(prefix="prefixmesh-ray-", dir=_TEMP_ROOT))
    sweeper = subprocess.Popen(
        [sys.executable, "-m", "prefixmesh.fleet.sweeper", str(folder), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # a pipe that this command writes to must not stay open for it
        start_new_session=True,  # Ctrl-C in the terminal is not for it
    )
    last_word, wait_s = b"", _INTERRUPTED_WAIT_S
    try:
        yield folder
        wait_s = _SWEEPER_WAIT_S
    except (ConfigError, ModelFileError, KeyboardInterrupt):
        raise
    except BaseException:
        _log.warning("the logs of this Ray session are kept in %s/session_latest/logs", folder)
        last_word = KEEP
        raise
    finally:
        with suppress(subprocess.TimeoutExpired):
            sweeper.communicate(last_word, timeout=wait_s)


def _load_ray(address: str | None) -> ModuleType:
    """Import Ray, with the settings that it reads at that moment."""
    settings = _RAY_ENVIRONMENT | (_LOCAL_RAY_ENVIRONMENT if address is None else {})
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    if address is not None:
        if address != "auto":
            _check_reachable(address)
        prepare_token(address)
    try:
        import ray
    except ImportError as error:
        raise ConfigError("Ray is not installed; run: pip install 'prefixmesh[worker,ray]'") from error
    return ray


_QUIET: Final[dict[str, Any]] = {"log_to_driver": False, "logging_level": logging.ERROR}


def _start_local(ray: ModuleType, temp_dir: Path) -> str:
    try:
        context = ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(temp_dir),
            **_QUIET,
        )
    except SystemExit as error:
        raise KeyboardInterrupt from error  # Ray's own answer to SIGTERM
    except (RuntimeError, ValueError, OSError, TimeoutError) as error:
        raise ConfigError(f"cannot start a local Ray: {_one_line(error)}") from error
    return str(context.address_info["gcs_address"])


def _join(ray: ModuleType, address: str) -> str:
    # What Ray raises is not one kind: ConnectionError, RuntimeError for versions, ValueError for the form, and it even exits.
    try:
        ray.init(address=address, **_QUIET)
    except (Exception, SystemExit) as error:
        raise _explain(address, error) from error
    return str(ray.get_runtime_context().gcs_address)


def _check_reachable(address: str) -> None:
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not host or not port.isdigit():
        raise ConfigError(f"--address must be auto, HOST:PORT or ray://HOST:PORT, got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot reach a Ray cluster at {address}: {_one_line(error)}; is it running, and is this its head's address?"
        ) from error


def _explain(address: str, error: BaseException) -> ConfigError:
    text = _one_line(error)
    if "mismatch" in text.lower():
        return ConfigError(f"the Ray cluster at {address} runs another version of Ray or Python: {text}")
    if address == "auto" and isinstance(error, ConnectionError):
        return ConfigError("no Ray cluster runs on this machine to join; leave --address out to start one")
    # Ray quotes its servers' traces; their last line says what it is.
    last = (str(error).strip().splitlines() or [text])[-1]
    return ConfigError(
        f"cannot join the Ray cluster at {address}: {last.strip()}; is it the address of a Ray head?"
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
