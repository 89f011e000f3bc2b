"""A router that is full says so at once, on both data paths; and a deadline ends a request on every hop of the direct one (F22)."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from prefixmesh.client import AsyncClient
from prefixmesh.config import EngineConfig
from prefixmesh.errors import DeadlineError, OverloadedError
from prefixmesh.proto.v1 import inference_pb2 as pb
from tests.support.fake_engine import FakeStage, fake_worker
from tests.support.routed_worker import router_before, scripted_model
from tests.support.router_kit import Router, token_request
from tests.support.servers import eventually

ONE_PLACE = EngineConfig(max_total_tokens=2000, max_running_requests=1)

paths = pytest.mark.parametrize("direct", [False, True], ids=["proxied", "direct"])


@asynccontextmanager
async def busy_router(max_wait_s: float) -> AsyncIterator[tuple[FakeStage, Router]]:
    """A router before a worker that is in the middle of the only answer that it has a place for."""
    async with (
        fake_worker(ONE_PLACE) as stage,
        router_before(stage.worker, scripted_model(), max_wait_s=max_wait_s) as router,
    ):
        endless = token_request([5, 5], sampling=pb.Sampling(max_tokens=900, ignore_eos=True))
        running = router.inference.Generate(endless)
        assert (await running.read()).HasField("started")
        assert (await running.read()).HasField("delta")
        stage.model.hold()
        await eventually(lambda: stage.model.is_held)
        try:
            yield stage, router
        finally:
            stage.model.release()
            running.cancel()
            await eventually(lambda: router.loads() == [0] and stage.is_quiet())


@paths
async def test_who_would_wait_too_long_is_refused_by_the_router_and_told_when_to_come_back(
    direct: bool,
) -> None:
    """Nothing of it reaches the worker, and nothing of it stays here; who may wait is taken."""
    async with busy_router(max_wait_s=0.001) as (stage, router):
        submitted = len(stage.engine._streams._queues)
        async with AsyncClient(router.address, direct=direct) as client:
            with pytest.raises(OverloadedError, match="would begin with this request") as caught:
                await client.generate([6, 7], max_tokens=2, timeout_s=30.0)
        assert caught.value.retry_after_s is not None
        assert caught.value.retry_after_s > 0.0
        assert router.loads() == [1]
        assert len(router.server.core.view.predictions) == 1, "of the one that runs"
        assert len(stage.engine._streams._queues) == submitted


@paths
async def test_the_decision_is_told_what_the_callers_deadline_leaves(
    direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same on both paths: of a call to Route, the call's own deadline is the request's."""
    async with fake_worker(ONE_PLACE) as stage, router_before(stage.worker, scripted_model()) as router:
        told: list[float | None] = []
        core, route = router.server.core, router.server.core.route

        def noted(*args: Any, **named: Any) -> Any:
            told.append(named["time_left_s"])
            return route(*args, **named)

        monkeypatch.setattr(core, "route", noted)
        async with AsyncClient(router.address, direct=direct) as client:
            await client.generate([6, 7], max_tokens=2, ignore_eos=True, timeout_s=50.0)
            await client.generate([6, 7], max_tokens=2, ignore_eos=True)
        limited, unlimited = told
        assert limited is not None
        assert 0.0 < limited < 51.0  # gRPC sends a timeout in few digits, rounded up
        assert unlimited == math.inf


async def test_the_deadline_of_a_direct_request_ends_it_on_every_hop() -> None:
    """It waits at the worker, which is held in a step: at its deadline the worker forgets it, and the router with the next report."""
    async with busy_router(max_wait_s=0.0) as (stage, router):
        steps = stage.model.steps
        async with AsyncClient(router.address, direct=True) as client:
            with pytest.raises(DeadlineError):
                await client.generate([6, 7], max_tokens=900, ignore_eos=True, timeout_s=0.3)
        await eventually(lambda: len(stage.engine._streams._queues) == 1)
        await eventually(lambda: router.loads() == [1])
        assert stage.model.steps == steps, "all of it happened while the engine computed one step"
        stage.model.release()
        await eventually(lambda: stage.scheduler.aborted_in == {"waiting": 1})
