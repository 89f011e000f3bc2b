"""CUDA graphs: records a model's decode steps on a GPU, each to be replayed with one launch. The only file that captures."""

import logging
import time
from collections.abc import Callable
from typing import Final

import torch

from prefixmesh.worker.cascade_plan import CascadeRule
from prefixmesh.worker.model.attention import AttentionBackend
from prefixmesh.worker.model.attention_choice import backend_maker
from prefixmesh.worker.model.cascade_bound import MEASURED_SEQUENCES, measured_rule, sharing_plan
from prefixmesh.worker.model.decode_graphs import DecodeGraphs, Recording
from prefixmesh.worker.model.flashinfer_attention import FlashInferAttention
from prefixmesh.worker.model.runner import ModelRunner
from prefixmesh.worker.padded_batch import fitting_size, padded_sizes

logger = logging.getLogger(__name__)

WARM_UPS: Final = 2
"""Runs before the recording: libraries allocate workspaces and choose kernels at their first use, which must not be recorded."""


class CudaGraphDevice:
    """``GraphDevice`` on one GPU. All recordings take their memory from one pool, so at most one may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def free_bytes(self) -> int:
        """What the driver has, and what torch keeps for itself but does not use."""
        free, _ = torch.cuda.mem_get_info(self._device)
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free + unused

    def record(self, compute: Callable[[], None]) -> Recording:
        """Warm up and capture on a stream of its own, as CUDA demands; RuntimeError when something cannot be captured."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads of the process do with CUDA meanwhile cannot spoil it.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            compute()
        return graph


def record_on_gpu(runner: ModelRunner, attention: AttentionBackend, max_running_requests: int) -> str:
    """Record decode steps of up to ``max_running_requests`` sequences, and measure from how much sharing on a cascade is worth
    leaving them. Seconds, and before the pool is used. Returns what was done, for people."""
    if not isinstance(attention, FlashInferAttention):
        return "no CUDA graphs: only the flashinfer backend's decoding can be recorded"
    started, device = time.monotonic(), CudaGraphDevice(runner.pool.device)
    free_bytes = device.free_bytes
    graphs = runner.record_decodes(attention, device, padded_sizes(max_running_requests))
    graphs.leave_for_cascade = bound_beside_replays(runner, graphs, attention)
    return (
        f"CUDA graphs for decode steps of {', '.join(map(str, graphs.sizes)) or 'no'} sequences: "
        f"{(free_bytes - device.free_bytes) / 2**20:,.0f} MiB, {time.monotonic() - started:.1f} s"
    )


def bound_beside_replays(
    runner: ModelRunner, graphs: DecodeGraphs, attention: FlashInferAttention
) -> CascadeRule | None:
    """From where on a cascade saves more reading than a replay saves launching; None for never, and for a pool too small to measure."""
    pool, config = runner.pool, runner.config
    plan = sharing_plan(MEASURED_SEQUENCES, 1, 1, pool.page_size)
    if fitting_size(MEASURED_SEQUENCES, graphs.sizes) is None or int(plan.kv_indices.max()) >= pool.num_pages:
        return None
    gain_s = runner.replay_gain_s(plan)
    make = backend_maker(config, pool, flashinfer=True, beside=attention)
    rule = measured_rule(make, pool, config.num_heads, lost_s=gain_s / config.num_layers)
    logger.info(
        "decode_graphs.measured sizes=%s gain_ms_a_step=%.3f leave_for_cascade_min_reads=%s",
        graphs.sizes,
        gain_s * 1e3,
        None if rule is None else rule.min_reads,
    )
    return rule
