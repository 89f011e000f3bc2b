"""Scripts of a fleet's mishaps as JSON: what a seed has drawn comes back from it, and what a person gets wrong is told by its place."""

import json
from pathlib import Path
from typing import Any

import pytest

from prefixmesh.errors import ConfigError
from prefixmesh.sim.fault_draws import KINDS
from prefixmesh.sim.fault_file import as_object, parse_script
from prefixmesh.sim.fault_plan import ALL_MIXED, FaultPlan, read_plan, script_of
from prefixmesh.sim.fault_script import FleetScript, LinkFaultKind, StoreFaultKind
from prefixmesh.sim.faults import FaultKind


def read(*faults: dict[str, Any], **fleet: int) -> FleetScript:
    """A script with these mishaps, of seed 0."""
    return script_of(0, FaultPlan(written=parse_script(json.dumps({**fleet, "faults": faults}), "f.json")))


def kinds_of(script: FleetScript) -> set[object]:
    found: set[object] = {fault.kind for one in script.workers.values() for fault in one.faults}
    found |= {"router"} if script.routers else set()
    return found | {one.kind for one in script.links} | {one.kind for one in script.store}


def test_whatever_a_seed_draws_comes_back_from_its_json() -> None:
    met: set[object] = set()
    for seed in range(150):
        drawn = script_of(seed, ALL_MIXED)
        told = json.loads(json.dumps(as_object(drawn)))
        again = parse_script(json.dumps(told), "f.json")
        script = script_of(seed, FaultPlan(written=again))
        assert as_object(script) == told
        assert (script.lines(), script.over_s) == (drawn.lines(), drawn.over_s)
        assert (list(script.workers), script.router_names) == (list(drawn.workers), drawn.router_names)
        met |= kinds_of(drawn)
    assert met == {*FaultKind, "router", *LinkFaultKind, *StoreFaultKind}


@pytest.mark.parametrize(
    ("kind", "only"),
    [
        ("crashes", {FaultKind.CRASH, "router", LinkFaultKind.CUT_SILENTLY}),
        ("stalls", {FaultKind.STALL, FaultKind.DELAY, FaultKind.STALL_STREAM}),
        ("lies", {FaultKind.WRONG_CACHED, FaultKind.WRONG_SUMS, FaultKind.SILENCE, FaultKind.CLOCK}),
        ("refusals", {FaultKind.REFUSE}),
        ("copies", {FaultKind.COPY_DELAY, FaultKind.COPY_FAIL}),
        ("partitions", {LinkFaultKind.CUT, LinkFaultKind.CUT_SILENTLY}),
        ("network", {LinkFaultKind.BAD}),
        ("store", {*StoreFaultKind, LinkFaultKind.CUT, LinkFaultKind.CUT_SILENTLY}),
    ],
)
def test_kind_draws_its_own_mishaps_and_no_others(kind: str, only: set[object]) -> None:
    scripts = [script_of(seed, read_plan(kind)) for seed in range(60)]
    assert set().union(*map(kinds_of, scripts)) == only
    assert all(script.lines() for script in scripts)
    assert all(script.has_store is (kind == "store") for script in scripts)


def test_some_seeds_that_mix_all_kinds_meet_the_store_and_the_others_do_not() -> None:
    share = sum(script_of(seed, ALL_MIXED).has_store for seed in range(200)) / 200
    assert 0.15 < share < 0.35


def test_several_kinds_draw_of_each() -> None:
    found = set().union(*(kinds_of(script_of(seed, read_plan("network, refusals"))) for seed in range(20)))
    assert found == {LinkFaultKind.BAD, FaultKind.REFUSE}
    assert read_plan(",".join(KINDS)).kinds == ALL_MIXED.kinds


def test_fleet_is_as_large_as_is_written_or_else_has_all_that_are_named() -> None:
    crash = {"of": "worker-6", "kind": "crash", "at_s": 1, "for_s": 2}
    assert len(read(crash).workers) == 7
    assert len(read(crash, workers=9, routers=3).workers) == 9
    assert read(crash, routers=3).router_names == ("router-0", "router-1", "router-2")
    cut = {"of": ["router-2", "store"], "kind": "cut", "at_s": 1, "for_s": 2}
    assert len(read(cut).router_names) == 3
    assert read(cut).has_store


def test_what_is_left_out_of_a_mishap_has_its_default() -> None:
    script = read(
        {"of": "worker-0", "kind": "refuse", "at_s": 1, "for_s": 2},
        {"of": "store", "kind": "flush", "at_s": 3},
    )
    assert script.lines() == [
        "   1.000 worker-0: refuse for 2.000 s, RESOURCE_EXHAUSTED",
        "   3.000 store: flush for 0.000 s",
    ]


GOOD: dict[str, Any] = {"of": "worker-0", "kind": "delay", "at_s": 1, "for_s": 2, "amount": 5}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"of": None}, r"faults\[1\].of: must be worker-N, router-N, .* got None"),
        ({"of": "worker-01"}, r"of: must be worker-N.* got 'worker-01'"),
        ({"of": "worker-3"}, "of: must be worker-0 to worker-2, got 'worker-3'"),
        ({"of": "router-9" * 900}, "of: must be worker-N"),
        ({"of": "router-4"}, "of: must be router-0 to router-3, got 'router-4'"),
        (
            {"of": ["worker-0", "router-0"]},
            "of: a link is of a router and a worker, or a router and the store",
        ),
        ({"of": ["router-0", "router-1"]}, "of: must be worker-N, got 'router-1'"),
        ({"of": ["router-0"]}, "of: a link is of a router"),
        ({"kind": "sulk"}, "kind: must be one of delay, crash, .* got 'sulk'"),
        ({"kind": ["crash"]}, "kind: must be one of delay"),
        ({"of": "router-0"}, "kind: must be one of crash, got 'delay'"),
        ({"of": "network"}, "kind: must be one of bad, got 'delay'"),
        ({"of": ["router-0", "store"]}, "kind: must be one of cut, cut_silently, got 'delay'"),
        ({"of": "store", "kind": "bad"}, "kind: must be one of crash, stall, delay, lose, flush, got 'bad'"),
        ({"at_s": -1}, "at_s: must be a number from 0 to 120, got -1"),
        ({"at_s": True}, "at_s: must be a number"),
        ({"for_s": 119.5}, "for_s: must be a number from 0 to 119, got 119.5"),
        ({"for_s": None}, "for_s: must be a number"),
        ({"amount": -1}, "amount: must be a number from 0 to 1e.06, got -1"),
        ({"amount": 10**400}, "amount: must be a number from 0 to 1e.06"),
        ({"kind": "crash"}, "amount: is for clock, copy_delay, delay, stall_stream, wrong_cached alone"),
        ({"status": "UNAVAILABLE"}, "status: is for refuse alone"),
        ({"amount": 0, "kind": "refuse"}, "amount: is for"),
        ({"seconds": 5}, "unknown field 'seconds'"),
    ],
)
def test_what_is_wrong_with_a_mishap_is_told_by_its_place_and_field(
    change: dict[str, Any], problem: str
) -> None:
    text = json.dumps({"workers": 3, "faults": [GOOD, GOOD | change]})
    with pytest.raises(ConfigError, match=rf"faults f.json: .*{problem}"):
        parse_script(text, "f.json")
    parse_script(json.dumps({"workers": 3, "faults": [GOOD, GOOD]}), "f.json")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{\n"faults": [\n{"of" "x"}]}', "faults f.json, line 3: not JSON"),
        ('{"faults": [{"at_s": NaN}]}', "faults f.json: not JSON: NaN is no number"),
        ("[" * 100_000, "not JSON"),
        ("[]", "must be an object"),
        ("{}", "faults must be a list of 1 to 1000"),
        ('{"faults": []}', "faults must be a list of 1 to 1000"),
        ('{"faults": [5]}', r"faults\[0\]: must be an object"),
        ('{"faults": [{}], "seed": 5}', "unknown field 'seed'"),
        ('{"faults": [{}], "workers": 17}', "workers must be from 1 to 16, got 17"),
        ('{"faults": [{}], "routers": 0}', "routers must be from 1 to 4, got 0"),
        (
            '{"faults": [{"of": "store", "kind": "flush", "at_s": 1, "for_s": 2}]}',
            r"faults\[0\].for_s: a flush is done at once",
        ),
        (
            '{"faults": [{"of": "worker-0", "kind": "refuse", "at_s": 1, "for_s": 2, "status": "OK"}]}',
            "status: must be one of RESOURCE_EXHAUSTED, UNAVAILABLE, got 'OK'",
        ),
    ],
)
def test_what_is_no_script_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_script(text, "f.json")


def test_plan_that_is_neither_kinds_nor_a_file_is_refused(tmp_path: Path) -> None:
    for given in ("sulking", "crashes,sulking", str(tmp_path)):
        with pytest.raises(ConfigError, match=r"neither a file nor mixed or some of crashes, .*, store"):
            read_plan(given)
    path = tmp_path / "f.json"
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="no text in UTF-8"):
        read_plan(str(path))
    path.write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(ConfigError, match="at most 1,048,576 bytes"):
        read_plan(str(path))
