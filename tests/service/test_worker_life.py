"""A worker from start to stop: ports, health, reflection, graceful stop, the engine's death, what is logged."""

import asyncio
import logging
import pickle
import socket
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from prefixmesh import fleet_secret
from prefixmesh.config import EngineConfig, WorkerConfig
from prefixmesh.errors import ConfigError, ModelFileError, UnavailableError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2
from prefixmesh.worker.server import WorkerServer
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import Worker, byte_text, failure_of, records_of, rest_of, scripted_worker

REQUEST = pb.GenerateRequest(text="ping")
SERVICES = ("", "prefixmesh.v1.Inference", "prefixmesh.v1.WorkerControl")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(worker: Worker, service: str = "") -> int:
    answer = await health_stub(worker).Check(health_pb2.HealthCheckRequest(service=service))
    return int(answer.status)


def health_stub(worker: Worker) -> Any:
    return health_pb2_grpc.HealthStub(worker.channel)


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


async def test_a_ready_worker_is_serving_and_describes_its_services() -> None:
    """Health answers for the server and each service, and reflection lists them all."""
    async with scripted_worker(ScriptedEngine()) as worker:
        assert [await health_of(worker, name) for name in SERVICES] == [SERVING] * 3
        stub: Any = reflection_pb2_grpc.ServerReflectionStub
        call = stub(worker.channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {entry.name for entry in (await call.read()).list_services_response.service}
        call.cancel()
    assert listed >= {*SERVICES[1:], "grpc.health.v1.Health"}


async def test_a_port_in_use_is_named_before_anything_is_loaded() -> None:
    """A second worker on the port is refused with the address, and its engine never starts."""
    async with scripted_worker(ScriptedEngine()) as worker:
        engine = ScriptedEngine()
        config = WorkerConfig(port=worker.bound.port)
        second = WorkerServer(config, fleet_secret.generate(), engine=engine, text=byte_text())
        with pytest.raises(ConfigError, match=f"127.0.0.1:{worker.bound.port}"):
            await second.start()
        assert not engine.started
        await worker.generate(REQUEST)


@pytest.mark.parametrize("error", [ConfigError("does not fit"), ModelFileError("no such file")])
async def test_a_failed_start_leaves_nothing_behind(error: ConfigError | ModelFileError) -> None:
    """The engine's own error comes through, the engine is closed and the port is free again."""
    engine = ScriptedEngine()
    engine.start_error = error
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = WorkerServer(WorkerConfig(port=port), fleet_secret.generate(), engine=engine, text=byte_text())
    with pytest.raises(type(error), match=str(error)):
        await server.start()
    assert engine.closed.is_set()
    assert port_is_free(port)


async def test_a_missing_model_is_a_model_file_error(tmp_path: Path) -> None:
    """What the text side cannot find is told as it is, whatever the engine thinks."""
    config = WorkerConfig(engine=EngineConfig(model=str(tmp_path / "nothing")))
    server = WorkerServer(config, fleet_secret.generate(), engine=ScriptedEngine())
    with pytest.raises(ModelFileError, match="nothing"):
        await server.start()


async def test_a_stop_lets_running_answers_finish() -> None:
    """NOT_SERVING and UNAVAILABLE for new calls at once, while 50 streams run to their end (F66)."""
    engine = ScriptedEngine()
    engine.hold_after_tokens = 2
    async with scripted_worker(engine) as worker:
        calls = [worker.inference.Generate(REQUEST) for _ in range(50)]
        for call in calls:
            await call.read()
        stopping = asyncio.create_task(worker.server.stop(30.0))
        await asyncio.sleep(0)
        assert [await health_of(worker, name) for name in SERVICES] == [NOT_SERVING] * 3
        assert isinstance(await failure_of(worker, REQUEST), UnavailableError)
        assert not stopping.done()
        engine.release()
        ends = [(await rest_of(call))[-1] for call in calls]
        assert all(end.HasField("finished") for end in ends)
        async with asyncio.timeout(5):
            await stopping
            await worker.server.wait_closed()
        assert engine.closed.is_set()
        assert port_is_free(worker.bound.port)


async def test_when_grace_is_over_the_rest_ends_in_a_status() -> None:
    """A stream that does not end by itself gets UNAVAILABLE, and the worker goes."""
    engine = ScriptedEngine()
    engine.hold_after_tokens = 1
    async with scripted_worker(engine) as worker:
        call = worker.inference.Generate(REQUEST)
        await call.read()
        async with asyncio.timeout(5):
            await worker.server.stop(0.05)
        with pytest.raises(UnavailableError):
            await rest_of(call)


async def test_a_health_watcher_does_not_hold_up_the_stop() -> None:
    """Whoever watches health is told NOT_SERVING, and the grace is not spent on them."""
    async with scripted_worker(ScriptedEngine()) as worker:
        watch = health_stub(worker).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        async with asyncio.timeout(5):
            await worker.server.stop(60.0)
        assert (await watch.read()).status == NOT_SERVING


async def test_the_engines_death_is_told_everywhere() -> None:
    """Streams fail, health turns, new calls are refused, and ``wait_closed`` raises, all without anybody asking."""
    engine = ScriptedEngine()
    engine.hold_after_tokens = 1
    async with scripted_worker(engine) as worker:
        call = worker.inference.Generate(REQUEST)
        await call.read()
        engine.die()
        with pytest.raises(UnavailableError):
            await rest_of(call)
        async with asyncio.timeout(5):
            with pytest.raises(UnavailableError, match="unexpectedly"):
                await worker.server.wait_closed()
        assert await health_of(worker) == NOT_SERVING
        assert isinstance(await failure_of(worker, REQUEST), UnavailableError)


async def test_the_configuration_is_logged_once_without_secrets(caplog: pytest.LogCaptureFixture) -> None:
    """Every effective setting is in one line of the log, and no key is in any (F70)."""
    with caplog.at_level(logging.DEBUG, logger="prefixmesh"):
        async with scripted_worker(ScriptedEngine(), worker_id="w-9") as worker:
            secret = worker.secret
            await worker.control.Describe(
                worker_control_pb2.DescribeRequest(), metadata=worker.control_metadata()
            )
            await worker.generate(REQUEST, worker.ticket())
    (record,) = records_of(caplog, "worker_starting")
    line = record.getMessage()
    for setting in (
        "'worker_id': 'w-9'",
        "'page_size': 1",
        "'schedule_policy': 'lpm'",
        "'isolation': 'tenant'",
    ):
        assert setting in line
    keys = (secret.raw, secret.ticket_key(), secret.namespace_key())
    for shown in (*(key.hex() for key in keys), *(repr(key) for key in keys), secret.control_token()):
        assert shown not in caplog.text


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (self._target,))  # type: ignore[return-value]


@pytest.mark.parametrize("protocol", [0, 2, 5])
async def test_a_pickle_bomb_runs_nothing(tmp_path: Path, protocol: int) -> None:
    """As a body, in every field that takes bytes or text, and in metadata, a pickle is data (F72)."""
    target = tmp_path / "boom"
    bomb = pickle.dumps(Bomb(target), protocol)
    pickle.loads(bomb)
    assert target.exists(), "the bomb itself must work"
    target.unlink()
    async with scripted_worker(ScriptedEngine()) as worker:
        methods = ("Generate", "Abort", "Tokenize", "ListModels")
        paths = [f"/prefixmesh.v1.Inference/{name}" for name in methods]
        for path in (*paths, "/prefixmesh.v1.WorkerControl/Describe"):
            for metadata in ((), (("x-prefixmesh-ticket-bin", bomb),), (("bomb-bin", bomb),)):
                method: Any = worker.channel.unary_stream(path)
                call = method(bomb, metadata=metadata)
                assert await call.code() is not grpc.StatusCode.INTERNAL
        tokens = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=bomb[: len(bomb) // 4 * 4]))
        await failure_of(worker, tokens)
        await worker.generate(REQUEST)
    assert not target.exists()
