"""A fleet with a Ray of its own, in the foreground and in the background."""

import json
import signal
from pathlib import Path

import pytest

from prefixmesh import fleet_state
from prefixmesh.client import Client
from tests.support.fleet_processes import foreground, prefixmesh, processes_of, read_until, wait_gone

pytestmark = pytest.mark.cluster

SETTINGS = ("--workers", "1", "--max-total-tokens", "4096", "--grace", "5")


def test_sigterm_ends_a_foreground_fleet_and_its_ray(tiny_model: Path, tmp_path: Path) -> None:
    """Exit code 0, the endpoints forgotten, no process left: not of Ray, not of a worker, not of an engine."""
    with foreground(tmp_path, "up", "--model", str(tiny_model), *SETTINGS) as up:
        read_until(up, "Stop it")
        state = fleet_state.load(tmp_path / "fleet.json")
        assert state.started_ray
        processes = processes_of(tmp_path)
        names = " ".join(" ".join(process.cmdline()) for process in processes)
        assert all(part in names for part in ("raylet", "WorkerActor", "RouterActor", "engine_process")), (
            names
        )
        up.send_signal(signal.SIGTERM)
        assert up.wait(timeout=60) == 0
    assert wait_gone(processes) == []
    assert processes_of(tmp_path) == []
    assert not (tmp_path / "fleet.json").exists()


def test_a_detached_fleet_outlives_its_command_until_down(tiny_model: Path, tmp_path: Path) -> None:
    """``up --detach`` returns when requests are answered; ``status`` finds it; a second ``up`` is refused; ``down`` ends it all."""
    done = prefixmesh(tmp_path, "up", "--detach", "--model", str(tiny_model), *SETTINGS)
    assert done.returncode == 0, done.stderr
    state = fleet_state.load(tmp_path / "fleet.json")
    with Client(state.router, timeout_s=30) as client:
        assert client.generate("Hello", max_tokens=2).completion_tokens <= 2
    shown = json.loads(prefixmesh(tmp_path, "status", "--json").stdout)
    (worker,) = shown["workers"]
    assert (worker["worker_id"], worker["ready"], worker["routed"], worker["in_flight"]) == (
        "worker-0",
        True,
        1,
        0,
    )
    assert worker["address"] == state.workers["worker-0"]
    again = prefixmesh(tmp_path, "up", "--model", str(tiny_model), *SETTINGS)
    assert again.returncode == 2
    assert again.stderr.splitlines()[-1] == "Error: a fleet is already up; stop it with: prefixmesh down"
    processes = processes_of(tmp_path)
    assert prefixmesh(tmp_path, "down").stdout == "The fleet is stopped.\n"
    assert wait_gone(processes) == []
    assert processes_of(tmp_path) == []
