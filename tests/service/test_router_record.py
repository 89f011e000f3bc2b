"""A router that records: requests over real sockets, and the file that a replay reads."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from prefixmesh.cli.main import main
from prefixmesh.errors import InvalidRequestError, UnavailableError
from prefixmesh.sim.workload_file import read_workload
from tests.support.fake_worker import ANSWER_TOKENS, Script
from tests.support.router_kit import running_router, token_request

PROMPT = range(200)
LONG_ANSWER = [97 + number % 26 for number in range(70)]


async def test_what_was_asked_is_recorded_without_prompts_and_replayed(tmp_path: Path) -> None:
    """Two turns of one caller and a stranger: the second turn's blocks are the first's, prompt and answer; a stranger's are its own."""
    path = tmp_path / "load.jsonl"
    script = Script(answer=lambda _: LONG_ANSWER)
    async with running_router(2, script=script, record=str(path)) as router:
        await router.generate(token_request(PROMPT), tenant="acme")
        await router.generate(token_request([*PROMPT, *LONG_ANSWER, *range(50)]), tenant="acme")
        await router.generate(token_request(PROMPT), tenant="zeta")
    workload = read_workload(path)
    first, second, stranger = workload.requests
    assert workload.block_size == 64
    assert [one.input_length for one in workload.requests] == [200, 320, 200]
    assert [one.output_length for one in workload.requests] == [70, 70, 70]
    assert second.block_ids[:4] == (*first.block_ids, *first.answer_ids)
    assert set(stranger.block_ids).isdisjoint(first.block_ids)
    assert (first.tenant, second.tenant, stranger.tenant) == ("t0", "t0", "t1")
    arrivals = [one.arrival_ms for one in workload.requests]
    assert arrivals == sorted(arrivals, key=lambda one: one or 0)
    assert b"acme" not in path.read_bytes()
    told = CliRunner().invoke(
        main, ["replay", str(path), "--policy", "cost", "--json"], catch_exceptions=False
    )
    assert told.exit_code == 0
    assert '"requests": 3' in told.stdout


async def test_requests_that_failed_are_recorded_as_far_as_they_came(
    tmp_path: Path,
) -> None:
    path = tmp_path / "load.jsonl"
    async with running_router(1, record=str(path)) as router:
        await router.generate(token_request(PROMPT))
        router.workers[0].script.breaks_with = InvalidRequestError("prompt", "is odd")
        with pytest.raises(UnavailableError):
            await router.generate(token_request(PROMPT))
    whole, broken = read_workload(path).requests
    assert whole.output_length == ANSWER_TOKENS
    assert broken.output_length == 1
    assert broken.block_ids == whole.block_ids
