"""What can be found wrong with a fleet's settings before anything starts: in a moment, not after a minute of loading."""

import dataclasses
import errno
import importlib.util
import os
import socket
from pathlib import Path
from typing import Final

from prefixmesh.adapter_names import split_adapter_setting
from prefixmesh.errors import ConfigError, InvalidRequestError
from prefixmesh.fleet.plan import FleetRequest
from prefixmesh.model_files.adapter_folder import AdapterRoot
from prefixmesh.model_files.linear_sizes import LinearSizes
from prefixmesh.model_files.model_config import read_model_config
from prefixmesh.model_files.peft_adapter import inspect_adapter
from prefixmesh.model_files.source import resolve_model
from prefixmesh.router_config import RouterConfig
from prefixmesh.rpc.identity import ApiKeys
from prefixmesh.state_url import FILE_STATE, check_state_url

_CLIENT_SCHEME: Final = "ray://"
"""Through Ray's client the router runs on the cluster's head, where its port and its keys file are."""


LEAST_POOL_TOKENS: Final = 64
"""Of a fleet's worker. A chat template and a question of one line have some forty tokens: with less, every request would be refused."""


def check_request(request: FleetRequest) -> FleetRequest:
    """``request`` with the paths of its keys file, state, history, recording, disk cache and adapter root made absolute, for an actor has a working
    folder of its own.

    Raises ConfigError for a package that is not installed, GPUs that are not there, a pool that nothing fits, a state of no known kind, a keys file that cannot be read, an adapter root that is no folder and a router
    port that is taken. Reads one file and binds one socket for a moment.
    """
    _check_installed(request)
    _check_gpus(request)
    _check_pool(request)
    request = _with_absolute_disk(_with_absolute_root(request))
    if request.address is not None and request.address.startswith(_CLIENT_SCHEME):
        return request
    if request.router_port:
        _check_free(request.router_host, request.router_port)
    request = dataclasses.replace(
        request, state=_absolute_state(request.state), routing=_with_absolute_files(request.routing)
    )
    if request.api_keys_file is None:
        return request
    path = Path(request.api_keys_file).expanduser().absolute()
    ApiKeys.from_file(path)
    return dataclasses.replace(request, api_keys_file=str(path))


def _absolute_state(state: str) -> str:
    check_state_url(state)
    if not state.startswith(FILE_STATE):
        return state
    return f"{FILE_STATE}{Path(state.removeprefix(FILE_STATE)).expanduser().absolute()}"


def _with_absolute_files(routing: RouterConfig) -> RouterConfig:
    """The files that a router writes."""
    return dataclasses.replace(routing, history=_absolute(routing.history), record=_absolute(routing.record))


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())


def check_adapters(request: FleetRequest) -> None:
    """Look at the adapters that workers load at start as a worker will, but for their weights. Needs the model's files here.

    Raises ConfigError. Milliseconds for each; nothing on a joined cluster, where adapters lie on each worker's own node.
    """
    engine = request.engine
    if request.address is not None or not engine.adapters:
        return
    sizes = LinearSizes.of(read_model_config(resolve_model(engine.model)))
    root = AdapterRoot(engine.adapter_root)
    for setting in engine.adapters:
        name, path = split_adapter_setting(setting)
        try:
            inspect_adapter(root, path, sizes)
        except InvalidRequestError as error:
            raise ConfigError(f"adapter {name} cannot be loaded from {path!r}: {error.problem}") from error


def _check_pool(request: FleetRequest) -> None:
    tokens = request.engine.max_total_tokens
    if tokens is not None and tokens < LEAST_POOL_TOKENS:
        raise ConfigError(
            f"max_total_tokens must be at least {LEAST_POOL_TOKENS}, got {tokens}: a worker would refuse whatever it is asked"
        )


def _check_installed(request: FleetRequest) -> None:
    needed = (
        ("ray", "torch") if request.address is None else ("ray",)
    )  # a cluster's nodes have a torch of their own
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        names = " and ".join("Ray" if package == "ray" else package for package in missing)
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(f"{names} {verb} not installed; run: pip install 'prefixmesh[worker,ray]'")


def _check_gpus(request: FleetRequest) -> None:
    """On this machine only: another cluster may have them, or grow. Loads torch, which takes seconds, only when a GPU is asked for."""
    if request.address is not None or not request.engine.device.startswith("cuda"):
        return
    import torch

    found, wanted = torch.cuda.device_count(), request.workers or 1
    if found < wanted:
        raise ConfigError(
            f"--device {request.engine.device} needs {wanted} GPUs for {wanted} workers, and torch finds {found} here; "
            "ask for fewer with --workers, or --device cpu"
        )


def _with_absolute_root(request: FleetRequest) -> FleetRequest:
    """On a joined cluster the adapters are looked up on each worker's own node, where the folder may be another."""
    root = request.engine.adapter_root
    if root is None:
        return request
    path = Path(root).expanduser().absolute()
    if not path.is_dir():
        if request.address is None:
            raise ConfigError(f"adapter_root {path} is not a folder")
        return request
    return dataclasses.replace(request, engine=dataclasses.replace(request.engine, adapter_root=str(path)))


def _with_absolute_disk(request: FleetRequest) -> FleetRequest:
    """The folder is made when it is missing, so that one that cannot be is told of here and not by every worker; on a joined cluster it is on
    each worker's own node."""
    folder = request.engine.disk_cache_dir
    if folder is None:
        return request
    path = Path(folder).expanduser().absolute()
    if request.address is None:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)  # callers' prompts are in it
        except FileExistsError as error:
            raise ConfigError(f"--disk-cache-dir {path} is no folder") from error
        except OSError as error:
            raise ConfigError(
                f"cannot make the folder of --disk-cache-dir, {path}: {error.strerror}"
            ) from error
    return dataclasses.replace(request, engine=dataclasses.replace(request.engine, disk_cache_dir=str(path)))


def _check_free(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"cannot listen on {host}:{port}: the port is taken") from error
        problem = error.strerror or os.strerror(error.errno or 0)
        raise ConfigError(f"cannot listen on {host}:{port}: {problem}") from error
