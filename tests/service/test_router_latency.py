"""What a router adds to the time to the first token, with every part in a process of its own."""

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from prefixmesh import fleet_secret
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.ids import Incarnation, Namespace, RequestId, TenantId
from prefixmesh.proto.v1 import inference_pb2_grpc, worker_control_pb2, worker_control_pb2_grpc
from prefixmesh.rpc.channel import open_channel
from prefixmesh.ticket import TICKET_METADATA, Ticket, sign
from tests.support.router_kit import token_request

MAX_ADDED_MS = 3.0
ROUNDS = 60
Metadata = tuple[tuple[str, str | bytes], ...]


@asynccontextmanager
async def program(*arguments: str) -> AsyncIterator[str]:
    """A program that prints its address when it serves; killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        yield (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()
    finally:
        process.kill()
        await process.wait()


async def first_token_ms(stub: Any, number: int, metadata: Metadata) -> float:
    """Milliseconds from the call to its first Delta, for a prompt of 1,500 tokens."""
    request = token_request([number % 250, *([7] * 1499)])
    begun = time.perf_counter()
    call = stub.Generate(request, metadata=metadata, wait_for_ready=True)
    while not (await call.read()).HasField("delta"):
        pass
    elapsed = (time.perf_counter() - begun) * 1000
    call.cancel()
    return elapsed


async def ticket_for(channel: Any, secret: FleetSecret) -> Any:
    control: Any = worker_control_pb2_grpc.WorkerControlStub(channel)  # type: ignore[no-untyped-call]
    facts = await control.Describe(
        worker_control_pb2.DescribeRequest(),
        metadata=(("authorization", f"Bearer {secret.control_token()}"),),
    )

    def make(number: int) -> Metadata:
        ticket = Ticket(
            request_id=RequestId(f"direct-{number}"),
            tenant=TenantId("default"),
            namespace=Namespace(b"n" * 16),
            incarnation=Incarnation(facts.incarnation),
        )
        return ((TICKET_METADATA, sign(ticket, secret)),)

    return make


@pytest.mark.slow
async def test_first_token_comes_at_most_3_ms_later_through_a_router() -> None:
    """Median at concurrency 1, taken in turns so that a busy machine is busy for both."""
    secret = fleet_secret.generate()
    async with (
        program("tests.support.fake_worker", "--secret", secret.raw.hex()) as worker,
        program("tests.support.router_kit", "--worker", worker, "--secret", secret.raw.hex()) as router,
        open_channel(worker) as to_worker,
        open_channel(router) as to_router,
    ):
        direct: Any = inference_pb2_grpc.InferenceStub(to_worker)  # type: ignore[no-untyped-call]
        routed: Any = inference_pb2_grpc.InferenceStub(to_router)  # type: ignore[no-untyped-call]
        ticket = await ticket_for(to_worker, secret)
        async with asyncio.timeout(30):
            while True:  # until the router knows the worker
                try:
                    await first_token_ms(routed, 0, ())
                    break
                except Exception:
                    await asyncio.sleep(0.05)
        times: dict[str, list[float]] = {"direct": [], "routed": []}
        for number in range(ROUNDS):
            times["direct"].append(await first_token_ms(direct, number, ticket(number)))
            times["routed"].append(await first_token_ms(routed, number, ()))
        medians = {name: statistics.median(values) for name, values in times.items()}
        print(medians)
        assert medians["routed"] - medians["direct"] <= MAX_ADDED_MS
