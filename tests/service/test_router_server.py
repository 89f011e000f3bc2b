"""A router's life: start without workers, health, credentials, one configuration line, an end that lets streams finish."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from prefixmesh import fleet_secret
from prefixmesh.cache.ledger import Hits, LedgerRow, Misses
from prefixmesh.config import describe
from prefixmesh.errors import ConfigError, UnavailableError
from prefixmesh.proto.cache_counts import encode_cache_counts
from prefixmesh.proto.v1 import router_pb2, router_pb2_grpc, worker_control_pb2
from prefixmesh.router.server import RouterServer
from prefixmesh.router_config import RouterConfig
from prefixmesh.rpc.channel import open_channel
from tests.support.fake_worker import FakeWorker, Script
from tests.support.router_kit import Router, running_router, tiny_model, token_request
from tests.support.servers import eventually, records_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(router: Router) -> int:
    stub: Any = health_pb2_grpc.HealthStub(router.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest())
    return int(answer.status)


async def test_router_starts_before_its_workers() -> None:
    """F11: it listens at once, lists the workers as not ready, says NOT_SERVING, and serves when the first one answers."""
    late = FakeWorker(fleet_secret.generate())
    await late.start()
    await late.kill()  # its port stays free for it
    async with running_router(0, workers=(late.address,)) as router:
        late.secret = router.secret
        assert await health_of(router) == NOT_SERVING
        with pytest.raises(UnavailableError, match=late.address):
            await router.generate(token_request([1]))
        (view,) = await router.list_workers()
        assert (view.address, view.ready, view.worker_id) == (late.address, False, "")
        await late.start()
        await router.until_ready(1)
        await eventually_health(router, SERVING)
        assert (await router.generate(token_request([1]))).started.worker_id == "w0"
        await late.kill()
        await eventually_health(router, NOT_SERVING)


async def eventually_health(router: Router, state: int) -> None:
    async def holds() -> bool:
        return await health_of(router) == state

    await eventually(holds)


async def test_router_that_has_started_knows_the_workers_that_are_there() -> None:
    """A request that comes in the first moment, as after a restart, is not told that no worker is ready."""
    async with running_router(2, wait=False) as router:
        assert len(router.server.core.registry.ready) == 2


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (Script(model_revision="other"), "another revision"),
        (Script(tokenizer_digest="other"), "another tokenizer"),
    ],
)
async def test_worker_of_another_model_is_not_ready(script: Script, problem: str) -> None:
    """F33: the mismatch is named to whoever asks, and nothing is sent there."""
    async with running_router(1, script=script, wait=False) as router:
        (entry,) = router.server.core.registry
        await eventually(lambda: problem in entry.problem)
        with pytest.raises(UnavailableError, match=problem):
            await router.generate(token_request([1]))
        assert problem in (await router.list_workers())[0].problem


@pytest.mark.parametrize("row", [None, LedgerRow(2, 40, Hits(10, 5), Misses(11, 7, 4, 3))])
async def test_operators_see_what_a_worker_has_counted(row: LedgerRow | None) -> None:
    """Every figure as the worker told it; a worker that tells nothing is not shown as one that found nothing."""
    counts = None if row is None else encode_cache_counts(row)
    async with running_router(1, script=Script(counts=counts)) as router:
        (view,) = await router.list_workers()
    assert view.HasField("cache") == (row is not None)
    assert row is None or view.cache == counts


async def test_two_workers_with_one_id_are_a_named_problem() -> None:
    """The operator learns which two addresses share an id."""
    async with running_router(1) as router:
        twin = await FakeWorker(router.secret, "w0").start()
        router.server.add_worker(twin.address)

        async def problem_is_told() -> bool:
            views = {view.address: view for view in await router.list_workers()}
            return router.workers[0].address in views[twin.address].problem

        await eventually(problem_is_told)
        await twin.kill()


async def test_reflection_lists_the_services() -> None:
    """grpcurl needs no proto files."""
    async with running_router(0) as router:
        stub = reflection_pb2_grpc.ServerReflectionStub(cast(Any, router.channel))
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        call = cast(Any, stub).ServerReflectionInfo(iter([ask]))
        names = {service.name async for answer in call for service in answer.list_services_response.service}
        assert {"prefixmesh.v1.Inference", "prefixmesh.v1.Router", "grpc.health.v1.Health"} <= names


async def test_effective_configuration_is_logged_once_without_secrets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """F70: one line with every setting; no key, no secret, no prompt anywhere in the log."""
    caplog.set_level(logging.DEBUG)
    async with running_router(1, spill_weight=1.5) as router:
        await router.generate(token_request([104, 117, 115, 104]), tenant="acme")
        (record,) = records_of(caplog, "router_starting")
        assert "'spill_weight': 1.5" in record.getMessage()
        for hidden in (router.secret.raw.hex(), router.secret.control_token()):
            assert hidden not in caplog.text


def test_password_of_a_state_is_in_no_log() -> None:
    """The URL is a setting like any other, but for what stands before its host."""
    shown = describe(RouterConfig(state="redis://:s3cret@127.0.0.1:6379/1"))
    assert shown["state"] == "redis://***@127.0.0.1:6379/1"
    with pytest.raises(ConfigError, match="state must be") as refused:
        RouterConfig(workers=("127.0.0.1:1",), state="rdis://user:s3cret@127.0.0.1:6379")
    assert "s3cret" not in str(refused.value)


def test_without_api_keys_only_loopback() -> None:
    """A router that strangers could reach does not start without credentials; the message says what to do."""
    with pytest.raises(ConfigError, match="--api-keys-file"):
        RouterServer(RouterConfig(workers=("127.0.0.1:1",), host="0.0.0.0"), fleet_secret.generate())


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_spill_weight_is_a_finite_number(weight: float) -> None:
    """With NaN in every cost no worker is cheaper than another, and nothing would say so."""
    with pytest.raises(ConfigError, match="spill_weight"):
        RouterConfig(workers=("127.0.0.1:1",), spill_weight=weight)


async def test_port_in_use_is_a_named_problem() -> None:
    """A second router on the same port fails, and says which."""
    async with running_router(0) as router:
        port = router.address.rsplit(":", 1)[1]
        second = RouterServer(
            RouterConfig(workers=("127.0.0.1:1",), port=int(port)),
            fleet_secret.generate(),
            model=tiny_model(),
        )
        with pytest.raises(ConfigError, match=port):
            await second.start()


async def test_stop_lets_streams_finish_and_refuses_new_ones() -> None:
    """F66: NOT_SERVING and refusals at once, running streams finish, then it is closed."""
    script = Script()
    script.before_delta.shut()
    async with running_router(1, script=script) as router:
        running = asyncio.create_task(router.generate(token_request([1])))
        await eventually(lambda: script.before_delta.waiting == 1)
        stopping = asyncio.create_task(router.server.stop(5.0))
        await eventually_health(router, NOT_SERVING)
        with pytest.raises(UnavailableError, match="stopping"):
            await router.generate(token_request([2]))
        script.before_delta.open()
        assert (await running).finished
        await stopping
        await router.server.wait_closed()


async def test_drained_router_takes_nothing_new_until_it_is_let() -> None:
    """By call: NOT_SERVING and refusals at once, on both paths; what runs finishes and is waited for; an undo brings it back."""
    script = Script()
    script.before_delta.shut()
    async with running_router(1, script=script) as router:
        stub: Any = router_pb2_grpc.RouterStub(router.channel)  # type: ignore[no-untyped-call]
        running = asyncio.create_task(router.generate(token_request([1])))
        await eventually(lambda: script.before_delta.waiting == 1)
        assert (await stub.Drain(worker_control_pb2.DrainRequest())).running_requests == 1
        assert await health_of(router) == NOT_SERVING
        with pytest.raises(UnavailableError, match="this router is draining"):
            await router.generate(token_request([2]))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Route(router_pb2.RouteRequest(request=token_request([2])))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        router.server._ready_changed.set()  # a worker's news does not make it serve
        draining = asyncio.ensure_future(stub.Drain(worker_control_pb2.DrainRequest(grace_ms=60_000)))
        script.before_delta.open()
        assert (await running).finished
        assert (await draining).running_requests == 0
        assert await health_of(router) == NOT_SERVING
        await stub.Drain(worker_control_pb2.DrainRequest(undo=True))
        assert await health_of(router) == SERVING
        assert (await router.generate(token_request([2]))).finished


async def test_grace_of_a_drain_is_bounded() -> None:
    async with running_router(0) as router:
        stub: Any = router_pb2_grpc.RouterStub(router.channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError, match="grace_ms: must be 0 to"):
            await stub.Drain(worker_control_pb2.DrainRequest(grace_ms=-1))


async def test_stop_ends_what_outlives_the_grace() -> None:
    """A stream that does not finish in time ends in UNAVAILABLE, and its worker is told."""
    script = Script()
    script.before_delta.shut()
    async with running_router(1, script=script) as router:
        running = asyncio.create_task(router.generate(token_request([1])))
        await eventually(lambda: script.before_delta.waiting == 1)
        await router.server.stop(0.05)
        with pytest.raises(UnavailableError, match="stopping"):
            await running
        await eventually(lambda: router.workers[0].running == 0)


async def test_start_that_is_cancelled_leaves_the_port_free() -> None:
    """A router whose start fails half-way lets go of everything."""
    config = RouterConfig(workers=("127.0.0.1:1",), model="/nonexistent/model")
    with pytest.raises(Exception, match="nonexistent"):
        await RouterServer(config, fleet_secret.generate()).start()


def test_importing_the_router_brings_neither_torch_nor_ray() -> None:
    """The base install has neither."""
    code = "import prefixmesh.router.server, sys; print({'torch', 'ray'} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "set()"


async def test_program_says_where_it_listens_and_ends_on_sigterm(tmp_path: Path) -> None:
    """``python -m prefixmesh.router`` with a real model folder: one line when it serves, exit 0 after SIGTERM."""
    from tests.support.tiny_model import make_tiny_model

    model = make_tiny_model(tmp_path / "tiny")
    program = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "prefixmesh.router", "--worker", "127.0.0.1:1", "--model", str(model)),
        *("--fleet-secret-file", str(tmp_path / "secret")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PREFIXMESH_HOME": str(tmp_path)},
    )
    try:
        assert program.stdout is not None
        line = (await asyncio.wait_for(program.stdout.readline(), 30)).decode()
        assert line.startswith("prefixmesh router listening on 127.0.0.1:")
        async with open_channel(line.split()[-1]) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
        program.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(program.wait(), 10) == 0
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
