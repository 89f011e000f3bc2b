"""Workers of one fleet that copy KV from each other through their real sockets, with a tiny model's engine behind each."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from prefixmesh import fleet_secret
from prefixmesh.config import EngineConfig, WorkerConfig
from prefixmesh.kv_source import KvSource
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2 as control_pb
from prefixmesh.tokens import pack
from prefixmesh.worker.kv_copies.copier import KvCopier
from prefixmesh.worker.prefix_messages import PrefixName
from prefixmesh.worker.server import WorkerServer
from tests.support.servers import Answer, Worker, running_worker

NAMESPACE = b"n" * 16


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
