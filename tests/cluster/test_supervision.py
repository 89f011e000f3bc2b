"""One fleet on a cluster of three nodes, whose parts are killed one after the other while somebody keeps asking it.

The tests share the fleet, which takes longer to start than any of them: each leaves it whole.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from tests.support.fleet_processes import is_alive, prefixmesh, wait_gone
from tests.support.steady_requests import SteadyRequests
from tests.support.supervised_fleet import SupervisedFleet, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PROMPT: Final = (
    "The system policy of this shop says that a customer may return what was bought within thirty days."
)
OBJECT_STORE_BYTES: Final = 80 * 2**20


@pytest.fixture(scope="module")
def fleet(
    ray_cluster: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SupervisedFleet]:
    """Two workers and a router under a detached supervisor; a part that is killed twice in a row waits for a fraction of a second."""
    home = tmp_path_factory.mktemp("supervised")
    settings = ("--model", str(tiny_model), "--max-total-tokens", "4096", "--grace", "2", "--workers", "2")
    done = prefixmesh(home, "up", "--address", ray_cluster, "--detach", *settings)
    try:
        assert done.returncode == 0, done.stderr
        yield SupervisedFleet(home)
    finally:
        prefixmesh(home, "down")


def test_a_killed_worker_serves_again_as_its_next_life_and_nobody_notices(fleet: SupervisedFleet) -> None:
    """Its requests go on elsewhere meanwhile. ``status`` tells which life serves, since when, and what ended the one before."""
    before = fleet.part("worker-0")
    with SteadyRequests(fleet.state.router, PROMPT) as caller:
        caller.wait_for_more(2)
        fleet.process("worker-0").send_signal(signal.SIGKILL)
        after = fleet.wait_serving("worker-0", before.life + 1)
        caller.wait_for_more(5)
    assert caller.errors == []
    assert len(caller.texts()) == 1
    assert after.address not in ("", before.address)
    shown = json.loads(prefixmesh(fleet.home, "status", "--json").stdout)
    (part,) = (part for part in shown["parts"] if part["name"] == "worker-0")
    assert (part["phase"], part["life"], part["restarts"]) == (
        "serving",
        before.life + 1,
        before.restarts + 1,
    )
    assert part["since_unix_s"] > before.since_unix_s
    assert part["reason"] == "its process died"
    assert sorted(worker["address"] for worker in shown["workers"]) == sorted(fleet.state.workers.values())


def test_a_killed_router_serves_again_at_its_address_and_its_callers_ride_over_it(
    fleet: SupervisedFleet,
) -> None:
    """The standby takes its place, and another stands by."""
    router = fleet.part("router")
    with SteadyRequests(router.address, PROMPT) as caller:
        caller.wait_for_more(2)
        fleet.process("router").send_signal(signal.SIGKILL)
        after = fleet.wait_serving("router", router.life + 1)
        caller.wait_for_more(5)
    assert caller.errors == []
    assert len(caller.texts()) == 1
    assert after.address == router.address
    wait_until(lambda: f"router.{after.life + 1}" in fleet.state.actor_names)


def test_a_killed_supervisor_goes_on_where_it_was(fleet: SupervisedFleet) -> None:
    """The parts that live are left alone; the next one that dies is started again, and the router's standby still takes its place."""
    before = {part.name: (part.life, part.address) for part in fleet.state.parts}
    fleet.process("supervisor").send_signal(signal.SIGKILL)
    fleet.process("worker-1").send_signal(signal.SIGKILL)  # before anybody looks again
    fleet.wait_serving("worker-1", before["worker-1"][0] + 1)
    after = {part.name: (part.life, part.address) for part in fleet.state.parts}
    del before["worker-1"], after["worker-1"]
    assert after == before
    life, address = before["router"]
    assert f"router.{life + 1}" in fleet.state.actor_names
    fleet.process("router").send_signal(signal.SIGKILL)
    after_router = fleet.wait_serving("router", life + 1)
    assert (after_router.life, after_router.address) == (life + 1, address), "the standby, not a new one"


def test_the_worker_of_a_node_that_dies_serves_again_on_another(fleet: SupervisedFleet, cluster: Any) -> None:
    """Requests go on meanwhile."""
    workers = ("worker-0", "worker-1")
    head = cluster.head_node.node_id
    victim, lost = next((name, fleet.node(name)) for name in workers if fleet.node(name) != head)
    life = fleet.part(victim).life
    (node,) = (node for node in cluster.list_all_nodes() if node.node_id == lost)
    try:
        with SteadyRequests(fleet.state.router, PROMPT) as caller:
            caller.wait_for_more(2)
            cluster.remove_node(node, allow_graceful=False)
            fleet.wait_serving(victim, life + 1)
            caller.wait_for_more(5)
        assert caller.errors == []
        assert fleet.node(victim) != lost
    finally:
        cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
        cluster.wait_for_nodes()
    fleet.wait_whole()


def test_a_fleet_outlives_its_holder_and_is_still_found_refused_a_second_time_and_stopped(
    fleet: SupervisedFleet,
) -> None:
    """``status``, ``up`` and ``down`` ask the supervisor then."""
    state = fleet.state
    assert state.pid is not None
    processes = [fleet.process(part.name) for part in state.parts]
    os.kill(state.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive_pid(state.pid))
    with SteadyRequests(state.router, PROMPT) as caller:
        caller.wait_for_more(2)
    assert caller.errors == []
    shown = json.loads(prefixmesh(fleet.home, "status", "--json").stdout)
    assert [part["phase"] for part in shown["parts"]] == ["serving"] * 3
    again = prefixmesh(fleet.home, "up")
    assert (again.returncode, again.stderr.splitlines()[-1]) == (
        2,
        "Error: a fleet is already up; stop it with: prefixmesh down",
    )
    assert prefixmesh(fleet.home, "down").stdout == "The fleet is stopped.\n"
    assert wait_gone(processes) == []
    assert prefixmesh(fleet.home, "down").stdout == "No fleet is up.\n"


def is_alive_pid(pid: int | None) -> bool:
    return pid is not None and psutil.pid_exists(pid) and is_alive(psutil.Process(pid))
