"""Warming on workers with a real model: the same answers as cold, adapters resident, pins of the host tier, and KV from another worker."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch

from prefixmesh import fleet_secret
from prefixmesh.config import EngineConfig, WorkerConfig
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.model_files.linear_sizes import LinearSizes
from prefixmesh.model_files.model_config import read_model_config
from prefixmesh.model_files.source import resolve_model
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2 as control
from prefixmesh.rpc.status import from_rpc_error
from prefixmesh.tokens import pack
from prefixmesh.worker.server import WorkerServer
from tests.support.peft_adapters import write_adapter
from tests.support.servers import Worker, real_worker, running_worker
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="function")

NS = b"n" * 16
PROMPT = [int(token) for token in torch.randint(3, 500, (64,), generator=torch.Generator().manual_seed(7))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and adapters ``one`` and ``other`` below ``adapters``."""
    folder = tmp_path_factory.mktemp("pins-real")
    model = make_tiny_model(folder / "tiny")
    sizes = LinearSizes.of(read_model_config(resolve_model(str(model))))
    for seed, name in enumerate(("one", "other")):
        write_adapter(folder / "adapters" / name, sizes, seed=seed, strength=2.0)
    return folder


def engine(folder: Path, **settings: Any) -> EngineConfig:
    fields: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 2048, "page_size": 8, "threads": 1}
    return EngineConfig(model=str(folder / "tiny"), **fields | settings)


async def warm(worker: Worker, **fields: Any) -> control.WarmResponse:
    request = control.WarmRequest(**{"prefix": control.Prefix(namespace=NS, token_ids=pack(PROMPT))} | fields)
    try:
        answer: control.WarmResponse = await worker.control.Warm(
            request, metadata=worker.control_metadata(), timeout=60.0
        )
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return answer


async def adapters_of(worker: Worker) -> list[control.Adapter]:
    answer = await worker.control.ListAdapters(
        control.ListAdaptersRequest(), metadata=worker.control_metadata()
    )
    return list(answer.adapters)


async def answer_to(worker: Worker, request_id: str, adapter: str = "", **ticket: Any) -> Any:
    request = pb.GenerateRequest(
        tokens=pb.TokenPrompt(ids=pack([*PROMPT, 9, 8, 7])),
        sampling=pb.Sampling(temperature=0, max_tokens=8, ignore_eos=True),
        adapter=adapter,
    )
    return await worker.generate(request, worker.ticket(request_id=request_id, **ticket), 60.0)


async def test_a_warmed_prompt_has_the_answer_of_a_cold_one(folder: Path) -> None:
    async with real_worker(engine(folder)) as worker:
        cold = await answer_to(worker, "cold", namespace=b"c" * 16)
        warmed = await warm(worker, pin=control.WorkerPin(pin_id="p", owner="acme"))
        assert (warmed.held_tokens, warmed.computed_tokens) == (64, 64)
        answer = await answer_to(worker, "warm", namespace=NS)
        assert answer.started.cached_tokens.device == 64
        assert answer.token_ids == cold.token_ids


async def test_an_adapter_is_made_resident_and_its_prefix_warm_by_its_digest(folder: Path) -> None:
    """Of two, with room for one."""
    names = ("one=one", "other=other")
    settings = engine(folder, adapter_root=str(folder / "adapters"), adapters=names, max_resident_adapters=1)
    async with real_worker(settings) as worker:
        (away,) = [adapter for adapter in await adapters_of(worker) if not adapter.resident]
        await warm(worker, prefix=control.Prefix(adapter_digest=away.digest))
        (resident,) = [adapter for adapter in await adapters_of(worker) if adapter.resident]
        assert (resident.digest, resident.running_requests) == (away.digest, 0)
        described = await worker.control.Describe(
            control.DescribeRequest(), metadata=worker.control_metadata()
        )
        assert (described.cache.requests, described.pool.evictable_pages) == (0, 0)
        cold = await answer_to(worker, "cold", away.name, namespace=b"c" * 16, adapter_digest=away.digest)
        prefix = control.Prefix(namespace=NS, token_ids=pack(PROMPT), adapter_digest=away.digest)
        assert (await warm(worker, prefix=prefix)).held_tokens == 64
        answer = await answer_to(worker, "warm", away.name, namespace=NS, adapter_digest=away.digest)
        assert answer.started.cached_tokens.device == 64
        assert answer.token_ids == cold.token_ids
        base = await answer_to(worker, "base", namespace=b"d" * 16)
        assert base.token_ids != cold.token_ids, "the adapter changes nothing: the test proves nothing"


async def test_a_pin_of_the_host_tier_is_held_there(folder: Path) -> None:
    settings = engine(folder, hicache_ratio=1.0, hicache_write_policy="write_through_selective")
    async with real_worker(settings) as worker:
        pin = control.WorkerPin(pin_id="p", owner="acme", tier=control.TIER_HOST)
        warmed = await warm(worker, pin=pin)
        assert (warmed.held_tokens, warmed.computed_tokens) == (64, 64)
        metadata = worker.control_metadata()
        pins = await worker.control.ListPins(control.WorkerPinsRequest(), metadata=metadata)
        (one,) = pins.pins
        assert (one.tier, one.held_tokens, one.pages) == (control.TIER_HOST, 64, 8)
        assert (pins.charged_pages, pins.host_budget_pages, pins.host_owner_budget_pages) == (0, 76, 38)
        again = await warm(worker, pin=pin)
        assert (again.found_tokens, again.computed_tokens) == (64, 0)


async def test_what_another_worker_has_is_copied_and_the_rest_computed(folder: Path) -> None:
    secret = fleet_secret.generate()
    async with one_of(folder, secret) as holder, one_of(folder, secret) as worker:
        await warm(holder, prefix=control.Prefix(namespace=NS, token_ids=pack(PROMPT[:40])))
        cold = await answer_to(holder, "cold", namespace=b"c" * 16)
        source = control.KvSource(
            address=holder.bound.address, incarnation=holder.bound.incarnation, tokens=40
        )
        warmed = await warm(worker, sources=[source], copy_only=True)
        assert (warmed.held_tokens, warmed.copied_tokens, warmed.computed_tokens) == (40, 40, 0)
        warmed = await warm(worker, sources=[source])
        assert (warmed.held_tokens, warmed.found_tokens, warmed.computed_tokens) == (64, 40, 24)
        answer = await answer_to(worker, "warm", namespace=NS)
        assert (answer.token_ids, answer.started.cached_tokens.device) == (cold.token_ids, 64)


def one_of(folder: Path, secret: FleetSecret) -> AbstractAsyncContextManager[Worker]:
    """A worker of this fleet."""
    config = WorkerConfig(engine=engine(folder), in_process=True)
    return running_worker(WorkerServer(config, secret), secret)
