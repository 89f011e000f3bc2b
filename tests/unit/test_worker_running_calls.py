"""The table of running calls: its bound, its owners, and its end."""

import asyncio

import pytest

from prefixmesh.errors import AuthenticationError, OverloadedError, UnavailableError
from prefixmesh.ids import RequestId, TenantId
from prefixmesh.worker.running_calls import RunningCalls

A, B, C = (RequestId(name) for name in "abc")
ACME, BOLT = TenantId("acme"), TenantId("bolt")


async def test_a_place_is_given_back_whatever_happens() -> None:
    """An error inside a call frees its place."""
    calls = RunningCalls(1)
    with pytest.raises(ValueError, match="inside"), calls.enter(A, ACME):
        raise ValueError("inside")
    assert len(calls) == 0
    assert await calls.wait_idle(0)


async def test_places_are_bounded_and_ids_are_unique() -> None:
    """The table never holds more than its limit, nor an id twice."""
    calls = RunningCalls(2)
    with calls.enter(A, ACME), calls.enter(B, ACME):
        with pytest.raises(OverloadedError, match="2 requests"), calls.enter(C, ACME):
            pass
        with pytest.raises(AuthenticationError), calls.enter(A, BOLT):
            pass
        assert len(calls) == 2
        assert calls.belongs_to(A, ACME)
        assert not calls.belongs_to(A, BOLT)
    assert not calls.belongs_to(A, ACME)


async def test_a_closed_table_refuses_and_waits_for_the_rest() -> None:
    """After ``close`` nobody comes in; the wait ends with the last that was in, or with its time."""
    calls = RunningCalls(2)
    with calls.enter(A, ACME):
        calls.close("going home")
        with pytest.raises(UnavailableError, match="going home"), calls.enter(B, ACME):
            pass
        assert not await calls.wait_idle(0.01)
        waiting = asyncio.create_task(calls.wait_idle(5))
        await asyncio.sleep(0)
        assert not waiting.done()
    assert await waiting
