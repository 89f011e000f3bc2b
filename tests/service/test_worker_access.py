"""Who may call what on a worker: every method of both services, with every kind of credentials."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from prefixmesh import fleet_secret
from prefixmesh.proto.v1 import worker_control_pb2
from prefixmesh.rpc.identity import new_key
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import Metadata, Worker, scripted_worker

pytestmark = pytest.mark.asyncio(loop_scope="function")

CONTROL = worker_control_pb2.DESCRIPTOR.services_by_name["WorkerControl"]
METHODS = sorted(CONTROL.methods_by_name)

STRANGERS: dict[str, Metadata] = {
    "nothing": (),
    "a tenant's name": (("x-prefixmesh-tenant", "acme"),),
    "an API key": (("authorization", f"Bearer {new_key()}"),),
    "another fleet's token": (("authorization", f"Bearer {fleet_secret.generate().control_token()}"),),
    "an empty token": (("authorization", "Bearer "),),
}


@pytest_asyncio.fixture(loop_scope="function")
async def worker() -> AsyncIterator[Worker]:
    async with scripted_worker(ScriptedEngine()) as running:
        yield running


async def outcome(worker: Worker, method: str, metadata: Metadata) -> grpc.StatusCode:
    """How a call with an empty request ends; OK as soon as a stream says anything."""
    descriptor = CONTROL.methods_by_name[method]
    request: Any = getattr(worker_control_pb2, descriptor.input_type.name)()
    call = getattr(worker.control, method)(request, metadata=metadata, timeout=10.0)
    try:
        if descriptor.server_streaming:
            await call.read()
            call.cancel()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", METHODS)
async def test_without_the_fleets_token_nothing_of_a_workers_control_is_served(
    worker: Worker, method: str
) -> None:
    """Neither a tenant nor an administrator's key is one: both are the router's to check."""
    ticket = worker.ticket()
    for name, metadata in (*STRANGERS.items(), ("a ticket", ticket)):
        assert await outcome(worker, method, metadata) is grpc.StatusCode.UNAUTHENTICATED, name


@pytest.mark.parametrize("method", METHODS)
async def test_with_the_fleets_token_every_method_is_there(worker: Worker, method: str) -> None:
    """An empty request may be wrong, or ask for what this engine does not have; nobody is turned away for who he is."""
    code = await outcome(worker, method, worker.control_metadata())
    assert code not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
