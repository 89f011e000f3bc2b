"""A router and workers as processes of their own, which are killed, stopped, continued and started again at the addresses they had.

The workers are fake (``prefixmesh.sim``) unless told otherwise: real processes, sockets and signals, and answers that are known beforehand.
No event loop owns a fleet: a module's tests share one, each from a loop of its own.
"""

import asyncio
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import grpc.aio

from prefixmesh.cache.namespace import derive_namespace
from prefixmesh.fleet_secret import load_or_create
from prefixmesh.proto.v1 import router_pb2, router_pb2_grpc
from prefixmesh.rpc.channel import open_channel
from prefixmesh.rpc.identity import DEFAULT_TENANT
from prefixmesh.sim.fake_engine import ModelIdentity
from prefixmesh.sim.fake_model import expected_answer
from tests.support.forked_process import PRELOADED, ForkedProcess

START_S: Final = 180.0
"""Far more than a process takes to begin, on a machine that is busy with others."""

LISTENING: Final = " listening on "
METRICS: Final = " metrics on "
ROUTER: Final = "prefixmesh.router"
FAKE_WORKER: Final = "prefixmesh.sim.fake_worker"
REAL_WORKER: Final = "prefixmesh.worker"

Views = dict[str, Any]
"""A router's ``WorkerView`` of each worker, by its name."""


class ServerProcess:
    """One server, in one life after another; each life has the port of the first."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        self.address = ""
        """``host:port``, once it has announced it."""

        self.metrics_url = ""
        self._module = module
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None

    def __repr__(self) -> str:
        return f"{self.name} at {self.address}, {'running' if self.is_running else 'gone'}"

    @property
    def is_running(self) -> bool:
        """A stopped process runs, too."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def launch(self) -> None:
        """Begin a life; ``wait_listening`` sees it serve."""
        assert not self.is_running, self
        if self._process is not None:
            self.wait()
        port = self.address.rpartition(":")[2] or "0"
        arguments = (*self._arguments, "--port", port)
        if self._module in PRELOADED:
            self._process = ForkedProcess(self._module, arguments, self.log)
            return
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                (sys.executable, "-m", self._module, *arguments),
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,  # no line lies in a buffer, where no selector sees it
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def wait_listening(self) -> None:
        """Return once it has announced where it serves. Fails when it ends before, or takes longer than anything does."""
        line = self._read_line()
        assert LISTENING in line, f"{self} said {line!r}: {self.log.read_text()[-2000:]}"
        self.address = line.split(LISTENING)[1].strip()
        if "--metrics-port" in self._arguments:
            self.metrics_url = self._read_line().split(METRICS)[1].strip()

    def start(self) -> None:
        """Begin a life and see it serve."""
        self.launch()
        self.wait_listening()

    def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        self.send(signal.SIGKILL)
        self.wait()

    def send(self, number: signal.Signals) -> None:
        """A signal to the process."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        assert self._process is not None
        code = self._process.wait(START_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code

    def _read_line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            assert selector.select(START_S), f"{self} announces nothing: {self.log.read_text()[-2000:]}"
        line: bytes = self._process.stdout.readline()
        return line.decode()


class FailureFleet:
    """Workers and a router before them. ``with`` it: whatever still runs at the end is killed."""

    def __init__(
        self,
        folder: Path,
        *,
        model: str = "smollm2",
        worker_module: str = FAKE_WORKER,
        worker_arguments: Sequence[str] = (),
        router_arguments: Sequence[str] = (),
    ) -> None:
        """Starts nothing. ``folder`` gets the fleet's secret and the logs."""
        self.folder = folder
        self.model = model
        self.workers: list[ServerProcess] = []
        self._worker_module = worker_module
        self._worker_arguments = worker_arguments
        self._router_arguments = router_arguments
        self._secret_file = folder / "secret"
        self.history_file = folder / "history.jsonl"
        """What the router notes of every request."""

        self._faults_file = folder / "faults.json"
        self._secret = load_or_create(self._secret_file)
        self._identity = ModelIdentity.of_files(model)
        self._namespace = derive_namespace(
            self._secret.namespace_key(),
            tenant=DEFAULT_TENANT,
            adapter_digest="",
            model_revision=self._identity.revision,
            caller_key="",
        )
        self.router: ServerProcess = self._server("router", ROUTER, router_arguments)

    def start(self, workers: int) -> None:
        """So many workers, all at once, then the router."""
        begun = [self.add_worker() for _ in range(workers)]
        for worker in begun:
            worker.launch()
        for worker in begun:
            worker.wait_listening()
        named = [word for worker in begun for word in ("--worker", worker.address)]
        named += ["--history", str(self.history_file)]
        self.router = self._server("router", ROUTER, (*self._router_arguments, *named))
        self.router.start()

    def add_worker(self) -> ServerProcess:
        """One more, not begun; the router is not told of it."""
        name = f"w{len(self.workers)}"
        arguments = ["--worker-id", name, "--metrics-port", "0", *self._worker_arguments]
        if self._worker_module == FAKE_WORKER:
            arguments += ["--faults", str(self._faults_file)]
        self.workers.append(self._server(name, self._worker_module, arguments))
        return self.workers[-1]

    def worker(self, name: str) -> ServerProcess:
        """By the name that it tells of itself."""
        return next(worker for worker in self.workers if worker.name == name)

    def set_faults(self, *faults: dict[str, Any]) -> None:
        """What all fake workers do wrong from now on (``sim/faults.py``); none ends it. Replaced whole: nobody reads half of it."""
        new = self._faults_file.with_suffix(".new")
        new.write_text(json.dumps(faults))
        new.replace(self._faults_file)

    def close(self) -> None:
        """Kill what still runs."""
        for server in (self.router, *self.workers):
            if server.is_running:
                server.kill()

    def __enter__(self) -> "FailureFleet":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def vocab_size(self) -> int:
        """Ids below it are tokens of the model."""
        return self._identity.vocab_size

    def expected(self, prompt: Sequence[int], count: int) -> list[int]:
        """What every fake worker answers to a prompt of this fleet's callers."""
        never = self._identity.eos_token_ids
        return expected_answer(self._namespace, prompt, count, self.vocab_size, never)

    async def views(self) -> Views:
        """How the router sees its workers, by their names; those that it has not met yet are not in it."""
        async with open_channel(self.router.address) as channel:
            stub: Any = router_pb2_grpc.RouterStub
            answer = await stub(channel).ListWorkers(router_pb2.ListWorkersRequest(), timeout=30)
        return {view.worker_id: view for view in answer.workers}

    async def tell_router_of(self, worker: ServerProcess) -> None:
        """The router follows it from now on."""
        async with open_channel(self.router.address) as channel:
            stub: Any = router_pb2_grpc.RouterStub
            await stub(channel).AddWorker(router_pb2.AddWorkerRequest(address=worker.address), timeout=30)

    async def until_ready(self, workers: Sequence[ServerProcess] | None = None) -> None:
        """Wait until the router may send requests to all of ``workers``: those that run, unless named."""
        expected = {worker.name for worker in workers or [one for one in self.workers if one.is_running]}

        async def all_ready() -> bool:
            views = await self.views()
            return all(name in views and views[name].ready for name in expected)

        await until(all_ready, "all workers are ready")

    def _server(self, name: str, module: str, arguments: Sequence[str]) -> ServerProcess:
        common = ("--model", self.model, "--fleet-secret-file", str(self._secret_file))
        return ServerProcess(name, module, (*common, *arguments), self.folder / f"{name}.log")


class RestartingParent:
    """What starts a server again as soon as it is gone; the simplest that can be, to measure the server and not its supervisor."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.restarts = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "RestartingParent":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self.server.is_running:
            self.server.send(signal.SIGKILL)
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.server.wait()
            if self._is_over.is_set():
                return
            self.server.start()
            self.restarts += 1
            if self._is_over.is_set():  # set while it started: nobody else ends it
                self.server.kill()
                return


@contextlib.contextmanager
def stopped(server: ServerProcess) -> Iterator[None]:
    """SIGSTOP now, SIGCONT at the end."""
    server.send(signal.SIGSTOP)
    try:
        yield
    finally:
        server.send(signal.SIGCONT)


async def until(
    condition: Callable[[], Any], what: str, timeout_s: float = START_S, interval_s: float = 0.05
) -> float:
    """Ask until it is so; the seconds that took. ``condition`` may be a coroutine function; a call that fails on the way is asked again."""
    began = time.monotonic()
    problem: object = "it was not so"
    while time.monotonic() - began < timeout_s:
        try:
            answer = condition()
            if asyncio.iscoroutine(answer):
                answer = await answer
            if answer:
                return time.monotonic() - began
        except grpc.aio.AioRpcError as error:
            problem = error.details()
        await asyncio.sleep(interval_s)
    raise AssertionError(f"waited {timeout_s:.0f} s in vain until {what}: {problem}")
