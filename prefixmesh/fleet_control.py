"""One control call to every worker of a fleet at once, and what each of them made of it.

For operators: the calls carry the fleet's control token, which whoever can read the fleet secret can make. A worker that fails says so
beside those that did not; nothing is undone, since the call can be made again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc.aio

from prefixmesh.errors import PrefixmeshError
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.proto.v1 import worker_control_pb2_grpc
from prefixmesh.rpc.channel import open_channel
from prefixmesh.rpc.identity import AUTHORIZATION_METADATA
from prefixmesh.rpc.status import from_rpc_error

_T = TypeVar("_T")

ControlCall = Callable[[Any, Any], Awaitable[_T]]
"""Takes a ``WorkerControlStub`` and the settings (metadata, timeout) that its call needs."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[_T]):
    """What became of a call at one worker: its answer, or the error."""

    worker_id: str
    address: str
    answer: _T | None
    error: PrefixmeshError | None


async def call_workers(
    workers: Mapping[str, str], secret: FleetSecret, call: ControlCall[_T], timeout_s: float | None
) -> list[Outcome[_T]]:
    """Make ``call`` at every worker, all at once; the outcomes in the order of ``workers``, which maps ids to addresses."""
    settings = {
        "metadata": ((AUTHORIZATION_METADATA, f"Bearer {secret.control_token()}"),),
        "timeout": timeout_s,
    }

    async def one(worker_id: str, address: str) -> Outcome[_T]:
        async with open_channel(address) as channel:
            stub = worker_control_pb2_grpc.WorkerControlStub(channel)  # type: ignore[no-untyped-call]
            try:
                return Outcome(worker_id, address, await call(stub, settings), None)
            except grpc.aio.AioRpcError as error:
                return Outcome(worker_id, address, None, from_rpc_error(error))

    return await asyncio.gather(*(one(worker_id, address) for worker_id, address in workers.items()))
