"""What a fleet consists of, decided before anything starts: how many workers, what each may use, and who listens where.

Pure: it looks at what was asked and at what the cluster has, and returns a plan; ``prefixmesh.fleet.fleet`` carries it out.
Ray itself chooses the node of each worker within the resources planned here.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from prefixmesh.cache.namespace import Isolation
from prefixmesh.config import EngineConfig, WorkerConfig
from prefixmesh.errors import ConfigError
from prefixmesh.fleet.supervision import DEFAULT_MAX_RESTARTS, RestartPolicy
from prefixmesh.router_config import RouterConfig
from prefixmesh.rpc.identity import is_loopback
from prefixmesh.state_url import MEMORY_STATE

DEFAULT_CPU_WORKERS: Final = 2
"""Where there is no GPU: the fewest workers among which routing means something."""

MAX_WORKERS: Final = 1024
"""One router's view is per worker; a larger number is a typing error."""

MAX_PORT: Final = 65535
LOOPBACK: Final = "127.0.0.1"
_ANY_ADDRESS: Final = "unused:1"

_RAY_RESOLUTION: Final = 10_000
"""Ray counts resources in ten-thousandths; a share is rounded down to what it can hold."""

Bind = Literal["loopback", "node"]
"""Where a worker listens: only this machine, or the address by which other nodes reach its node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetRequest:
    """What ``prefixmesh up`` was asked for."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    workers: int | None = None
    """None: one per GPU where there are any, else ``DEFAULT_CPU_WORKERS``."""

    routing: RouterConfig = field(default_factory=lambda: RouterConfig(workers=(_ANY_ADDRESS,)))
    """How the router decides. Its workers and model are the fleet's, and the fields below hold instead of its own."""

    router_host: str = LOOPBACK
    router_port: int = 0
    """0 takes a free port."""

    api_keys_file: str | None = None
    state: str = MEMORY_STATE
    """Where the router remembers the workers that operators add; see ``RouterConfig.state``."""

    isolation: Isolation = "tenant"
    address: str | None = None
    """A Ray cluster to join (``auto``, ``HOST:PORT`` or ``ray://HOST:PORT``); None starts a local one that ends with the fleet."""

    metrics_port: int | None = None
    """Worker N serves its figures to its own node at this port + N, so that whoever scrapes knows where; None serves none."""

    start_timeout_s: float = 600.0
    """How long a worker may wait for room in the cluster and load its model; a large model on a cold disk takes minutes."""

    max_restarts: int = DEFAULT_MAX_RESTARTS
    """Restarts in a row after which a worker or the router is given up."""

    standby_router: bool = True
    """Keep a second router's process ready, for a restart within a second; see ``RestartPolicy.standby_routers``."""

    def __post_init__(self) -> None:
        self.router_config((_ANY_ADDRESS,))  # what it refuses should not cost the time of loading the workers
        self.restart_policy()
        if self.workers is not None and not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"workers must be 1 to {MAX_WORKERS}, got {self.workers}")
        if not self.start_timeout_s > 0:
            raise ConfigError(f"start_timeout_s must be above 0, got {self.start_timeout_s}")
        if self.metrics_port is not None and not 1 <= self.metrics_port <= MAX_PORT - MAX_WORKERS:
            raise ConfigError(
                f"metrics_port must be 1 to {MAX_PORT - MAX_WORKERS}, worker 0's, got {self.metrics_port}"
            )
        if self.api_keys_file is None and not is_loopback(self.router_host):
            raise ConfigError(
                f"a router on {self.router_host} can be reached from other machines and needs --api-keys-file; "
                f"without keys it listens on {LOOPBACK} only"
            )

    def router_config(self, addresses: Sequence[str], port: int | None = None) -> RouterConfig:
        """Settings of the router in front of workers at ``addresses``; ``port`` is the one that an earlier life of it was given."""
        return dataclasses.replace(
            self.routing,
            workers=tuple(addresses),
            model=self.engine.model,
            host=self.router_host,
            port=self.router_port if port is None else port,
            api_keys_file=self.api_keys_file,
            state=self.state,
            isolation=self.isolation,
        )

    def restart_policy(self) -> RestartPolicy:
        """How dead parts are dealt with."""
        return RestartPolicy(max_restarts=self.max_restarts, standby_routers=self.standby_router)


@dataclass(frozen=True, slots=True)
class NodeView:
    """What Ray says about one living node."""

    cpus: float
    gpus: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterView:
    """What Ray says about the cluster."""

    nodes: tuple[NodeView, ...]
    may_grow: bool = False
    """A joined cluster may start nodes when actors wait for room; a local one never does."""

    @property
    def gpus(self) -> int:
        """Whole GPUs in the cluster."""
        return sum(int(node.gpus) for node in self.nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlan:
    """One worker: its settings and what it takes of its node. The host in ``config`` holds only for ``bind="loopback"``."""

    config: WorkerConfig
    bind: Bind
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetPlan:
    """A whole fleet. The router is planned once the workers' addresses are known (``FleetRequest.router_config``)."""

    request: FleetRequest
    workers: tuple[WorkerPlan, ...]

    def cpus_now(self, worker: WorkerPlan, cluster: ClusterView) -> float:
        """What a worker that is started again asks for: its share, or nothing once nodes have died and the rest has not shares enough
        for all. Then workers take turns on cores, which is slower than before and better than not at all. GPUs are never shared."""
        share = worker.num_cpus
        if not share or sum(int(node.cpus / share + 1e-9) for node in cluster.nodes) >= len(self.workers):
            return share
        return 0.0


def plan_fleet(request: FleetRequest, cluster: ClusterView) -> FleetPlan:
    """Decide who runs with what; raises ConfigError when the cluster cannot hold what was asked for and will not grow.

    Workers that share a node's CPUs and memory divide them: each gets its part of the cores as threads, and its part of
    ``mem_fraction_static``. GPUs are not shared. O(workers * nodes).
    """
    on_gpu = _wants_gpu(request.engine, cluster)
    count = request.workers or (cluster.gpus if on_gpu and cluster.gpus else DEFAULT_CPU_WORKERS)
    fits = count <= cluster.gpus if on_gpu else True
    if not fits and not cluster.may_grow:
        raise ConfigError(
            f"{count} workers need {count} GPUs, and there are {cluster.gpus}; ask for fewer with --workers, or --device cpu"
        )
    bind: Bind = "loopback" if len(cluster.nodes) == 1 and fits else "node"
    num_cpus = 0.0 if on_gpu else _cpu_share(cluster.nodes, count)
    engine = request.engine if on_gpu else _divide_node(request.engine, cluster, count)
    return FleetPlan(
        request=request,
        workers=tuple(
            WorkerPlan(
                config=WorkerConfig(
                    engine=_with_own_folder(engine, f"worker-{index}"),
                    worker_id=f"worker-{index}",
                    # Where callers need keys, nobody may name a tenant by going round the router.
                    tickets_only=request.api_keys_file is not None,
                    isolation=request.isolation,
                    metrics_port=None if request.metrics_port is None else request.metrics_port + index,
                ),
                bind=bind,
                num_cpus=num_cpus,
                num_gpus=1.0 if on_gpu else 0.0,
            )
            for index in range(count)
        ),
    )


def _wants_gpu(engine: EngineConfig, cluster: ClusterView) -> bool:
    return engine.device.startswith("cuda") or (engine.device == "auto" and cluster.gpus > 0)


def _divide_node(engine: EngineConfig, cluster: ClusterView, workers: int) -> EngineConfig:
    """The settings of one of several workers on a node without GPUs: threads and memory are its part of the node's."""
    usable = [node for node in cluster.nodes if node.cpus > 0]  # a head may have none to give
    per_node = math.ceil(workers / max(1, len(usable)))
    cores = min((int(node.cpus) for node in usable), default=1)
    return dataclasses.replace(
        engine,
        threads=engine.threads or max(1, cores // per_node),
        mem_fraction_static=engine.mem_fraction_static / per_node,
    )


def _with_own_folder(engine: EngineConfig, worker_id: str) -> EngineConfig:
    """A folder of its own below ``disk_cache_dir``, the same in each of its lives: two workers must never write the same files."""
    if engine.disk_cache_dir is None:
        return engine
    return dataclasses.replace(engine, disk_cache_dir=f"{engine.disk_cache_dir.rstrip('/')}/{worker_id}")


def _cpu_share(nodes: Sequence[NodeView], workers: int) -> float:
    """The largest part of a CPU, at most a whole one, of which every worker can have one: Ray never splits it over nodes."""
    shares = {min(1.0, node.cpus / k) for node in nodes if node.cpus > 0 for k in range(1, workers + 1)}
    for share in sorted(shares, reverse=True):
        rounded = math.floor(share * _RAY_RESOLUTION + 1e-6) / _RAY_RESOLUTION
        if rounded > 0 and sum(int(node.cpus / rounded + 1e-9) for node in nodes) >= workers:
            return rounded
    return 0.0
