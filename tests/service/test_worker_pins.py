"""Warm, Unpin and ListPins of a worker, over its real socket and with the real engine but for its model."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from prefixmesh.config import EngineConfig
from prefixmesh.errors import (
    BudgetError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PrefixmeshError,
    UnavailableError,
    UnsupportedError,
)
from prefixmesh.proto.v1 import inference_pb2
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.rpc.status import from_rpc_error
from prefixmesh.tokens import pack
from prefixmesh.worker import metrics, warming
from prefixmesh.worker.warm_order import MAX_TTL_MS
from tests.support.fake_engine import FakeStage, fake_worker
from tests.support.scraping import scrape
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import eventually, scripted_worker

pytestmark = pytest.mark.asyncio(loop_scope="function")

NS = b"n" * 16
PROMPT = list(range(1, 21))
SETTINGS: dict[str, Any] = {"max_total_tokens": 400, "page_size": 4, "max_running_requests": 4}


@asynccontextmanager
async def stage(**settings: Any) -> AsyncIterator[FakeStage]:
    """A worker; every count of what requests hold is 0 again at the end, and the engine's books are right."""
    async with fake_worker(EngineConfig(**SETTINGS | settings)) as worker:
        yield worker
        worker.model.release()
        await eventually(lambda: not (worker.scheduler.running or worker.scheduler.queued), 20.0)
        await worker.engine.stats()
        worker.core.check_invariants()
        assert worker.scheduler.kv.receipts_out == 0


def prefix(tokens: list[int] = PROMPT, **fields: Any) -> pb.Prefix:
    return pb.Prefix(**{"namespace": NS, "token_ids": pack(tokens)} | fields)


def pin(pin_id: str = "p", **fields: Any) -> pb.WorkerPin:
    return pb.WorkerPin(**{"pin_id": pin_id, "owner": "acme"} | fields)


async def ask(stage: FakeStage, method: str, request: Any) -> Any:
    """The answer; the error of our tree when the call fails."""
    worker = stage.worker
    try:
        return await getattr(worker.control, method)(
            request, metadata=worker.control_metadata(), timeout=30.0
        )
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def warm(stage: FakeStage, **fields: Any) -> pb.WarmResponse:
    answer: pb.WarmResponse = await ask(stage, "Warm", pb.WarmRequest(**{"prefix": prefix()} | fields))
    return answer


async def pins(stage: FakeStage) -> dict[str, int]:
    """Ids of the pins there are, and the tokens that each holds."""
    answer = await ask(stage, "ListPins", pb.WorkerPinsRequest())
    return {one.pin_id: one.held_tokens for one in answer.pins}


async def generate(stage: FakeStage, tokens: list[int], request_id: str, **fields: Any) -> Any:
    request = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenPrompt(ids=pack(tokens)),
        sampling=inference_pb2.Sampling(max_tokens=1),
    )
    metadata = stage.worker.ticket(request_id=request_id, namespace=NS, **fields)
    return await stage.worker.generate(request, metadata)


def warming_of(stage: FakeStage) -> warming.Warming:
    """What sees to its calls."""
    found = stage.worker.server._warming
    assert found is not None
    return found


async def fill(stage: FakeStage) -> None:
    """Other traffic, of more than the pool holds."""
    for number in range(10):
        await generate(stage, [100 + number, *range(100, 160)], f"other-{number}")


async def test_a_warmed_prompt_is_there_for_whoever_asks_next() -> None:
    async with stage() as worker:
        warmed = await warm(worker)
        assert (warmed.held_tokens, warmed.found_tokens, warmed.computed_tokens) == (20, 0, 20)
        again = await warm(worker)
        assert (again.held_tokens, again.found_tokens, again.computed_tokens) == (20, 20, 0)
        longer = await warm(worker, prefix=prefix([*PROMPT, 31, 32, 33, 34, 35]))
        assert (longer.held_tokens, longer.found_tokens, longer.computed_tokens) == (24, 20, 4)
        answer = await generate(worker, [*PROMPT, 50], "r")
        assert answer.started.cached_tokens.device == 20


async def test_a_pinned_prompt_is_still_a_hit_when_other_traffic_has_filled_the_pool() -> None:
    async with stage() as worker:
        warmed = await warm(worker, pin=pin())
        assert warmed.held_tokens == 20
        await fill(worker)
        stats = await worker.engine.stats()
        assert stats.evicted_pages > 0, "the pool was never full"
        assert (stats.pins.pinned_pages, stats.pins.charged_pages, stats.pins.pins) == (5, 5, 1)
        answer = await generate(worker, [*PROMPT, 50], "r")
        assert answer.started.cached_tokens.device == 20


async def test_what_is_unpinned_may_go_again() -> None:
    async with stage() as worker:
        await warm(worker, pin=pin())
        answer = await ask(worker, "Unpin", pb.UnpinRequest(pin_id="p"))
        assert answer.removed
        answer = await ask(worker, "Unpin", pb.UnpinRequest(pin_id="p"))
        assert not answer.removed
        await fill(worker)
        answer = await generate(worker, [*PROMPT, 50], "r")
        assert answer.started.cached_tokens.device == 0


async def test_a_flush_leaves_the_wish_and_the_next_prompt_fulfils_it() -> None:
    async with stage() as worker:
        await warm(worker, pin=pin())
        listed = await ask(worker, "ListPins", pb.WorkerPinsRequest())
        await ask(worker, "Flush", pb.FlushRequest())
        after = await ask(worker, "ListPins", pb.WorkerPinsRequest())
        (one,) = after.pins
        assert (one.held_tokens, one.missing_tokens, one.pages, one.owner) == (0, 20, 5, "acme")
        assert after.version > listed.version
        assert (after.charged_pages, after.budget_pages, after.owner_budget_pages) == (5, 30, 15)
        await generate(worker, [*PROMPT, 50], "r")
        assert await pins(worker) == {"p": 20}


async def test_a_pin_with_a_time_tells_when_it_ends() -> None:
    async with stage() as worker:
        await warm(worker, pin=pin(ttl_ms=3_600_000))
        (one,) = (await ask(worker, "ListPins", pb.WorkerPinsRequest())).pins
        assert 3_000_000 < one.expires_in_ms <= 3_600_000
        await warm(worker, pin=pin(ttl_ms=MAX_TTL_MS))
        (one,) = (await ask(worker, "ListPins", pb.WorkerPinsRequest())).pins
        assert 0 < MAX_TTL_MS - one.expires_in_ms < 600_000
        await warm(worker, pin=pin())
        (one,) = (await ask(worker, "ListPins", pb.WorkerPinsRequest())).pins
        assert one.expires_in_ms == 0


async def test_a_pin_without_room_is_refused_with_the_sums_and_computes_nothing() -> None:
    """Of 100 pages an owner may have 15."""
    async with stage() as worker:
        with pytest.raises(BudgetError, match="16 more wanted, 0 used, limit 15 pages per owner"):
            await warm(worker, prefix=prefix([7] * 64), pin=pin())
        assert (await worker.engine.stats()).steps == 0
        assert await pins(worker) == {}


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({"prefix": prefix(namespace=b"short")}, "prefix.namespace"),
        ({"prefix": prefix(token_ids=b"12345")}, "prefix.token_ids"),
        ({"prefix": prefix([1, 2, 3])}, "prefix.token_ids"),
        ({"prefix": prefix([1] * 404)}, "prefix.token_ids"),
        ({"prefix": prefix([1, 2, 3, 1 << 31])}, "prefix.token_ids"),
        ({"prefix": pb.Prefix(namespace=NS)}, "prefix.token_ids"),
        ({"prefix": prefix(boundary_tokens=3, tail_namespace=NS)}, "prefix.boundary_tokens"),
        ({"prefix": prefix(boundary_tokens=-64, tail_namespace=NS)}, "prefix.boundary_tokens"),
        ({"prefix": prefix(boundary_tokens=64)}, "prefix.tail_namespace"),
        ({"prefix": prefix(tail_namespace=NS)}, "prefix.tail_namespace"),
        ({"pin": pin("")}, "pin.pin_id"),
        ({"pin": pin("x" * 513)}, "pin.pin_id"),
        ({"pin": pin(owner="")}, "pin.owner"),
        ({"pin": pin(owner="o" * 129)}, "pin.owner"),
        ({"pin": pin(ttl_ms=-1)}, "pin.ttl_ms"),
        ({"pin": pin(ttl_ms=2**63 - 1)}, "pin.ttl_ms"),
        ({"pin": pin(tier=7)}, "pin.tier"),
        ({"prefix": pb.Prefix(adapter_digest="d"), "pin": pin()}, "pin"),
        ({"sources": [pb.KvSource(address="a:1")] * 17}, "sources"),
        ({"sources": [pb.KvSource()]}, "sources[0].address"),
        ({"sources": [pb.KvSource(address="a:1", tokens=-1)]}, "sources[0].tokens"),
    ],
)
async def test_every_field_is_checked_before_anything_is_begun(
    request_fields: dict[str, Any], field: str
) -> None:
    async with stage() as worker:
        with pytest.raises(InvalidRequestError) as caught:
            await warm(worker, **request_fields)
        assert caught.value.field == field
        assert await pins(worker) == {}
        assert (await worker.engine.stats()).steps == 0


async def test_an_unknown_adapter_is_refused_by_its_field() -> None:
    async with stage() as worker:
        for fields in ({"prefix": prefix(adapter_digest="d")}, {"prefix": pb.Prefix(adapter_digest="d")}):
            with pytest.raises(NotFoundError, match=r"prefix\.adapter_digest"):
                await warm(worker, **fields)


async def test_the_same_id_for_another_prefix_is_refused_and_leaves_the_first() -> None:
    async with stage() as worker:
        await warm(worker, pin=pin())
        with pytest.raises(InvalidRequestError) as caught:
            await warm(worker, prefix=prefix([9] * 20), pin=pin())
        assert caught.value.field == "pin.pin_id"
        assert await pins(worker) == {"p": 20}


async def test_a_caller_that_leaves_takes_its_pin_and_its_request_along() -> None:
    async with stage() as worker:
        worker.model.hold()
        call = asyncio.create_task(warm(worker, pin=pin()))
        await eventually(lambda: worker.model.is_held)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await eventually(lambda: not len(worker.worker.server._calls))
        worker.model.release()

        async def gone() -> bool:
            return await pins(worker) == {}

        await eventually(gone)


async def test_a_caller_that_leaves_takes_no_pin_along_that_was_there_before() -> None:
    async with stage() as worker:
        await warm(worker, pin=pin())
        await ask(worker, "Flush", pb.FlushRequest())
        worker.model.hold()
        call = asyncio.create_task(warm(worker, pin=pin()))
        await eventually(lambda: worker.model.is_held)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await eventually(lambda: not len(worker.worker.server._calls))
        worker.model.release()
        assert set(await pins(worker)) == {"p"}


async def test_of_two_calls_for_one_pin_the_one_that_goes_on_keeps_it() -> None:
    async with stage() as worker:
        worker.model.hold()
        first = asyncio.create_task(warm(worker, pin=pin()))
        await eventually(lambda: worker.model.is_held)
        second = asyncio.create_task(warm(worker, pin=pin()))
        await eventually(lambda: warming_of(worker)._by_pin["p"] == 2)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await eventually(lambda: warming_of(worker)._by_pin["p"] == 1)
        worker.model.release()
        assert (await second).held_tokens == 20
        assert await pins(worker) == {"p": 20}


async def test_only_so_many_are_warmed_at_once_and_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "MAX_WAITING_WARMS", 2)
    async with stage() as worker:
        worker.model.hold()
        calls = [
            asyncio.create_task(warm(worker, prefix=prefix([number] * 20)))
            for number in range(warming.MAX_WARMS + 2)
        ]
        await eventually(lambda: warming_of(worker)._entered == len(calls))
        assert len(worker.worker.server._calls) == warming.MAX_WARMS
        with pytest.raises(OverloadedError, match="2 prefixes wait to be warmed already"):
            await warm(worker)
        worker.model.release()
        assert [answer.held_tokens for answer in await asyncio.gather(*calls)] == [20] * len(calls)


async def test_a_worker_that_drains_warms_nothing_new() -> None:
    async with stage() as worker:
        await ask(worker, "Drain", pb.DrainRequest())
        with pytest.raises(UnavailableError, match="draining"):
            await warm(worker, pin=pin())
        assert await pins(worker) == {}
        await ask(worker, "Drain", pb.DrainRequest(undo=True))
        assert (await warm(worker)).held_tokens == 20


async def test_warming_counts_among_no_callers_prompts() -> None:
    async with stage() as worker:
        await warm(worker, pin=pin())
        stats = await worker.engine.stats()
        assert (stats.cache.requests, stats.answer_tokens) == (0, 0)
        await generate(worker, [*PROMPT, 50], "r")
        assert (await worker.engine.stats()).cache.requests == 1


async def test_warming_takes_no_callers_place() -> None:
    async with stage(max_queued_requests=1, max_running_requests=1) as worker:
        worker.model.hold()
        running = asyncio.create_task(generate(worker, [1, 2, 3], "running"))
        await eventually(lambda: worker.model.is_held)
        call = asyncio.create_task(warm(worker))
        await eventually(lambda: len(worker.worker.server._calls) == 2)
        queued = asyncio.create_task(generate(worker, [4, 5, 6], "queued"))
        await eventually(lambda: len(worker.worker.server._calls) == 3)
        worker.model.release()
        await asyncio.gather(running, queued)
        [outcome] = await asyncio.gather(call, return_exceptions=True)
        # Whoever comes to the engine's own queue second finds it full, and a caller goes before.
        assert isinstance(outcome, pb.WarmResponse | OverloadedError)


@pytest.mark.parametrize("kind", ["hash", "off"])
async def test_other_caches_say_that_they_pin_nothing(kind: str) -> None:
    async with stage(prefix_cache=kind) as worker:
        for method, request in (
            ("Warm", pb.WarmRequest(prefix=prefix(), pin=pin())),
            ("Unpin", pb.UnpinRequest(pin_id="p")),
            ("ListPins", pb.WorkerPinsRequest()),
        ):
            with pytest.raises(UnsupportedError, match="radix"):
                await ask(worker, method, request)


async def test_a_host_pin_wants_a_host_tier() -> None:
    async with stage() as worker:
        with pytest.raises(UnsupportedError, match="no host tier"):
            await warm(worker, pin=pin(tier=pb.TIER_HOST))


async def test_an_id_that_cannot_be_is_refused_by_unpin() -> None:
    async with stage() as worker:
        for pin_id in ("", "x" * 513):
            with pytest.raises(InvalidRequestError) as caught:
                await ask(worker, "Unpin", pb.UnpinRequest(pin_id=pin_id))
            assert caught.value.field == "pin_id"


async def test_an_engine_that_pins_nothing_leaves_the_worker_well() -> None:
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.control.ListPins(pb.WorkerPinsRequest(), metadata=worker.control_metadata())
        assert isinstance(from_rpc_error(caught.value), PrefixmeshError)
        request = inference_pb2.GenerateRequest(tokens=inference_pb2.TokenPrompt(ids=pack([1, 2])))
        assert (await worker.generate(request)).finished.usage.completion_tokens


async def test_the_hottest_prefixes_are_told_for_who_takes_over() -> None:
    async with stage() as worker:
        for number in range(3):
            await generate(worker, [*PROMPT, 60 + number], f"r-{number}")
        await generate(worker, [9] * 12, "once")
        answer = await ask(worker, "ListHotPrefixes", pb.HotPrefixesRequest(max_prefixes=8, max_tokens=1000))
        (one,) = answer.prefixes
        assert (one.prefix, one.hits, one.owner) == (prefix(), 2, "acme")
        for fields, field in (
            ({"max_prefixes": 0, "max_tokens": 1}, "max_prefixes"),
            ({"max_prefixes": 1, "max_tokens": -1}, "max_tokens"),
            ({"max_prefixes": 1 << 20, "max_tokens": 1}, "max_prefixes"),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                await ask(worker, "ListHotPrefixes", pb.HotPrefixesRequest(**fields))
            assert caught.value.field == field


async def test_pins_and_warming_are_on_the_metrics_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LEAST_INTERVAL_S", 0.0)
    async with fake_worker(EngineConfig(**SETTINGS), metrics_port=0) as worker:
        await warm(worker, pin=pin())
        await warm(worker, prefix=prefix([*PROMPT, 30, 31, 32, 33]), pin=pin("q"))
        with pytest.raises(BudgetError):
            await warm(worker, prefix=prefix([7] * 64), pin=pin("r"))
        url = worker.worker.bound.metrics_url
        assert url is not None
        page = await scrape(url)
        assert page.value("prefixmesh_pins") == 2
        assert page.value("prefixmesh_pinned_pages", tier="device") == 6
        assert page.value("prefixmesh_pin_charged_pages", tier="device") == 11
        assert page.value("prefixmesh_pin_charged_pages", tier="host") == 0
        assert page.value("prefixmesh_pin_budget_pages") == 30
        assert page.value("prefixmesh_warms_total", outcome="warmed") == 2
        assert page.value("prefixmesh_warms_total", outcome="over_budget") == 1
        assert page.value("prefixmesh_warmed_tokens_total", source="computed") == 24
        assert page.value("prefixmesh_warmed_tokens_total", source="found") == 20
        assert page.value("prefixmesh_requests_total", outcome="length") == 0


async def test_reports_tell_when_the_list_of_pins_has_changed() -> None:
    async with stage() as worker:
        control = worker.worker.control
        request = pb.WatchCacheRequest(report_interval_ms=100, reports_only=True)
        watch = control.WatchCache(request, metadata=worker.worker.control_metadata(), timeout=30.0)
        assert (await watch.read()).report.pins_version == 0
        for change in (
            ("Warm", pb.WarmRequest(prefix=prefix(), pin=pin())),
            ("Unpin", pb.UnpinRequest(pin_id="p")),
        ):
            before = (await ask(worker, "ListPins", pb.WorkerPinsRequest())).version
            await ask(worker, *change)
            version = (await ask(worker, "ListPins", pb.WorkerPinsRequest())).version
            assert version > before
            while (await watch.read()).report.pins_version != version:
                pass
        watch.cancel()
