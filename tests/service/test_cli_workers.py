"""``prefixmesh workers`` and ``prefixmesh explain`` against a real router, before a real worker's front and fake workers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from click.testing import CliRunner, Result

from prefixmesh import fleet_secret
from prefixmesh.cli.main import main
from prefixmesh.client import AsyncClient
from prefixmesh.errors import (
    AccessDeniedError,
    ConfigError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import router_pb2, router_pb2_grpc, worker_control_pb2
from prefixmesh.router.server import RouterServer
from prefixmesh.router.state_file import FileStore
from prefixmesh.router_config import RouterConfig
from prefixmesh.rpc.channel import open_channel
from prefixmesh.rpc.identity import hash_key
from prefixmesh.rpc.status import from_rpc_error
from tests.support.fake_worker import MODEL, FakeWorker
from tests.support.routed_worker import TEXT, router_before, scripted_model
from tests.support.router_kit import Router, headers, running_router, tiny_model
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import eventually, scripted_worker


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREFIXMESH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PREFIXMESH_API_KEY", raising=False)
    return tmp_path


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    async with running_router(2) as running:
        yield running


async def run(router: Router, *arguments: str, given: bytes | None = None) -> Result:
    """Run the command in a thread: the servers live on this event loop."""
    command = [*arguments, "--address", router.address]
    return await asyncio.to_thread(CliRunner().invoke, main, command, input=given)


async def operate(router: Router, method: str, request: Any, *, key: str = "") -> Any:
    """A call of the service itself; the error of our tree when it fails."""
    stub: Any = router_pb2_grpc.RouterStub(router.channel)  # type: ignore[no-untyped-call]
    try:
        return await getattr(stub, method)(request, metadata=headers(key=key), timeout=20)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def test_list_shows_load_trust_and_errors(router: Router) -> None:
    """As a table and as JSON: what the router has learnt of each worker."""
    async with AsyncClient(router.address) as client:
        for _ in range(3):
            await client.generate(list(range(200)))
    table = await run(router, "workers", "list")
    assert table.exit_code == 0, table.output
    assert "first token ms off by" in table.stdout
    for worker in router.workers:
        assert worker.address in table.stdout
    told = json.loads((await run(router, "workers", "list", "--json")).stdout)["workers"]
    assert {one["trust"] for one in told} == {"exact"}
    assert sum(one["routed"] for one in told) == 3
    assert max(one["first_token_ms_error"] for one in told) > 0
    assert {one["address"] for one in told if one["ready"]} == {worker.address for worker in router.workers}


async def test_worker_is_added_listed_served_and_removed(router: Router) -> None:
    """Twice is no error, and said; its running answers end undisturbed."""
    third = await FakeWorker(router.secret, "w2").start()
    try:
        assert "added" in (await run(router, "workers", "add", third.address)).stdout
        assert "was known already" in (await run(router, "workers", "add", third.address)).stdout
        await router.until_ready(3)
        third.script.before_delta.shut()
        async with AsyncClient(router.address) as client:
            for one in router.workers:
                await operate(router, "RemoveWorker", router_pb2.RemoveWorkerRequest(address=one.address))
            stream = client.stream([1, 2, 3])
            await anext(stream)
            assert "removed" in (await run(router, "workers", "remove", third.address)).stdout
            assert "was not known" in (await run(router, "workers", "remove", third.address)).stdout
            assert await router.list_workers() == []
            third.script.before_delta.open()
            assert len((await stream.collect()).token_ids) == 4
    finally:
        await third.kill()


async def test_drained_worker_takes_nothing_until_it_is_let() -> None:
    """Through the router to the worker's own Drain; the answer that runs is waited for."""
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker, router_before(worker, scripted_model()) as router:
        address = worker.bound.address
        engine.hold_after_tokens = 1
        async with AsyncClient(router.address) as client:
            stream = client.stream(TEXT)
            await anext(stream)
            busy = await run(router, "workers", "drain", address, "--grace", "0.05")
            assert busy.exit_code == 1
            assert "1 requests are still running" in busy.stderr
            assert (await run(router, "workers", "drain", address, "--grace", "0")).exit_code == 0
            draining = asyncio.create_task(run(router, "workers", "drain", address))
            engine.release()
            await stream.collect()
            assert "is drained" in (await draining).stdout
            await router.until_ready(0)
            assert "draining" in (await run(router, "workers", "list")).stdout
            with pytest.raises(UnavailableError, match="drain"):
                await client.generate(TEXT)
            assert "takes requests again" in (await run(router, "workers", "drain", address, "--undo")).stdout
            await router.until_ready(1)
            assert (await client.generate(TEXT)).text == "Hello, world."


async def test_flush_reaches_the_worker() -> None:
    """Its cache is empty; one that does not answer is said so."""
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker, router_before(worker, scripted_model()) as router:
        await router.generate(pb.GenerateRequest(text=TEXT))
        flushed = await run(router, "workers", "flush", worker.bound.address)
        assert flushed.stdout == f"flushed {worker.bound.address}\n"
        again = await router.generate(pb.GenerateRequest(text=TEXT))
        assert again.started.cached_tokens.device == 0


async def test_worker_is_named_by_its_id_as_well_as_by_its_address() -> None:
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker, router_before(worker, scripted_model()) as router:
        (entry,) = router.server.core.registry
        assert (await run(router, "workers", "flush", entry.name)).exit_code == 0
        assert "is drained" in (await run(router, "workers", "drain", entry.name)).stdout
        assert "takes requests again" in (await run(router, "workers", "drain", entry.name, "--undo")).stdout
        assert "removed" in (await run(router, "workers", "remove", entry.name)).stdout
        assert await router.list_workers() == []


async def test_worker_that_is_added_and_cannot_be_used_is_said_so(router: Router) -> None:
    """Whoever adds it learns that its id is taken, or that nobody is there, and not only from the list."""
    twin = await FakeWorker(router.secret, "w0").start()
    try:
        added = await run(router, "workers", "add", twin.address)
        assert (added.exit_code, f"added {twin.address}" in added.stdout) == (0, True)
        assert f"has the worker id 'w0' that {router.workers[0].address} has already" in added.stderr
    finally:
        await twin.kill()
    nobody = await run(router, "workers", "add", "127.0.0.1:1")
    assert "cannot be reached" in nobody.stderr


async def test_worker_that_cannot_be_forgotten_is_followed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be back after a restart: the operator is told, and asks again."""
    async with running_router(1, state=f"file://{tmp_path}/state.json") as router:

        async def fail(*_: Any, **__: Any) -> None:
            raise UnavailableError("cannot keep the state: No space left on device")

        monkeypatch.setattr(FileStore, "delete", fail)
        address = router.workers[0].address
        with pytest.raises(UnavailableError, match="No space left"):
            await operate(router, "RemoveWorker", router_pb2.RemoveWorkerRequest(address=address))
        assert (await router.generate(pb.GenerateRequest(text="on"))).started.worker_id == "w0"


@pytest.mark.parametrize("method", ["AddWorker", "RemoveWorker", "DrainWorker", "FlushWorker"])
async def test_bad_address_is_refused_by_its_field(router: Router, method: str) -> None:
    """And a worker that is not this router's is told apart from that; nothing changes."""
    make = getattr(router_pb2, f"{method}Request")
    for address in ("", "nowhere", "host:99999", "a b:1:2"):
        with pytest.raises(InvalidRequestError, match="address: must be host:port"):
            await operate(router, method, make(address=address))
    if method in ("DrainWorker", "FlushWorker"):
        with pytest.raises(NotFoundError, match="no worker of this router"):
            await operate(router, method, make(address="other:1"))
    refused = await run(router, "workers", "add", "nowhere")
    assert (refused.exit_code, "address: must be host:port" in refused.stderr) == (2, True)
    assert len(await router.list_workers()) == 2


async def test_grace_is_bounded(router: Router) -> None:
    for grace_ms in (-1, 24 * 3_600_000 + 1):
        with pytest.raises(InvalidRequestError, match="grace_ms: must be 0 to 86400000"):
            await operate(
                router,
                "DrainWorker",
                router_pb2.DrainWorkerRequest(address=router.workers[0].address, grace_ms=grace_ms),
            )


async def test_operators_calls_are_for_administrators(tmp_path: Path) -> None:
    """A tenant's key opens none of them, an administrator's all; nothing was done for the first."""
    keys = tmp_path / "keys"
    keys.write_text(f"{hash_key('pm-key')} acme\n{hash_key('pm-admin')} ops admin\n")
    async with running_router(api_keys_file=str(keys)) as router:
        address = router.workers[0].address
        calls: dict[str, Any] = {
            "ListWorkers": router_pb2.ListWorkersRequest(),
            "Explain": router_pb2.ExplainRequest(request=pb.GenerateRequest(text="hi")),
            "AddWorker": router_pb2.AddWorkerRequest(address="127.0.0.1:1"),
            "RemoveWorker": router_pb2.RemoveWorkerRequest(address=address),
            "DrainWorker": router_pb2.DrainWorkerRequest(address=address),
            "FlushWorker": router_pb2.FlushWorkerRequest(address=address),
            "Drain": worker_control_pb2.DrainRequest(),
            "ListHeat": router_pb2.ListHeatRequest(),
            "PutAdapter": router_pb2.PutAdapterRequest(spec=router_pb2.AdapterSpec(name="a", path="a")),
            "ListAdapters": router_pb2.ListFleetAdaptersRequest(),
            "RemoveAdapter": router_pb2.RemoveAdapterRequest(name="a"),
        }
        for method, request in calls.items():
            with pytest.raises(AccessDeniedError, match="administrator"):
                await operate(router, method, request, key="pm-key")
        assert len(await router.list_workers(key="pm-admin")) == 1
        await operate(router, "Explain", calls["Explain"], key="pm-admin")
        assert not (await operate(router, "ListAdapters", calls["ListAdapters"], key="pm-admin")).adapters


@asynccontextmanager
async def remembering(state: str, secret: FleetSecret) -> AsyncIterator[Router]:
    """A router that is given no workers."""
    server = RouterServer(RouterConfig(state=state, model=MODEL), secret, model=tiny_model())
    bound = await server.start()
    try:
        async with open_channel(bound.address) as channel:
            yield Router(server=server, address=bound.address, secret=secret, workers=[], channel=channel)
    finally:
        await server.stop(0.0)


async def test_added_worker_comes_back_with_the_router(tmp_path: Path) -> None:
    """The state's file remembers it; a removed one stays away. A second router on the file is kept out."""
    secret = fleet_secret.generate()
    worker = await FakeWorker(secret, "w0").start()
    state = f"file://{tmp_path}/state.json"
    try:
        async with remembering(state, secret) as first:
            assert (await run(first, "workers", "add", worker.address)).exit_code == 0
            with pytest.raises(ConfigError, match="another router"):
                async with remembering(state, secret):
                    pass
        async with remembering(state, secret) as second:
            await second.until_ready(1)
            assert "removed" in (await run(second, "workers", "remove", worker.address)).stdout
        async with remembering(state, secret) as third:
            assert await third.list_workers() == []
    finally:
        await worker.kill()


async def test_worker_that_cannot_be_remembered_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator is told; requests are served as before, since none waits for the state."""
    async with running_router(1, state=f"file://{tmp_path}/state.json") as router:

        async def fail(*_: Any, **__: Any) -> None:
            raise UnavailableError("cannot keep the state: No space left on device")

        monkeypatch.setattr(FileStore, "put", fail)
        with pytest.raises(UnavailableError, match="No space left"):
            await operate(router, "AddWorker", router_pb2.AddWorkerRequest(address="127.0.0.1:1"))
        assert len(await router.list_workers()) == 1
        async with AsyncClient(router.address) as client:
            await client.generate([1, 2])


async def test_workers_that_others_add_are_followed(tmp_path: Path) -> None:
    """What stands in the store is the roster, whoever wrote it; what is no address is left alone."""
    async with running_router(1, state=f"file://{tmp_path}/state.json") as router:
        store = router.server._store
        assert store is not None
        await store.put("workers/no address", b"")
        await store.put("workers/127.0.0.1:1", b"")
        await eventually(lambda: len(router.server.core.registry) == 2)
        await store.delete("workers/127.0.0.1:1")
        await eventually(lambda: len(router.server.core.registry) == 1)


async def test_explanation_is_of_the_decision_that_follows(router: Router) -> None:
    """The chosen one is where the request then goes, with its terms; nothing is booked by asking."""
    async with AsyncClient(router.address) as client:
        first = await client.generate("word " * 100)
        table = await run(router, "explain", "--raw", "word " * 100)
        told = json.loads((await run(router, "explain", "--raw", "word " * 100, "--json")).stdout)
        assert router.loads() == [0, 0]
        second = await client.generate("word " * 100)
    assert told["chosen"] == first.worker_id == second.worker_id
    chosen, other = told["candidates"]
    assert (chosen["worker_id"], other["device_tokens"]) == (told["chosen"], 0)
    assert (
        chosen["counted_tokens"] == second.started.routing.predicted_cached_tokens
        if second.started.routing
        else 0
    )
    assert chosen["total_ms"] < other["total_ms"]
    assert table.stdout.startswith(
        f"{told['prompt_tokens']} prompt tokens go to {told['chosen']} · policy cost"
    )
    assert f"* {told['chosen']}" in table.stdout


async def test_prompts_to_explain_come_in_every_form(router: Router, tmp_path: Path) -> None:
    """Text, a file, stdin, ids, a chat; each exactly one of them."""
    (tmp_path / "prompt.txt").write_text("hello")
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    (tmp_path / "chat.json").write_text(json.dumps(chat))

    async def tokens(*arguments: str, given: bytes | None = None) -> int:
        result = await run(router, "explain", "--json", *arguments, given=given)
        assert result.exit_code == 0, result.output
        count: int = json.loads(result.stdout)["prompt_tokens"]
        return count

    assert (
        await tokens("--raw", "hello") == await tokens("--raw", "--file", str(tmp_path / "prompt.txt")) == 5
    )
    assert await tokens("--raw", "-", given=b"hello") == 5
    assert await tokens("--tokens", "5,17,9") == 3
    assert await tokens("hello", "--system", "be brief") == await tokens(
        "--messages", str(tmp_path / "chat.json")
    )
    (tmp_path / "deep.json").write_text("[" * 100_000)
    deep = ("--messages", str(tmp_path / "deep.json"))
    for wrong in ((), ("hello", "--tokens", "1"), ("--raw", "hello", "--system", "x"), deep):
        assert (await run(router, "explain", *wrong)).exit_code == 2


async def test_who_cannot_take_a_request_is_named_with_the_reason(router: Router) -> None:
    """A worker that is away; where nobody is left, nobody is chosen or the call says why."""
    await router.workers[0].set_serving(serving=False)
    await router.until_ready(1)
    told = json.loads((await run(router, "explain", "hello", "--json")).stdout)
    assert [one["address"] for one in told["excluded"]] == [router.workers[0].address]
    assert "not serving" in told["excluded"][0]["why"]
    refused = await run(router, "explain", "hello", "--adapter", "none")
    assert (refused.exit_code, "adapter" in refused.stderr) == (2, True)
    request = router_pb2.ExplainRequest(request=pb.GenerateRequest(text="x"), tenant="é")
    with pytest.raises(InvalidRequestError, match="tenant: must be 1 to"):
        await operate(router, "Explain", request)


async def test_worker_is_no_router() -> None:
    """The command says so, and does not show a gRPC status."""
    async with scripted_worker(ScriptedEngine()) as worker:
        command = ["workers", "list", "--address", worker.bound.address]
        result = await asyncio.to_thread(CliRunner().invoke, main, command)
    assert result.exit_code == 1
    assert "is no router" in result.stderr


async def test_command_line_streams_directly(router: Router) -> None:
    """``--direct`` asks the router for the way; the answer is the same."""
    answer = await run(router, "generate", "hi", "--direct", "--json", "--max-tokens", "4")
    assert answer.exit_code == 0, answer.output
    received = [one for worker in router.workers for one in worker.received]
    assert [one.ticket.max_tokens for one in received] == [4]
    assert json.loads(answer.stdout)["routing"]["policy"] == "cost"
