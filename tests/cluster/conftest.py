"""One Ray cluster of three nodes for all tests of a run, and the tiny model that they serve."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.support.tiny_model import make_tiny_model

OBJECT_STORE_BYTES = 80 * 2**20


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that loads in no time."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def ray_cluster(cluster: Cluster) -> str:
    """Address of a cluster of three nodes with one CPU each, all on this machine; this process has joined it."""
    return str(cluster.address)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The same, to add nodes to and to take some away: leave three."""
    quiet = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "OMP_NUM_THREADS": "1",
    }
    before = dict(os.environ)
    os.environ.update(quiet)
    cluster: Any = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False},
    )
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES, wait=False)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)
