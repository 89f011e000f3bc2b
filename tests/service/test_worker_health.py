"""A router over real sockets: who stands still is put out and comes back, who is only busy is not."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from click.testing import CliRunner

from prefixmesh.cli.main import main
from prefixmesh.errors import InternalError, PrefixmeshError
from prefixmesh.proto.v1 import router_pb2
from prefixmesh.router.worker_entry import WorkerEntry
from prefixmesh.router.worker_health import FAILURES_OUT
from tests.support.router_kit import Router, running_router, token_request
from tests.support.servers import eventually, records_of
from tests.support.silent_proxy import SilentProxy, proxy_before

HASTY_TIMEOUT_S = 0.1
"""A tenth of a second for each probe: three and an interval are over well within a test's patience."""


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixmesh.router.worker_link.PROBE_TIMEOUT_S", HASTY_TIMEOUT_S)
    for name in ("PROBE_INTERVAL_S", "FIRST_PAUSE_S"):
        monkeypatch.setattr(f"prefixmesh.router.worker_health.{name}", HASTY_TIMEOUT_S / 4)


@asynccontextmanager
async def fleet_behind_proxies(count: int) -> AsyncIterator[tuple[Router, list[SilentProxy]]]:
    """A router that reaches ``count`` workers through a proxy each."""
    async with running_router(count) as router, AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(proxy_before(worker.address)) for worker in router.workers]
        for worker, proxy in zip(router.workers, proxies, strict=True):
            router.server.remove_worker(worker.address)
            router.server.add_worker(proxy.address)
        await router.until_ready(count)
        try:
            yield router, proxies
        finally:
            for proxy in proxies:
                proxy.go_on()
                router.server.remove_worker(proxy.address)


def entry_of(router: Router, worker_id: str) -> WorkerEntry:
    return next(entry for entry in router.server.core.registry if entry.name == worker_id)


async def view_of(router: Router, worker_id: str) -> router_pb2.WorkerView:
    return next(view for view in await router.list_workers() if view.worker_id == worker_id)


async def test_worker_that_stands_still_is_put_out_and_back_when_it_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with fleet_behind_proxies(2) as (router, proxies):
        proxies[0].stall()
        await eventually(lambda: entry_of(router, "w0").ejected)
        for seed in range(4):
            assert (await router.generate(token_request([seed] * 100))).started.worker_id == "w1"
        view = await view_of(router, "w0")
        assert (view.ready, view.ejected) == (False, True)
        assert view.failures >= FAILURES_OUT
        assert "was put out: it did not answer within" in view.problem
        assert records_of(caplog, "worker_ejected")
        listed = await asyncio.to_thread(
            CliRunner().invoke, main, ["workers", "list", "--address", router.address]
        )
        assert "was put out" in listed.stdout
        proxies[0].go_on()
        await router.until_ready(2)
        view = await view_of(router, "w0")
        assert (view.ready, view.ejected, view.failures) == (True, False, 0)


async def test_request_on_a_worker_that_stands_still_goes_on_elsewhere() -> None:
    """Once the worker is put out, which is told that nobody waits for it any more when it goes on."""
    async with fleet_behind_proxies(2) as (router, proxies):
        for worker in router.workers:
            worker.script.before_start.shut()
        running = asyncio.create_task(router.generate(token_request([1])))
        await eventually(lambda: any(worker.script.before_start.waiting for worker in router.workers))
        home = next(place for place, worker in enumerate(router.workers) if worker.running)
        proxies[home].stall()
        other = router.workers[1 - home]
        other.script.before_start.open()
        assert (await running).started.worker_id == other.worker_id
        assert router.workers[home].running == 1
        proxies[home].go_on()
        await eventually(lambda: router.workers[home].running == 0)


async def test_where_most_stand_still_requests_go_to_all_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with fleet_behind_proxies(2) as (router, proxies):
        for proxy in proxies:
            proxy.stall()
        await eventually(lambda: router.server.core.registry.spreads_over_all)
        await eventually(lambda: records_of(caplog, "workers_spread_over_all"))
        assert len(router.server.core.registry.ready) == 2
        assert not any(view.ejected for view in await router.list_workers())
        told = await asyncio.to_thread(
            CliRunner().invoke, main, ["workers", "list", "--json", "--address", router.address]
        )
        assert all(one["failures"] >= FAILURES_OUT for one in json.loads(told.stdout)["workers"])
        for proxy in proxies:
            proxy.go_on()
        await eventually(lambda: not router.server.core.registry.failing)
        await eventually(lambda: records_of(caplog, "workers_spread_over_well"))


async def test_worker_that_fails_its_requests_is_put_out_although_its_probes_are_good() -> None:
    async with running_router(2) as router:
        broken = router.workers[0]
        broken.script.error = InternalError("a bug of its")
        failed = 0
        for seed in range(40):
            try:
                await router.generate(token_request([seed] * 100))
            except PrefixmeshError:
                failed += 1
            if entry_of(router, "w0").ejected:
                break
        assert failed == FAILURES_OUT
        assert "a bug of its" in entry_of(router, "w0").problem
        broken.script.error = None
        await router.until_ready(2)


async def test_busy_worker_that_reports_and_answers_no_probe_is_never_put_out() -> None:
    async with running_router(2) as router:
        for worker in router.workers:
            worker.before_check.shut()
        await eventually(lambda: all(worker.checks_begun > FAILURES_OUT for worker in router.workers))
        assert len(router.server.core.registry.ready) == 2
        assert not router.server.core.registry.failing


async def test_draining_worker_is_not_failing() -> None:
    """So that it is back at once when the drain is undone."""
    async with running_router(2) as router:
        worker = router.workers[0]
        await worker.set_serving(serving=False)
        begun = worker.checks_begun
        await eventually(lambda: worker.checks_begun > begun + 2 * FAILURES_OUT)
        assert entry_of(router, "w0").health.failures == 0
        await worker.set_serving(serving=True)
        await router.until_ready(2)
