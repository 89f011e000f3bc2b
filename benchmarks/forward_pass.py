"""Where the time of a forward pass goes on this machine: its products, its attention, and the rest, for four shapes of a step.

The whole step is timed, then the same step with attention left out, then its matrix products alone; least of the repeats each, so
that others on the machine disturb little. Beside them stands the machine's own ceiling: a bfloat16 product of 1,500 x 576 x 3,072 and
a read of memory. No engine, no scheduler: a model on an empty pool, token 0 throughout.

    python benchmarks/forward_pass.py [--model smollm2] [--dtype bfloat16] [--threads 2] [--repeats 5] [--json FILE]
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from prefixmesh.worker.process_engine import ENGINE_ENVIRONMENT

os.environ.update(ENGINE_ENVIRONMENT | os.environ)  # before torch is loaded, as in an engine's process

import torch

from prefixmesh.model_files.model_config import ModelConfig, read_model_config
from prefixmesh.model_files.source import resolve_model
from prefixmesh.worker.batch_plan import BatchPlan
from prefixmesh.worker.model.attention import AttentionBackend
from prefixmesh.worker.model.attention_choice import choose_attention
from prefixmesh.worker.model.cascade_bound import sharing_plan
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.model.linear import make_linear
from prefixmesh.worker.model.llama import Llama, StepTensors
from prefixmesh.worker.model.loader import load_weights
from prefixmesh.worker.model.runner import single_sequence_plan
from prefixmesh.worker.model.weights import LlamaWeights

CPU = torch.device("cpu")
POOL_TOKENS = 16384
SHAPES: dict[str, list[BatchPlan]] = {
    "1500 cold, chunks of 512": [single_sequence_plan(s, min(512, 1500 - s), 1) for s in (0, 512, 1024)],
    "1500 cold, one chunk": [single_sequence_plan(0, 1500, 1)],
    "100 after 1400": [single_sequence_plan(1400, 100, 1)],
    "decode 1 at 1500": [single_sequence_plan(1500, 1, 1)],
    "decode 64, 1400 shared": [sharing_plan(64, 1400, 108, 1)],
}


class NoAttention:
    """Stands where attention was."""

    def prepare(self, plan: BatchPlan) -> None:
        """Nothing."""

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """The queries themselves."""
        return q.contiguous()


def least_ms(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times) * 1e3


def ceiling(repeats: int) -> dict[str, float]:
    x, linear = torch.randn(1500, 576).bfloat16(), make_linear(torch.randn(3072, 576).bfloat16())
    memory = torch.zeros(2**25, dtype=torch.int64)
    product_ms, read_ms = least_ms(lambda: linear(x), 4 * repeats), least_ms(memory.sum, repeats)
    return {
        "product_gflops": 2 * 1500 * 576 * 3072 / product_ms / 1e6,
        "read_gb_per_s": memory.nbytes / read_ms / 1e6,
    }


def steps(llama: Llama, plans: Sequence[BatchPlan], attention: AttentionBackend) -> None:
    for plan in plans:
        attention.prepare(plan)
        llama(StepTensors.of(plan, CPU, llama.least_rows), attention)


def products(weights: LlamaWeights, plans: Sequence[BatchPlan], config: ModelConfig) -> None:
    """The products of the steps, the activation within the gate's included."""
    dtype = weights.embedding.dtype
    for plan in plans:
        rows = len(plan.token_ids)
        x = torch.ones(rows, config.hidden_size, dtype=dtype)
        attended = torch.ones(rows, config.num_heads * config.head_dim, dtype=dtype)
        inner = torch.ones(rows, config.intermediate_size, dtype=dtype)
        for layer in weights.layers:
            layer.qkv(x)
            layer.attention_out(attended)
            layer.gate_up.gated(x)
            layer.down(inner)
        weights.lm_head(x[: len(plan.logit_rows)])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    files = resolve_model(options.model)
    config, dtype = read_model_config(files), getattr(torch, options.dtype)
    weights = load_weights(files, config, dtype, CPU)
    pool = KVPool(config, POOL_TOKENS, 1, dtype, CPU)
    llama, attention = Llama(config, weights, pool), choose_attention(config, pool)
    result: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        **ceiling(options.repeats),
    }
    print(" ".join(f"{name} {value:.1f}" for name, value in result.items()))
    for name, plans in SHAPES.items():
        whole = least_ms(partial(steps, llama, plans, attention), options.repeats)
        bare = least_ms(partial(steps, llama, plans, NoAttention()), options.repeats)
        only = least_ms(partial(products, weights, plans, config), options.repeats)
        parts = {"step_ms": whole, "products_ms": only, "attention_ms": whole - bare, "rest_ms": bare - only}
        result[name] = parts
        print(f"{name:26}", " ".join(f"{part} {value:8.1f}" for part, value in parts.items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
