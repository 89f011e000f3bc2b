"""How soon a fleet under Ray is whole again: a worker, the router, the supervisor and a node of three are killed while a caller asks on.

Real processes of Ray on this machine, a model that loads in no time, two workers, one caller with one request after the other. Times are from
the kill to the part's next life serving, as its supervisor noted it; the longest gap is between two answers of the caller. What the machine
needs to start Python and to import torch is most of a worker's time.

    python -m benchmarks.supervision [--rounds 3] [--check] [--json FILE]
"""

import argparse
import json
import logging
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import ray
from ray.cluster_utils import Cluster

from tests.support.failure_figures import Figure, at_least, at_most, failing, none, told
from tests.support.fleet_processes import prefixmesh
from tests.support.steady_requests import SteadyRequests
from tests.support.supervised_fleet import SupervisedFleet
from tests.support.tiny_model import make_tiny_model

OBJECT_STORE_BYTES: Final = 80 * 2**20
PROMPTS: Final = tuple(
    f"{n}: what was bought within {n} days may be returned, says the shop. " * 4 for n in range(8)
)
BEFORE_S: Final = 5.0
RECOVERY_S: Final = 5.0
"""By then the share of prompt tokens from caches is to be back at 90 %."""

NODE_BACK_S: Final = 20.0
ROUTER_BACK_S: Final = 2.0

Samples = dict[str, list[float]]


@contextmanager
def cluster_of_three() -> Iterator[Any]:
    """One CPU each."""
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"})
    head = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES, wait=False)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def kill(fleet: SupervisedFleet, name: str) -> float:
    """Now; by the wall clock."""
    fleet.process(name).send_signal(signal.SIGKILL)
    return time.time()


def worker(fleet: SupervisedFleet, samples: Samples) -> None:
    life = fleet.part("worker-0").life
    at = kill(fleet, "worker-0")
    samples["worker back"].append(fleet.wait_serving("worker-0", life + 1).since_unix_s - at)


def router(fleet: SupervisedFleet, samples: Samples, caller: SteadyRequests) -> None:
    time.sleep(BEFORE_S)
    life, at_monotonic = fleet.part("router").life, time.monotonic()
    before = caller.cached_share(at_monotonic - BEFORE_S, at_monotonic)
    at = kill(fleet, "router")
    samples["router back"].append(fleet.wait_serving("router", life + 1).since_unix_s - at)
    time.sleep(2 * RECOVERY_S)
    after = caller.cached_share(at_monotonic + RECOVERY_S, at_monotonic + 2 * RECOVERY_S)
    samples["cached share, after / before"].append(after / max(before, 1e-9))


def supervisor(fleet: SupervisedFleet, samples: Samples) -> None:
    """And at once a worker, which the next life of the supervisor finds dead."""
    life = fleet.part("worker-1").life
    kill(fleet, "supervisor")
    at = kill(fleet, "worker-1")
    samples["worker back without its supervisor"].append(
        fleet.wait_serving("worker-1", life + 1).since_unix_s - at
    )


def node(fleet: SupervisedFleet, samples: Samples, cluster: Any) -> None:
    head = cluster.head_node.node_id
    names = ("worker-0", "worker-1")
    victim, lost = next((name, fleet.node(name)) for name in names if fleet.node(name) != head)
    life = fleet.part(victim).life
    at = time.time()
    cluster.remove_node(
        next(one for one in cluster.list_all_nodes() if one.node_id == lost), allow_graceful=False
    )
    samples["worker back on another node"].append(fleet.wait_serving(victim, life + 1).since_unix_s - at)
    cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
    cluster.wait_for_nodes()


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Everything, so often; medians."""
    samples: Samples = defaultdict(list)
    errors = answers = 0
    gaps = []
    model = make_tiny_model(folder / "tiny")
    settings = (
        "--model",
        str(model),
        "--max-total-tokens",
        "16384",
        "--workers",
        "2",
        "--max-restarts",
        "100",
    )
    with cluster_of_three() as cluster:
        done = prefixmesh(folder, "up", "--address", cluster.address, "--detach", *settings)
        try:
            if done.returncode:
                raise SystemExit(done.stderr)
            fleet = SupervisedFleet(folder)
            for _ in range(rounds):
                with SteadyRequests(fleet.state.router, *PROMPTS) as caller:
                    caller.wait_for_more(2 * len(PROMPTS))
                    worker(fleet, samples)
                    router(fleet, samples, caller)
                    supervisor(fleet, samples)
                    node(fleet, samples, cluster)
                    caller.wait_for_more(len(PROMPTS))
                errors, answers = errors + len(caller.errors), answers + len(caller.answers)
                gaps.append(caller.longest_gap_s())
        finally:
            prefixmesh(folder, "down")
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return [
        told("worker killed: serving again, s", medians["worker back"]),
        at_most("router killed: serving again, s", medians["router back"], ROUTER_BACK_S),
        at_least(
            "router killed: cached share 5 s later, of before", medians["cached share, after / before"], 0.9
        ),
        told("worker and supervisor killed: serving again, s", medians["worker back without its supervisor"]),
        at_most("node killed: its worker on another, s", medians["worker back on another node"], NODE_BACK_S),
        told("answers", answers),
        none("errors", errors),
        told("longest gap between answers, s", max(gaps)),
    ]


def main() -> None:
    """Print the figures; with --check, exit code 1 when one misses its target."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(arguments.rounds, Path(folder))
    for figure in figures:
        print(figure)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=2) + "\n")
    if arguments.check and failing(figures):
        sys.exit(1)


if __name__ == "__main__":
    main()
