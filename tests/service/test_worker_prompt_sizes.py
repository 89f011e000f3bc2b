"""F62, the worker's hop: a prompt of any size up to the cap reaches the engine as it was sent, and the channel lives on after one too large."""

import msgspec
import numpy as np
import pytest

from prefixmesh.errors import InvalidRequestError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.rpc.channel import MAX_MESSAGE_BYTES
from tests.support.scripted_engine import INFO, ScriptedEngine
from tests.support.servers import Worker, failure_of, scripted_worker

pytestmark = pytest.mark.asyncio(loop_scope="function")

CONTEXT_LENGTH = 2**25
MB = 10**6


def large_engine() -> ScriptedEngine:
    """One whose context is larger than any message."""
    return ScriptedEngine("x", info=msgspec.structs.replace(INFO, context_length=CONTEXT_LENGTH))


async def send(worker: Worker, engine: ScriptedEngine, size_bytes: int) -> None:
    packed = (np.arange(size_bytes // 4, dtype="<u4") % 250).tobytes()
    request = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=packed), sampling=pb.Sampling(max_tokens=1))
    ticket = worker.ticket(request_id=str(size_bytes), prompt_tokens=size_bytes // 4)
    await worker.generate(request, ticket)
    assert engine.submitted.pop().tokens == packed


@pytest.mark.parametrize("size_mb", [1.0, 4.1, 16.0, pytest.param(63.0, marks=pytest.mark.slow)])
async def test_large_prompt_reaches_the_engine_as_it_was_sent(size_mb: float) -> None:
    engine = large_engine()
    async with scripted_worker(engine) as worker:
        await send(worker, engine, int(size_mb * MB) // 4 * 4)


@pytest.mark.slow
async def test_prompt_above_the_cap_is_refused_by_the_caps_name_and_the_next_is_served() -> None:
    engine = large_engine()
    async with scripted_worker(engine) as worker:
        request = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=bytes(MAX_MESSAGE_BYTES)))
        error = await failure_of(worker, request, worker.ticket(request_id="large"))
        assert isinstance(error, InvalidRequestError)
        assert str(MAX_MESSAGE_BYTES) in str(error)
        await send(worker, engine, 4)
