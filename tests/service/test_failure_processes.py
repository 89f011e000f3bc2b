"""What callers meet when processes are killed, stopped, or refuse: the small forms of ``benchmarks/failures.py``, one fleet for all of them.

The processes are real, the model is not: every answer is known beforehand. What takes how long is measured there and not asserted here.
"""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixmesh.client import AsyncClient
from prefixmesh.rpc.channel import open_channel
from tests.support.failure_figures import Figure, failing
from tests.support.failure_fleet import FailureFleet, RestartingParent, until
from tests.support.failure_kills import kill_at_each_token, kill_under_load, wrong_answers
from tests.support.failure_leaks import cancel_many, check_history
from tests.support.failure_load import Sent, Workload, run
from tests.support.failure_storms import refuse_under_load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WAYS = pytest.mark.parametrize("direct", [False, True], ids=["proxied", "direct"])
GRACE_S = 60


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Iterator[FailureFleet]:
    """Three workers of 8 ms a step, and a router."""
    arguments = ("--step-ms", "8", "--grace-s", str(GRACE_S))
    with FailureFleet(
        tmp_path_factory.mktemp("failures"),
        model=str(tiny_model_folder),
        worker_arguments=arguments,
        router_arguments=("--grace-s", str(GRACE_S)),
    ) as fleet:
        fleet.start(3)
        yield fleet


@pytest.fixture
async def fleet(started: FailureFleet) -> FailureFleet:
    """All of it runs, and is ready."""
    dead = [one for one in (*started.workers, started.router) if not one.is_running]
    for server in dead:
        server.launch()
    for server in dead:
        await asyncio.to_thread(server.wait_listening)
    await started.until_ready()
    return started


def hold(figures: list[Figure], *but: str) -> None:
    """All targets are met, those of ``but`` left out: they are of time, which a machine under load has none of."""
    missed = [one for one in failing(figures) if not one.startswith(but or ("-",))]
    assert not missed, missed


@WAYS
async def test_a_worker_killed_under_load_costs_nobody_an_answer(fleet: FailureFleet, direct: bool) -> None:
    """F29, F65: neither those that had no token nor the streams that had begun."""
    hold(await kill_under_load(fleet, per_s=15, before_s=0.7, after_s=1.2, direct=direct), "sent to")


@pytest.mark.parametrize(
    ("direct", "branches", "points"), [(False, 1, (0, 16)), (False, 2, (3,)), (True, 1, (5,))]
)
async def test_answers_go_on_as_if_the_worker_had_not_been_killed(
    fleet: FailureFleet, direct: bool, branches: int, points: tuple[int, ...]
) -> None:
    """F67, at some tokens: before the first, in the middle, at the last."""
    workload = Workload(vocab_size=fleet.vocab_size, max_tokens=16 * branches)
    async with AsyncClient(fleet.router.address, direct=direct) as client:
        request = workload.request(branches)
        options: Any = {"max_tokens": 16, "branches": branches}
        hold(await kill_at_each_token(fleet, client, points, request=request, options=options))


@WAYS
async def test_a_client_rides_over_a_router_that_is_killed(fleet: FailureFleet, direct: bool) -> None:
    """Streams in the middle of their answers and requests that come while nobody is there: all are answered."""
    workload = Workload(vocab_size=fleet.vocab_size, max_tokens=60)
    requests = [workload.request(index) for index in range(12)]
    async with AsyncClient(fleet.router.address, direct=direct) as client:
        with RestartingParent(fleet.router) as parent:
            running = [asyncio.create_task(run(client, one)) for one in requests[:6]]
            await until(lambda: all(one.tokens for one in requests[:6]), "streams have begun")
            fleet.router.send(signal.SIGKILL)
            running += [asyncio.create_task(run(client, one)) for one in requests[6:]]
            await asyncio.gather(*running)
            await until(lambda: parent.restarts == 1, "the router runs again")
    assert [one for one in requests if not one.is_whole] == []
    assert wrong_answers(fleet, requests) == []


@WAYS
async def test_sixty_cancels_leave_nothing_behind(fleet: FailureFleet, direct: bool) -> None:
    """F12: by callers that leave, by the router's Abort and by the worker's, at random points."""
    hold(await cancel_many(fleet, 60, direct=direct, at_once=15))


@pytest.mark.parametrize(
    ("direct", "status"), [(False, "RESOURCE_EXHAUSTED"), (True, "RESOURCE_EXHAUSTED"), (True, "UNAVAILABLE")]
)
async def test_a_fleet_that_refuses_is_not_asked_twice_as_often(
    fleet: FailureFleet, direct: bool, status: str
) -> None:
    """F69: 200 requests that everybody refuses make hardly more attempts, and the next are answered."""
    figures = await refuse_under_load(
        fleet, status=status, per_s=200, for_s=1.0, direct=direct, after_s=0.3, most=1.5
    )
    hold(figures, "first answer")


async def test_a_worker_that_is_told_to_go_finishes_its_streams(fleet: FailureFleet) -> None:
    """F66: 30 streams, SIGTERM to the worker of some of them: each is whole and was never interrupted, and its process ends well."""
    requests, reading = await begin_streams(fleet, 30)
    leaving = fleet.worker(requests[0].worker)
    leaving.send(signal.SIGTERM)
    await reading
    assert [one for one in requests if not one.is_whole or one.interruptions] == []
    assert await asyncio.to_thread(leaving.wait) == 0
    assert wrong_answers(fleet, requests) == []


async def test_a_router_that_is_told_to_go_says_so_and_finishes_its_streams(fleet: FailureFleet) -> None:
    """F66: NOT_SERVING at once, while 50 streams end as they would have; then its process ends well."""
    requests, reading = await begin_streams(fleet, 50)
    async with open_channel(fleet.router.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        states = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await states.read()).status == health_pb2.HealthCheckResponse.SERVING
        fleet.router.send(signal.SIGTERM)
        assert (await states.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert any(not one.ended_s for one in requests), "it said so after its streams had ended"
        states.cancel()
    await reading
    assert [one for one in requests if not one.is_whole or one.interruptions] == []
    assert await asyncio.to_thread(fleet.router.wait) == 0
    assert wrong_answers(fleet, requests) == []


async def test_the_history_of_all_that_has_no_violation(fleet: FailureFleet) -> None:
    """Every request above and here ended once, each of its tokens was told once, every reservation was given back."""
    async with AsyncClient(fleet.router.address) as client:
        await run(client, Workload(vocab_size=fleet.vocab_size).request(0))
    await until(lambda: check_history(fleet).requests, "the router has written what it noted", timeout_s=10)
    assert check_history(fleet).violations == []


class Streams(NamedTuple):
    """Requests that have begun, and what reads them to their ends."""

    requests: list[Sent]
    reading: "asyncio.Task[None]"


async def begin_streams(fleet: FailureFleet, count: int) -> Streams:
    """So many, each of which has a token and is far from its end."""
    workload = Workload(vocab_size=fleet.vocab_size, max_tokens=100)
    requests = [workload.request(index) for index in range(count)]

    async def read_all() -> None:
        async with AsyncClient(fleet.router.address) as client:
            await asyncio.gather(*(run(client, one) for one in requests))

    reading = asyncio.create_task(read_all())
    await until(lambda: all(one.tokens for one in requests), "streams have begun")
    return Streams(requests, reading)
