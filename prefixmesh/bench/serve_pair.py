"""A pair of workers and a router of one's own, for what ``prefixmesh bench serve`` compares: processes on loopback, gone afterwards. For the main thread.

Each worker has one thread, and a core of its own where the system can give one away; router and client take what is left, so that of two
cores nothing is. Nobody else's fleet is touched: the pair has a secret of its own in a folder that goes with it.
"""

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from prefixmesh.config import DEFAULT_MODEL
from prefixmesh.errors import ConfigError, UnavailableError
from prefixmesh.fleet_secret import load_or_create
from prefixmesh.proto.v1 import router_pb2, router_pb2_grpc
from prefixmesh.rpc.channel import open_sync_channel

START_S: Final = 180.0
"""For one process: a worker reads its model, and machines may be busy."""

STOP_S: Final = 10.0
"""Then it is killed: nothing runs there any more."""

ASK_AGAIN_S: Final = 0.1
MAX_WORKERS: Final = 16
"""On one machine."""

WORKER: Final[Sequence[str]] = ("-m", "prefixmesh.worker")
"""What Python is told to run; flags follow."""

_LOG_TAIL: Final = 400
"""Characters of what a process said that are told when it does not start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSpec:
    """Which workers."""

    model: str = DEFAULT_MODEL
    workers: int = 2
    device_tokens: int = 16_384
    """KV of each; there is no host tier."""

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"workers must be from 1 to {MAX_WORKERS}, got {self.workers}")


@dataclass(frozen=True, slots=True)
class Pair:
    """A pair that is ready."""

    router: str
    workers: Sequence[str]
    has_cores: bool
    """Whether each worker has a core that no other worker has."""


@contextmanager
def running_pair(spec: PairSpec, cache: str) -> Iterator[Pair]:
    """Workers with this ``--prefix-cache`` behind a router. Takes some seconds for each. Raises UnavailableError with a process's own words when
    one does not start."""
    with ExitStack() as stack:
        stack.enter_context(_ends_when_told())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prefixmesh-bench-")))
        secret = folder / "secret"
        load_or_create(secret)
        cores = _cores()
        workers = [
            stack.enter_context(_worker(spec, cache, number, secret, cores)) for number in range(spec.workers)
        ]
        flags = [flag for address in workers for flag in ("--worker", address)]
        router = stack.enter_context(
            _process(
                ["-m", "prefixmesh.router", "--port", "0", "--model", spec.model, *flags],
                secret,
                "router",
                None,
            )
        )
        _wait_ready(router, spec.workers)
        yield Pair(router, workers, len(cores) >= spec.workers)


@contextmanager
def _worker(spec: PairSpec, cache: str, number: int, secret: Path, cores: Sequence[int]) -> Iterator[str]:
    command = [*WORKER, "--port", "0", "--worker-id", f"bench-{number}", "--model", spec.model]
    command += ["--prefix-cache", cache, "--max-total-tokens", str(spec.device_tokens)]
    command += ["--hicache-ratio", "0", "--threads", "1"]
    with _process(
        command, secret, f"worker-{number}", cores[number % len(cores)] if cores else None
    ) as address:
        yield address


@contextmanager
def _process(command: Sequence[str], secret: Path, name: str, core: int | None) -> Iterator[str]:
    """A server of ours that says where it listens; its address."""
    whole = [sys.executable, *command, "--fleet-secret-file", str(secret), "--grace-s", "0"]
    log = secret.with_name(f"{name}.log")
    with log.open("wb") as said, _on_core(core):
        # A session of its own: Ctrl-C in the terminal is for the bench, which ends its processes itself.
        process = subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=said, start_new_session=True)
    try:
        assert process.stdout is not None
        line = _first_line(process.stdout)
        if " listening on " not in line:
            tail = log.read_text(errors="replace")[-_LOG_TAIL:].strip()
            raise UnavailableError(f"{name} did not start: {tail or 'it said nothing'}")
        yield line.split(" listening on ")[1].strip()
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _first_line(stdout: IO[bytes]) -> str:
    """What a process says first; nothing when it says nothing in time, or ends."""
    ready, _, _ = select.select([stdout], [], [], START_S)
    return stdout.readline().decode(errors="replace") if ready else ""


def _wait_ready(router: str, workers: int) -> None:
    ends_at = time.monotonic() + START_S
    make_stub: Any = router_pb2_grpc.RouterStub
    with open_sync_channel(router) as channel:
        stub = make_stub(channel)
        while True:
            views = stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=START_S).workers
            if sum(view.ready for view in views) == workers:
                return
            if time.monotonic() > ends_at:
                problems = "; ".join(f"{view.worker_id}: {view.problem}" for view in views)
                raise UnavailableError(f"the pair is not ready: {problems}")
            time.sleep(ASK_AGAIN_S)


@contextmanager
def _ends_when_told() -> Iterator[None]:
    """SIGTERM ends this process by way of its ``finally``s, or the pair would stay."""

    def end(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _cores() -> Sequence[int]:
    """Those that this process may use; none where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()


@contextmanager
def _on_core(core: int | None) -> Iterator[None]:
    """What is started meanwhile by this thread stays on this core."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
