"""``prefixmesh replay`` and ``prefixmesh traces`` on small workloads."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from prefixmesh.cli.main import main
from prefixmesh.errors import ConfigError
from prefixmesh.sim import fault_run
from prefixmesh.sim.public_traces import PUBLIC_TRACES, check_file, public_trace
from prefixmesh.sim.replay_spec import POLICIES
from prefixmesh.sim.workload_file import read_workload
from prefixmesh.sim.workloads.catalogue import GENERATORS

SAMPLE = Path(__file__).parents[1] / "golden" / "trace_sample.jsonl"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


def figures(*arguments: str | Path) -> dict[str, dict[str, float]]:
    result = run("replay", SAMPLE, "--json", *arguments)
    assert result.exit_code == 0, result.output
    policies: dict[str, dict[str, float]] = json.loads(result.stdout)["policies"]
    for one in policies.values():
        del one["decision_us"]  # this machine's time, which is another in each run
    return policies


def page_of(*arguments: str | Path) -> dict[str, Any]:
    result = run("replay", SAMPLE, "--policy", "round_robin", "--json", *arguments)
    assert result.exit_code == 0, result.output
    value: dict[str, Any] = json.loads(result.stdout)
    return value


def test_policies_are_compared_in_a_table() -> None:
    result = run("replay", SAMPLE)
    assert result.exit_code == 0, result.output
    for policy in ("cost", "match_gate", "block_cost", "weighted_scores", "round_robin"):
        assert f"\n{policy} " in result.stdout
    assert "trace_sample.jsonl: 5 requests" in result.stdout
    assert "not measured" in result.stdout


def test_json_tells_what_was_replayed_on_what_and_by_which_form() -> None:
    result = run("replay", SAMPLE, "--policy", "cost", "--workers", "3", "--json")
    told = json.loads(result.stdout)
    assert told["form"] == "block-level"
    assert (told["trace"]["block_size"], told["fleet"]["workers"], told["fleet"]["profile"]) == (
        512,
        3,
        "h100-8b",
    )
    assert set(told["policies"]) == {"cost"}
    assert {"cached_share", "max_over_mean", "ttft_ms", "tokens_per_s"} <= set(told["policies"]["cost"])
    assert set(told["policies"]["cost"]["ttft_ms"]) == {"p50", "p90", "p99"}


def test_profile_without_a_bottom_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_bytes(b'{"x":' + b"[" * 100_000)
    result = run("replay", SAMPLE, "--profile", tmp_path / "deep.json")
    assert result.exit_code == 2
    assert "deep.json: maximum recursion depth" in result.output


def test_names_that_a_file_has_steer_no_terminal_and_no_page(tmp_path: Path) -> None:
    """A workload's and a profile's: they may come from anybody."""
    hostile = "a\\u001b[31m\\u0007\\nb<script>"
    trace, profile, page = (tmp_path / name for name in ("trace.jsonl", "profile.json", "page.html"))
    trace.write_text(
        f'{{"format":"prefixmesh-workload","version":1,"block_size":64,"name":"{hostile}"}}\n'
        '{"arrival_ms":0,"input_length":64,"output_length":1,"block_ids":[0]}\n'
    )
    profile.write_text(f'{{"source":"{hostile}","timing":{{"step_ms":1,"prefill_ms_per_token":1}}}}')
    asked = ("replay", trace, "--policy", "round_robin", "--profile", profile)
    told = run(*asked, "--report", page, "--no-sweep")
    assert told.exit_code == 0, told.output
    assert "a[31m b<script>: 1 requests" in told.stdout
    assert "(a[31m b<script>)" in told.stdout
    written = page.read_text()
    assert "a[31m b&lt;script&gt;" in written
    assert not {"\x1b", "\x07"} & {*told.stdout, *written}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("replay", "x" * 300), "trace"),
        (("bench", "serve", "x" * 300), "trace"),
        (("replay", SAMPLE, "--profile", "x" * 300), "profile"),
        (("replay", SAMPLE, "--faults", "x" * 300), "faults"),
    ],
    ids=["trace", "served", "profile", "faults"],
)
def test_name_that_no_file_can_have_is_refused(arguments: tuple[str | Path, ...], named: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.exception
    assert result.stderr.startswith(f"Error: {named}")
    assert len(result.stderr) < 400


def test_every_flag_of_the_fleet_changes_what_comes_of_it() -> None:
    base = figures("--policy", "cost")["cost"]
    for flag, value in (
        ("--workers", "1"),
        ("--profile", "h100x2-70b"),
        ("--speed", "100"),
    ):
        assert figures("--policy", "cost", flag, value)["cost"] != base, flag
    small = ("--device-tokens", "2048", "--workers", "1", "--policy", "cost")
    assert figures(*small) != figures("--workers", "1", "--policy", "cost")
    host = ("--device-tokens", "2048", "--workers", "1", "--policy", "cost")
    assert (
        figures(*host, "--host-tokens", "100000")["cost"]["host_share"] > figures(*host)["cost"]["host_share"]
    )
    again = ("--policy", "round_robin", "--workers", "1")
    assert figures(*again, "--at-once")["round_robin"] != figures(*again)["round_robin"]
    assert page_of("--max-resident-adapters", "3")["fleet"]["max_resident_adapters"] == 3
    assert page_of("--pins")["fleet"]["pins"] is True
    assert page_of("--cascade")["fleet"]["cascade"] is True
    assert (
        page_of("--profile", "h100x8-70b")["fleet"]["cascade_min_reads"]
        == 8 * page_of()["fleet"]["cascade_min_reads"]
    )
    assert figures("--policy", "random", "--seed", "3") != figures("--policy", "random")
    assert figures("--policy", "cost", "--spill-weight", "1.85")["cost"] == base


def test_caches_are_compared_by_their_names_and_only_where_there_are_several() -> None:
    compared = figures("--policy", "cost", "--cache", "radix, off")
    assert set(compared) == {"cost/radix", "cost/off"}
    assert compared["cost/off"]["cached_share"] == 0.0 < compared["cost/radix"]["cached_share"]
    assert compared["cost/radix"] == figures("--policy", "cost")["cost"]


def test_objective_adds_goodput_to_the_table_and_decisions_are_told() -> None:
    told = run("replay", SAMPLE, "--policy", "cost", "--slo-ttft-ms", "300", "--slo-tpot-ms", "50")
    assert "the first token within 300 ms and each token within 50 ms" in " ".join(told.stdout.split())
    assert " good " in told.stdout
    assert " µs" in told.stdout
    assert " good " not in run("replay", SAMPLE, "--policy", "round_robin").stdout.split("cached, host")[0]


def test_adapters_and_pins_have_columns_where_there_are_any() -> None:
    def columns(*arguments: str) -> str:
        shown = run("replay", *arguments, "--requests", "24", "--policy", "round_robin").stdout
        return shown.split("cached, host")[0]

    assert " waited " in columns("lora-tenants")
    assert " waited " not in columns("lora-tenants", "--max-resident-adapters", "0")
    assert " pins " in columns("agents", "--pins")
    assert " pins " not in columns("agents")
    assert "KV that several share read once" in " ".join(columns("agents", "--cascade").split())


def test_workload_that_is_named_has_the_length_that_is_asked_for() -> None:
    arguments = ("--requests", "40", "--block-size", "4", "--concurrency", "3", "--policy", "cost", "--json")
    told = json.loads(run("replay", "chat", *arguments).stdout)
    assert told["trace"]["requests"] in range(40, 60)
    assert (told["trace"]["block_size"], told["fleet"]["concurrency"]) == (4, 3)


def test_faults_hold_under_a_trace_and_a_seed_is_a_run() -> None:
    told, again = (
        json.loads(
            run("replay", "agents", "--requests", "80", "--faults", "mixed", "--seeds", "2", "--json").stdout
        )
        for _ in range(2)
    )
    assert told == again
    assert told["requests"] > told["finished"] > 0
    assert told["faults"] >= 2
    printed = run("replay", SAMPLE, "--faults", "mixed", "--seed", "1").stdout
    assert "Nothing is broken, lost or left." in printed


def test_seed_that_breaks_a_rule_is_told_with_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_run, "broken_rules", lambda _: ["worker-0: 1 locks are left"])
    result = run("replay", SAMPLE, "--faults", "mixed", "--seed", "7")
    assert result.exit_code == 1
    assert "seed 7" in result.stdout
    assert "worker-0: 1 locks are left" in result.stdout
    assert "--faults mixed --seed 7" in result.stdout


def test_all_is_every_policy_and_ceiling_and_ours_on_the_other_caches() -> None:
    found = figures("--policy", "all")
    assert set(found) == {*POLICIES, "cost/hash", "cost/off"}
    assert found["cost/off"]["cached_share"] == 0.0
    assert set(figures("--policy", "all", "--cache", "hash")) == set(POLICIES)


def test_workload_may_be_named_in_a_files_place(tmp_path: Path) -> None:
    result = run("traces", "make", "fork", "--requests", "16", "--seed", "4", "--out", tmp_path / "f.jsonl")
    assert result.exit_code == 0, result.output
    assert len(read_workload(tmp_path / "f.jsonl").requests) == 16
    assert run("replay", tmp_path / "f.jsonl", "--policy", "round_robin").exit_code == 0


def test_seed_makes_the_same_file_and_block_size_another(tmp_path: Path) -> None:
    def made(*arguments: str) -> bytes:
        path = tmp_path / "made.jsonl"
        assert run("traces", "make", "chat", "--requests", "20", "--out", path, *arguments).exit_code == 0
        return path.read_bytes()

    assert made() == made("--seed", "0", "--block-size", "64")
    assert made() != made("--seed", "1")
    assert b'"block_size":16' in made("--block-size", "16")


def test_list_tells_of_every_workload_and_public_trace() -> None:
    listed = run("traces", "list").stdout
    assert all(
        f"{name} (made; {make().requests:,} requests unless told)" in listed
        for name, make in GENERATORS.items()
    )
    assert "`" not in listed, "what people read has no marks of the source's"
    assert all(f"{name} (public)" in listed for name in PUBLIC_TRACES)
    assert "2,048 tokens" in listed


def test_public_trace_is_shown_with_source_size_and_checksum() -> None:
    shown = run("traces", "show", "conversation").stdout
    trace = public_trace("conversation")
    assert all(
        part in shown for part in (trace.url, trace.sha256, f"{trace.size_bytes:,} bytes", trace.licence)
    )


def test_file_is_told_from_the_trace_by_size_and_checksum(tmp_path: Path) -> None:
    path = tmp_path / "copy.jsonl"
    path.write_bytes(b"1234")
    trace = replace(public_trace("conversation"), size_bytes=4, sha256=hashlib.sha256(b"1234").hexdigest())
    check_file(trace, path)
    with pytest.raises(ConfigError, match=r"has the SHA-256 [0-9a-f]{64}, 'conversation' has 00"):
        check_file(replace(trace, sha256="00"), path)
    result = run("traces", "show", "conversation", "--check", path)
    assert (result.exit_code, "has 4 bytes, 'conversation' has 3,029,533" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("replay", "nowhere.jsonl"), "neither a file nor one of customer-service"),
        (("replay", SAMPLE, "--policy", "best"), "'best' is not one of cost, "),
        (("replay", SAMPLE, "--profile", "h200"), "'h200' is neither a file nor one of h100-8b"),
        (("replay", SAMPLE, "--workers", "0"), "workers must be from 1 to 4096, got 0"),
        (("replay", SAMPLE, "--workers", "4097"), "workers must be from 1 to 4096, got 4097"),
        (("replay", SAMPLE, "--routers", "65"), "routers must be from 1 to 64, got 65"),
        (("replay", SAMPLE, "--workers", "1000000"), "workers must be from 1 to 4096, got 1000000"),
        (
            ("replay", SAMPLE, "--device-tokens", "-1"),
            "device_tokens must be from 1 to 1099511627776, got -1",
        ),
        (("replay", SAMPLE, "--concurrency", "-1"), "concurrency must be from 0 to 1048576, got -1"),
        (("replay", SAMPLE, "--max-resident-adapters", "-1"), "max_resident_adapters must be from 0 to 1024"),
        (("replay", SAMPLE, "--pins", "--at-once"), "pins cannot be with at_once"),
        (("replay", SAMPLE, "--speed", "nan"), "speed must be a number above 0, got nan"),
        (("replay", SAMPLE, "--speed", "1e-300"), "a replay lasts at most 604,800 s"),
        (("replay", SAMPLE, "--cache", "tree"), "cache must be one of radix, hash, off, got 'tree'"),
        (("replay", SAMPLE, "--slo-ttft-ms", "0"), "ttft_ms must be milliseconds above 0"),
        (("replay", SAMPLE, "--concurrency", "2", "--speed", "3"), "speed cannot be with concurrency"),
        (
            ("replay", SAMPLE, "--faults", "mixed", "--workers", "8", "--cascade"),
            "--workers, --cascade: with --faults the seed says what the fleet is",
        ),
        (("replay", SAMPLE, "--sweep"), "--sweep: of --report, which is not asked for"),
        (("replay", SAMPLE, "--faults", "mixed", "--seeds", "0"), "seeds must be from 1 to 1000000, got 0"),
        (("replay", SAMPLE, "--requests", "5"), "a file has the requests and blocks that it has"),
        (("replay", "chat", "--requests", "4000001"), "requests must be from 1 to 4000000, got 4000001"),
        (("replay", SAMPLE, "--device-tokens", "5"), "device_tokens must hold the largest request"),
        (("replay", __file__), r"line 1: not JSON"),
        (("traces", "show", "chess"), "no public trace is called 'chess'; there are: conversation"),
        (("traces", "make", "chess", "--out", "x"), "no workload is called 'chess'"),
        (("traces", "make", "chat", "--requests", "0", "--out", "x"), "requests must be from 1 to 4000000"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_line(arguments: tuple[str, ...], problem: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert problem in " ".join(result.stderr.split())
