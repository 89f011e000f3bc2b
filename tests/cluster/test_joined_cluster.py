"""A fleet on a Ray cluster of three nodes, started by the command its users run."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from prefixmesh import fleet_state
from prefixmesh.client import Client
from prefixmesh.errors import AuthenticationError
from prefixmesh.fleet_state import FleetState
from tests.support.fleet_processes import family_of, foreground, prefixmesh, read_until, wait_gone
from tests.support.supervised_fleet import wait_until

pytestmark = pytest.mark.cluster

SETTINGS = ("--max-total-tokens", "4096", "--grace", "5")
PROMPT = (
    12 * "The system policy of this shop says that a customer may return what was bought within thirty days. "
)
"""Some blocks long: a router knows who has computed it, and not only which of two equal workers it would take."""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """The state of one fleet, which a test that fails does not leave behind for the next one."""
    yield tmp_path
    prefixmesh(tmp_path, "down")


def actor_of(state: FleetState, name: str) -> Any:
    """One of a fleet's actors, by its own name or its part's."""
    names = {part.name: part.actor for part in state.parts}
    return ray.get_actor(names.get(name, name), namespace=state.ray_namespace)


def node_of(actor: Any) -> str:
    """The Ray node on which an actor lives."""
    node: str = ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))
    return node


def families(state: FleetState) -> dict[str, list[psutil.Process]]:
    """Every process of a fleet, by actor."""
    return {part.name: family_of(ray.get(actor_of(state, part.actor).ping.remote())) for part in state.parts}


def ends_of(state: FleetState) -> list[psutil.Process]:
    """All of them in one list."""
    return [process for family in families(state).values() for process in family]


def test_a_fleet_on_three_nodes_serves_and_leaves_nothing(
    ray_cluster: str, tiny_model: Path, home: Path
) -> None:
    """Workers spread over nodes and take only what comes through the router; a killed one takes its engine along; ``down`` ends the
    rest and leaves the cluster alone."""
    done = prefixmesh(home, "up", "--address", ray_cluster, "--detach", "--model", str(tiny_model), *SETTINGS)
    assert done.returncode == 0, done.stderr
    state = fleet_state.load(home / "fleet.json")
    before = families(state)
    assert len({node_of(actor_of(state, worker)) for worker in state.workers}) == 2
    assert not any(address.startswith("127.") for address in state.workers.values())
    assert state.router.startswith("127.0.0.1:")

    with Client(state.router, tenant="acme", timeout_s=30) as client:
        cold, warm = (client.generate(PROMPT, max_tokens=4, temperature=0) for _ in range(2))
        assert (cold.cached_tokens, warm.cached_tokens) == (0, warm.prompt_tokens - 1)
        assert warm.text == cold.text
    with (
        Client(state.workers[warm.worker_id], tenant="acme", timeout_s=30) as stranger,
        pytest.raises(AuthenticationError),
    ):
        stranger.generate(PROMPT, max_tokens=4)

    assert len(before[warm.worker_id]) >= 2, "an actor and its engine"
    ray.kill(actor_of(state, warm.worker_id))
    assert wait_gone(before[warm.worker_id]) == []
    with Client(state.router, tenant="acme", timeout_s=30) as client:
        assert client.generate(PROMPT, max_tokens=4, temperature=0).text == cold.text

    assert prefixmesh(home, "down").stdout == "The fleet is stopped.\n"
    assert wait_gone([process for family in before.values() for process in family]) == []
    assert not (home / "fleet.json").exists()
    assert prefixmesh(home, "down").stdout == "No fleet is up.\n"
    nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
    assert sum(node["Alive"] for node in nodes()) == 3


def test_without_its_keeper_a_fleet_in_the_foreground_ends(
    ray_cluster: str, tiny_model: Path, home: Path
) -> None:
    """Nobody could stop the workers any more."""
    with foreground(
        home, "up", "--address", ray_cluster, "--workers", "1", "--model", str(tiny_model), *SETTINGS
    ) as keeper:
        read_until(keeper, "Stop it")
        processes = ends_of(fleet_state.load(home / "fleet.json"))
        keeper.kill()
        assert keeper.wait(timeout=30) == -signal.SIGKILL
        assert wait_gone(processes) == []
    assert prefixmesh(home, "status").returncode == 1


def test_a_worker_that_cannot_load_ends_the_start_in_one_line(
    ray_cluster: str, tiny_model: Path, home: Path
) -> None:
    """With what the engine said, exit code 1, and nothing left of the fleet."""
    broken = home / "broken"
    broken.mkdir()
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    done = prefixmesh(
        home, "up", "--address", ray_cluster, "--workers", "1", "--model", str(broken), *SETTINGS
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Error: worker-0 could not start: ")
    assert "safetensors" in done.stderr.splitlines()[-1]
    assert prefixmesh(home, "status").returncode == 1


@pytest.mark.parametrize("detach", [(), ("--detach",)], ids=["foreground", "background"])
def test_ctrl_c_while_loading_takes_everything_down(
    ray_cluster: str, tiny_model: Path, home: Path, detach: tuple[str, ...]
) -> None:
    """Also what had not come up yet, and a supervisor that would begin it anew."""
    settings = ("--address", ray_cluster, "--workers", "1", "--model", str(tiny_model), *SETTINGS, *detach)
    with foreground(home, "up", *settings) as keeper:
        while "loading" not in (home / "err.txt").read_text():
            assert keeper.poll() is None
        keeper.send_signal(signal.SIGINT)
        assert keeper.wait(timeout=30) == 130
    engines = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(tiny_model) in " ".join(process.info["cmdline"] or [])
    ]
    assert wait_gone(engines) == []
    list_actors: Callable[..., list[dict[str, str]]] = ray.util.list_named_actors
    wait_until(lambda: list_actors(all_namespaces=True) == [])
