"""Workers for tests: started in this process on a free port, called through their real sockets, and gone afterwards."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest

from prefixmesh import fleet_secret
from prefixmesh.config import EngineConfig, WorkerConfig
from prefixmesh.errors import PrefixmeshError
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.ids import Incarnation, Namespace, RequestId, TenantId
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import inference_pb2_grpc, worker_control_pb2_grpc
from prefixmesh.rpc.channel import open_channel
from prefixmesh.rpc.status import from_rpc_error
from prefixmesh.text.chat_template import ChatTemplate
from prefixmesh.ticket import TICKET_METADATA, Ticket, sign
from prefixmesh.tokens import unpack
from prefixmesh.worker.server import BoundWorker, TextSide, WorkerServer
from tests.support.scripted_engine import ScriptedEngine, byte_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A running worker and a channel to it."""

    server: WorkerServer
    bound: BoundWorker
    secret: FleetSecret
    channel: grpc.aio.Channel

    @property
    def inference(self) -> Any:
        return inference_pb2_grpc.InferenceStub(self.channel)  # type: ignore[no-untyped-call]

    @property
    def control(self) -> Any:
        return worker_control_pb2_grpc.WorkerControlStub(self.channel)  # type: ignore[no-untyped-call]

    def ticket(
        self,
        *,
        tenant: str = "acme",
        request_id: str = "ticket-1",
        namespace: bytes = b"n" * 16,
        incarnation: int | None = None,
        secret: FleetSecret | None = None,
        adapter_digest: str = "",
        **more: Any,
    ) -> Metadata:
        """Metadata with a ticket for this worker, or a forged one; ``more`` is what else ``Ticket`` has."""
        life = self.bound.incarnation if incarnation is None else incarnation
        note = Ticket(
            request_id=RequestId(request_id),
            tenant=TenantId(tenant),
            namespace=Namespace(namespace),
            incarnation=Incarnation(life),
            adapter_digest=adapter_digest,
            **more,
        )
        return ((TICKET_METADATA, sign(note, secret or self.secret)),)

    def control_metadata(self) -> Metadata:
        return (("authorization", f"Bearer {self.secret.control_token()}"),)

    async def generate(
        self, request: pb.GenerateRequest, metadata: Metadata = (), timeout_s: float = 30.0
    ) -> "Answer":
        """A whole answer; the error of our tree when the call fails."""
        call = self.inference.Generate(request, metadata=metadata, timeout=timeout_s)
        try:
            return answer_of([message async for message in call], len(request.resumed_output) // 4)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The messages of one stream, checked for their order."""

    started: pb.Started
    deltas: list[pb.Delta]
    finished: pb.Finished

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [int(token) for delta in self.deltas for token in unpack(delta.token_ids)]


async def rest_of(call: Any) -> list[pb.GenerateResponse]:
    """What a call that was read from still has to say; the error of our tree when it ends in one."""
    messages = []
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return messages


def answer_of(messages: Iterable[pb.GenerateResponse], position: int = 0) -> Answer:
    """Sorts a stream's messages; asserts that they are Started, Deltas without a gap from ``position`` on, Finished."""
    kinds = []
    sorted_: dict[str, Any] = {"deltas": []}
    for message in messages:
        kind = message.WhichOneof("event")
        kinds.append(kind)
        if kind == "delta":
            assert message.delta.position == position
            position += len(message.delta.token_ids) // 4
            sorted_["deltas"].append(message.delta)
        elif kind is not None:
            sorted_[kind] = getattr(message, kind)
    assert kinds[0] == "started"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) <= {"delta"}
    return Answer(**sorted_)


def byte_text() -> TextSide:
    """The text side that goes with ``ScriptedEngine``."""
    return TextSide(byte_tokenizer(), ChatTemplate(CHAT_TEMPLATE, "", "<|end|>"))


@asynccontextmanager
async def running_worker(server: WorkerServer, secret: FleetSecret) -> AsyncIterator[Worker]:
    """Start a worker and stop it at the end, whatever happens."""
    bound = await server.start()
    try:
        async with open_channel(f"127.0.0.1:{bound.port}") as channel:
            yield Worker(server=server, bound=bound, secret=secret, channel=channel)
    finally:
        await server.stop(0.0)


@asynccontextmanager
async def scripted_worker(scripted: ScriptedEngine, **settings: Any) -> AsyncIterator[Worker]:
    """A worker in front of a scripted engine; ``settings`` are those of ``WorkerConfig``, its ``engine`` too."""
    secret = fleet_secret.generate()
    server = WorkerServer(WorkerConfig(**settings), secret, engine=scripted, text=byte_text())
    async with running_worker(server, secret) as worker:
        yield worker


@asynccontextmanager
async def real_worker(engine: EngineConfig, **settings: Any) -> AsyncIterator[Worker]:
    """A worker with a real model, its engine on a thread unless ``in_process=False``."""
    secret = fleet_secret.generate()
    config = WorkerConfig(engine=engine, **({"in_process": True} | settings))
    async with running_worker(WorkerServer(config, secret), secret) as worker:
        yield worker


async def failure_of(worker: Worker, request: pb.GenerateRequest, metadata: Metadata = ()) -> PrefixmeshError:
    """The error that a Generate call ends in; fails the test when it does not."""
    with pytest.raises(PrefixmeshError) as caught:
        await worker.generate(request, metadata)
    return caught.value


async def eventually(condition: Any, timeout_s: float = 5.0) -> None:
    """Wait until a condition that nobody announces holds; for state behind a socket or a thread."""
    async with asyncio.timeout(timeout_s):
        while True:
            result = condition()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return
            await asyncio.sleep(0.005)


def records_of(caplog: pytest.LogCaptureFixture, event: str) -> list[logging.LogRecord]:
    """Log records of one event."""
    return [record for record in caplog.records if record.getMessage().startswith(event + " ")]
