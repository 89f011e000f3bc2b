"""Decode steps that a GPU replays from what it recorded once, so that it does not wait for the interpreter to launch each kernel.

For each padded size (``padded_batch``) one step of dummies is recorded, at start, over arrays that stay where they are. Replaying a step
is then: pad its plan, copy it to those arrays, let attention plan the size's kernels, replay, and read the first rows of the logits.

A step is computed as ever (the caller's business: ``forward`` says None) when it is not all decoding, has more sequences or pages than
was recorded for, or shares so much that a cascade is worth more than a replay. What records and replays is behind ``GraphDevice``, so
that all of this is proved on a CPU.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch

from prefixmesh.worker.batch_plan import BatchPlan
from prefixmesh.worker.cascade_plan import CascadeRule, build_cascade
from prefixmesh.worker.model.attention import AttentionBackend
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.model.llama import StepTensors
from prefixmesh.worker.padded_batch import dummies_only, fitting_size, only_decodes, pad_decodes

logger = logging.getLogger(__name__)

MIN_FREE_BYTES: Final = 512 * 2**20
"""Recording stops when the device has less memory left: prefills need it more than another size does."""

ForwardPass = Callable[[StepTensors, AttentionBackend], torch.Tensor]
"""``Llama``: float32 logits [R, vocab_size] of the wanted rows."""


class Recording(Protocol):
    """Something that was computed once and can be computed again."""

    def replay(self) -> None:
        """Compute again, on whatever the arrays hold now. Returns before the device is done."""
        ...


class GraphDevice(Protocol):
    """What records: ``cuda_graphs.CudaGraphDevice``."""

    @property
    def free_bytes(self) -> int:
        """Memory that can still be taken."""
        ...

    def record(self, compute: Callable[[], None]) -> Recording:
        """Run ``compute`` to warm up, then record it. Raises whatever the device or a library does when that is not possible."""
        ...


class GraphAttention(Protocol):
    """A backend whose decoding can be recorded."""

    @property
    def max_graph_pages(self) -> int:
        """Most pages, of all sequences of a step together, that a recorded step may read."""
        ...

    def decode_of_size(self, size: int) -> AttentionBackend:
        """Attention for steps of exactly ``size`` decodes. Its ``forward`` is recorded; ``prepare`` is called before every replay, and
        changes only what lies in arrays that stay where they are."""
        ...


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One size."""

    inputs: torch.Tensor
    """[3, size] int64: token ids, positions and slots; the place that its kernels read."""

    attention: AttentionBackend
    recording: Recording


class DecodeGraphs:
    """Recorded decode steps of one model. Not thread-safe; under ``torch.inference_mode`` like the model."""

    leave_for_cascade: CascadeRule | None = None
    """A step that shares so much is not replayed: what a cascade saves is more than what recording does. None: always replayed."""

    def __init__(
        self,
        model: ForwardPass,
        pool: KVPool,
        vocab_size: int,
        attention: GraphAttention,
        device: GraphDevice,
        sizes: Sequence[int],
    ) -> None:
        if pool.scratch_pages < 1:
            raise ValueError("recorded steps need a scratch page in the pool")
        self._model = model
        self._pool = pool
        self._max_pages = attention.max_graph_pages
        largest = max(sizes)
        # One place for all sizes, since only one of them is replayed at a time.
        self._inputs = torch.zeros(3 * largest, dtype=torch.int64, device=pool.device)
        self._rows = torch.arange(largest, dtype=torch.int64, device=pool.device)
        self._logits = torch.zeros(largest, vocab_size, dtype=torch.float32, device=pool.device)
        self._recorded: dict[int, _Recorded] = {}
        self._record_all(attention, device, sizes)
        self._sizes = tuple(sorted(self._recorded))

    @property
    def sizes(self) -> tuple[int, ...]:
        """What was recorded, rising; empty when nothing could be."""
        return self._sizes

    def forward(self, plan: BatchPlan) -> torch.Tensor | None:
        """Replay a step; None when it must be computed as ever, in which case nothing was done.

        Returns float32 [R, vocab_size], valid until the next replay. Cost on the CPU O(pages) and one launch. LoadBackError, and nothing
        done, when KV that the step reads did not come.
        """
        if not only_decodes(plan):
            return None
        sequences = len(plan.last_page_len)
        size = fitting_size(sequences, self._sizes)
        if size is None or len(plan.kv_indices) + size - sequences > self._max_pages or self._leaves(plan):
            return None
        recorded = self._recorded[size]
        self._pool.await_layers()  # a recording cannot ask for one layer after the other
        self._fill(recorded, pad_decodes(plan, size, self._pool.num_pages, self._pool.page_size))
        recorded.recording.replay()
        return self._logits[:sequences]

    def _leaves(self, plan: BatchPlan) -> bool:
        rule = self.leave_for_cascade
        return rule is not None and build_cascade(plan, self._pool.page_size, rule) is not None

    def _fill(self, recorded: _Recorded, plan: BatchPlan) -> None:
        arrays = np.stack((plan.token_ids, plan.positions, plan.out_slots)).astype(np.int64)
        # From memory that is not pinned: such a copy has read its source when it returns, so nothing need be kept.
        recorded.inputs.copy_(torch.from_numpy(arrays), non_blocking=True)
        recorded.attention.prepare(plan)

    def _record_all(self, attention: GraphAttention, device: GraphDevice, sizes: Sequence[int]) -> None:
        """The largest size first: what smaller ones need then fits into the memory that it took."""
        for size in sorted(sizes, reverse=True):
            if device.free_bytes < MIN_FREE_BYTES:
                logger.warning("decode_graphs.short_of_memory size=%d free_bytes=%d", size, device.free_bytes)
                return
            try:
                self._recorded[size] = self._record(attention.decode_of_size(size), device, size)
            except (
                Exception
            ) as error:  # whatever a device or a library refuses: steps are then computed as ever
                logger.warning(
                    "decode_graphs.not_recorded size=%d error=%s: %s", size, type(error).__name__, error
                )
                return

    def _record(self, attention: AttentionBackend, device: GraphDevice, size: int) -> _Recorded:
        inputs = self._inputs[: 3 * size].view(3, size)
        step = StepTensors(inputs[0], inputs[1], inputs[2], self._rows[:size], num_logits=size)
        logits = self._logits[:size]

        def compute() -> None:
            # Copied out, so that the memory of the model's own result can serve other sizes.
            logits.copy_(self._model(step, attention))

        plan = dummies_only(size, self._pool.num_pages, self._pool.page_size)
        inputs.copy_(torch.from_numpy(np.stack((plan.token_ids, plan.positions, plan.out_slots))))
        attention.prepare(plan)
        return _Recorded(inputs, attention, device.record(compute))
