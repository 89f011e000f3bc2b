"""Real processes that are told to go, with streams under way and before they serve at all: F66."""

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixmesh.errors import UnavailableError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import inference_pb2_grpc, router_pb2, router_pb2_grpc
from prefixmesh.rpc.channel import open_channel
from prefixmesh.rpc.status import from_rpc_error
from prefixmesh.tokens import pack
from tests.support.failure_fleet import FailureFleet, until
from tests.support.servers import answer_of, eventually
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow

STREAMS = 50
TOKENS = 40
STEP_MS = 50.0
"""Of a fake worker: its answers take two seconds, more than enough for all to be under way at one moment."""

GRACE_S = 60.0
END_S = 15.0
"""Far more than a process needs to end, far less than a model or a grace would take."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


def fleet_of(folder: Path, model: str) -> FailureFleet:
    grace = ("--grace-s", str(GRACE_S))
    return FailureFleet(
        folder,
        model=model,
        worker_arguments=(*grace, "--step-ms", str(STEP_MS), "--max-total-tokens", "65536"),
        router_arguments=grace,
    )


def request(seed: int) -> pb.GenerateRequest:
    sampling = pb.Sampling(max_tokens=TOKENS, ignore_eos=True)
    return pb.GenerateRequest(tokens=pb.TokenPrompt(ids=pack([seed, 2, 3])), sampling=sampling)


class Streams:
    """Answers of one server that are read in the background, all begun."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        make_stub: Any = inference_pb2_grpc.InferenceStub
        self.stub = make_stub(channel)
        self.begun = 0
        self.tasks: list[asyncio.Task[Any]] = []

    async def begin(self, count: int) -> None:
        self.tasks = [asyncio.create_task(self._read(request(seed))) for seed in range(count)]
        await eventually(lambda: self.begun == count, timeout_s=60.0)

    async def _read(self, message: pb.GenerateRequest) -> Any:
        messages = []
        try:
            async for answer in self.stub.Generate(message, timeout=120):
                self.begun += answer.HasField("delta") and answer.delta.position == 0
                messages.append(answer)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return answer_of(messages)


async def says_it_is_not_serving(channel: grpc.aio.Channel) -> bool:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
    return bool(answer.status == health_pb2.HealthCheckResponse.NOT_SERVING)


@pytest.mark.parametrize("who", ["worker", "router"])
async def test_fifty_streams_finish_after_sigterm_and_nothing_new_begins(
    tmp_path: Path, model: str, who: str
) -> None:
    """NOT_SERVING at once, refusals in words, every answer whole, exit code 0 long before the grace is over."""
    with fleet_of(tmp_path, model) as fleet:
        fleet.start(1)
        await fleet.until_ready()
        leaving = fleet.workers[0] if who == "worker" else fleet.router
        async with open_channel(leaving.address) as channel:
            streams = Streams(channel)
            await streams.begin(STREAMS)
            leaving.send(signal.SIGTERM)
            await until(lambda: says_it_is_not_serving(channel), "it says so", interval_s=0.01)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await streams.stub.Generate(request(99), timeout=10).read()
            error = from_rpc_error(refused.value)
            assert isinstance(error, UnavailableError)
            assert "stopping" in str(error)
            if who == "router":
                make_stub: Any = router_pb2_grpc.RouterStub
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await make_stub(channel).Route(router_pb2.RouteRequest(request=request(99)), timeout=10)
                assert isinstance(from_rpc_error(refused.value), UnavailableError)
            assert not any(task.done() for task in streams.tasks), "all of that while they stream"
            answers = await asyncio.gather(*streams.tasks)
        assert {len(answer.token_ids) for answer in answers} == {TOKENS}
        assert await asyncio.wait_for(asyncio.to_thread(leaving.wait), END_S) == 0


PROGRAMS = ["prefixmesh.worker", "prefixmesh.router"]


@contextmanager
def starting(module: str, home: Path, **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A program that begins with the model that must be fetched; killed if it is left running."""
    arguments = ("--worker", "127.0.0.1:1") if module.endswith("router") else ("--device", "cpu")
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            (sys.executable, "-m", module, "--model", "smollm2", *arguments),
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=os.environ | {"PREFIXMESH_HOME": str(home), "OMP_NUM_THREADS": "1"} | environment,
        )
    try:
        yield process
    finally:
        for one in (*psutil.Process(process.pid).children(recursive=True),) if process.poll() is None else ():
            one.kill()
        process.kill()
        process.wait()


async def ends_at_once(process: "subprocess.Popen[bytes]") -> int:
    process.terminate()
    return await asyncio.wait_for(asyncio.to_thread(process.wait), END_S)


@pytest.mark.parametrize("module", PROGRAMS)
async def test_sigterm_ends_a_program_that_waits_for_another_one_to_fetch_its_model(
    tmp_path: Path, module: str
) -> None:
    """It stands in a system call that nothing but the lock's holder would end."""
    lock = tmp_path / "models" / ".pull.lock"
    lock.parent.mkdir()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        inode = os.fstat(held.fileno()).st_ino

        def someone_waits() -> bool:
            locks = Path("/proc/locks").read_text().splitlines()
            return any(f":{inode} " in line and "->" in line for line in locks)

        with starting(module, tmp_path) as process:
            await eventually(someone_waits, timeout_s=60.0)
            assert await ends_at_once(process) == 0
            await eventually(lambda: not someone_waits())


async def test_sigterm_ends_a_program_that_fetches_its_model_and_the_fetching(tmp_path: Path) -> None:
    """From an index that accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        url = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        with starting(
            "prefixmesh.router", tmp_path, PIP_INDEX_URL=url, PIP_CONFIG_FILE=os.devnull
        ) as process:

            def fetching() -> list[psutil.Process]:
                family = psutil.Process(process.pid).children(recursive=True)
                return [one for one in family if "download" in one.cmdline()]

            await eventually(lambda: process.poll() is not None or fetching(), timeout_s=60.0)
            (pip,) = fetching()
            asked, _ = await asyncio.to_thread(index.accept)
            with asked:
                assert await ends_at_once(process) == 0
            await eventually(lambda: not pip.is_running() or pip.status() == psutil.STATUS_ZOMBIE)
