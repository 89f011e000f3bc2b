"""Calls that a link gives up: their readers wake up and know why, and nobody else's call is touched."""

import asyncio

import pytest

from prefixmesh.errors import UnavailableError
from prefixmesh.router import worker_link
from prefixmesh.router.worker_link import WorkerLink
from tests.support.fake_worker import Script
from tests.support.router_kit import Router, running_router, token_request
from tests.support.servers import eventually


def link_of(router: Router) -> WorkerLink:
    pool = router.server._pool
    assert pool is not None
    return pool.link(router.server.core.registry.ready[0].endpoint)


def shut_script() -> Script:
    script = Script()
    script.before_start.shut()
    return script


async def test_stream_on_a_worker_that_is_given_up_ends_at_once_and_says_why() -> None:
    script = shut_script()
    async with running_router(1, script=script) as router:
        running = asyncio.create_task(router.generate(token_request([1])))
        await eventually(lambda: script.before_start.waiting == 1)
        link_of(router).give_up_calls("worker w0 has stalled")
        with pytest.raises(UnavailableError, match="w0 has stalled"):
            await running
        await eventually(lambda: router.workers[0].running == 0)
        assert router.loads() == [0]


async def test_call_that_was_given_up_tells_so_and_one_that_was_cancelled_does_not() -> None:
    async with running_router(1, script=shut_script()) as router:
        link = link_of(router)
        with link.generate(b"", (), None) as left, link.generate(b"", (), None) as given_up:
            readers = [asyncio.ensure_future(call.read()) for call in (left, given_up)]
            left.cancel()
            link.give_up_calls("stalled")
            await asyncio.wait(readers)
        assert all(reader.cancelled() for reader in readers)
        assert (left.given_up, given_up.given_up) == ("", "stalled")


async def test_call_that_has_ended_keeps_its_own_end() -> None:
    async with running_router(1) as router:
        link = link_of(router)
        with link.generate(b"", (), None) as call:
            with pytest.raises(Exception, match="ticket"):
                await call.read()
            link.give_up_calls("stalled")
        assert call.given_up == ""


async def test_link_that_has_given_its_calls_up_carries_new_ones() -> None:
    async with running_router(1) as router:
        link_of(router).give_up_calls("stalled")
        assert (await router.generate(token_request([1]))).finished


async def test_calls_at_a_worker_that_nobody_can_reach_may_end_by_themselves_before_they_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that has drained is gone as soon as it has sent its last frames: those that are here and not read yet are no loss."""
    monkeypatch.setattr(worker_link, "END_BY_THEMSELVES_S", 0.05)
    script = shut_script()
    async with running_router(1, script=script) as router:
        link = link_of(router)
        running = asyncio.create_task(router.generate(token_request([1])))
        await eventually(lambda: script.before_start.waiting == 1)
        link._give_up_later("nobody is there")
        assert [call.given_up for call in link._calls] == [""]
        with pytest.raises(UnavailableError, match="nobody is there"):
            await running
