"""What ``up`` refuses before it starts anything."""

import importlib.util
import socket
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from prefixmesh.config import EngineConfig
from prefixmesh.errors import ConfigError
from prefixmesh.fleet.plan import FleetRequest
from prefixmesh.fleet.precheck import check_adapters, check_request
from prefixmesh.router_config import RouterConfig
from prefixmesh.rpc.identity import hash_key, new_key
from tests.support.tiny_model import make_tiny_model


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    """Packages that are not installed."""
    find = importlib.util.find_spec

    def find_spec(name: str) -> ModuleSpec | None:
        return None if name in missing else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_a_base_installation_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the model is fetched."""
    without(monkeypatch, "ray", "torch")
    with pytest.raises(
        ConfigError,
        match=r"^Ray and torch are not installed; run: pip install 'prefixmesh\[worker,ray\]'$",
    ):
        check_request(FleetRequest())


def test_joining_a_cluster_needs_no_torch_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nodes have it."""
    without(monkeypatch, "torch")
    check_request(FleetRequest(address="auto"))


def test_a_taken_router_port_is_told_at_once() -> None:
    """Not when the workers have loaded."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^cannot listen on 127.0.0.1:{port}: the port is taken$"):
            check_request(FleetRequest(router_port=port))
    check_request(FleetRequest(router_port=port))


def test_an_address_that_is_not_this_machines_is_told(tmp_path: Path) -> None:
    """With the system's own reason."""
    keys = tmp_path / "keys"
    keys.write_text(f"{hash_key(new_key())} acme\n")
    with pytest.raises(ConfigError, match=r"^cannot listen on 192\.0\.2\.77:9: \w"):
        check_request(FleetRequest(router_host="192.0.2.77", router_port=9, api_keys_file=str(keys)))


def test_a_keys_file_is_read_and_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router is an actor, whose working folder may be another."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="cannot read the API keys file"):
        check_request(FleetRequest(api_keys_file="keys"))
    Path("keys").write_text(f"{hash_key(new_key())} acme\n")
    assert check_request(FleetRequest(api_keys_file="keys")).api_keys_file == str(tmp_path / "keys")


def test_a_relative_state_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router is an actor, and memory is no file."""
    monkeypatch.chdir(tmp_path)
    assert check_request(FleetRequest(state="file://state.json")).state == f"file://{tmp_path}/state.json"
    assert check_request(FleetRequest(state="memory://")).state == "memory://"


def test_a_folder_for_the_disk_is_named_in_full_and_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are actors; on a joined cluster the folder is on their nodes. One that cannot be is told of before they load."""
    monkeypatch.chdir(tmp_path)
    engine = EngineConfig(hicache_ratio=1.0, disk_cache_dir="kv/here")
    checked = check_request(FleetRequest(engine=engine)).engine
    assert checked.disk_cache_dir == str(tmp_path / "kv" / "here")
    assert (tmp_path / "kv" / "here").stat().st_mode & 0o077 == 0, "others may not read prompts"
    (tmp_path / "taken").touch()
    engine = EngineConfig(hicache_ratio=1.0, disk_cache_dir="taken/below")
    with pytest.raises(ConfigError, match=r"--disk-cache-dir, .*taken/below: Not a directory"):
        check_request(FleetRequest(engine=engine))
    with pytest.raises(ConfigError, match=r"--disk-cache-dir .*taken is no folder"):
        check_request(FleetRequest(engine=EngineConfig(hicache_ratio=1.0, disk_cache_dir="taken")))
    joined = check_request(FleetRequest(engine=engine, address="auto")).engine
    assert joined.disk_cache_dir == str(tmp_path / "taken" / "below")


@pytest.mark.parametrize("state", ["file://", "http://here", "state.json", ""])
def test_a_state_of_no_known_kind_is_refused_before_anything_is_started(state: str) -> None:
    with pytest.raises(ConfigError, match="state must be memory://, file://PATH or redis://"):
        check_request(FleetRequest(state=state))


def test_through_rays_client_the_routers_settings_are_its_nodes_business() -> None:
    """Its port and its files are on the cluster."""
    request = FleetRequest(address="ray://head:10001", api_keys_file="on/the/head", router_port=1)
    assert check_request(request) is request


def test_an_adapter_root_is_named_in_full_and_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are actors, too. On a cluster that is only joined it may be a folder of other nodes."""
    monkeypatch.chdir(tmp_path)
    engine = EngineConfig(adapter_root="adapters")
    with pytest.raises(ConfigError, match=f"^adapter_root {tmp_path}/adapters is not a folder$"):
        check_request(FleetRequest(engine=engine))
    assert check_request(FleetRequest(engine=engine, address="auto")).engine.adapter_root == "adapters"
    Path("adapters").mkdir()
    assert check_request(FleetRequest(engine=engine)).engine.adapter_root == str(tmp_path / "adapters")


def test_an_adapter_that_no_worker_could_load_is_told_before_anything_starts(tmp_path: Path) -> None:
    """By name and path. On a cluster that is only joined it may lie on other nodes."""
    model = make_tiny_model(tmp_path / "tiny")
    (tmp_path / "adapters" / "empty").mkdir(parents=True)
    for path, problem in (("nowhere", "no folder"), ("empty", "adapter_config.json")):
        engine = EngineConfig(
            model=str(model), adapter_root=str(tmp_path / "adapters"), adapters=(f"clerk={path}",)
        )
        with pytest.raises(
            ConfigError, match=f"^adapter clerk cannot be loaded from '{path}': .*({problem})"
        ):
            check_adapters(FleetRequest(engine=engine))
        check_adapters(FleetRequest(engine=engine, address="auto"))


def test_gpus_that_are_not_there_are_missed_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only on this machine: a cluster that is joined may have them."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    engine = EngineConfig(device="cuda")
    check_request(FleetRequest(engine=engine))
    with pytest.raises(ConfigError, match="needs 2 GPUs for 2 workers, and torch finds 1 here"):
        check_request(FleetRequest(engine=engine, workers=2))
    check_request(FleetRequest(engine=engine, workers=2, address="auto"))


def test_a_pool_that_nothing_fits_is_refused_before_anything_starts() -> None:
    """A fleet that comes up and then refuses every request is no fleet."""
    for tokens in (1, 3, 63):
        with pytest.raises(ConfigError, match=f"max_total_tokens must be at least 64, got {tokens}"):
            check_request(FleetRequest(engine=EngineConfig(max_total_tokens=tokens)))
    check_request(FleetRequest(engine=EngineConfig(max_total_tokens=64)))


def test_history_and_recording_are_written_where_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router's actor has a working folder of its own."""
    monkeypatch.chdir(tmp_path)
    routing = RouterConfig(workers=("unused:1",), history="history.jsonl", record="load.jsonl")
    checked = check_request(FleetRequest(routing=routing)).routing
    assert checked.history == str(tmp_path / "history.jsonl")
    assert checked.record == str(tmp_path / "load.jsonl")
