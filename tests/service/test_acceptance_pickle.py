"""F72 at the router's port, and in raw bytes at both: a pickle is data, and nothing of it runs."""

import asyncio
import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import router_pb2
from tests.support.router_kit import running_router, token_request
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import scripted_worker

SERVICES = [pb.DESCRIPTOR.services_by_name["Inference"], router_pb2.DESCRIPTOR.services_by_name["Router"]]
OTHERS = [
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
]
METHODS = [f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods]


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self._target,))


@pytest.fixture
def bomb(tmp_path: Path) -> Iterator[bytes]:
    """A pickle that works; fails the test in which it went off."""
    target = tmp_path / "boom"
    made = pickle.dumps(Bomb(target))
    pickle.loads(made)
    assert target.exists()
    target.unlink()
    yield made
    assert not target.exists(), "the bomb went off"


async def shoot(channel: grpc.aio.Channel, method: str, body: bytes, metadata: Any) -> None:
    call: Any = channel.unary_stream(method)
    running = call(body, metadata=metadata, timeout=2)
    with contextlib.suppress(grpc.aio.AioRpcError):
        await running.read()
    running.cancel()
    assert await running.code() is not grpc.StatusCode.INTERNAL, method


async def test_a_pickle_bomb_at_every_method_of_a_router_runs_nothing(bomb: bytes) -> None:
    """As a body and in metadata, also in the place of a key, a tenant and a ticket; the next request works."""
    assert len(METHODS) >= 5
    async with running_router(1) as router:
        for method in (*METHODS, *OTHERS):
            for name in ("", "x-prefixmesh-ticket-bin", "bomb-bin"):
                await shoot(router.channel, method, bomb, ((name, bomb),) if name else ())
        for request in (
            pb.GenerateRequest(tokens=pb.TokenPrompt(ids=bomb[: len(bomb) // 4 * 4])),
            pb.GenerateRequest(text="a", extra_key=bomb.decode("latin-1"), request_id="mine"),
        ):
            await shoot(router.channel, METHODS[0], request.SerializeToString(), ())
        assert (await router.generate(token_request(range(70)))).token_ids


async def test_raw_bytes_at_the_ports_of_router_and_worker_run_nothing(bomb: bytes) -> None:
    """Without any gRPC around them; the ports go on serving."""
    async with running_router(1) as router, scripted_worker(ScriptedEngine()) as worker:
        for address in (router.address, worker.bound.address):
            host, port = address.rsplit(":", 1)
            for sent in (
                bomb,
                len(bomb).to_bytes(4, "little") + bomb,
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bomb,
            ):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(sent)
                writer.write_eof()
                async with asyncio.timeout(5):
                    with contextlib.suppress(ConnectionResetError):
                        await reader.read()
                writer.close()
        assert (await router.generate(token_request(range(70)))).token_ids
        assert (await worker.generate(pb.GenerateRequest(text="ping"))).text
