"""``python -m prefixmesh.worker`` as a process: what it prints, how it ends, and that nothing of it stays."""

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import inference_pb2_grpc
from prefixmesh.rpc.channel import open_channel
from tests.support.scraping import scrape
from tests.support.servers import answer_of, eventually
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow

START_S = 60.0
GREEDY = pb.Sampling(temperature=0, max_tokens=5, ignore_eos=True)
READY = "prefixmesh worker w-5 listening on 127.0.0.1:"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@dataclass(frozen=True)
class Running:
    """A worker's process that serves."""

    process: Process
    address: str
    log: Path

    def engine(self) -> psutil.Process:
        """Its engine's process."""
        (engine,) = psutil.Process(self.process.pid).children()
        return engine

    async def generate(self, text: str) -> Any:
        async with open_channel(self.address) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub
            call = stub(channel).Generate(pb.GenerateRequest(text=text, sampling=GREEDY), timeout=30)
            return answer_of([message async for message in call])


async def spawn(folder: Path, *arguments: str) -> Process:
    """The command, with its log in ``folder/log``."""
    secret = folder / "secret"
    command = ("-m", "prefixmesh.worker", "--fleet-secret-file", str(secret), "--worker-id", "w-5")
    with (folder / "log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            *arguments,
            stdout=PIPE,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


@asynccontextmanager
async def running(folder: Path, model: Path, *arguments: str) -> AsyncIterator[Running]:
    """A ready worker; it and its engine are killed at the end if they still live."""
    settings = ("--max-total-tokens", "4096", "--device", "cpu", "--threads", "1")
    process = await spawn(folder, "--model", str(model), *settings, *arguments)
    engine = None
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), START_S)).decode()
        assert line.startswith(READY), (folder / "log").read_text()
        worker = Running(
            process, line.removeprefix("prefixmesh worker w-5 listening on ").strip(), folder / "log"
        )
        engine = worker.engine()
        yield worker
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        if engine is not None and engine.is_running():
            engine.kill()
            engine.wait(10)


async def exit_code(process: Process) -> int:
    async with asyncio.timeout(15):
        return await process.wait()


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_until_a_signal_and_leaves_nothing(
    tmp_path: Path, model: Path, number: signal.Signals
) -> None:
    """It says where it listens, answers, and goes with code 0; its engine goes with it."""
    async with running(tmp_path, model) as worker:
        engine = worker.engine()
        assert len((await worker.generate("Hello")).token_ids) == 5
        worker.process.send_signal(number)
        assert await exit_code(worker.process) == 0
        assert is_gone(engine)
    log = worker.log.read_text()
    assert log.count("worker_starting") == 1
    assert "Traceback" not in log


async def test_it_says_where_its_metrics_are(tmp_path: Path, model: Path) -> None:
    """The second line on stdout; a scrape there finds the worker's name and the memory of front and engine."""
    async with running(tmp_path, model, "--metrics-port", "0") as worker:
        assert worker.process.stdout is not None
        line = (await worker.process.stdout.readline()).decode()
        assert line.startswith("prefixmesh worker w-5 metrics on http://127.0.0.1:")
        page = await scrape(line.split()[-1])
        assert 'worker_id="w-5"' in page.text
        for owner in ("", "prefixmesh_engine_"):
            assert page.value(f"{owner}process_resident_memory_bytes") > 10 * 2**20
    assert f"worker_metrics url={line.split()[-1]}" in worker.log.read_text()


@pytest.mark.parametrize("stopped", [False, True])
async def test_killing_the_front_leaves_no_engine(tmp_path: Path, model: Path, stopped: bool) -> None:
    """kill -9 gives nobody time to clean up; the engine goes by itself, even one that is stopped and can notice nothing."""
    async with running(tmp_path, model) as worker:
        engine = worker.engine()
        await worker.generate("Hello")
        if stopped:
            engine.suspend()
        worker.process.kill()
        await worker.process.wait()
        await eventually(lambda: is_gone(engine), timeout_s=5.0)


async def test_killing_the_engine_ends_the_worker_with_an_error(tmp_path: Path, model: Path) -> None:
    """A worker without an engine is no worker: it goes, says why, and not with code 0 (F65)."""
    async with running(tmp_path, model) as worker:
        worker.engine().kill()
        assert await exit_code(worker.process) == 1
    log = worker.log.read_text()
    assert "Error: the engine of this worker ended unexpectedly" in log
    assert "Traceback" not in log


async def test_a_signal_while_the_model_loads_ends_it_too(tmp_path: Path, model: Path) -> None:
    """Nobody has to wait for a model in order to stop loading it."""
    process = await spawn(tmp_path, "--model", str(model), "--device", "cpu")
    await eventually(lambda: bool(psutil.Process(process.pid).children()), timeout_s=START_S)
    (engine,) = psutil.Process(process.pid).children()
    process.terminate()
    assert await exit_code(process) == 0
    assert is_gone(engine)


async def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, model: Path) -> None:
    """A taken port, a missing model, a wrong setting: the message, code 1 and no traceback."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cases = {
            f"Error: cannot listen on 127.0.0.1:{port}": ("--port", str(port), "--model", str(model)),
            "Error: page_size must be a power of two": ("--page-size", "3"),
            "is neither a file or folder here nor a known model": ("--model", str(tmp_path / "nothing")),
        }
        for message, arguments in cases.items():
            process = await spawn(tmp_path, *arguments)
            assert await exit_code(process) == 1
            log = (tmp_path / "log").read_text()
            assert message in log
            assert "Traceback" not in log
