"""A fleet with a Ray of its own, in the foreground and in the background."""

import json
import signal
from pathlib import Path

import psutil
import pytest

from prefixmesh import fleet_state
from prefixmesh.client import Client
from tests.support.fleet_processes import foreground, prefixmesh, processes_of, read_until, wait_gone

pytestmark = pytest.mark.cluster

SETTINGS = ("--workers", "1", "--max-total-tokens", "4096", "--grace", "5")


def ray_folder_of(processes: list[psutil.Process]) -> Path:
    """The folder of these processes' Ray, which the sweeper among them is told."""
    (sweeper,) = (process for process in processes if "prefixmesh.fleet.sweeper" in process.cmdline())
    return Path(sweeper.cmdline()[-2])


def listening_hosts(processes: list[psutil.Process]) -> set[str]:
    """Where these processes listen, IPv4 addresses in IPv6 form taken for what they are."""
    connections = [one for process in processes for one in process.net_connections("tcp")]
    return {one.laddr.ip.removeprefix("::ffff:") for one in connections if one.status == psutil.CONN_LISTEN}


def test_sigterm_ends_a_foreground_fleet_and_its_ray(tiny_model: Path, tmp_path: Path) -> None:
    """It listens on loopback alone, Ray's own ports too, which let whoever reaches them run code. Exit code 0, the endpoints
    forgotten, no process left: not of Ray, not of a worker, not of an engine; nor Ray's folder."""
    with foreground(tmp_path, "up", "--model", str(tiny_model), *SETTINGS) as up:
        read_until(up, "Stop it")
        state = fleet_state.load(tmp_path / "fleet.json")
        assert state.started_ray
        processes = processes_of(tmp_path)
        names = " ".join(" ".join(process.cmdline()) for process in processes)
        assert listening_hosts(processes) == {"127.0.0.1"}
        assert all(part in names for part in ("raylet", "WorkerActor", "RouterActor", "engine_process")), (
            names
        )
        folder = ray_folder_of(processes)
        assert folder.exists()
        up.send_signal(signal.SIGTERM)
        assert up.wait(timeout=60) == 0
    assert wait_gone(processes) == []
    assert processes_of(tmp_path) == []
    assert not (tmp_path / "fleet.json").exists()
    assert not folder.exists()


def test_nothing_outlives_a_fleet_whose_holder_was_killed(tiny_model: Path, tmp_path: Path) -> None:
    """Ray's agents would live on for a minute or two, and its folder for ever."""
    with foreground(tmp_path, "up", "--model", str(tiny_model), *SETTINGS) as up:
        read_until(up, "Stop it")
        processes = processes_of(tmp_path)
        folder = ray_folder_of(processes)
        assert folder.exists()
        up.kill()
        up.wait(timeout=10)
    assert wait_gone(processes) == []
    assert processes_of(tmp_path) == []
    assert not folder.exists()


@pytest.mark.parametrize("detach", [(), ("--detach",)], ids=["foreground", "background"])
def test_ctrl_c_while_ray_starts_leaves_nothing(
    tiny_model: Path, tmp_path: Path, detach: tuple[str, ...]
) -> None:
    """Exit code 130, no process, no folder."""
    with foreground(tmp_path, "up", "--model", str(tiny_model), *SETTINGS, *detach) as up:
        while not any("gcs_server" in " ".join(one.cmdline()) for one in processes_of(tmp_path)):
            assert up.poll() is None
        folder = ray_folder_of(processes_of(tmp_path))
        up.send_signal(signal.SIGINT)
        assert up.wait(timeout=60) == 130
        assert wait_gone(processes_of(tmp_path)) == []
    assert not folder.exists()


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
