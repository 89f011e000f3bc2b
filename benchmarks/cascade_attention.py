"""What cascade attention saves on this machine: a decode step of requests that share a prefix, plain against cascade.

Times the whole attention of a step, every layer and what is prepared once for all of them, in turns, and prints medians and their
ratio. The model's shape is SmolLM2-135M's unless told otherwise. ``--bound`` prints instead, for several numbers of KV heads, from
how many sequences x shared tokens on a cascade is quicker: what ``CPU_HEAD_READS`` was taken from.

    python benchmarks/cascade_attention.py [--requests 32] [--shared 2048] [--own 64] [--page-size 1] [--dtype bfloat16]
        [--heads 9] [--kv-heads 3] [--head-dim 64] [--layers 30] [--repeats 7] [--threads 2] [--json FILE] [--check 0.4]
    python benchmarks/cascade_attention.py --bound
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from prefixmesh.model_files.model_config import ModelConfig
from prefixmesh.worker.batch_plan import BatchPlan
from prefixmesh.worker.model.cascade_bound import cpu_rule, measured_rule, sharing_plan
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.model.torch_attention import TorchAttention

BOUND_KV_HEADS = ((4, 1), (14, 2), (9, 3), (32, 8))
"""(query heads, KV heads) that ``--bound`` tries."""


def model_of(heads: int, kv_heads: int, head_dim: int, layers: int) -> ModelConfig:
    """A shape; what attention does not look at is filler."""
    return ModelConfig(
        architecture="llama",
        hidden_size=heads * head_dim,
        intermediate_size=8,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=16,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
        context_length=2**20,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_ids=(),
    )


def random_pool(config: ModelConfig, tokens: int, page_size: int, dtype: torch.dtype) -> KVPool:
    pool = KVPool(config, -(-tokens // page_size), page_size, dtype, torch.device("cpu"))
    pool.storage.normal_(generator=torch.Generator().manual_seed(0))
    return pool


def shuffled(plan: BatchPlan, pool: KVPool) -> BatchPlan:
    """The same step on scattered pages, as a cache that has lived for a while hands them out."""
    order = torch.randperm(pool.num_pages, generator=torch.Generator().manual_seed(0)).int().numpy()
    plan.kv_indices[:] = order[plan.kv_indices]
    return plan


@torch.inference_mode()
def step_ms(backend: TorchAttention, plan: BatchPlan, q: torch.Tensor, layers: int) -> float:
    started = time.perf_counter()
    backend.prepare(plan)
    for layer in range(layers):
        backend.forward(layer, q)
    return (time.perf_counter() - started) * 1e3


@torch.inference_mode()
def largest_difference(
    plain: TorchAttention, cascade: TorchAttention, plan: BatchPlan, q: torch.Tensor
) -> float:
    plain.prepare(plan)
    cascade.prepare(plan)
    return float((plain.forward(0, q).float() - cascade.forward(0, q).float()).abs().max())


def compare(options: argparse.Namespace) -> dict[str, Any]:
    config = model_of(options.heads, options.kv_heads, options.head_dim, options.layers)
    dtype = getattr(torch, options.dtype)
    own_room = -(-options.own // options.page_size) * options.page_size
    pool = random_pool(config, options.shared + options.requests * own_room, options.page_size, dtype)
    plan = sharing_plan(options.requests, options.shared // options.page_size, options.own, options.page_size)
    plan = shuffled(plan, pool)
    q = torch.randn(options.requests, options.heads, options.head_dim).to(dtype)
    plain = TorchAttention(config, pool)
    cascade = TorchAttention(config, pool, cpu_rule(config.num_kv_heads))
    difference = largest_difference(plain, cascade, plan, q)
    times: dict[str, list[float]] = {"plain": [], "cascade": []}
    for backend in (plain, cascade):
        step_ms(backend, plan, q, options.layers)
    for _ in range(options.repeats):
        times["plain"].append(step_ms(plain, plan, q, options.layers))
        times["cascade"].append(step_ms(cascade, plan, q, options.layers))
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "requests": options.requests,
        "shared_tokens": options.shared,
        "own_tokens": options.own,
        "page_size": options.page_size,
        "dtype": options.dtype,
        "heads": [options.heads, options.kv_heads, options.head_dim],
        "layers": options.layers,
        "threads": torch.get_num_threads(),
        "repeats": options.repeats,
        "load_average": os.getloadavg()[0],
        "plain_step_ms": round(medians["plain"], 2),
        "cascade_step_ms": round(medians["cascade"], 2),
        "ratio": round(medians["cascade"] / medians["plain"], 4),
        "largest_difference": difference,
    }


def bounds(options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for heads, kv_heads in BOUND_KV_HEADS:
        for name in ("float32", "bfloat16"):
            config = model_of(heads, kv_heads, options.head_dim, 1)
            pool = random_pool(config, 8192, 1, getattr(torch, name))
            rule = measured_rule(lambda rule: TorchAttention(config, pool, rule), pool, heads)  # noqa: B023
            rows.append(
                {
                    "kv_heads": kv_heads,
                    "heads": heads,
                    "dtype": name,
                    "measured_min_reads": None if rule is None else rule.min_reads,
                    "cpu_rule": cpu_rule(kv_heads).min_reads,
                }
            )
    return {"threads": torch.get_num_threads(), "load_average": os.getloadavg()[0], "bounds": rows}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag, default in (
        ("--requests", 32), ("--shared", 2048), ("--own", 64), ("--page-size", 1), ("--heads", 9), ("--kv-heads", 3),
        ("--head-dim", 64), ("--layers", 30), ("--repeats", 7), ("--threads", 0),
    ):  # fmt: skip
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--bound", action="store_true", help="measure from where on a cascade pays")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--check", type=float, help="exit 1 when the ratio is above this")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    result = bounds(options) if options.bound else compare(options)
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(options.check is not None and not options.bound and result["ratio"] > options.check)


if __name__ == "__main__":
    raise SystemExit(main())
