"""F19: a cancellation that lands in any await of a call, or of a worker's start, leaves nothing locked, taken, running or open.

The calls go through the very code that serves gRPC, in tasks that are cancelled at the first await, the second, and so on until one
comes to its end; others that share the prefix are answered meanwhile.
"""

import asyncio
import itertools
import socket
from collections.abc import Collection
from typing import Any

import grpc.aio
import pytest

from prefixmesh import fleet_secret
from prefixmesh.config import EngineConfig, WorkerConfig
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.rpc.server import _guard_stream
from prefixmesh.tokens import pack
from prefixmesh.worker.call_metrics import CountedInference
from prefixmesh.worker.server import INFERENCE, WorkerServer
from tests.support.cancelling import cancel_at
from tests.support.fake_engine import FakeStage, Surroundings, fake_worker
from tests.support.free_ports import free_ports
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import byte_text, eventually

SETTINGS = EngineConfig(max_total_tokens=200, max_running_requests=4, chunked_prefill_size=10)
PROMPT = list(range(25))
"""Three chunks."""

MOST_AWAITS = 200


class Caller:
    """A call's context, as gRPC gives it to a handler."""

    def __init__(self) -> None:
        self.messages: list[pb.GenerateResponse] = []

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> None:
        return None

    def cancelled(self) -> bool:
        return False

    async def write(self, message: pb.GenerateResponse) -> None:
        await asyncio.sleep(0)
        self.messages.append(message)

    async def abort(self, *status: object) -> None:
        raise grpc.aio.AbortError(*status)


def request_for(tail: int, *, branches: int = 1, max_tokens: int = 4) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokens=pb.TokenPrompt(ids=pack([*PROMPT, tail])),
        sampling=pb.Sampling(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        branches=branches,
    )


async def call_cancelled_at(stage: FakeStage, request: pb.GenerateRequest, points: Collection[int]) -> bool:
    """Serve one call as gRPC would; whether it came as far as the cancellation."""
    server = stage.worker.server
    assert server._inference is not None
    service = CountedInference(server._inference, server._metrics.calls)
    handle = _guard_stream(INFERENCE.methods_by_name["Generate"], service.Generate)
    context: Any = Caller()
    reached = await cancel_at(handle(request.SerializeToString(), context), points)  # type: ignore[arg-type]
    if not reached:
        assert context.messages[-1].HasField("finished")
    return reached


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
async def test_a_cancel_at_every_await_of_a_call_leaves_nothing(branches: int, again: bool) -> None:
    """Also a second one, at the await after it; free + evictable + protected is the pool whenever the engine is idle."""
    async with fake_worker(SETTINGS) as stage:
        for point in itertools.count(1):
            assert point < MOST_AWAITS
            other = asyncio.create_task(stage.worker.generate(request_for(100 + point % 100, max_tokens=8)))
            points = (point, point + 1) if again else (point,)
            reached = await call_cancelled_at(stage, request_for(99, branches=branches), points)
            expected = stage.expected([*PROMPT, 100 + point % 100], 8)
            assert (await other).token_ids == expected
            await eventually(stage.is_quiet)
            stage.core.check_invariants()
            kv = stage.scheduler.kv
            assert kv.free_pages + kv.evictable_pages + kv.protected_pages == kv.total_pages
            if not reached:
                break
        assert point > 4, "a call has more awaits than that"
        outcomes = stage.worker.server._metrics.calls.outcomes
        assert {name for name, count in outcomes.items() if count} == {"length", "cancelled"}


async def test_a_cancel_at_every_await_of_a_start_leaves_nothing() -> None:
    """The engine is closed, both ports are free, and no task goes on."""
    port, metrics_port = free_ports(2)
    around = Surroundings()
    for point in itertools.count(1):
        assert point < MOST_AWAITS
        engine = ScriptedEngine()
        server = WorkerServer(
            WorkerConfig(port=port, metrics_port=metrics_port),
            fleet_secret.generate(),
            engine=engine,
            text=byte_text(),
        )
        reached = await cancel_at(server.start(), (point,))
        if not reached:
            await server.stop(0.0)
            break
        assert engine.closed.is_set()
        for number in (port, metrics_port):
            socket.create_server(("127.0.0.1", number)).close()  # raises where it is taken
        await eventually(lambda: not [task for task in around.left_over() if isinstance(task, asyncio.Task)])
    assert point > 2, "a start has more awaits than that"
