"""Stands in for a GPU that records and replays: on a CPU it computes again what it was given, with the torch backend.

What a recording reads is bound when it is made, as on a GPU: only what is copied into its arrays later reaches it. The torch
backend's own arrays are an exception, made anew by every ``prepare``; those of FlashInfer's graph mode are tests/gpu's matter.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from prefixmesh.model_files.model_config import ModelConfig, read_model_config
from prefixmesh.model_files.source import resolve_model
from prefixmesh.worker.batch_plan import BatchPlan
from prefixmesh.worker.model.attention import AttentionBackend
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.model.loader import load_weights
from prefixmesh.worker.model.lora import LoraSlots
from prefixmesh.worker.model.runner import ModelRunner
from prefixmesh.worker.model.torch_attention import TorchAttention

PAGES = 96
"""Of ``make_runner``'s pool."""


def make_runner(
    folder: Path, page_size: int = 4, scratch_pages: int = 1, adapters: LoraSlots | None = None
) -> ModelRunner:
    """A float32 model on the CPU, with room for dummies."""
    files = resolve_model(str(folder))
    config, cpu = read_model_config(files), torch.device("cpu")
    weights = load_weights(files, config, torch.float32, cpu)
    pool = KVPool(config, PAGES, page_size, torch.float32, cpu, scratch_pages=scratch_pages)
    return ModelRunner(config, weights, pool, TorchAttention(config, pool), adapters)


class FakeRecording:
    def __init__(self, compute: Callable[[], None]) -> None:
        self.compute = compute
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.compute()


class FakeGraphDevice:
    """``fails_from``: sizes recorded after so many cannot be. ``free_bytes`` falls by ``bytes_each`` with every recording."""

    def __init__(self, *, fails_from: int = 10**9, free_bytes: int = 2**40, bytes_each: int = 0) -> None:
        self.recordings: list[FakeRecording] = []
        self._fails_from = fails_from
        self._free_bytes = free_bytes
        self._bytes_each = bytes_each

    @property
    def free_bytes(self) -> int:
        return self._free_bytes

    @property
    def replays(self) -> int:
        return sum(recording.replays for recording in self.recordings)

    def record(self, compute: Callable[[], None]) -> FakeRecording:
        if len(self.recordings) >= self._fails_from:
            raise RuntimeError("operation not permitted when stream is capturing")
        compute()
        self._free_bytes -= self._bytes_each
        self.recordings.append(FakeRecording(compute))
        return self.recordings[-1]


class _OfSize:
    """The torch backend, held to one number of sequences."""

    def __init__(self, backend: AttentionBackend, size: int) -> None:
        self._backend = backend
        self._size = size

    def prepare(self, plan: BatchPlan) -> None:
        assert len(plan.last_page_len) == len(plan.token_ids) == self._size
        self._backend.prepare(plan)

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        assert len(q) == self._size
        return self._backend.forward(layer, q)


class TorchGraphAttention:
    """``GraphAttention`` by the torch backend."""

    def __init__(self, config: ModelConfig, pool: KVPool, max_graph_pages: int = 10**6) -> None:
        self._config, self._pool = config, pool
        self.max_graph_pages = max_graph_pages

    def decode_of_size(self, size: int) -> AttentionBackend:
        return _OfSize(TorchAttention(self._config, self._pool), size)
