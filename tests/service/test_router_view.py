"""A router's view of its workers over real streams: it comes to be exact, stays so through faults, and says what it is."""

import asyncio
import logging

import pytest

from prefixmesh.cache.tier import Tier
from prefixmesh.router import fleet_view, report_interval
from prefixmesh.router.fleet_view import Followed
from prefixmesh.router.worker_view import Trust
from tests.support.fake_worker import Script
from tests.support.router_kit import Router, running_router, token_request
from tests.support.servers import eventually, records_of

PROMPT = range(200)


def followed_at(router: Router, index: int = 0) -> Followed:
    return list(router.server.core.view)[index][1]


def is_exact(router: Router) -> bool:
    """Every view is proved, and holds what its worker's own books hold."""
    core = router.server.core
    by_address = {worker.address: worker for worker in router.workers}
    return all(
        followed.trust is Trust.EXACT
        and core.view.index.held(followed.slot, Tier.DEVICE) == by_address[endpoint].told.held
        for endpoint, followed in core.view
    )


async def ask(router: Router, *seeds: int) -> None:
    await asyncio.gather(*(router.generate(token_request([seed] * 300)) for seed in seeds))


async def test_view_holds_what_the_worker_holds_and_proves_it() -> None:
    async with running_router(2) as router:
        await ask(router, *range(20))
        await eventually(lambda: is_exact(router))
        assert len(router.server.core.view.index) == 20 * 4
        assert [view.trust for view in await router.list_workers()] == ["exact", "exact"]
        assert sum(view.blocks for view in await router.list_workers()) == 20 * 4
        router.workers[0].told.evict(3)
        await eventually(lambda: is_exact(router))
        router.server.core.check_invariants()


async def test_what_is_evicted_is_not_counted_on_a_moment_later() -> None:
    """A request that comes after an eviction is predicted to find what is left."""
    async with running_router(1) as router:
        await ask(router, 1)
        await eventually(lambda: is_exact(router))
        router.workers[0].told.evict(100)
        await eventually(lambda: is_exact(router))
        await eventually(lambda: len(router.server.core.view.predictions) == 0)
        answer = await router.generate(token_request([1] * 300))
        assert answer.started.routing.predicted_cached_tokens == 0


async def test_flush_of_an_idle_worker_leaves_nothing_credited_to_it() -> None:
    """F26."""
    async with running_router(1) as router:
        await ask(router, 1, 2)
        await eventually(lambda: is_exact(router))
        router.workers[0].told.flush()
        await eventually(lambda: is_exact(router))
        assert followed_at(router).blocks == 0
        assert not followed_at(router).view.causes, "events alone tell of a flush"


async def test_one_lost_event_costs_one_resync_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """F24: the loss is seen, a snapshot repairs it, later events need none; log and counts say so."""
    caplog.set_level(logging.INFO)
    async with running_router(1) as router:
        await ask(router, 1)
        await eventually(lambda: is_exact(router))
        router.workers[0].told.skip_next = True
        router.workers[0].told.evict(1)
        await eventually(lambda: followed_at(router).view.causes.total() == 1)
        await eventually(lambda: is_exact(router))
        router.workers[0].told.evict(1)
        await ask(router, 3)
        await eventually(lambda: is_exact(router))
        ((cause, count),) = followed_at(router).view.causes.items()
        assert count == 1
        assert [dict(view.resyncs) for view in await router.list_workers()] == [{cause: 1}]
        told = [record.getMessage() for record in records_of(caplog, "worker_view")]
        assert any(f"from=exact to=catching_up cause={cause}" in line for line in told)
        assert told[-1].endswith("to=exact cause=proved")
        ((view,), changes) = await router.list_workers(), followed_at(router).changes
        assert dict(view.trust_changes) == changes
        assert changes["exact"] >= 2


async def test_message_without_sense_begins_the_stream_anew(caplog: pytest.LogCaptureFixture) -> None:
    async with running_router(1) as router:
        await ask(router, 1)
        await eventually(lambda: is_exact(router))
        router.workers[0].told.garble_next = True
        router.workers[0].told.evict(1)
        await eventually(lambda: router.workers[0].told.streams >= 2 and is_exact(router))
        assert followed_at(router).view.causes == {"malformed": 1}
        (record,) = records_of(caplog, "cache_stream_ended")
        assert "events.events[0]" in record.getMessage()


async def test_silent_stream_makes_the_view_stale_and_is_opened_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that lives and says nothing of its cache: believed less, reported, asked again, and exact when it speaks."""
    monkeypatch.setattr(fleet_view, "LEAST_SILENCE_S", 0.3)
    async with running_router(1) as router:
        await ask(router, 1)
        await eventually(lambda: is_exact(router))
        told = router.workers[0].told
        told.silent.set()
        await eventually(lambda: followed_at(router).trust is Trust.STALE)
        await eventually(lambda: told.streams >= 2)
        assert "cause=silent" in records_of(caplog, "cache_stream_ended")[0].getMessage()
        assert (await router.generate(token_request([1] * 300))).started.cached_tokens.device == 299
        told.silent.clear()
        await eventually(lambda: is_exact(router))


async def test_worker_that_tells_nothing_is_reported_and_not_taken_for_cold(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """F27: a cache that has no events is named in the log and shown as blind, and what was sent there is believed all the same."""
    async with running_router(1, script=Script(prefix_cache="hash")) as router:
        await eventually(lambda: records_of(caplog, "worker_tells_nothing"))
        assert (await router.list_workers())[0].trust == "blind"
        await ask(router, 1)
        again = await router.generate(token_request([1] * 300))
        assert again.started.routing.predicted_cached_tokens > 0
        assert router.workers[0].told.streams == 0


async def test_router_that_comes_late_gets_everything() -> None:
    """F25, F27: a new router knows within a snapshot what thousands of requests before it have left, and counts on it at once."""
    async with running_router(1) as first:
        worker = first.workers[0]
        for seed in range(10_000):
            worker.told.held.add(seed + 1)  # type: ignore[arg-type]
        worker.told.publisher.stored(Tier.DEVICE, None, sorted(worker.told.held))
        await ask(first, 1)
        await first.server.stop(0.0)
        async with running_router(0, workers=(worker.address,), secret=first.secret) as second:
            second.workers.append(worker)
            await eventually(lambda: is_exact(second))
            answer = await second.generate(token_request([1] * 300))
            assert answer.started.routing.predicted_cached_tokens == 256
            assert len(second.server.core.view.index) == 10_004


async def test_restarted_worker_is_empty_and_exact_again() -> None:
    """F23: another life under the same address holds nothing of the old one's, and its load is its own."""
    async with running_router(1) as router:
        await ask(router, 1, 2)
        await eventually(lambda: is_exact(router))
        await router.workers[0].restart()
        await eventually(lambda: followed_at(router).blocks == 0)
        await router.until_ready(1)
        await ask(router, 3)
        await eventually(lambda: is_exact(router))
        assert router.loads() == [0]
        router.server.core.check_invariants()


async def test_restart_with_blocks_of_another_size_is_refused_and_back_by_itself() -> None:
    """A worker that names blocks otherwise is refused with the reason, is not followed, and is taken in again once it names them alike."""
    async with running_router(1) as router:
        worker = router.workers[0]
        await eventually(lambda: is_exact(router))
        worker.script.block_size = 16
        await worker.restart()
        (entry,) = router.server.core.registry
        await eventually(lambda: "blocks of 16 tokens, this router of 64" in entry.problem)
        assert worker.told.streams == 0
        worker.script.block_size = 64
        await worker.restart()
        await router.until_ready(1)
        await ask(router, 1)
        await eventually(lambda: is_exact(router))


async def test_removed_while_it_streams_and_added_again_begins_from_nothing() -> None:
    """F23, F31."""
    async with running_router(1) as router:
        await ask(router, 1)
        await eventually(lambda: is_exact(router))
        address = router.workers[0].address
        assert router.server.remove_worker(address)
        assert router.server.add_worker(address)
        followed = followed_at(router)
        assert (followed.trust, followed.blocks, router.loads()) == (Trust.BLIND, 0, [0])
        await router.until_ready(1)
        await eventually(lambda: is_exact(router))
        router.server.core.check_invariants()


async def test_first_token_and_cached_tokens_are_compared_with_what_was_predicted() -> None:
    async with running_router(1) as router:
        router.workers[0].script.cached_tokens = 64
        await ask(router, 1)
        (view,) = await router.list_workers()
        assert (view.cached_tokens_bias, view.cached_tokens_error) == (64.0, 64.0)
        assert view.first_token_ms_error > 0.0


@pytest.mark.parametrize(("workers", "interval_s"), [(1, 0.1), (100, 0.1), (4096, 4.096)])
def test_all_workers_together_report_at_most_two_thousand_times_a_second(
    workers: int, interval_s: float
) -> None:
    """F30: and whatever the interval, a silence is at least three of them."""
    assert report_interval.report_interval_s(workers) == pytest.approx(interval_s)
    assert fleet_view.silence_of(interval_s) >= 3 * interval_s


async def test_a_stream_reports_as_often_as_the_size_of_the_fleet_allows_by_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fleet that grows or shrinks worker by worker; no stream asks for a snapshot because of that."""
    monkeypatch.setattr(report_interval, "MAX_REPORTS_PER_S", 20)
    more = ("127.0.0.1:1", "127.0.0.1:2")
    async with running_router(1) as router:
        await ask(router, 1)
        told = router.workers[0].told
        await eventually(lambda: is_exact(router))
        assert told.asked_interval_ms == 100
        for address in more:
            router.server.add_worker(address)
        await eventually(lambda: told.asked_interval_ms == 300)
        for address in more:
            router.server.remove_worker(address)
        await eventually(lambda: told.asked_interval_ms == 100)
        await eventually(lambda: is_exact(router))
        assert not followed_at(router).view.causes
