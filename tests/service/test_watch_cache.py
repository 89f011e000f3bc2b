"""``WatchCache`` of a real worker (its model a fake): what a reader holds is what the radix cache holds, whatever goes on meanwhile."""

import asyncio
import random
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE, block_fingerprints
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.cache.tier import Tier
from prefixmesh.config import EngineConfig
from prefixmesh.errors import (
    AuthenticationError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from prefixmesh.ids import Namespace
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2 as control_pb
from prefixmesh.rpc.status import from_rpc_error
from prefixmesh.tokens import pack
from tests.support.cache_following import REPORT_MS, Follower
from tests.support.fake_engine import FakeStage, fake_worker
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import eventually, scripted_worker

pytestmark = pytest.mark.asyncio(loop_scope="function")

SMALL = EngineConfig(max_total_tokens=1200, max_running_requests=6, chunked_prefill_size=128)
"""A pool for some five prompts, so that what is old is evicted all the time."""


@pytest.fixture
async def stage() -> AsyncIterator[FakeStage]:
    async with fake_worker(SMALL) as stage:
        yield stage


LOG_EVENTS = 24
"""Fewer than thirty prompts make, and more than one of them does."""


def prompt(seed: int, size: int = 200) -> list[int]:
    """``size`` tokens, of which a third begins like those of every seed of equal parity."""
    shared = random.Random(seed % 2).choices(range(200), k=size // 3)
    return shared + random.Random(seed).choices(range(200), k=size - len(shared))


async def ask(stage: FakeStage, tokens: list[int], max_tokens: int = 4) -> None:
    request = pb.GenerateRequest(
        tokens=pb.TokenPrompt(ids=pack(tokens)), sampling=pb.Sampling(max_tokens=max_tokens)
    )
    await stage.worker.generate(request)


def held(stage: FakeStage) -> set[int]:
    """The blocks of the engine's own cache; look only while it is idle."""
    cache = stage.scheduler.kv._cache
    assert isinstance(cache, RadixCache)
    return set(cache.blocks(Tier.DEVICE))


async def test_reader_holds_what_the_cache_holds_after_traffic_with_evictions(stage: FakeStage) -> None:
    early = Follower(stage.worker)
    await early.next_report()
    for seed in range(12):
        await ask(stage, prompt(seed))
    late = Follower(stage.worker)
    await eventually(stage.is_quiet)
    for follower in (early, late):
        await follower.until(lambda f=follower: f.view.blocks(Tier.DEVICE) == held(stage))
        await follower.next_report()
    assert stage.core.stats().evicted_pages > 0
    assert early.kinds[0] == late.kinds[0] == "part"
    assert "events" in early.kinds
    early.close()
    late.close()


async def test_readers_that_come_in_the_middle_of_a_storm_end_up_equal(stage: FakeStage) -> None:
    followers: list[Follower] = []

    async def come_late(index: int) -> None:
        await eventually(lambda: stage.model.steps >= 12 * index)
        follower = Follower(stage.worker)
        followers.append(follower)
        await follower.until(lambda: done.is_set() and follower.view.blocks(Tier.DEVICE) == held(stage))
        await follower.next_report()

    done = asyncio.Event()
    readers = [asyncio.create_task(come_late(index)) for index in range(4)]
    await asyncio.gather(*(ask(stage, prompt(seed), 8) for seed in range(40)))
    await eventually(stage.is_quiet)
    while len(followers) < 4:
        await ask(stage, prompt(99), 8)
    await eventually(stage.is_quiet)
    done.set()
    await asyncio.wait_for(asyncio.gather(*readers), 20)
    for follower in followers:
        follower.view.check_invariants()
        follower.close()


async def test_flush_of_an_idle_worker_is_told_at_once(stage: FakeStage) -> None:
    await ask(stage, prompt(1))
    follower = Follower(stage.worker)
    await follower.until(lambda: follower.view.blocks(Tier.DEVICE))
    epoch = follower.view.epoch
    await stage.worker.control.Flush(control_pb.FlushRequest(), metadata=stage.worker.control_metadata())
    await follower.until(lambda: follower.view.epoch != epoch)
    assert not follower.view.blocks(Tier.DEVICE)
    await ask(stage, prompt(1))
    await follower.until(lambda: len(follower.view.blocks(Tier.DEVICE)) == 3)
    follower.close()


async def test_who_learns_that_a_request_has_ended_can_read_of_its_blocks(stage: FakeStage) -> None:
    """The blocks are in the books before ``Ended`` goes out: a reader that comes after an answer has them in its snapshot."""
    for seed in range(3):
        tokens = prompt(seed, 2 * DEFAULT_BLOCK_SIZE + 2 * seed)
        await ask(stage, tokens)
        follower = Follower(stage.worker)
        await follower.step()
        assert len(follower.view.blocks(Tier.DEVICE)) >= len(tokens) // DEFAULT_BLOCK_SIZE
        follower.close()


async def test_blocks_are_named_as_a_router_names_them(stage: FakeStage) -> None:
    tokens = prompt(5)
    namespace = Namespace(b"n" * 16)
    request = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=pack(tokens)), sampling=pb.Sampling(max_tokens=1))
    await stage.worker.generate(request, stage.worker.ticket(namespace=namespace))
    follower = Follower(stage.worker)
    await follower.step()
    names = block_fingerprints(namespace, pack(tokens), DEFAULT_BLOCK_SIZE)
    assert follower.view.blocks(Tier.DEVICE) == set(names)
    follower.close()


async def test_stream_goes_on_where_an_earlier_one_ended(stage: FakeStage) -> None:
    await ask(stage, prompt(1))
    first = Follower(stage.worker)
    await first.next_report()
    first.close()
    await ask(stage, prompt(3))
    assert first.view.epoch is not None
    second = Follower(stage.worker, (first.view.epoch, first.view.sequence), first.view)
    await second.next_report()
    assert second.kinds[0] == "events"
    assert second.view.blocks(Tier.DEVICE) == held(stage)
    second.close()


async def test_place_of_another_life_gets_a_snapshot(stage: FakeStage) -> None:
    follower = Follower(stage.worker, (12345, 6))
    await follower.step()
    assert follower.kinds == ["part"]
    follower.close()


async def test_report_tells_of_load_and_pool(stage: FakeStage) -> None:
    follower = Follower(stage.worker)
    stage.model.hold()
    asking = [asyncio.create_task(ask(stage, prompt(seed))) for seed in range(3)]
    await eventually(lambda: stage.model.is_held)
    await follower.next_report()
    stage.model.release()
    await asyncio.gather(*asking)
    await eventually(stage.is_quiet)
    await follower.until(lambda: follower.report is not None and follower.report.device_pool.evictable_pages)
    report = follower.report
    assert report is not None
    pool = report.device_pool
    assert pool.total_pages == 1200
    assert pool.free_pages + pool.evictable_pages + pool.protected_pages == 1200
    assert (report.running_requests, report.queued_requests, report.uncached_tokens) == (0, 0, 0)
    follower.close()


async def test_reader_that_does_not_read_holds_up_neither_the_engine_nor_other_readers(
    stage: FakeStage,
) -> None:
    """What it has not taken is not kept for it either: it is told to begin anew when the log has left it behind."""
    watchers = stage.worker.server._watchers
    watchers._publisher._log._max_events = LOG_EVENTS
    await ask(stage, prompt(0))
    slow = watchers.read(None, 0.0)
    await anext(slow)
    quick = Follower(stage.worker)
    for seed in range(30):
        await ask(stage, prompt(seed))
    await eventually(stage.is_quiet)
    await quick.until(lambda: quick.view.blocks(Tier.DEVICE) == held(stage))
    assert watchers._publisher.sequence > 2 * LOG_EVENTS
    with pytest.raises(OverloadedError, match="begin anew"):
        [news async for news in slow]
    again = Follower(stage.worker)
    await again.next_report()
    assert again.view.blocks(Tier.DEVICE) == held(stage)
    quick.close()
    again.close()


async def test_reader_ends_when_the_worker_stops(stage: FakeStage) -> None:
    follower = Follower(stage.worker)
    await follower.next_report()
    stopping = asyncio.create_task(stage.worker.server.stop(0.0))
    with pytest.raises(UnavailableError):
        await follower.until(lambda: False)
    await stopping


async def test_caller_without_the_fleets_token_is_refused(stage: FakeStage) -> None:
    call = stage.worker.control.WatchCache(control_pb.WatchCacheRequest())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert isinstance(from_rpc_error(refused.value), AuthenticationError)


async def test_malformed_place_is_refused_by_its_name(stage: FakeStage) -> None:
    follower = Follower(stage.worker, (1, -1))
    with pytest.raises(InvalidRequestError, match=r"resume_from\.sequence"):
        await follower.step()


async def test_cache_that_tells_nothing_says_so() -> None:
    settings = EngineConfig(max_total_tokens=1200, prefix_cache="hash")
    async with fake_worker(settings) as stage:
        follower = Follower(stage.worker)
        with pytest.raises(UnsupportedError, match="radix"):
            await follower.step()


@pytest.mark.parametrize("cache", ["hash", "radix"])
async def test_who_asks_for_reports_alone_is_told_the_load_and_nothing_of_the_cache(cache: str) -> None:
    """Also where the cache names no blocks: its load is known all the same."""
    settings = EngineConfig(max_total_tokens=1200, prefix_cache=cache)  # type: ignore[arg-type]
    async with fake_worker(settings) as stage:
        request = control_pb.WatchCacheRequest(report_interval_ms=REPORT_MS, reports_only=True)
        call = stage.worker.control.WatchCache(request, metadata=stage.worker.control_metadata())
        await ask(stage, prompt(1))
        async for message in call:
            assert message.WhichOneof("news") == "report"
            if message.report.prefill.linear_ms_per_token:
                break
        call.cancel()


async def test_worker_without_a_cache_tells_its_load_and_that_it_holds_nothing() -> None:
    settings = EngineConfig(max_total_tokens=1200, prefix_cache="off")
    async with fake_worker(settings) as stage:
        follower = Follower(stage.worker)
        await ask(stage, prompt(1))
        await follower.until(lambda: follower.report is not None and follower.report.prefill_ms_per_token)
        assert not follower.view.blocks(Tier.DEVICE)
        follower.close()


async def test_dead_engine_ends_the_readers() -> None:
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        follower = Follower(worker)
        await follower.next_report()
        engine.die()
        with pytest.raises(UnavailableError, match="gone"):
            await follower.until(lambda: False)
