"""``prefixmesh bench serve`` against a real router with workers that have no model."""

import asyncio
import json
from pathlib import Path

from click.testing import CliRunner, Result

from prefixmesh.bench.serve_drive import ServeRun, ServeSpec
from prefixmesh.bench.serve_figures import figures_of
from prefixmesh.cli.main import main
from prefixmesh.errors import InvalidRequestError
from prefixmesh.sim.replay_figures import NO_OBJECTIVE
from prefixmesh.sim.workload import Workload, WorkloadRequest
from prefixmesh.sim.workload_file import write_workload
from tests.support.fake_worker import ANSWER_TOKENS, Script
from tests.support.router_kit import running_router
from tests.support.servers import eventually

IDS = 250
"""Of the tests' vocabulary."""

BLOCK = 64


def two_turns(tenant: str = "") -> Workload:
    """A stranger, and a talk of two turns whose second takes up what was answered to the first."""
    first = {"input_length": 190, "output_length": ANSWER_TOKENS, "tenant": tenant}
    return Workload(
        name="talk",
        block_size=BLOCK,
        requests=[
            WorkloadRequest(arrival_ms=50, block_ids=(0, 1), answer_ids=(2,), **first),  # type: ignore[arg-type]
            WorkloadRequest(after=0, pause_ms=5, input_length=256, output_length=ANSWER_TOKENS, block_ids=(0, 1, 2, 3), tenant=tenant),
            WorkloadRequest(arrival_ms=60, input_length=64, output_length=ANSWER_TOKENS, block_ids=(9,)),
        ],
    )  # fmt: skip


async def bench(*arguments: str | Path) -> Result:
    return await asyncio.to_thread(
        CliRunner().invoke, main, ["bench", "serve", *map(str, arguments), "--ids", str(IDS)]
    )


async def test_a_workload_is_sent_and_measured_by_a_replays_names(tmp_path: Path) -> None:
    write_workload(two_turns("acme"), tmp_path / "talk.jsonl")
    async with running_router(2) as router:
        result = await bench(tmp_path / "talk.jsonl", "--router", router.address, "--json", "--workers", "2")
        assert result.exit_code == 0, result.output
        received = [call for worker in router.workers for call in worker.received]
    told = json.loads(result.stdout)
    figures = told["policies"]["cost"]
    assert (told["form"], figures["requests"], figures["errors"]) == ("measured", 3, {})
    assert figures["prompt_tokens"] == 190 + 256 + 64
    assert figures["output_tokens"] == 3 * ANSWER_TOKENS
    # The second turn finds the first's prompt and answer, but for the answer's last token, which was never computed.
    assert figures["device_share"] == 192 / 510
    assert {call.ticket.tenant for call in received} == {"acme", "default"}
    assert all(call.message.sampling.ignore_eos for call in received)


async def test_errors_are_counted_and_told_and_who_follows_comes_all_the_same(tmp_path: Path) -> None:
    write_workload(two_turns(), tmp_path / "talk.jsonl")
    script = Script(error=InvalidRequestError("prompt", "is odd"))
    async with running_router(1, script=script) as router:
        result = await bench(tmp_path / "talk.jsonl", "--router", router.address, "--concurrency", "1")
    assert result.exit_code == 1
    assert "3 × INVALID_REQUEST: prompt: is odd" in result.stderr
    assert "talk: 3 requests" in result.stdout


async def test_what_cannot_be_simulated_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    """A profile that is misspelt, or a cache that is too small, costs no run of an hour."""
    write_workload(two_turns(), tmp_path / "talk.jsonl")
    async with running_router(1) as router:
        asked = (tmp_path / "talk.jsonl", "--router", router.address, "--simulate")
        for more, problem in (
            (("h100-9b",), "profile: 'h100-9b' is neither a file nor"),
            (("h100-8b", "--device-tokens", "64"), "device_tokens must hold the largest request"),
        ):
            result = await bench(*asked, *more)
            assert result.exit_code == 2
            assert problem in result.stderr
        assert router.workers[0].received == []


async def test_a_cluster_may_be_larger_than_a_pair_of_ones_own(tmp_path: Path) -> None:
    write_workload(two_turns(), tmp_path / "talk.jsonl")
    async with running_router(1) as router:
        result = await bench(tmp_path / "talk.jsonl", "--router", router.address, "--workers", "64", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["policies"]["cost"]["max_over_mean"] == 64.0
    started = await bench("--compare", "cache=radix", "--workers", "64")
    assert "workers must be from 1 to 16, got 64" in started.stderr


async def test_who_is_interrupted_has_what_is_there() -> None:
    script = Script()
    async with running_router(1, script=script) as router:
        run = ServeRun(two_turns(), ServeSpec(address=router.address, ids=IDS))
        script.before_start.shut()
        running = asyncio.create_task(run.run())
        await eventually(lambda: script.before_start.waiting == 2)
        script.before_start.let_one()
        await eventually(lambda: len(run.served) == 1)
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()
        await eventually(lambda: router.loads() == [0])
    figures = figures_of(run.served, NO_OBJECTIVE)
    assert (figures.requests, figures.errors) == (1, {})
