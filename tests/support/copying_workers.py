"""Workers of one fleet that copy KV from each other through their real sockets, with a tiny model's engine behind each."""

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from prefixmesh import fleet_secret
from prefixmesh.config import EngineConfig, WorkerConfig
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.ids import Incarnation
from prefixmesh.kv_source import KvSource
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2 as control_pb
from prefixmesh.proto.v1 import worker_control_pb2_grpc
from prefixmesh.rpc.channel import open_channel
from prefixmesh.tokens import pack
from prefixmesh.worker.kv_copies.copier import KvCopier
from prefixmesh.worker.prefix_messages import PrefixName
from prefixmesh.worker.server import WorkerServer
from tests.support.servers import Answer, Worker, running_worker

NAMESPACE = b"n" * 16

TOKEN_KV = 512
"""Bytes of a token's KV in the tiny model, in float32."""

_HOLDER = """
import asyncio, sys
from prefixmesh.config import EngineConfig, WorkerConfig
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.worker.kv_copies import parts
from prefixmesh.worker.server import WorkerServer

async def main(model, part_bytes):
    parts.PART_BYTES = int(part_bytes)
    rate = 5 * int(part_bytes) / 1e6
    engine = EngineConfig(model=model, device="cpu", dtype="float32", max_total_tokens=4096, kv_copy_rate=rate)
    secret = FleetSecret(bytes.fromhex(sys.stdin.readline().strip()))
    server = WorkerServer(WorkerConfig(engine=engine, in_process=True), secret)
    bound = await server.start()
    print(bound.address, bound.incarnation, flush=True)
    await server.wait_closed()

asyncio.run(main(*sys.argv[1:]))
"""


@asynccontextmanager
async def two_workers(model: Path, **engine: Any) -> AsyncIterator[tuple[Worker, Worker]]:
    """A holder and a taker, engines on threads of this process."""
    async with fleet(model, [engine, engine]) as workers:
        yield workers[0], workers[1]


@asynccontextmanager
async def fleet(
    model: Path, engines: Sequence[dict[str, Any]], **settings: Any
) -> AsyncIterator[list[Worker]]:
    """Workers by these settings of their engines."""
    secret = fleet_secret.generate()
    async with AsyncExitStack() as stack:
        workers = []
        for engine in engines:
            fields: dict[str, Any] = {"max_total_tokens": 4096, "device": "cpu", "dtype": "float32"} | engine
            config = WorkerConfig(
                engine=EngineConfig(**({"model": str(model)} | fields)), **({"in_process": True} | settings)
            )
            server = WorkerServer(config, secret)
            workers.append(await stack.enter_async_context(running_worker(server, secret)))
        yield workers


def source(worker: Worker, tokens: int = 10_000, **more: Any) -> KvSource:
    """It, as a ticket names it."""
    fields: dict[str, Any] = {"address": worker.bound.address, "incarnation": worker.bound.incarnation}
    return KvSource(**(fields | {"tokens": tokens} | more))


def prefix(ids: Sequence[int], namespace: bytes = NAMESPACE) -> PrefixName:
    return PrefixName(namespace, pack(list(ids)))


def copier(worker: Worker) -> KvCopier:
    found = worker.server._copier
    assert found is not None
    return found


async def ask(
    worker: Worker,
    ids: Sequence[int],
    *sources: KvSource,
    max_tokens: int = 8,
    number: int = 0,
    **ticket: Any,
) -> Answer:
    """What a worker answers to a prompt, greedily, by a ticket that names these sources."""
    request = pb.GenerateRequest(
        tokens=pb.TokenPrompt(ids=pack(list(ids))),
        sampling=pb.Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
    )
    fields: dict[str, Any] = {"request_id": f"r-{number}", "namespace": NAMESPACE, "sources": tuple(sources)}
    return await worker.generate(request, worker.ticket(**(fields | ticket)))


async def read(worker: Worker, ids: Sequence[int], start: int = 0, **fields: Any) -> list[Any]:
    """What ``ReadPrefix`` sends of a prefix: the header, and the parts."""
    called = worker.control.ReadPrefix(
        await read_request(worker, ids, start, **fields), metadata=worker.control_metadata()
    )
    return [message async for message in called]


async def read_request(
    worker: Worker, ids: Sequence[int], start: int = 0, **fields: Any
) -> control_pb.ReadPrefixRequest:
    """What a worker of its own kind would ask."""
    told = await worker.control.Describe(control_pb.DescribeRequest(), metadata=worker.control_metadata())
    known: dict[str, Any] = {
        "prefix": control_pb.Prefix(namespace=NAMESPACE, token_ids=pack(list(ids))),
        "start_tokens": start,
        "model_revision": told.model_revision,
        "layout_digest": told.kv_layout,
    }
    return control_pb.ReadPrefixRequest(**(known | fields))


async def kv_of(worker: Worker, ids: Sequence[int]) -> bytes:
    """All KV that a worker has of a prefix."""
    return b"".join(message.part.kv for message in (await read(worker, ids))[1:])


async def pages_of(worker: Worker) -> tuple[int, int, int]:
    """Free, evictable and protected pages of a worker's device."""
    pool = (
        await worker.control.Describe(control_pb.DescribeRequest(), metadata=worker.control_metadata())
    ).pool
    return pool.free_pages, pool.evictable_pages, pool.protected_pages


class HolderProcess:
    """A worker in a process that can be killed; it gives five parts a second."""

    def __init__(
        self, process: asyncio.subprocess.Process, address: str, incarnation: int, secret: FleetSecret
    ) -> None:
        self._process = process
        self._address = address
        self._incarnation = Incarnation(incarnation)
        self._secret = secret

    def source(self, tokens: int) -> KvSource:
        return KvSource(address=self._address, incarnation=self._incarnation, tokens=tokens)

    async def warm(self, ids: Sequence[int]) -> None:
        """Have it compute a prefix."""
        async with open_channel(self._address) as channel:
            control: Any = worker_control_pb2_grpc.WorkerControlStub(channel)  # type: ignore[no-untyped-call]
            await control.Warm(
                control_pb.WarmRequest(
                    prefix=control_pb.Prefix(namespace=NAMESPACE, token_ids=pack(list(ids)))
                ),
                metadata=(("authorization", f"Bearer {self._secret.control_token()}"),),
            )

    def kill(self) -> None:
        self._process.kill()


@asynccontextmanager
async def holder_process(model: Path, secret: FleetSecret, part_bytes: int) -> AsyncIterator[HolderProcess]:
    """Such a worker of the tiny model; gone afterwards."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _HOLDER, str(model), str(part_bytes), stdin=PIPE, stdout=PIPE
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(secret.raw.hex().encode() + b"\n")
        address, incarnation = (await process.stdout.readline()).decode().split()
        yield HolderProcess(process, address, int(incarnation), secret)
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
        await process.wait()
