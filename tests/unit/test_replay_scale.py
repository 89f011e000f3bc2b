"""What ``benchmarks/replay_scale.py`` measures, at a size that takes a moment; and how often workers of a great fleet report in a replay."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from prefixmesh.router import report_interval
from prefixmesh.router.routing import RouterCore
from prefixmesh.sim.replay import replay
from prefixmesh.sim.replay_spec import ReplaySpec
from prefixmesh.sim.timing import H100_8B
from prefixmesh.worker_report import WorkerReport

DEVICE_TOKENS = 20_000


def load() -> Any:
    """The script, which is in no package."""
    path = Path(__file__).parents[2] / "benchmarks" / "replay_scale.py"
    spec = spec_from_file_location("replay_scale", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


scale = load()


def test_a_tiny_fleet_is_measured_and_the_core_holds_what_the_caches_do_however_many_requests_come() -> None:
    few, many = (scale.measure(4, requests, "cost", DEVICE_TOKENS) for requests in (80, 240))
    for one in (few, many):
        assert 0.0 < one["known_s"] < one["took_s"]
        assert one["decision_us"] > 0.0
        assert one["core_kib_per_worker"] > 10.0
        assert 0.8 < one["blocks_per_worker"] * scale.BLOCK / DEVICE_TOKENS <= 1.0
    assert scale.measure(4, 20, "match_gate", DEVICE_TOKENS)["core_kib_per_worker"] == 0.0, "not our router"


def test_what_an_object_has_counts_once_and_large_numbers_count() -> None:
    inner = ["x" * 1000]
    once, twice = ([inner], [inner, inner])
    assert scale.bytes_of(twice) - scale.bytes_of(once) == sys.getsizeof(twice) - sys.getsizeof(once)
    names = {1 << 60 | n: 7 for n in range(100)}
    assert scale.bytes_of(names) == sys.getsizeof(names) + 100 * sys.getsizeof(1 << 60)


def test_growth_is_told_from_the_least_fleet_to_the_largest(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"workers": 8, "decision_us": 50.0, "core_kib_per_worker": 100.0},
        {"workers": 64, "decision_us": 75.0, "core_kib_per_worker": 110.0},
    ]
    scale.print_growth(rows)
    assert "8 times the workers: a decision takes 1.50 times as long" in capsys.readouterr().out
    scale.print_growth(rows[:1])
    assert not capsys.readouterr().out


def test_workers_of_a_replay_report_no_oftener_than_the_router_of_so_many_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[float] = []
    told_of = RouterCore.on_report

    def noted(core: RouterCore, endpoint: Any, report: WorkerReport, now: float) -> None:
        told.append(now)
        told_of(core, endpoint, report, now)

    monkeypatch.setattr(RouterCore, "on_report", noted)
    spec = ReplaySpec(workers=4, device_tokens=DEVICE_TOKENS, timing=H100_8B)
    lasted_s = replay(scale.workload(100, 4), spec, "cost").lasted_s
    assert len(told) > 15 * lasted_s, "ten a second of each that is busy"
    monkeypatch.setattr(report_interval, "MAX_REPORTS_PER_S", 10)
    told.clear()
    lasted_s = replay(scale.workload(100, 4), spec, "cost").lasted_s
    assert 4 <= len(told) <= 4 + 10 * lasted_s
