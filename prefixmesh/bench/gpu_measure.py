"""What a GPU check measures: both attention backends on the same plans, what a cascade saves, decoding with and without recording.

Times are medians, of whole steps, and each waits for the device. The sizes are arguments, so that a CPU can run all of it small.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from prefixmesh.bench.gpu_model import ModelShape, config_of, random_weights
from prefixmesh.model_files.model_config import ModelConfig
from prefixmesh.worker.batch_plan import BatchPlan
from prefixmesh.worker.cascade_plan import CascadeRule
from prefixmesh.worker.model.attention import AttentionBackend
from prefixmesh.worker.model.attention_choice import backend_maker, choose_attention
from prefixmesh.worker.model.cascade_bound import sharing_plan
from prefixmesh.worker.model.cuda_graphs import record_on_gpu
from prefixmesh.worker.model.device import wait_for_device
from prefixmesh.worker.model.flashinfer_attention import unsupported
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.model.runner import ModelRunner, single_sequence_plan

ALWAYS: Final = CascadeRule(min_reads=1)
AGREEMENT: Final = 0.05
"""Largest difference between the backends' outputs in bfloat16, on values of about 1."""


class NotRunError(Exception):
    """This cannot be measured here; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is measured."""

    shape: ModelShape
    requests: int
    shared_tokens: int
    own_tokens: int
    page_sizes: tuple[int, ...]
    batches: tuple[int, ...]
    """Sequences decoding together."""

    context: int
    """Tokens of each of them."""

    prompt_tokens: int
    repeats: int

    @property
    def pool_tokens(self) -> int:
        """Enough for any one of the measurements."""
        return max(
            self.shared_tokens + self.requests * (self.own_tokens + max(self.page_sizes)),
            max(self.batches) * (self.context + max(self.page_sizes)),
            self.prompt_tokens,
        )


def compare_backends(sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    """``flashinfer`` beside ``torch`` on decodes and cascades. Raises NotRunError where it cannot run, ValueError where they differ."""
    rows: list[dict[str, Any]] = []
    for page_size in sizes.page_sizes:
        config, pool = _attention_over(sizes, page_size, device)
        _demand_flashinfer(config, pool)
        q = _queries(sizes.requests, config, pool)
        for kind, rule in (("decode", None), ("cascade", ALWAYS)):
            outputs = [
                _one_layer(backend_maker(config, pool, flashinfer=which)(rule), _shared(sizes, page_size), q)
                for which in (False, True)
            ]
            difference = float((outputs[0].float() - outputs[1].float()).abs().max())
            rows.append({"plan": kind, "page size": page_size, "largest difference": difference})
    worst = max(row["largest difference"] for row in rows)
    if not worst <= AGREEMENT:  # not a number is no agreement
        raise ValueError(f"the backends' outputs differ by {worst}, more than {AGREEMENT}: {rows}")
    return rows


def cascade_gain(sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    """The whole attention of a decode step of requests that share a prefix, plain and as a cascade."""
    rows = []
    for page_size in sizes.page_sizes:
        config, pool = _attention_over(sizes, page_size, device)
        plan, q = _shared(sizes, page_size), _queries(sizes.requests, config, pool)
        for name in _backends(config, pool):
            make = backend_maker(config, pool, flashinfer=name == "flashinfer")
            plain_s, cascade_s = (
                _seconds(partial(_all_layers, make(rule), plan, q, config.num_layers), sizes.repeats, device)
                for rule in (None, ALWAYS)
            )
            rows.append(
                {
                    "backend": name,
                    "page size": page_size,
                    "plain ms": plain_s * 1e3,
                    "cascade ms": cascade_s * 1e3,
                    "ratio": cascade_s / plain_s,
                }
            )
    return rows


def decode_speed(sizes: Sizes, device: torch.device) -> tuple[list[dict[str, Any]], str]:
    """Greedy decode steps, computed and replayed; and what was recorded, in words."""
    runner, recorded, words = _runners(sizes, device)
    rows = []
    for batch in sizes.batches:
        plan = sharing_plan(batch, 0, sizes.context, runner.pool.page_size)
        computed_s = _seconds(partial(_greedy, runner, plan), sizes.repeats, device)
        replayed_s = recorded and _seconds(partial(_greedy, recorded, plan), sizes.repeats, device)
        rows.append(
            {
                "sequences": batch,
                "computed ms": computed_s * 1e3,
                "replayed ms": replayed_s and replayed_s * 1e3,
                "computed tokens/s": batch / computed_s,
                "replayed tokens/s": replayed_s and batch / replayed_s,
            }
        )
    return rows, words


def prefill_speed(sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    """One prompt, computed whole."""
    runner, _, _ = _runners(sizes, device, record=False)
    plan = single_sequence_plan(0, sizes.prompt_tokens, runner.pool.page_size)
    seconds = _seconds(partial(_greedy, runner, plan), sizes.repeats, device)
    return [
        {"prompt tokens": sizes.prompt_tokens, "ms": seconds * 1e3, "tokens/s": sizes.prompt_tokens / seconds}
    ]


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _attention_over(sizes: Sizes, page_size: int, device: torch.device) -> tuple[ModelConfig, KVPool]:
    """A pool full of random KV."""
    config = config_of(sizes.shape, sizes.pool_tokens)
    pool = KVPool(config, -(-sizes.pool_tokens // page_size), page_size, _dtype(device), device)
    pool.storage.normal_(generator=torch.Generator(device).manual_seed(0))
    return config, pool


def _shared(sizes: Sizes, page_size: int) -> BatchPlan:
    return sharing_plan(sizes.requests, sizes.shared_tokens // page_size, sizes.own_tokens, page_size)


def _queries(count: int, config: ModelConfig, pool: KVPool) -> torch.Tensor:
    generator = torch.Generator(pool.device).manual_seed(1)
    q = torch.empty(count, config.num_heads, config.head_dim, dtype=pool.dtype, device=pool.device)
    return q.normal_(generator=generator)


def _backends(config: ModelConfig, pool: KVPool) -> list[str]:
    return ["torch"] if unsupported(config, pool.dtype, pool.device) else ["torch", "flashinfer"]


def _demand_flashinfer(config: ModelConfig, pool: KVPool) -> None:
    reason = unsupported(config, pool.dtype, pool.device)
    if reason:
        raise NotRunError(reason)


@torch.inference_mode()
def _one_layer(backend: AttentionBackend, plan: BatchPlan, q: torch.Tensor) -> torch.Tensor:
    backend.prepare(plan)
    return backend.forward(0, q).clone()


@torch.inference_mode()
def _all_layers(backend: AttentionBackend, plan: BatchPlan, q: torch.Tensor, layers: int) -> None:
    backend.prepare(plan)
    for layer in range(layers):
        backend.forward(layer, q)


def _runners(
    sizes: Sizes, device: torch.device, *, record: bool = True
) -> tuple[ModelRunner, ModelRunner | None, str]:
    """The same model twice: one that computes, and one that replays where that can be recorded."""
    config = config_of(sizes.shape, sizes.pool_tokens)
    page_size = sizes.page_sizes[-1]
    weights = random_weights(config, _dtype(device), device)
    pages = -(-sizes.pool_tokens // page_size)
    pool = KVPool(config, pages, page_size, _dtype(device), device, scratch_pages=1)
    attention = choose_attention(config, pool)
    runner = ModelRunner(config, weights, pool, attention)
    if not record or device.type != "cuda":
        return runner, None, "nothing is recorded without a CUDA device"
    recorded = ModelRunner(config, weights, pool, attention)
    words = record_on_gpu(recorded, attention, max(sizes.batches))
    return runner, recorded if recorded.replays else None, words


def _greedy(runner: ModelRunner, plan: BatchPlan) -> Sequence[int]:
    tokens: list[int] = runner.forward(plan).argmax(dim=-1).tolist()
    return tokens


def _seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median, after one call that allocates and chooses kernels."""
    times = []
    call()
    for _ in range(repeats):
        wait_for_device(device)
        started = time.perf_counter()
        call()
        wait_for_device(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)
