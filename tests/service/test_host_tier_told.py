"""A worker with a host tier (its model alone a fake) behind a router: an evicted prompt is matched on the host, comes back, and every figure
that anybody is shown of that agrees with every other."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefixmesh import fleet_secret
from prefixmesh.config import EngineConfig, WorkerConfig
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import router_pb2
from prefixmesh.router import worker_link
from prefixmesh.router.worker_view import Trust
from prefixmesh.sim.fake_engine import ModelIdentity
from prefixmesh.sim.faulty_worker import FaultFile, FaultyEngine
from prefixmesh.sim.timing import TimingModel
from prefixmesh.tokens import pack
from prefixmesh.worker import metrics
from prefixmesh.worker.server import WorkerServer
from tests.support.routed_worker import router_before, scripted_model
from tests.support.router_kit import Router
from tests.support.scraping import scrape
from tests.support.scripted_engine import INFO
from tests.support.servers import Answer, Worker, byte_text, eventually, running_worker

PAGE, PROMPT_TOKENS = 16, 480
SETTINGS = EngineConfig(
    max_total_tokens=1024, page_size=PAGE, hicache_ratio=4.0, max_running_requests=4, chunked_prefill_size=256
)
"""A device for two prompts and a host for eight."""

IDENTITY = ModelIdentity(
    name=INFO.model,
    revision=INFO.model_revision,
    vocab_size=300,
    context_length=1024,
    kv_bytes_per_token=1024,
)
TIMING = TimingModel(
    step_ms=1.0, prefill_ms_per_token=0.04, load_back_ms_per_token=0.002, offload_ms_per_token=0.002
)
"""Twenty times as quick to load as to compute: a prompt takes 20 ms, and one to come back."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    router: Router
    worker: Worker

    async def ask(self, seed: int) -> Answer:
        """A prompt that shares nothing with any other's."""
        request = pb.GenerateRequest(
            tokens=pb.TokenPrompt(ids=pack([seed] * PROMPT_TOKENS)), sampling=pb.Sampling(max_tokens=2)
        )
        return await self.router.generate(request)

    async def view(self) -> router_pb2.WorkerView:
        (view,) = await self.router.list_workers()
        return view

    async def settled(self) -> None:
        """Nothing is being copied, and the router has proved that it knows what is where."""
        ((_, followed),) = self.router.server.core.view

        async def is_so() -> bool:
            view = await self.view()
            pool = view.host_pool
            is_full = pool.free_pages + pool.evictable_pages + pool.protected_pages == pool.total_pages > 0
            return (
                is_full
                and followed.trust is Trust.EXACT
                and not len(self.router.server.core.view.predictions)
            )

        await eventually(is_so)


@pytest.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr(metrics, "LEAST_INTERVAL_S", 0.0)
    monkeypatch.setattr(worker_link, "DESCRIBE_INTERVAL_S", 0.05)
    secret = fleet_secret.generate()
    server = WorkerServer(
        WorkerConfig(engine=SETTINGS, metrics_port=0),
        secret,
        engine=FaultyEngine(SETTINGS, IDENTITY, TIMING, FaultFile(tmp_path / "none.json")),
        text=byte_text(),
    )
    async with running_worker(server, secret) as worker, router_before(worker, scripted_model()) as router:
        yield Stage(router=router, worker=worker)


async def test_what_comes_back_from_the_host_is_told_alike_to_everybody(stage: Stage) -> None:
    first = await stage.ask(1)
    for seed in range(2, 5):
        await stage.ask(seed)
    await stage.settled()
    view = await stage.view()
    assert view.blocks < 4 * 7 <= view.host_blocks, "the device has given up some, and the host has all"
    again = await stage.ask(1)
    assert again.token_ids == first.token_ids
    found = again.started.cached_tokens
    assert (found.device + found.host, found.disk) == (PROMPT_TOKENS - PAGE, 0)
    assert found.host >= PROMPT_TOKENS // 2
    assert again.finished.usage.cached_tokens == found
    assert again.started.routing.predicted_cached_tokens == PROMPT_TOKENS // 64 * 64
    timings = again.finished.timings
    assert 0.0 < timings.load_back_ms <= timings.prefill_ms
    assert not first.finished.timings.load_back_ms
    await stage.settled()
    await shown_alike(stage, found)


async def shown_alike(stage: Stage, found: pb.CachedTokens) -> None:
    """To whoever scrapes, to whoever asks the router, and as the answer said."""
    url = stage.worker.bound.metrics_url
    assert url is not None
    page = await scrape(url)
    hits = page.by("prefixmesh_cache_hit_tokens_total", "tier")
    assert hits == {"device": found.device, "host": found.host, "disk": 0}
    pages = page.by("prefixmesh_host_pages", "state")
    assert sum(pages.values()) == 4 * 1024 // PAGE
    assert page.value("prefixmesh_load_back_seconds_count") == 1
    moved = page.by("prefixmesh_tier_tokens_total", "move")
    assert moved["loaded_back"] >= found.host

    async def is_told() -> bool:
        return bool((await stage.view()).cache.hit_tokens.host)

    await eventually(is_told)
    view = await stage.view()
    assert view.cache.hit_tokens == found
    assert view.tiers.loaded_back_tokens == moved["loaded_back"]
    assert view.host_pool.free_pages == pages["free"]
    assert view.load_back_ms_per_token > 0.0
    assert view.cached_tokens == found.device + found.host


async def test_flush_empties_both_tiers_for_the_router_too(stage: Stage) -> None:
    """F26."""
    await asyncio.gather(*(stage.ask(seed) for seed in range(1, 4)))
    await stage.settled()
    await stage.worker.server._engine.flush()

    async def is_empty() -> bool:
        view = await stage.view()
        return view.blocks == view.host_blocks == 0 and view.host_pool.free_pages == 4 * 1024 // PAGE

    await eventually(is_empty)
    answer = await stage.ask(1)
    assert answer.started.cached_tokens == pb.CachedTokens()
