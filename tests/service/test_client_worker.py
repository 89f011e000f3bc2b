"""The client library, the command line and callers without either, against a real worker's gRPC front."""

import asyncio
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner, Result
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, Parse
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from prefixmesh.cli.main import main
from prefixmesh.client import AsyncClient, Client
from prefixmesh.config import EngineConfig
from prefixmesh.errors import CancelledError, InvalidRequestError
from tests.support.scripted_engine import CONTEXT_LENGTH, ScriptedEngine
from tests.support.servers import Worker, real_worker, scripted_worker
from tests.support.tiny_model import make_tiny_model


def address_of(worker: Worker) -> str:
    return f"127.0.0.1:{worker.bound.port}"


async def run(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, arguments)


async def test_client_reads_what_a_worker_says() -> None:
    """Started, deltas, Finished; tokenizing and the model's limits."""
    engine = ScriptedEngine("Hello, world.")
    async with scripted_worker(engine, worker_id="w-7") as worker, AsyncClient(address_of(worker)) as client:
        answer = await client.generate("ping", seed=42)
        ids = await client.tokenize("ping")
        (model,) = await client.list_models()
    assert answer.text == "Hello, world."
    assert (answer.worker_id, answer.started.seed, answer.finish_reason) == ("w-7", 42, "stop")
    assert answer.started.routing is None
    assert ids == tuple(b"ping")
    assert (model.name, model.context_length) == ("scripted", CONTEXT_LENGTH)


async def test_leaving_a_stream_stops_the_engine() -> None:
    """From the blocking client's ``with`` to the engine's abort (F17)."""
    engine = ScriptedEngine("Hello, world.")
    engine.hold_after_tokens = 2

    def leave_early(address: str) -> None:
        with Client(address) as client, client.stream("ping") as stream:
            next(stream)

    async with scripted_worker(engine) as worker:
        await asyncio.to_thread(leave_early, address_of(worker))
        await engine.until(lambda: len(engine.aborted) == 1)


async def test_abort_by_the_started_id() -> None:
    """The other caller of the same tenant stops it; its reader gets CancelledError."""
    engine = ScriptedEngine("Hello, world.")
    engine.hold_after_tokens = 2
    async with (
        scripted_worker(engine) as worker,
        AsyncClient(address_of(worker)) as client,
        client.stream("ping") as stream,
    ):
        await anext(stream)
        assert stream.started is not None
        await client.abort(stream.started.request_id)
        with pytest.raises(CancelledError):
            await asyncio.wait_for(stream.collect(), 10)


async def test_workers_limits_come_back_with_their_field() -> None:
    """What only the server can know (the context, the vocabulary) names its field too (F59)."""
    async with scripted_worker(ScriptedEngine()) as worker, AsyncClient(address_of(worker)) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await client.generate("ping", max_tokens=CONTEXT_LENGTH)
        assert caught.value.field == "sampling.max_tokens"
        with pytest.raises(InvalidRequestError) as caught:
            await client.generate([5, 100_000])
        assert caught.value.field == "tokens.ids"
        assert (await client.generate("ping")).text


async def test_real_model_caches_what_the_client_sent(tmp_path: Path) -> None:
    """A tiny real model: the second time all but the last prompt token is cached, and the answer is the same."""
    folder = make_tiny_model(tmp_path / "tiny")
    engine = EngineConfig(model=str(folder), dtype="float32", max_total_tokens=2048, threads=1)
    history = [{"role": "user", "content": "What is the capital of France?"}]
    async with real_worker(engine) as worker:
        async with AsyncClient(address_of(worker), tenant="acme") as client:
            cold = await client.generate(history, temperature=0, max_tokens=8)
            warm = await client.generate(history, temperature=0, max_tokens=8)
        result = await run(
            *("generate", history[0]["content"], "--json", "--temperature", "0", "--max-tokens", "8"),
            *("--tenant", "other", "--address", address_of(worker)),
        )
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == warm.prompt_tokens - 1
    assert warm.token_ids == cold.token_ids
    other = json.loads(result.stdout)
    assert (other["text"], other["cached_tokens"]) == (cold.text, 0)


async def test_worker_can_be_called_with_nothing_but_reflection() -> None:
    """As grpcurl does it: services, messages and the answer, all from what the server tells about itself."""

    def call_by_reflection(address: str) -> tuple[list[str], list[dict[str, object]]]:
        with grpc.insecure_channel(address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            services = list(database.get_services())
            pool = DescriptorPool(database)
            method = pool.FindServiceByName("prefixmesh.v1.Inference").FindMethodByName("Generate")
            request = Parse('{"text": "ping"}', GetMessageClass(method.input_type)())
            answers: Callable[..., Iterable[Message]] = channel.unary_stream(
                f"/{method.containing_service.full_name}/{method.name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            return services, [MessageToDict(answer) for answer in answers(request, timeout=10)]

    async with scripted_worker(ScriptedEngine("Hi")) as worker:
        services, answers = await asyncio.to_thread(call_by_reflection, address_of(worker))
    assert {"prefixmesh.v1.Inference", "grpc.health.v1.Health"} <= set(services)
    assert "started" in answers[0]
    assert "finished" in answers[-1]
