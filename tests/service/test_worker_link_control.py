"""A control call of a router's ends in an answer or an error, whatever becomes of the connection."""

import asyncio
from typing import Any

import grpc.aio
import pytest

from prefixmesh.errors import UnavailableError
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.worker_link import WorkerLink
from tests.service.test_router_pins import WAIT_S, listed, pin, pinning_router, put, workers
from tests.support.servers import eventually


async def test_order_to_a_worker_that_is_removed_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Its connection is closed, which gRPC tells as a cancellation. Whoever ordered it hears of it like of any failure."""
    async with pinning_router(2) as router:
        worker = workers(router)[0]
        worker.before_warm.shut()
        await put(router, pin(replicas=2))
        await eventually(lambda: worker.before_warm.waiting, WAIT_S)
        assert router.server.remove_worker(worker.address)

        async def has_failed() -> bool:
            return dict((await listed(router)).actions).get("warm_failed") == 1

        await eventually(has_failed, WAIT_S)
        assert "the connection to it was closed" in caplog.text
        worker.before_warm.open()


class ClosedChannel:
    """What gRPC does with a call that runs while its channel is closed, or is begun afterwards."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def Describe(self, *_: Any, **__: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    "error", [asyncio.CancelledError(), grpc.aio.UsageError("Channel is closed.")], ids=["runs", "begins"]
)
async def test_question_to_a_worker_that_is_removed_ends_in_an_error(error: BaseException) -> None:
    """Who waits for what it says (a request with a new adapter, an order that has ended) is not cancelled with it."""
    link = WorkerLink.__new__(WorkerLink)
    link.endpoint, link._control, link._metadata = Endpoint("host-a:1"), ClosedChannel(error), ()  # type: ignore[assignment]
    with pytest.raises(UnavailableError, match="the connection to it was closed"):
        await link.describe(1.0)


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
async def test_caller_that_is_cancelled_is_cancelled(how: str) -> None:
    """And one that has waited long enough is told that."""
    link, begun = WorkerLink.__new__(WorkerLink), asyncio.Event()
    link.endpoint, link._control, link._metadata = Endpoint("host-a:1"), None, ()  # type: ignore[assignment]

    async def call(*_: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def ask() -> None:
        async with asyncio.timeout(0.0 if how == "timed out" else None):
            await link.control(call, 1.0)

    asking = asyncio.create_task(ask())
    if how == "cancelled":
        await begun.wait()
        asking.cancel()
    (ended,) = await asyncio.gather(asking, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError if how == "cancelled" else TimeoutError)
    assert not isinstance(ended, UnavailableError)
