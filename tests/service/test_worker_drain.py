"""Drain: nothing new at once, what runs finishes, whoever asked is answered, and it can be undone."""

import asyncio
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixmesh.errors import AuthenticationError, InvalidRequestError, UnavailableError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2 as control_pb
from prefixmesh.rpc.status import from_rpc_error
from prefixmesh.tokens import pack
from tests.support.cache_following import Follower
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import Worker, eventually, failure_of, scripted_worker

pytestmark = pytest.mark.asyncio(loop_scope="function")

REQUEST = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=pack([1, 2, 3])))
MINUTE_MS = 60_000


def drain(worker: Worker, **fields: Any) -> "asyncio.Task[control_pb.DrainResponse]":
    async def call() -> control_pb.DrainResponse:
        answer: control_pb.DrainResponse = await worker.control.Drain(
            control_pb.DrainRequest(**fields), metadata=worker.control_metadata()
        )
        return answer

    return asyncio.create_task(call())


async def serving(worker: Worker) -> list[bool]:
    """What health says of the server and of each service."""
    stub: Any = health_pb2_grpc.HealthStub(worker.channel)
    names = ("", "prefixmesh.v1.Inference", "prefixmesh.v1.WorkerControl")
    answers = [await stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in names]
    return [answer.status == health_pb2.HealthCheckResponse.SERVING for answer in answers]


async def test_drain_refuses_what_is_new_finishes_what_runs_and_answers_when_idle() -> None:
    engine = ScriptedEngine()
    engine.hold_after_tokens = 1
    async with scripted_worker(engine) as worker:
        running = asyncio.create_task(worker.generate(REQUEST))
        await eventually(lambda: engine.running)
        draining = drain(worker, grace_ms=MINUTE_MS)
        await eventually(lambda: worker.server._drainer.is_draining)
        assert not any(await serving(worker))
        error = await failure_of(worker, REQUEST)
        assert isinstance(error, UnavailableError)
        assert "draining" in str(error)
        assert not draining.done()
        engine.release()
        assert (await running).finished.usage.completion_tokens
        assert (await draining).running_requests == 0
        assert isinstance(await failure_of(worker, REQUEST), UnavailableError)


async def test_drain_whose_grace_is_over_says_what_still_runs_and_ends_nothing() -> None:
    engine = ScriptedEngine()
    engine.hold_after_tokens = 1
    async with scripted_worker(engine) as worker:
        running = asyncio.create_task(worker.generate(REQUEST))
        await eventually(lambda: engine.running)
        assert (await drain(worker)).running_requests == 1
        engine.release()
        await running


async def test_undone_drain_answers_who_waits_and_serves_as_before() -> None:
    engine = ScriptedEngine()
    engine.hold_after_tokens = 1
    async with scripted_worker(engine) as worker:
        running = asyncio.create_task(worker.generate(REQUEST))
        await eventually(lambda: engine.running)
        draining = drain(worker, grace_ms=MINUTE_MS)
        await eventually(lambda: worker.server._drainer.is_draining)
        assert (await drain(worker, undo=True)).running_requests == 1
        assert (await draining).running_requests == 1
        assert all(await serving(worker))
        engine.release()
        await running
        await worker.generate(REQUEST)
        assert (await drain(worker, undo=True)).running_requests == 0


async def test_drain_can_be_asked_for_twice_and_again_after_an_undo() -> None:
    async with scripted_worker(ScriptedEngine()) as worker:
        for _ in range(2):
            for _ in range(2):
                assert (await drain(worker, grace_ms=MINUTE_MS)).running_requests == 0
                assert not any(await serving(worker))
            await drain(worker, undo=True)
            await worker.generate(REQUEST)


async def test_drain_goes_on_when_whoever_asked_for_it_leaves() -> None:
    engine = ScriptedEngine()
    engine.hold_after_tokens = 1
    async with scripted_worker(engine) as worker:
        running = asyncio.create_task(worker.generate(REQUEST))
        await eventually(lambda: engine.running)
        draining = drain(worker, grace_ms=MINUTE_MS)
        await eventually(lambda: worker.server._drainer.is_draining)
        draining.cancel()
        engine.release()
        await running
        assert isinstance(await failure_of(worker, REQUEST), UnavailableError)


async def test_readers_are_told_of_a_drain_and_of_its_end_and_stay() -> None:
    async with scripted_worker(ScriptedEngine()) as worker:
        follower = Follower(worker)
        assert not (await follower.next_report()).draining
        await drain(worker)
        await follower.until(lambda: follower.report is not None and follower.report.draining)
        told = await worker.control.Describe(control_pb.DescribeRequest(), metadata=worker.control_metadata())
        assert told.draining
        await drain(worker, undo=True)
        await follower.until(lambda: follower.report is not None and not follower.report.draining)
        follower.close()


async def test_worker_that_stops_is_not_brought_back_by_an_undo() -> None:
    engine = ScriptedEngine()
    engine.hold_after_tokens = 1
    async with scripted_worker(engine) as worker:
        running = asyncio.create_task(worker.generate(REQUEST))
        await eventually(lambda: engine.running)
        await drain(worker)
        stopping = asyncio.create_task(worker.server.stop(30.0))
        await eventually(lambda: worker.server._calls._refusal)
        await drain(worker, undo=True)
        error = await failure_of(worker, REQUEST)
        assert "stopping" in str(error)
        assert not any(await serving(worker))
        engine.release()
        await running
        await stopping


@pytest.mark.parametrize(
    ("fields", "token", "kind"),
    [({"grace_ms": -1}, True, InvalidRequestError), ({}, False, AuthenticationError)],
)
async def test_bad_drain_is_refused_and_changes_nothing(
    fields: dict[str, Any], token: bool, kind: type[Exception]
) -> None:
    async with scripted_worker(ScriptedEngine()) as worker:
        metadata = worker.control_metadata() if token else ()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await worker.control.Drain(control_pb.DrainRequest(**fields), metadata=metadata)
        assert isinstance(from_rpc_error(refused.value), kind)
        await worker.generate(REQUEST)
