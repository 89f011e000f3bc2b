"""The table of running calls: its bound, its owners, and its end."""

import asyncio

import pytest

from prefixmesh.errors import (
    AuthenticationError,
    CancelledError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from prefixmesh.ids import RequestId, TenantId
from prefixmesh.worker.running_calls import RunningCalls

A, B, C = (RequestId(name) for name in "abc")
ACME, BOLT = TenantId("acme"), TenantId("bolt")


async def test_a_place_is_given_back_whatever_happens() -> None:
    """An error inside a call frees its place."""
    calls = RunningCalls(1, queue_limit=1)
    with pytest.raises(ValueError, match="inside"), calls.enter(A, ACME):
        raise ValueError("inside")
    assert len(calls) == 0
    assert await calls.wait_idle(0)


async def test_places_are_bounded_and_ids_are_unique() -> None:
    """The table never holds more than its limit, nor an id twice."""
    calls = RunningCalls(2, queue_limit=2)
    with calls.enter(A, ACME), calls.enter(B, ACME):
        with pytest.raises(OverloadedError, match="2 requests"), calls.enter(C, ACME):
            pass
        with pytest.raises(AuthenticationError), calls.enter(A, BOLT):
            pass
        assert len(calls) == 2
        assert calls.abort(A, ACME) == 1
        assert calls.abort(A, BOLT) == 0
    assert calls.abort(A, ACME) == 0


async def test_a_call_knows_that_its_own_tenant_has_aborted_it() -> None:
    calls = RunningCalls(2, queue_limit=2)
    with calls.enter(A, ACME) as place:
        calls.abort(A, BOLT)
        calls.abort(B, ACME)
        place.check_wanted()
        calls.abort(A, ACME)
        with pytest.raises(CancelledError):
            place.check_wanted()


async def test_a_call_gets_a_place_for_every_branch_or_none() -> None:
    """A refused call has taken nothing, an ended one has left nothing."""
    calls = RunningCalls(5, queue_limit=9)
    with calls.enter(A, ACME, 3):
        assert calls.abort(A, ACME) == 3
        with pytest.raises(OverloadedError, match="5 requests"), calls.enter(B, ACME, 3):
            pass
        with calls.enter(B, ACME, 2), pytest.raises(OverloadedError), calls.enter(C, ACME):
            pass
        assert len(calls) == 1
    with calls.enter(A, ACME, 5):
        pass


async def test_branches_are_taken_only_where_the_queue_holds_all() -> None:
    """Those of others that wait count until the engine has begun with them; a single request is left to the engine."""
    calls = RunningCalls(10, queue_limit=4)
    with calls.enter(A, ACME, 2) as place, calls.enter(B, ACME):
        with (
            pytest.raises(OverloadedError, match="3 requests are waiting here of 4"),
            calls.enter(C, ACME, 2),
        ):
            pass
        place.admitted()
        with calls.enter(C, ACME, 2), calls.enter(RequestId("d"), ACME):
            pass


async def test_more_branches_than_the_queue_can_ever_hold_are_the_callers_error() -> None:
    """To try again would never help."""
    calls = RunningCalls(10, queue_limit=4)
    with pytest.raises(InvalidRequestError, match="branches: at most 4"), calls.enter(A, ACME, 5):
        pass


async def test_a_closed_table_refuses_and_waits_for_the_rest() -> None:
    """After ``close`` nobody comes in; the wait ends with the last that was in, or with its time."""
    calls = RunningCalls(2, queue_limit=2)
    with calls.enter(A, ACME):
        calls.close("going home")
        with pytest.raises(UnavailableError, match="going home"), calls.enter(B, ACME):
            pass
        assert not await calls.wait_idle(0.01)
        waiting = asyncio.create_task(calls.wait_idle(5))
        await asyncio.sleep(0)
        assert not waiting.done()
    assert await waiting
