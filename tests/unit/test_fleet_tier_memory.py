"""F55 for a fleet: host tiers that do not fit in one machine's memory together are refused with the sums, before anything is loaded."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixmesh.config import EngineConfig
from prefixmesh.errors import ConfigError
from prefixmesh.fleet import tier_memory
from prefixmesh.fleet.plan import ClusterView, FleetPlan, FleetRequest, NodeView, plan_fleet
from prefixmesh.fleet.tier_memory import check_host_tiers, check_sums, weight_bytes
from prefixmesh.model_files.model_config import ModelConfig, read_model_config
from prefixmesh.model_files.source import resolve_model
from prefixmesh.worker.model import memory as worker_memory
from prefixmesh.worker.model.linear import can_pack
from prefixmesh.worker.model.loader import load_weights
from prefixmesh.worker.model.memory import DeviceMemory
from tests.support.tiny_model import TinyShape, make_tiny_model

LAPTOP = ClusterView(nodes=(NodeView(cpus=8, gpus=0),))
GPU_BOX = ClusterView(nodes=(NodeView(cpus=16, gpus=4),))
MIB, GIB = 2**20, 2**30

MODEL = ModelConfig(
    architecture="llama",
    hidden_size=1024,
    intermediate_size=4096,
    num_layers=16,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=32_768,
    rope_theta=1e4,
    rms_norm_eps=1e-5,
    context_length=8192,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_ids=(2,),
)
KV_BYTES = MODEL.kv_bytes_per_token(4)
WEIGHTS = weight_bytes(MODEL, 4, packs=can_pack(torch.device("cpu"), torch.float32))


def plan_of(cluster: ClusterView = LAPTOP, workers: int = 2, **settings: Any) -> FleetPlan:
    engine = EngineConfig(page_size=16, **({"dtype": "float32"} | settings))
    return plan_fleet(FleetRequest(engine=engine, workers=workers), cluster)


def refusal_of(plan: FleetPlan, free: int) -> str:
    with pytest.raises(ConfigError) as error:
        check(plan, free)
    return str(error.value)


def check(plan: FleetPlan, free: int) -> None:
    check_sums(plan.workers[0], len(plan.workers), MODEL, DeviceMemory(total=free, free=free, source="here"))


@pytest.mark.parametrize(
    ("setting", "tokens"),
    [({"hicache_ratio": 3.0}, 12_000), ({"hicache_size": 12_000 * KV_BYTES / GIB}, 12_000)],
)
def test_workers_that_fit_alone_and_not_together_are_refused_with_the_sums(
    setting: dict[str, Any], tokens: int
) -> None:
    plan = plan_of(max_total_tokens=4000, **setting)
    each = WEIGHTS + (4000 + tokens) * KV_BYTES
    check(plan, 2 * each)
    message = refusal_of(plan, 2 * each - 1)
    assert f"2 x {each / MIB:,.0f} MiB (weights {WEIGHTS / MIB:,.0f} MiB + KV" in message
    assert f"host tier {tokens * KV_BYTES / MIB:,.0f} MiB ({tokens:,} tokens" in message
    assert f"= {2 * each / MIB:,.0f} MiB, and " in message
    assert "MiB are free (here); lower --hicache-size, --hicache-ratio" in message
    check(plan_of(workers=1, max_total_tokens=4000, **setting), each)


def test_what_one_worker_would_refuse_by_itself_is_refused_without_starting_it() -> None:
    plan = plan_of(workers=1, max_total_tokens=4000, hicache_ratio=1000.0)
    assert "do not fit: weights" in refusal_of(plan, WEIGHTS + 100_000 * KV_BYTES)


def test_beside_gpus_the_host_tiers_alone_are_the_machines() -> None:
    """Weights and pools are on the GPUs; a tier whose size depends on a GPU's memory is left to the worker that can ask it."""
    plan = plan_of(GPU_BOX, workers=4, hicache_size=10.0)
    check(plan, 40 * GIB)
    assert "4 x 10,240 MiB (host tier) = 40,960 MiB" in refusal_of(plan, 40 * GIB - 1)
    asked = plan_of(GPU_BOX, workers=4, max_total_tokens=1000, hicache_ratio=8.0)
    check(asked, 4 * 8000 * KV_BYTES)
    assert "4 workers" in refusal_of(asked, 4 * 8000 * KV_BYTES - 1)
    check(plan_of(GPU_BOX, workers=4, hicache_ratio=8.0), 0)


def test_without_a_host_tier_or_on_a_joined_cluster_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of the model, no torch: a fleet that asks for no host tier starts as it always did."""
    monkeypatch.setattr(tier_memory, "resolve_model", lambda _: pytest.fail("the model was looked up"))
    check_host_tiers(plan_of())
    joined = plan_of(hicache_ratio=4.0)
    check_host_tiers(dataclasses.replace(joined, request=dataclasses.replace(joined.request, address="auto")))


def test_a_real_models_files_give_the_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path)
    free = DeviceMemory(total=4 * MIB, free=4 * MIB, source="here")
    monkeypatch.setattr(worker_memory, "read_cpu_memory", lambda _: free)
    with pytest.raises(ConfigError, match="host tiers of 2 workers do not fit"):
        check_host_tiers(plan_of(model=str(folder), max_total_tokens=1600, hicache_ratio=1.0))
    check_host_tiers(plan_of(model=str(folder), max_total_tokens=1600, hicache_ratio=0.25))


@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_are_counted_as_the_loader_finds_them(tmp_path: Path, *, is_tied: bool) -> None:
    """But for norms and biases."""
    shape = TinyShape(hidden_size=256, intermediate_size=512, tie_word_embeddings=is_tied)
    files, cpu = resolve_model(str(make_tiny_model(tmp_path, shape))), torch.device("cpu")
    config = read_model_config(files)
    found = load_weights(files, config, torch.float32, cpu).num_bytes
    assert found == pytest.approx(weight_bytes(config, 4, packs=can_pack(cpu, torch.float32)), rel=0.02)


def test_each_worker_has_a_folder_of_its_own_on_the_disk() -> None:
    """The same in each of its lives; a worker that is run by hand takes the folder as it is."""
    plan = plan_of(hicache_ratio=1.0, disk_cache_dir="/var/kv/")
    folders = [worker.config.engine.disk_cache_dir for worker in plan.workers]
    assert folders == ["/var/kv/worker-0", "/var/kv/worker-1"]
    assert {worker.config.engine.disk_cache_dir for worker in plan_of(hicache_ratio=1.0).workers} == {None}
