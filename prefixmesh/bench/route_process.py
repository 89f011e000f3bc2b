"""The processes of ``prefixmesh bench route``: each server in one of its own, which tells its own processor time when asked.

A server's time is that of its process, all threads, as the system counts it: gRPC's own threads are in it, which no profile of Python
shows. What it takes when nobody asks for anything (reports coming in, health) is measured for a while and taken off.
"""

import asyncio
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixmesh.bench.route_servers import serve_echo, serve_proxy
from prefixmesh.collector import freeze_what_stays
from prefixmesh.errors import UnavailableError
from prefixmesh.fleet_secret import load_or_create
from prefixmesh.router.server import RouterServer
from prefixmesh.router_config import RouterConfig
from prefixmesh.rpc.channel import open_channel

START_S: Final = 120.0
"""A router reads its model's tokenizer before it serves, and a machine may be busy."""

Serve = Callable[[], Awaitable[tuple[object, str]]]
"""Starts a server; what keeps it alive, and its address."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A server in a process of its own."""

    address: str
    _pipe: "Connection[Any, Any]"

    def cpu_s(self) -> float:
        """Processor time that its process has used since it began."""
        self._pipe.send(None)
        return float(self._pipe.recv())


@contextmanager
def measured_echo() -> Iterator[Measured]:
    """A server that echoes."""
    with _process(serve_echo) as server:
        yield server


@contextmanager
def measured_proxy(workers: tuple[str, ...]) -> Iterator[Measured]:
    """A proxy that knows nothing, before workers that it takes in turns."""
    with _process(serve_proxy, *workers) as server:
        yield server


@contextmanager
def measured_router(workers: tuple[str, ...], secret_file: Path, model: str) -> Iterator[Measured]:
    """A router before workers, ready."""
    with _process(_serve_router, workers, secret_file, model) as server:
        yield server


@contextmanager
def fake_worker(name: str, secret_file: Path, model: str, step_ms: float) -> Iterator[str]:
    """A worker with a timing model (``prefixmesh.sim``) as a process of its own; its address."""
    command = [sys.executable, "-m", "prefixmesh.sim.fake_worker", "--model", model, "--worker-id", name]
    command += ["--fleet-secret-file", str(secret_file), "--step-ms", str(step_ms), "--grace-s", "0"]
    command += ["--prefill-ms-per-token", "0", "--max-total-tokens", "2000000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if " listening on " not in line:
                raise UnavailableError(f"the fake worker did not start: {line!r}")
            yield line.split(" listening on ")[1].strip()
        finally:
            process.terminate()


async def _serve_router(workers: tuple[str, ...], secret_file: Path, model: str) -> tuple[RouterServer, str]:
    logging.basicConfig(level=logging.INFO, filename=os.devnull)  # it logs as a router does
    # Nobody uses the tickets that are asked for here, so that what is booked for them would seem a wait of minutes.
    config = RouterConfig(workers=workers, model=model, max_wait_s=0.0)
    server = RouterServer(config, load_or_create(secret_file))
    bound = await server.start()
    async with open_channel(bound.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        states = health.Watch(health_pb2.HealthCheckRequest(), timeout=START_S)
        async for state in states:  # serving is a router that has a worker
            if state.status == health_pb2.HealthCheckResponse.SERVING:
                break
    freeze_what_stays()  # as a router that runs as a program does
    return server, bound.address


@contextmanager
def _process(serve: Callable[..., Awaitable[tuple[object, str]]], *arguments: object) -> Iterator[Measured]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, serve, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_S):
            raise UnavailableError("a server of the bench did not start")
        yield Measured(ours.recv(), ours)
    finally:
        process.terminate()
        process.join()


def _run(
    pipe: "Connection[Any, Any]", serve: Callable[..., Awaitable[tuple[object, str]]], *arguments: object
) -> None:
    asyncio.run(_answer(pipe, serve, *arguments))


async def _answer(
    pipe: "Connection[Any, Any]", serve: Callable[..., Awaitable[tuple[object, str]]], *arguments: object
) -> None:
    server, address = await serve(*arguments)
    pipe.send(address)
    closed = asyncio.Event()

    def tell() -> None:
        try:
            pipe.recv()
        except EOFError:
            closed.set()
        else:
            pipe.send(time.process_time())

    asyncio.get_running_loop().add_reader(pipe.fileno(), tell)
    await closed.wait()
    del server
