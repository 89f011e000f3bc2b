"""The file in which ``prefixmesh up`` remembers its fleet."""

import os
from pathlib import Path

import pytest

from prefixmesh import fleet_state
from prefixmesh.errors import ConfigError, NotFoundError
from prefixmesh.fleet_state import FleetState

STATE = FleetState(
    router="127.0.0.1:5000",
    workers={"worker-0": "127.0.0.1:5001", "worker-1": "127.0.0.1:5002"},
    model="smollm2",
    ray_address="127.0.0.1:6379",
    ray_namespace="prefixmesh",
    actor_names=("worker-0", "worker-1", "router"),
    started_ray=True,
    pid=None,
)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    """A saved state is read back equal, from a folder that did not exist, and nothing else is left there."""
    path = tmp_path / "new" / "fleet.json"
    fleet_state.save(STATE, path)
    assert fleet_state.load(path) == STATE
    assert os.listdir(path.parent) == ["fleet.json"]


def test_default_path_is_under_the_home_of_prefixmesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a path the state lives where PREFIXMESH_HOME says."""
    monkeypatch.setenv("PREFIXMESH_HOME", str(tmp_path))
    fleet_state.save(STATE)
    assert (tmp_path / "fleet.json").exists()
    assert fleet_state.load() == STATE


def test_failed_save_keeps_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk refuses, the state of before stays whole and no draft is left."""
    path = tmp_path / "fleet.json"
    fleet_state.save(STATE, path)

    def refuse(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        fleet_state.save(STATE, path)
    assert fleet_state.load(path) == STATE
    assert os.listdir(tmp_path) == ["fleet.json"]


def test_no_state_says_how_to_start_a_fleet(tmp_path: Path) -> None:
    """A missing file is NotFoundError with the command that makes one."""
    with pytest.raises(NotFoundError, match="prefixmesh up"):
        fleet_state.load(tmp_path / "fleet.json")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"router": 5}', b'{"router": "a:1"}', b'{"x":' + b"[" * 100_000, b"\xff\xfe"],
)
def test_malformed_state_is_a_clear_error(tmp_path: Path, content: bytes) -> None:
    """Whatever is wrong with the file, the error names it."""
    path = tmp_path / "fleet.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"fleet\.json"):
        fleet_state.load(path)


def test_forget_removes_the_state_once(tmp_path: Path) -> None:
    """The second forget finds nothing and is no error."""
    path = tmp_path / "fleet.json"
    fleet_state.save(STATE, path)
    assert fleet_state.forget(path)
    assert not fleet_state.forget(path)
