"""One process at a time holds the fleet of a user."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefixmesh import fleet_state
from prefixmesh.errors import ConfigError, NotFoundError
from prefixmesh.fleet.control import revive_fleet, stop_fleet
from prefixmesh.fleet.hold import check_no_fleet, find_fleet, find_holder, hold_file, hold_fleet
from prefixmesh.fleet_state import FleetState
from tests.support.fake_inference import refusing_address

HOLD_UNTIL_STDIN_ENDS = """
import sys
from prefixmesh.fleet.hold import hold_fleet
with hold_fleet():
    print("held", flush=True)
    sys.stdin.read()
"""

LEFT = FleetState(
    router="r:1",
    workers={},
    model="m",
    ray_address="h:1",
    ray_namespace="n",
    actor_names=(),
    started_ray=False,
    pid=1,
)
"""What the holder of a fleet writes down."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own for each test."""
    monkeypatch.setenv("PREFIXMESH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_nobody_holds_a_fleet_that_never_was() -> None:
    """Without a file, and without making one."""
    assert find_holder() is None
    assert not hold_file().exists()


def test_the_holder_is_found_and_a_second_one_is_refused() -> None:
    """The error says how to end the first."""
    with hold_fleet():
        assert find_holder() == os.getpid()
        with pytest.raises(ConfigError, match="prefixmesh down"), hold_fleet():
            pass
    assert find_holder() is None


def test_a_holder_that_is_killed_holds_nothing() -> None:
    """Its process id is still in the file, and nobody believes it."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_UNTIL_STDIN_ENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert find_holder() == holder.pid
        holder.kill()
    assert hold_file().read_text() == str(holder.pid)
    assert find_holder() is None
    with hold_fleet():
        pass


def test_stopping_asks_the_holder_to_end_and_may_be_repeated() -> None:
    """``down`` ends the process that holds the lock, and the second ``down`` finds nothing to do."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_UNTIL_STDIN_ENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert stop_fleet(timeout_s=10.0)
        holder.wait(timeout=10)
    assert not stop_fleet(timeout_s=10.0)


def test_the_holder_is_asked_to_try_again_what_it_gave_up(tmp_path: Path) -> None:
    """By a signal; with no fleet up there is nobody to ask."""
    with pytest.raises(NotFoundError, match="no fleet is up"):
        revive_fleet()
    asked = HOLD_UNTIL_STDIN_ENDS.replace(
        "with hold_fleet",
        "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: print('asked', flush=True))\nwith hold_fleet",
    )
    with subprocess.Popen(
        [sys.executable, "-c", asked], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        fleet_state.save(LEFT)
        revive_fleet()
        assert holder.stdout.readline() == b"asked\n"


def test_a_fleet_with_a_supervisor_counts_as_up_without_a_holder() -> None:
    """It outlives whoever held it; any other fleet is gone with its holder."""
    fleet_state.save(LEFT)
    assert find_fleet() is None
    check_no_fleet()
    fleet_state.save(dataclasses.replace(LEFT, supervisor="supervisor"))
    assert find_fleet() is not None
    with pytest.raises(ConfigError, match="already up"):
        check_no_fleet()


def test_a_cluster_that_is_gone_leaves_the_fleets_file_and_says_what_to_do() -> None:
    """A network that fails for a moment must not make a fleet be forgotten that runs."""
    with refusing_address() as address:
        fleet_state.save(dataclasses.replace(LEFT, ray_address=address, supervisor="supervisor"))
        with pytest.raises(
            ConfigError, match=f"cannot reach a Ray cluster at {address}.*remove .*fleet.json"
        ):
            stop_fleet(1.0)
    assert find_fleet() is not None
