"""``prefixmesh replay TRACE --faults``: what a seed met can be printed, edited and repeated, and what broke a rule is told with how to repeat it."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from prefixmesh.cli.main import main
from prefixmesh.sim import fault_run, fault_seeds
from prefixmesh.sim.fault_run import run_seed

SAMPLE = Path(__file__).parents[1] / "golden" / "trace_sample.jsonl"
CHAT = ("chat", "--requests", "60")
RUN = "from prefixmesh.cli.main import main; main()"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["replay", *(str(one) for one in arguments)])


def told(*arguments: str | Path) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_script_that_a_seed_drew_gives_the_same_run_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    printed = run(*CHAT, "--faults", "mixed", "--seed", "6", "--print-script").stdout
    path.write_text(printed)
    drawn = told(*CHAT, "--faults", "mixed", "--seed", "6")
    assert drawn["script"] == json.loads(printed)
    assert any("store" in one["of"] for one in drawn["script"]["faults"])
    written = told(*CHAT, "--faults", path, "--seed", "6")
    assert written["log_digest"] == drawn["log_digest"]
    again = run(*CHAT, "--faults", path, "--seed", "6", "--print-script").stdout
    assert again == printed


def test_script_is_printed_with_a_mishap_a_line_for_people_to_edit() -> None:
    lines = run(*CHAT, "--faults", "partitions", "--print-script").stdout.splitlines()
    assert lines[0].startswith('{"workers": ')
    assert lines[-1] == "]}"
    assert {json.loads(line.strip(" ,"))["kind"] for line in lines[1:-1]} <= {"cut", "cut_silently"}


def test_seed_alone_is_the_seed_among_others() -> None:
    """What a workload draws is the same for all: else no seed but the first could be repeated."""
    three = told(*CHAT, "--faults", "crashes", "--seed", "4", "--seeds", "3")
    alone = [told(*CHAT, "--faults", "crashes", "--seed", str(seed)) for seed in (4, 5, 6)]
    for name in ("requests", "finished", "attempts", "faults"):
        assert three[name] == sum(one[name] for one in alone), name
    assert three["failed"] == []


def test_seeds_that_break_a_rule_are_told_with_the_commands_that_repeat_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fault_run.FaultRun, "_go_through", lambda _: None)
    monkeypatch.setattr(fault_run, "broken_rules", lambda _: ["worker-0: 1 locks are left"])
    result = run(*CHAT, "--faults", "refusals,lies", "--seed", "7", "--seeds", "9", "--block-size", "16")
    assert result.exit_code == 1
    for seed in range(7, 12):
        command = f"prefixmesh replay {' '.join(CHAT)} --block-size 16 --faults refusals,lies --seed {seed}"
        assert f"again: {command}\n" in result.stdout
    assert "--seed 12" not in result.stdout  # five say enough
    assert result.stdout.endswith("chat: 5 of 5 seeds broke a rule; the other 4 were not run\n")
    as_json = run(*CHAT, "--faults", "mixed", "--seed", "7", "--json")
    assert as_json.exit_code == 1
    (failed,) = json.loads(as_json.stdout)["failed"]
    assert failed["problems"] == ["worker-0: 1 locks are left"]
    assert failed["script"]["faults"]
    monkeypatch.undo()
    assert CliRunner().invoke(main, shlex.split(failed["again"])[1:]).exit_code == 0


def test_interrupt_tells_how_far_it_came_and_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seed: int, *arguments: Any, **more: Any) -> fault_run.FaultReport:
        if seed == 5:
            raise KeyboardInterrupt
        return run_seed(seed, *arguments, **more)

    monkeypatch.setattr(fault_seeds, "run_seed", interrupted)
    result = run(*CHAT, "--faults", "network", "--seed", "3", "--seeds", "100")
    assert result.exit_code == 130
    assert (
        "stopped after 2 of 100 seeds, from 3 on; none broke a rule. The rest: --seed 5 --seeds 98"
        in result.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--faults", "sulking"), "faults: 'sulking' is neither a file nor mixed or some of crashes, stalls"),
        (("--faults", "mixed", "--jobs", "0"), "jobs must be from 1 to 64, got 0"),
        (("--faults", "mixed", "--seeds", "1000001"), "seeds must be from 1 to 1000000, got 1000001"),
        (("--faults", SAMPLE), "line 2: not JSON"),
    ],
)
def test_what_cannot_be_run_is_told_in_a_line(arguments: tuple[str | Path, ...], problem: str) -> None:
    result = run(*CHAT, *arguments)
    assert result.exit_code == 2
    assert problem in " ".join(result.stderr.split())


@pytest.mark.parametrize("option", [("--seeds", "2"), ("--jobs", "2"), ("--print-script",)])
def test_options_of_faults_mean_nothing_without_them(option: tuple[str, ...]) -> None:
    result = run(*CHAT, *option)
    assert result.exit_code == 2
    assert "--seeds, --jobs and --print-script are of --faults" in result.stderr


@pytest.mark.slow
def test_seeds_come_to_the_same_by_one_process_and_by_two_and_in_any_order_of_hashes() -> None:
    command = [sys.executable, "-c", RUN, "replay", "lora-tenants", "--requests", "80"]
    command += ["--faults", "mixed", "--seed", "6", "--seeds", "2", "--json"]
    found = []
    for jobs, hash_seed in (("1", "0"), ("2", "1")):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(
            [*command, "--jobs", jobs], env=environment, capture_output=True, check=True, timeout=300
        )
        found.append(json.loads(ran.stdout))
    assert found[0] == found[1]
    assert found[0]["seeds"] == 2
