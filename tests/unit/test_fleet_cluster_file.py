"""The cluster files for ``ray up`` pass Ray's own validation."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy" / "ray"


def load_cluster() -> dict[str, Any]:
    """The file as it is shipped."""
    config: dict[str, Any] = yaml.safe_load((DEPLOY / "cluster.yaml").read_text())
    return config


def prepare_and_validate(config: dict[str, Any]) -> dict[str, Any]:
    """What ``ray up`` does before it starts a node."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared: dict[str, Any] = prepare_config(config)
    validate_config(prepared)
    return prepared


def test_the_cluster_file_is_valid() -> None:
    """With a head and at least one type of node that has GPUs."""
    prepared = prepare_and_validate(load_cluster())
    kinds = prepared["available_node_types"]
    assert prepared["head_node_type"] in kinds
    assert any(kind["resources"].get("GPU") for kind in kinds.values())


def test_ray_would_refuse_a_wrong_key() -> None:
    """So the test above can fail."""
    with pytest.raises(Exception, match="worker_count"):
        prepare_and_validate({**load_cluster(), "worker_count": 3})


def test_the_machines_of_ones_own_in_the_readme_are_valid() -> None:
    """The snippet replaces four keys of the shipped file, as the text says."""
    snippet = re.search(r"```yaml\n(.*?)```", (DEPLOY / "README.md").read_text(), re.DOTALL)
    assert snippet is not None
    config = load_cluster()
    for key in ("provider", "auth", "head_node_type", "available_node_types"):
        del config[key]
    prepared = prepare_and_validate({**config, **yaml.safe_load(snippet[1])})
    assert prepared["provider"]["worker_ips"] == ["10.0.0.2", "10.0.0.3"]


def test_the_image_has_the_ray_that_is_tested() -> None:
    """Ray insists on the same version everywhere."""
    constraints = (DEPLOY.parents[1] / "constraints.txt").read_text()
    pinned = re.search(r"^ray==(\S+)$", constraints, re.MULTILINE)
    assert pinned is not None
    docker = load_cluster()["docker"]
    assert all(
        docker[name].startswith(f"rayproject/ray:{pinned[1]}-py312")
        for name in ("head_image", "worker_image")
    )
