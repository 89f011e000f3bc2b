"""Pins every tenant's policy on every worker of the demo's fleet, and asks each worker itself whether it has it.

The workers that served a tenant have its policy; the others are brought it, copied from those. Then a new customer's question to each worker
(not through the router, which would choose one) finds it there.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import grpc.aio

from prefixmesh.client import AsyncClient
from prefixmesh.demo.pinned import Pinned, PinnedPolicy, Visit
from prefixmesh.demo.workload import TenantScript
from prefixmesh.errors import InternalError
from prefixmesh.proto.v1 import inference_pb2, router_pb2_grpc
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.requests import ChatMessage
from prefixmesh.rpc.channel import open_channel
from prefixmesh.rpc.identity import TENANT_METADATA
from prefixmesh.rpc.status import from_rpc_error

PIN_NAME: Final = "policy"
WAIT_S: Final = 60.0
"""A slow CPU computes both policies on every worker in less, should nothing be copied."""

POLL_S: Final = 0.1
CALL_TIMEOUT_S: Final = 10.0
"""The router answers from what it knows."""

QUESTION: Final = "Hello, I am new here. What can you help me with?"


async def pin_policies(
    router: str, workers: Mapping[str, str], tenants: Sequence[TenantScript], max_tokens: int
) -> Pinned:
    """Pin, wait until all workers hold all policies or ``WAIT_S`` is over, and ask each. Raises what a call ends in."""
    began = time.monotonic()
    async with open_channel(router) as channel:
        stub: Any = router_pb2_grpc.RouterStub(channel)  # type: ignore[no-untyped-call]
        for tenant in tenants:
            await _call(stub.PutPin, pb.PutPinRequest(spec=_spec(tenant)), tenant)
        seen = await _until_held(stub, tenants, began + WAIT_S)
    seconds = time.monotonic() - began
    policies = [
        PinnedPolicy(
            tenant=tenant.name,
            tokens=pin.tokens,
            wanted=pin.wanted,
            held=pin.held,
            why=pin.why,
            visits=await _visit(workers, tenant, max_tokens),
        )
        for tenant, pin in zip(tenants, seen, strict=True)
    ]
    return Pinned(policies=tuple(policies), seconds=seconds)


def _spec(tenant: TenantScript) -> pb.PinSpec:
    """The tenant's own pin, on all workers, of what its conversations begin with."""
    system = inference_pb2.ChatMessage(role="system", content=tenant.policy)
    return pb.PinSpec(name=PIN_NAME, chat=inference_pb2.ChatPrompt(messages=[system]))


async def _until_held(stub: Any, tenants: Sequence[TenantScript], ends_at: float) -> list[pb.PinStatus]:
    while True:
        seen = [(await _call(stub.GetPin, pb.GetPinRequest(name=PIN_NAME), tenant)).pin for tenant in tenants]
        if all(pin.wanted and not pin.missing for pin in seen) or time.monotonic() > ends_at:
            return seen
        await asyncio.sleep(POLL_S)


async def _call(method: Any, request: Any, tenant: TenantScript) -> Any:
    try:
        return await method(request, timeout=CALL_TIMEOUT_S, metadata=((TENANT_METADATA, tenant.name),))
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def _visit(workers: Mapping[str, str], tenant: TenantScript, max_tokens: int) -> tuple[Visit, ...]:
    messages = (ChatMessage("system", tenant.policy), ChatMessage("user", QUESTION))
    visits = []
    for name, address in workers.items():
        async with AsyncClient(address, tenant=tenant.name, timeout_s=WAIT_S) as client:
            answer = await client.generate(messages, temperature=0.0, max_tokens=max_tokens)
        if answer.first_token_s is None:
            raise InternalError(f"{name} answered {tenant.name} without a token")
        visits.append(
            Visit(
                worker=name,
                prompt_tokens=answer.prompt_tokens,
                cached_tokens=answer.cached_tokens,
                first_token_ms=answer.first_token_s * 1000,
            )
        )
    return tuple(visits)
