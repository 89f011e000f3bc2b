"""What a fleet consists of on which cluster."""

import pytest

from prefixmesh.config import EngineConfig
from prefixmesh.errors import ConfigError
from prefixmesh.fleet.plan import ClusterView, FleetRequest, NodeView, plan_fleet
from prefixmesh.router_config import RouterConfig

LAPTOP = ClusterView(nodes=(NodeView(cpus=8, gpus=0),))
GPU_BOX = ClusterView(nodes=(NodeView(cpus=16, gpus=4),))


def test_a_machine_without_gpus_gets_two_workers_on_loopback() -> None:
    """Two are the fewest that need a router."""
    plan = plan_fleet(FleetRequest(), LAPTOP)
    assert [worker.config.worker_id for worker in plan.workers] == ["worker-0", "worker-1"]
    assert {worker.bind for worker in plan.workers} == {"loopback"}
    assert {worker.num_gpus for worker in plan.workers} == {0.0}


def test_a_machine_with_gpus_gets_one_worker_for_each() -> None:
    """Each takes a whole GPU, and no CPU that Ray would count."""
    plan = plan_fleet(FleetRequest(), GPU_BOX)
    assert [(worker.num_gpus, worker.num_cpus) for worker in plan.workers] == [(1.0, 0.0)] * 4


def test_device_cpu_leaves_gpus_alone() -> None:
    """A user may want the GPUs for something else."""
    plan = plan_fleet(FleetRequest(engine=EngineConfig(device="cpu")), GPU_BOX)
    assert [worker.num_gpus for worker in plan.workers] == [0.0, 0.0]


def test_workers_of_one_machine_divide_its_cores_and_memory() -> None:
    """Two pools of half the memory each would fill it, and two times all cores only fight."""
    engine = EngineConfig(mem_fraction_static=0.75)
    plan = plan_fleet(FleetRequest(engine=engine, workers=3), LAPTOP)
    assert {worker.config.engine.threads for worker in plan.workers} == {2}
    assert {worker.config.engine.mem_fraction_static for worker in plan.workers} == {0.25}


def test_given_threads_are_kept() -> None:
    """``--threads`` is per worker."""
    plan = plan_fleet(FleetRequest(engine=EngineConfig(threads=5)), LAPTOP)
    assert {worker.config.engine.threads for worker in plan.workers} == {5}


def test_more_workers_than_cores_still_get_a_thread_each() -> None:
    """Slow, but it works."""
    plan = plan_fleet(FleetRequest(workers=5), ClusterView(nodes=(NodeView(cpus=2, gpus=0),)))
    assert {worker.config.engine.threads for worker in plan.workers} == {1}
    assert {worker.num_cpus for worker in plan.workers} == {0.4}


@pytest.mark.parametrize(
    ("cpus", "workers", "share"),
    [
        ((1, 1, 1), 3, 1.0),
        ((1, 1, 1), 4, 0.5),
        ((3,), 3, 1.0),
        ((2,), 3, 0.6666),
        ((0, 4), 8, 0.5),
        ((5, 1), 4, 1.0),
    ],
)
def test_every_worker_finds_a_node_with_its_share_of_a_cpu(
    cpus: tuple[float, ...], workers: int, share: float
) -> None:
    """Ray does not split a share over nodes: four workers on three nodes of one CPU take halves, not three quarters."""
    cluster = ClusterView(nodes=tuple(NodeView(cpus=count, gpus=0) for count in cpus))
    plan = plan_fleet(FleetRequest(workers=workers), cluster)
    assert {worker.num_cpus for worker in plan.workers} == {share}
    assert sum(int(count / share + 1e-9) for count in cpus) >= workers


def test_on_several_nodes_workers_bind_to_their_nodes() -> None:
    """The router must reach them from another machine; beyond loopback they take tickets only."""
    cluster = ClusterView(
        nodes=(NodeView(cpus=0, gpus=0), NodeView(cpus=8, gpus=1), NodeView(cpus=8, gpus=1))
    )
    plan = plan_fleet(FleetRequest(), cluster)
    assert [worker.bind for worker in plan.workers] == ["node", "node"]


def test_more_gpus_than_a_local_machine_has_are_refused() -> None:
    """At once, with what to do, instead of waiting for a GPU that cannot come."""
    with pytest.raises(ConfigError, match=r"6 workers need 6 GPUs, and there are 4.*--workers"):
        plan_fleet(FleetRequest(workers=6), GPU_BOX)


def test_a_cluster_that_may_grow_is_waited_for() -> None:
    """The nodes that come are others, so nothing binds to loopback."""
    cluster = ClusterView(nodes=(NodeView(cpus=8, gpus=1),), may_grow=True)
    plan = plan_fleet(FleetRequest(workers=3), cluster)
    assert [worker.bind for worker in plan.workers] == ["node"] * 3


def test_the_router_is_planned_from_the_request_and_the_addresses() -> None:
    """It serves the workers' model, by the policy that was asked for."""
    request = FleetRequest(
        engine=EngineConfig(model="some/model"),
        routing=RouterConfig(workers=("unused:1",), policy="round_robin", max_wait_s=7.0),
        router_port=8000,
        state="file:///state.json",
    )
    config = request.router_config(["127.0.0.1:1", "127.0.0.1:2"])
    assert config.workers == ("127.0.0.1:1", "127.0.0.1:2")
    assert config.state == "file:///state.json"
    assert (config.model, config.host, config.port) == ("some/model", "127.0.0.1", 8000)
    assert (config.policy, config.max_wait_s) == ("round_robin", 7.0)
    assert request.router_config(["127.0.0.1:3"], port=8123).port == 8123, "a later life keeps the port"


def test_what_no_router_would_take_is_refused_before_any_worker_loads() -> None:
    """By the field's name."""
    with pytest.raises(ConfigError, match="max_restarts"):
        FleetRequest(max_restarts=-1)
    with pytest.raises(ConfigError, match="port"):
        FleetRequest(router_port=70_000)


def test_a_worker_that_is_started_again_shares_cores_once_nodes_are_gone_and_gpus_never() -> None:
    """Ray would otherwise keep it waiting for a share that nobody has."""
    three = ClusterView(nodes=(NodeView(cpus=1, gpus=0),) * 3, may_grow=True)
    two = ClusterView(nodes=three.nodes[:2], may_grow=True)
    plan = plan_fleet(FleetRequest(workers=3), three)
    assert [plan.cpus_now(plan.workers[0], cluster) for cluster in (three, two)] == [1.0, 0.0]
    roomy = plan_fleet(FleetRequest(workers=2), three)
    assert roomy.cpus_now(roomy.workers[0], two) == 1.0
    on_gpus = plan_fleet(FleetRequest(), GPU_BOX)
    assert (on_gpus.workers[0].num_gpus, on_gpus.cpus_now(on_gpus.workers[0], two)) == (1.0, 0.0)


def test_a_router_beyond_loopback_needs_api_keys() -> None:
    """Refused before anything is started."""
    with pytest.raises(ConfigError, match="--api-keys-file"):
        FleetRequest(router_host="0.0.0.0")
    assert FleetRequest(router_host="0.0.0.0", api_keys_file="keys.txt").router_host == "0.0.0.0"


@pytest.mark.parametrize("workers", [0, -1, 100_000])
def test_senseless_numbers_of_workers_are_refused(workers: int) -> None:
    """With the range that is allowed."""
    with pytest.raises(ConfigError, match="workers must be 1 to"):
        FleetRequest(workers=workers)


def test_each_worker_has_a_metrics_port_that_is_known_beforehand() -> None:
    """Several share a node, and whoever scrapes them must know where; without a port none is served."""
    plan = plan_fleet(FleetRequest(workers=3, metrics_port=9400), LAPTOP)
    assert [worker.config.metrics_port for worker in plan.workers] == [9400, 9401, 9402]
    assert {worker.config.metrics_port for worker in plan_fleet(FleetRequest(), LAPTOP).workers} == {None}
    for port in (0, -1, 65000):
        with pytest.raises(ConfigError, match="metrics_port"):
            FleetRequest(metrics_port=port)


def test_workers_behind_api_keys_take_tickets_only() -> None:
    """On one machine, too, where they listen on loopback: nobody names a tenant by going round the router."""
    keyed = plan_fleet(FleetRequest(api_keys_file="keys.txt"), LAPTOP)
    assert all(worker.config.tickets_only for worker in keyed.workers)
    assert not any(worker.config.tickets_only for worker in plan_fleet(FleetRequest(), LAPTOP).workers)
