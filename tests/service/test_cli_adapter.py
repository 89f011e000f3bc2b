"""``prefixmesh adapter --worker`` against the control services of real fronts, and what `status` and `generate` make of adapters."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from prefixmesh import fleet_secret, paths
from prefixmesh.cli.adapter_workers import names_that_differ
from prefixmesh.cli.main import main
from prefixmesh.config import WorkerConfig
from prefixmesh.errors import InvalidRequestError
from prefixmesh.fleet_control import Outcome
from prefixmesh.proto.v1.worker_control_pb2 import Adapter
from prefixmesh.worker.messages import AdapterInfo
from prefixmesh.worker.server import WorkerServer
from tests.support.router_kit import running_router
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import byte_text, eventually

WAIT_S = 20


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, with the secret that workers of these tests share."""
    monkeypatch.setenv("PREFIXMESH_HOME", str(tmp_path))
    monkeypatch.delenv("PREFIXMESH_API_KEY", raising=False)
    return tmp_path


class Refusing(ScriptedEngine):
    """Has no adapters below its root."""

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> AdapterInfo:
        raise InvalidRequestError("path", f"there is no folder {path!r} below the adapter root")


@asynccontextmanager
async def workers(*engines: ScriptedEngine) -> AsyncIterator[list[str]]:
    """Addresses of workers with these engines."""
    secret = fleet_secret.load_or_create(paths.fleet_secret_file())
    async with AsyncExitStack() as stack:
        addresses = []
        for index, engine in enumerate(engines):
            config = WorkerConfig(worker_id=f"worker-{index}")
            server = WorkerServer(config, secret, engine=engine, text=byte_text())
            addresses.append((await server.start()).address)
            stack.push_async_callback(server.stop, 0.0)
        yield addresses


async def run(*arguments: str) -> Result:
    """Run the command in a thread: the workers live on this event loop."""
    return await asyncio.wait_for(asyncio.to_thread(CliRunner().invoke, main, arguments), WAIT_S)


def named(addresses: list[str]) -> list[str]:
    return [word for address in addresses for word in ("--worker", address)]


async def test_load_list_and_unload_reach_every_worker() -> None:
    """One line a worker, exit code 0; the secret and the workers are those that were named."""
    engines = [ScriptedEngine(), ScriptedEngine()]
    async with workers(*engines) as addresses:
        loaded = await run("adapter", "load", "clerk", "some/folder", "--pin", *named(addresses))
        assert loaded.exit_code == 0, loaded.output
        assert "the fleet's router does not remember it" in loaded.stderr
        digest = engines[0].adapters["clerk"].digest
        assert loaded.stdout.splitlines() == [
            f"{address}  loaded clerk  {digest[:12]}  rank 8  0.0 MB  pinned" for address in addresses
        ]
        assert all(engine.adapters["clerk"].pinned for engine in engines)
        listed = await run("adapter", "list", *named(addresses))
        assert listed.stdout == "".join(
            f"{address}  clerk  {digest[:12]}  rank 8  0.0 MB  pinned  0 running\n" for address in addresses
        )
        unloaded = await run("adapter", "unload", "clerk", *named(addresses))
        assert unloaded.exit_code == 0, unloaded.output
        assert [engine.adapters for engine in engines] == [{}, {}]
        empty = await run("adapter", "list", *named(addresses))
        assert (empty.exit_code, empty.stdout) == (0, "No adapter is loaded.\n")


async def test_a_worker_that_fails_is_named_and_the_others_keep_what_they_did() -> None:
    """Exit code 1; with every worker refusing the request itself 2; with a worker that is away 1."""
    good = ScriptedEngine()
    async with workers(good, Refusing()) as (first, second):
        partly = await run("adapter", "load", "clerk", "p", *named([first, second]))
        assert partly.exit_code == 1
        assert partly.stdout.startswith(f"{first}  loaded clerk")
        assert f"{second}  failed: path: there is no folder 'p' below the adapter root" in partly.stderr
        assert "1 of 2 workers failed" in partly.stderr
        assert set(good.adapters) == {"clerk"}
        refused = await run("adapter", "load", "clerk", "p", *named([second]))
        assert refused.exit_code == 2
        listed = await run("adapter", "list", *named([first, second]))
        assert "clerk is not the same on all workers" in listed.stderr
        away = await run("adapter", "list", *named([first, "127.0.0.1:1"]))
        assert away.exit_code == 1
        assert "127.0.0.1:1 does not answer" in away.stderr
        gone = await run("adapter", "unload", "other", *named([first]))
        assert (gone.exit_code, gone.stdout) == (1, "")
        assert "no adapter 'other' is loaded here" in gone.stderr


@pytest.mark.parametrize("option", ["--json", "--no-wait"])
@pytest.mark.parametrize("command", [["load", "clerk", "clerk-v1"], ["unload", "clerk"]])
async def test_what_would_be_left_out_of_account_at_workers_is_refused(
    command: list[str], option: str
) -> None:
    """Before any worker is asked: a script that reads JSON gets some, or an error."""
    result = await run("adapter", *command, option, *named(["127.0.0.1:1"]))
    assert result.exit_code == 2
    assert f"{option} does not go with --worker" in result.stderr


async def test_a_wrong_secret_is_refused(tmp_path: Path) -> None:
    """By the worker."""
    async with workers(ScriptedEngine()) as addresses:
        result = await run(
            "adapter", "list", "--fleet-secret-file", str(tmp_path / "another"), *named(addresses)
        )
        assert result.exit_code == 1
        assert "control token" in result.stderr


async def test_the_list_as_json_tells_everything() -> None:
    """Plain values; a worker that failed has its error."""
    engine = ScriptedEngine()
    async with workers(engine) as addresses:
        await run("adapter", "load", "clerk", "p", *named(addresses))
        result = await run("adapter", "list", "--json", *named([*addresses, "127.0.0.1:1"]))
        first, second = json.loads(result.stdout)["workers"]
        info = engine.adapters["clerk"]
        assert first["adapters"] == [
            {
                "name": "clerk",
                "digest": info.digest,
                "rank": 8,
                "size_bytes": 1000,
                "resident": False,
                "pinned": False,
                "running_requests": 0,
            }
        ]
        assert first["error"] is None
        assert second["error"]


async def test_status_shows_adapters_where_there_are_any() -> None:
    """A column of their own, and a list for programs."""
    async with running_router(2) as router:
        plain = await run("status", "--address", router.address)
        assert "adapters" not in plain.stdout
        router.workers[0].script.adapters = {"clerk": "d1", "poet": "d2"}
        await eventually(router.server.core.registry.adapter_names)
        shown = await run("status", "--address", router.address)
        assert "clerk, poet" in shown.stdout
        told = json.loads((await run("status", "--json", "--address", router.address)).stdout)
        assert [worker["adapters"] for worker in told["workers"]] == [["clerk", "poet"], []]


async def test_generate_with_an_adapter() -> None:
    """`--adapter` asks for it, an unknown one ends in a line that names it, `models served` lists what there is."""
    async with running_router(1) as router:
        router.workers[0].script.adapters = {"clerk": "d1"}
        at = ("--address", router.address)
        answered = await run("generate", "hi", "--adapter", "clerk", "--json", *at)
        assert answered.exit_code == 0, answered.output
        assert json.loads(answered.stdout)["adapter_digest"] == "d1"
        unknown = await run("generate", "hi", "--adapter", "poet", *at)
        assert unknown.exit_code == 2
        assert "no adapter 'poet' is loaded here" in unknown.stderr
        assert "\tclerk\n" in (await run("models", "served", *at)).stdout


def test_a_name_differs_where_its_content_or_its_being_there_does() -> None:
    """Workers that did not answer say nothing about it."""

    def told(**adapters: str) -> Outcome[Sequence[Adapter]]:
        return Outcome("w", "a", [Adapter(name=name, digest=d) for name, d in adapters.items()], None)

    away: Outcome[Sequence[Adapter]] = Outcome("w", "a", None, InvalidRequestError("x", "y"))
    assert names_that_differ([told(a="1", b="1"), told(a="1", b="1"), away]) == []
    assert names_that_differ([told(a="1", b="1", c="1"), told(a="1", b="2")]) == ["b", "c"]
