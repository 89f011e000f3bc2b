"""``prefixmesh adapter`` at a router: remembered for the fleet, waited for, and told of."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from prefixmesh import fleet_state
from prefixmesh.cli.adapter_text import adapters_line, told
from prefixmesh.cli.main import main
from prefixmesh.fleet.hold import hold_fleet
from prefixmesh.fleet_state import FleetState
from prefixmesh.proto.v1 import router_pb2 as pb
from tests.support.adapter_worker import (
    WAIT_S,
    AdapterWorker,
    adapter_workers,
    digest_of,
    listed,
    share_folders,
)
from tests.support.pinning_worker import PinningWorker
from tests.support.router_kit import Router, running_router
from tests.support.servers import eventually

DIGEST = digest_of("weights")[:12]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own."""
    monkeypatch.setenv("PREFIXMESH_HOME", str(tmp_path))
    monkeypatch.delenv("PREFIXMESH_API_KEY", raising=False)
    return tmp_path


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    async with running_router(2, make_worker=AdapterWorker) as running:
        share_folders(adapter_workers(running), {"a": "weights"})
        yield running


async def run(router: Router | None, *arguments: str) -> Result:
    """Run the command in a thread: the servers live on this event loop."""
    at = () if router is None else ("--router", router.address)
    return await asyncio.wait_for(
        asyncio.to_thread(CliRunner().invoke, main, ("adapter", *arguments, *at)), WAIT_S
    )


async def test_load_list_and_unload_are_the_fleets(router: Router) -> None:
    """Each waits until every worker has done it; exit code 0."""
    loaded = await run(router, "load", "clerk", "a", "--pin")
    assert loaded.exit_code == 0, loaded.output
    assert loaded.stdout == f"clerk: 2 of 2 workers loaded version 1 ({DIGEST})\n"
    assert all("clerk" in worker.pinned for worker in adapter_workers(router))
    shown = await run(router, "list")
    (row,) = [line.split() for line in shown.stdout.splitlines() if line.startswith("clerk")]
    assert row == ["clerk", "a", DIGEST, "1", "yes", "2", "of", "2"]
    unloaded = await run(router, "unload", "clerk")
    assert (unloaded.exit_code, unloaded.stdout) == (0, "unloaded clerk\n")
    assert [worker.script.adapters for worker in router.workers] == [{}, {}]
    empty = await run(router, "list")
    assert (empty.exit_code, empty.stdout) == (0, "No adapter is loaded.\n")


async def test_router_of_the_fleet_that_is_up_is_the_default(router: Router) -> None:
    missing = await run(None, "list")
    assert missing.exit_code == 1
    assert "no fleet is up" in missing.stderr
    state = FleetState(
        router=router.address,
        workers={},
        model="m",
        ray_address="",
        ray_namespace="",
        actor_names=(),
        started_ray=True,
        pid=1,
    )
    fleet_state.save(state)
    with hold_fleet():
        assert (await run(None, "load", "clerk", "a")).exit_code == 0
    assert set(await listed(router)) == {"clerk"}


async def test_exit_code_tells_whose_fault_it_is(router: Router) -> None:
    """2 when every worker refuses the request, 1 when some have it; and nobody waits for what only an operator can mend."""
    nowhere = await run(router, "load", "clerk", "nowhere")
    assert nowhere.exit_code == 2
    for worker in ("w0", "w1"):
        assert f"{worker}  refused: failed" in nowhere.stderr
    assert "there is no folder 'nowhere' below the adapter root" in nowhere.stderr
    assert "2 of 2 workers lack it; it is tried again, unless it is unloaded" in nowhere.stderr
    adapter_workers(router)[1].folders = {}
    partly = await run(router, "load", "clerk", "a")
    assert partly.exit_code == 1
    assert "1 of 2 workers lack it" in partly.stderr
    assert "clerk: 1 of 2 workers loaded version 2" in partly.stdout
    kept = await run(router, "load", "clerk", "nowhere")
    assert kept.exit_code == 2
    assert kept.stdout == "clerk: 0 of 2 workers loaded version 3; version 2 (a) stays until one has\n"
    assert "it is tried again, unless a is loaded again" in kept.stderr
    malformed = await run(router, "load", "cl/erk", "a")
    assert (malformed.exit_code, "spec.name" in malformed.stderr) == (2, True)


async def test_time_that_is_over_is_told_and_the_wish_stays(router: Router) -> None:
    """With ``--no-wait`` nobody waits at all."""
    for worker in adapter_workers(router):
        worker.before_load.shut()
    late = await run(router, "load", "clerk", "a", "--timeout", "0.3")
    assert late.exit_code == 1
    assert "2 of 2 workers lack it" in late.stderr
    at_once = await run(router, "load", "poet", "a", "--no-wait")
    assert (at_once.exit_code, at_once.stdout) == (0, "poet: 0 of 2 workers loaded version 1\n")
    for worker in adapter_workers(router):
        worker.before_load.open()

    async def all_have() -> bool:
        told = await listed(router)
        return {name: one.held for name, one in told.items()} == {"clerk": 2, "poet": 2}

    await eventually(all_have, WAIT_S)


async def test_where_no_worker_is_ready_the_wish_stays() -> None:
    async with running_router(0, make_worker=AdapterWorker) as router:
        late = await run(router, "load", "clerk", "a", "--timeout", "0.3")
        assert late.exit_code == 1
        assert "no worker is ready after 0.3 s; those that come will load it" in late.stderr


class Owner(AdapterWorker):
    """One that is started with an adapter."""

    async def start(self) -> AdapterWorker:
        self.started_with = {"own": "its weights"}
        return await super().start()


async def test_workers_own_adapters_are_shown_as_such() -> None:
    """And are not the router's to unload."""
    async with running_router(1, make_worker=Owner) as router:
        assert "the workers' own, not put at the router" in (await run(router, "list")).stdout
        refused = await run(router, "unload", "own")
        assert refused.exit_code == 1
        assert "w0 has it as its own, and forgets it with --worker" in refused.stderr
        unknown = await run(router, "unload", "nobody")
        assert (unknown.exit_code, "no adapter 'nobody' is loaded here" in unknown.stderr) == (1, True)


async def test_json_tells_everything(router: Router) -> None:
    loaded = json.loads((await run(router, "load", "clerk", "a", "--json")).stdout)
    assert (loaded["held"], loaded["wanted"], loaded["remembered"]) == (2, 2, True)
    told = json.loads((await run(router, "list", "--json")).stdout)
    assert told["acting"] is True
    (clerk,) = told["adapters"]
    assert clerk == loaded
    assert clerk["workers"][0] == {
        "worker_id": "w0",
        "address": router.workers[0].address,
        "state": "held",
        "problem": "",
        "digest": digest_of("weights"),
    }
    assert json.loads((await run(router, "unload", "clerk", "--json")).stdout) == {
        "removed": True,
        "left": [],
    }


async def test_status_shows_what_lacks(router: Router) -> None:
    """A line for people, and for programs each worker that lacks it."""

    async def status(*more: str) -> Result:
        arguments = ("status", "--address", router.address, *more)
        return await asyncio.to_thread(CliRunner().invoke, main, arguments)

    assert "adapters:" not in (await status()).stdout
    adapter_workers(router)[1].folders = {}
    await run(router, "load", "clerk", "a")
    shown = (await status()).stdout
    assert "adapters: 1 · 1 of 2 loaded · missing: clerk: 1 of 2 workers loaded version 1" in shown
    assert "w1 failed, tried again in" in shown
    summary = json.loads((await status("--json")).stdout)["adapters"]
    assert (summary["adapters"], summary["held"], summary["wanted"]) == (1, 1, 2)
    (missing,) = summary["missing"]
    assert missing["name"] == "clerk"
    assert [(one["worker_id"], one["state"]) for one in missing["workers"]] == [("w1", "refused")]


async def test_router_of_an_earlier_version_is_told_of() -> None:
    """A server without the calls says so in a line."""
    async with running_router(1, make_worker=PinningWorker) as router:
        worker = await run(None, "list", "--router", router.workers[0].address)
        assert worker.exit_code == 1
        assert "is no router that knows ListAdapters" in worker.stderr


@pytest.mark.parametrize(
    "arguments",
    [("--router", "r:1", "--worker", "w:1"), ("--fleet-secret-file", "secret")],
)
async def test_flags_that_do_not_go_together_are_refused(arguments: tuple[str, ...]) -> None:
    result = await run(None, "list", *arguments)
    assert result.exit_code == 2
    assert "--worker" in result.stderr


def test_lines_stay_lines() -> None:
    """Many workers' problems are cut, and another's words cannot steer the terminal."""
    workers = [
        pb.AdapterAtWorker(worker_id=f"w{i}", state="failed", problem="bad\nthing \x1b[2J") for i in range(9)
    ]
    adapter = pb.FleetAdapter(spec=pb.AdapterSpec(name="clerk"), generation=1, wanted=9, workers=workers)
    assert told(adapter).count("bad thing") == 3
    assert "and 6 more" in told(adapter)
    assert "\x1b" not in adapters_line([adapter] * 5)
    assert "and 2 more" in adapters_line([adapter] * 5)
    assert adapters_line([]) == ""
