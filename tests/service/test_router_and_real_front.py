"""Routers in front of a real worker (its model a fake): their views equal the worker's own cache, and their load views its own load."""

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.cache.tier import Tier
from prefixmesh.config import EngineConfig
from prefixmesh.fleet_secret import generate
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.router.fleet_view import Followed
from prefixmesh.router.worker_entry import WorkerEntry
from prefixmesh.router.worker_view import Trust
from prefixmesh.tokens import pack
from tests.support.fake_engine import FakeStage, fake_worker
from tests.support.routed_worker import router_before, scripted_model
from tests.support.router_kit import Router
from tests.support.servers import eventually

SMALL = EngineConfig(max_total_tokens=1200, max_running_requests=8, chunked_prefill_size=128)
"""A pool for some five prompts, so that what is old is evicted all the time."""


def prompt(seed: int, size: int = 200) -> list[int]:
    """``size`` tokens, of which a third begins like those of every seed of equal parity."""
    shared = random.Random(seed % 2).choices(range(200), k=size // 3)
    return shared + random.Random(seed).choices(range(200), k=size - len(shared))


async def ask(router: Router, seed: int, max_tokens: int = 4) -> None:
    sampling = pb.Sampling(max_tokens=max_tokens)
    await router.generate(
        pb.GenerateRequest(tokens=pb.TokenPrompt(ids=pack(prompt(seed))), sampling=sampling)
    )


@asynccontextmanager
async def router_of(stage: FakeStage) -> AsyncIterator[Router]:
    async with router_before(stage.worker, scripted_model(SMALL.max_total_tokens or 0)) as router:
        yield router


def entry_of(router: Router) -> WorkerEntry:
    (entry,) = router.server.core.registry
    return entry


def followed_by(router: Router) -> Followed:
    ((_, followed),) = router.server.core.view
    return followed


def is_exact(router: Router, stage: FakeStage) -> bool:
    """The view is proved and equals the engine's own tree; look only while the engine is idle."""
    cache, core = stage.scheduler.kv._cache, router.server.core
    assert isinstance(cache, RadixCache)
    return followed_by(router).trust is Trust.EXACT and all(
        core.view.index.held(followed_by(router).slot, tier) == set(cache.blocks(tier)) for tier in Tier
    )


async def come_to_rest(stage: FakeStage, *routers: Router) -> None:
    await eventually(stage.is_quiet)
    for router in routers:
        await eventually(lambda r=router: is_exact(r, stage))
        await eventually(lambda r=router: len(r.server.core.view.predictions) == 0)
        router.server.core.check_invariants()


async def test_load_of_a_worker_whose_cache_names_no_blocks_is_known_by_its_reports() -> None:
    """Its view stays blind, and what was sent there is believed; its load is its own word, not this router's guess."""
    settings = dataclasses.replace(SMALL, prefix_cache="hash")
    async with fake_worker(settings) as stage, router_of(stage) as router:
        await ask(router, 1)
        await eventually(lambda: (report := entry_of(router).report) and report.prefill_ms_per_token)
        await asyncio.gather(*(ask(router, seed) for seed in range(6)))
        await eventually(lambda: entry_of(router).load.in_flight == 0)
        assert followed_by(router).trust is Trust.BLIND
        assert followed_by(router).view.causes.total() == 0
        assert len(router.server.core.view.predictions) > 0
        router.server.core.check_invariants()


async def test_view_equals_the_workers_own_cache_after_a_storm_with_evictions_and_a_flush() -> None:
    """Events alone keep it: not one snapshot but the first."""
    async with fake_worker(SMALL) as stage, router_of(stage) as router:
        await asyncio.gather(*(ask(router, seed) for seed in range(24)))
        await come_to_rest(stage, router)
        assert stage.core.stats().evicted_pages > 0
        assert len(router.server.core.view.index) > 0
        await stage.engine.flush()
        await come_to_rest(stage, router)
        assert followed_by(router).blocks == 0
        await asyncio.gather(*(ask(router, seed) for seed in range(8)))
        await come_to_rest(stage, router)
        assert followed_by(router).view.causes == {}


async def test_a_router_that_begins_anew_knows_what_the_worker_holds() -> None:
    async with fake_worker(SMALL) as stage:
        async with router_of(stage) as first:
            await asyncio.gather(*(ask(first, seed) for seed in range(6)))
            await come_to_rest(stage, first)
        async with router_of(stage) as second:
            await come_to_rest(stage, second)
            assert followed_by(second).blocks > 0


async def test_a_worker_that_begins_anew_is_known_to_be_empty() -> None:
    """Under its address, with its id, on the same port."""
    secret = generate()
    async with fake_worker(SMALL, secret=secret) as stage:
        port = stage.worker.bound.port
        context = router_of(stage)
        router = await context.__aenter__()
        try:
            await ask(router, 1)
            await come_to_rest(stage, router)
            life = entry_of(router).load.incarnation
            await stage.worker.server.stop(0.0)
            async with fake_worker(SMALL, secret=secret, port=port) as again:
                await eventually(lambda: entry_of(router).load.incarnation != life)
                await router.until_ready(1)
                await come_to_rest(again, router)
                assert followed_by(router).blocks == 0
                await ask(router, 1)
                await come_to_rest(again, router)
                assert followed_by(router).blocks > 0
        finally:
            await context.__aexit__(None, None, None)


async def test_two_routers_see_each_others_load_through_the_worker_and_count_nobody_twice() -> None:
    async with fake_worker(SMALL) as stage, router_of(stage) as one, router_of(stage) as two:
        await come_to_rest(stage, one, two)
        stage.model.hold()
        asking = [asyncio.create_task(ask(one, seed)) for seed in range(4)]
        asking += [asyncio.create_task(ask(two, 10 + seed)) for seed in range(2)]
        await eventually(lambda: one.loads() == [4] and two.loads() == [2])
        for router in (one, two):
            await eventually(lambda r=router: entry_of(r).load.total.in_flight == 6)
            assert entry_of(router).load.total.prefill_ms > 0.0
        stage.model.release()
        await asyncio.gather(*asking)
        for router in (one, two):
            await eventually(lambda r=router: entry_of(r).load.total == (0, 0.0, 0.0))
        await come_to_rest(stage, one, two)
