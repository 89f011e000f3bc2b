"""Exact attention with plain torch operations, for CPUs and for proof.

A sequence that computes several tokens (prefill) goes through blocks of query rows: the query heads that share a KV head
become rows of one product, so K and V are never repeated; a block's scores stay in cache; keys after the block are not
touched, and only the block's own triangle needs a mask. On a CPU this is about twice as fast as
``scaled_dot_product_attention`` at 1,500 tokens, which multiplies in float32 and repeats K/V per head.

Sequences that compute one token (decode) are gathered into padded groups, and each group is one
``scaled_dot_product_attention`` in which the query heads of a KV head are again the rows.

In bfloat16, scores and probabilities are rounded to bfloat16 between the products (sums are kept in float32), as in
Hugging Face's eager attention.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch.nn import functional

from prefixmesh.model_files.model_config import ModelConfig
from prefixmesh.worker.batch_plan import BatchPlan
from prefixmesh.worker.model.attention_groups import group_by_length, kv_lengths, sequence_slots
from prefixmesh.worker.model.kv_pool import KVPool

MAX_BLOCK_ROWS: Final = 64
"""Query tokens per block. 64 keeps the scores of 1,500 keys near the size of a core's cache and wastes 32 keys a row on the
triangle; larger blocks measured no faster."""

MIN_BLOCK_ROWS: Final = 8
"""Fewer rows than this leave the processor's registers half empty."""

MAX_SCORES: Final = 2**22
"""Scores held at once (twice: before and after softmax): 8 MiB each in bfloat16, however long the context."""

CPU_GROUP_TOKENS: Final = 4096
"""Padded tokens per decode group on a CPU, so that the gathered K and V stay in cache."""

GPU_GROUP_TOKENS: Final = 2**18
"""The same on a GPU, where fewer and larger launches pay; bounds the gathered copies."""

MIN_SLACK: Final = 128
"""Padding that always costs less than another group."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A sequence that computes rows ``start:end`` of the step."""

    start: int
    end: int
    kv_length: int
    slots: torch.Tensor
    """[kv_length] int32"""

    block_rows: int


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Sequences that compute one row each, padded to the longest."""

    rows: torch.Tensor
    """[G] int64 rows of the step."""

    slots: torch.Tensor
    """[G * longest] int32; padding points to the sequence's own first token, so that it is finite."""

    longest: int
    mask: torch.Tensor | None
    """[G, 1, 1, longest] 0 or -inf, in the model's dtype; None when all are equally long."""


class TorchAttention:
    """The ``torch`` backend."""

    def __init__(self, config: ModelConfig, pool: KVPool) -> None:
        self._pool = pool
        self._kv_heads = config.num_kv_heads
        self._group = config.num_heads // config.num_kv_heads
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        self._group_tokens = CPU_GROUP_TOKENS if pool.device.type == "cpu" else GPU_GROUP_TOKENS
        self._future = torch.ones(MAX_BLOCK_ROWS, MAX_BLOCK_ROWS, dtype=torch.bool, device=pool.device).triu_(
            1
        )
        self._scratch = _Scratch(pool.dtype, pool.device)
        self._prefills: list[_Prefill] = []
        self._decodes: list[_DecodeGroup] = []

    def prepare(self, plan: BatchPlan) -> None:
        """Work out slots, blocks, groups and masks; O(tokens of KV read)."""
        lengths = kv_lengths(plan, self._pool.page_size)
        new_tokens = np.diff(plan.qo_indptr)
        self._prefills = [
            self._prefill(plan, int(b), int(lengths[b])) for b in np.flatnonzero(new_tokens > 1)
        ]
        single = np.flatnonzero(new_tokens == 1)
        groups = group_by_length(lengths[single].tolist(), self._group_tokens, MIN_SLACK)
        self._decodes = [self._decode_group(plan, single[group], lengths) for group in groups]

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """[T, num_heads, head_dim] -> the same."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        keys, values = self._pool.keys(layer), self._pool.values(layer)
        for prefill in self._prefills:
            self._run_prefill(prefill, q, keys, values, out)
        for group in self._decodes:
            self._run_decode(group, q, keys, values, out)
        return out

    def _prefill(self, plan: BatchPlan, sequence: int, kv_length: int) -> _Prefill:
        slots = sequence_slots(plan, sequence, kv_length, self._pool.page_size)
        fitting = MAX_SCORES // (self._kv_heads * self._group * kv_length)
        return _Prefill(
            start=int(plan.qo_indptr[sequence]),
            end=int(plan.qo_indptr[sequence + 1]),
            kv_length=kv_length,
            slots=torch.tensor(slots, device=self._pool.device),
            block_rows=max(MIN_BLOCK_ROWS, min(MAX_BLOCK_ROWS, fitting)),
        )

    def _decode_group(self, plan: BatchPlan, sequences: np.ndarray, lengths: np.ndarray) -> _DecodeGroup:
        device = self._pool.device
        own = lengths[sequences]
        longest = int(own[0])
        slots = np.empty((len(sequences), longest), dtype=np.int32)
        for row, (sequence, length) in enumerate(zip(sequences.tolist(), own.tolist(), strict=True)):
            slots[row, :length] = sequence_slots(plan, sequence, length, self._pool.page_size)
            slots[row, length:] = slots[row, 0]
        mask = None
        if own[-1] != longest:
            hidden = torch.tensor(np.arange(longest) >= own[:, None], device=device)
            mask = torch.zeros(hidden.shape, dtype=self._pool.dtype, device=device)
            mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None, :]
        return _DecodeGroup(
            rows=torch.tensor(plan.qo_indptr[sequences], dtype=torch.int64, device=device),
            slots=torch.tensor(slots.reshape(-1), device=device),
            longest=longest,
            mask=mask,
        )

    def _run_prefill(
        self, work: _Prefill, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        kv_heads, group, dim, length = self._kv_heads, self._group, self._head_dim, work.kv_length
        scratch = self._scratch
        gathered = scratch.take("keys", (length, kv_heads, dim))
        torch.index_select(keys, 0, work.slots, out=gathered)
        keys_t = scratch.take("keys_transposed", (kv_heads, dim, length)).copy_(gathered.permute(1, 2, 0))
        gathered = scratch.take("values", (length, kv_heads, dim))
        torch.index_select(values, 0, work.slots, out=gathered)
        values_t = gathered.transpose(0, 1)
        seen = length - (work.end - work.start)
        for start in range(work.start, work.end, work.block_rows):
            end = min(start + work.block_rows, work.end)
            rows, visible = end - start, seen + end - work.start
            folded = (kv_heads, group * rows)
            block = scratch.take("queries", (kv_heads, group, rows, dim))
            block.copy_(q[start:end].view(rows, kv_heads, group, dim).permute(1, 2, 0, 3)).mul_(self._scale)
            scores = scratch.take("scores", (*folded, visible))
            torch.bmm(block.view(*folded, dim), keys_t[:, :, :visible], out=scores)
            own_keys = scores.view(kv_heads * group, rows, visible)[:, :, visible - rows :]
            own_keys.masked_fill_(self._future[:rows, :rows], -torch.inf)
            shares = scratch.take("shares", (*folded, visible))
            torch.softmax(scores, dim=-1, out=shares)
            mixed = scratch.take("mixed", (*folded, dim))
            torch.bmm(shares, values_t[:, :visible], out=mixed)
            target = out[start:end].view(rows, kv_heads, group, dim)
            target.copy_(mixed.view(kv_heads, group, rows, dim).permute(2, 0, 1, 3))

    def _run_decode(
        self, work: _DecodeGroup, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        count, kv_heads, dim = len(work.rows), self._kv_heads, self._head_dim
        shape = (count, work.longest, kv_heads, dim)
        own_keys, own_values = self._scratch.take("keys", shape), self._scratch.take("values", shape)
        torch.index_select(keys, 0, work.slots, out=own_keys.view(-1, kv_heads, dim))
        torch.index_select(values, 0, work.slots, out=own_values.view(-1, kv_heads, dim))
        queries = q.index_select(0, work.rows).view(count, kv_heads, self._group, dim)
        mixed = functional.scaled_dot_product_attention(
            queries,
            own_keys.transpose(1, 2),
            own_values.transpose(1, 2),
            attn_mask=work.mask,
            scale=self._scale,
        )
        out.index_copy_(0, work.rows, mixed.reshape(count, kv_heads * self._group, dim))


class _Scratch:
    """Working memory that is kept between layers and steps: fresh memory would be faulted in anew each time. It grows to
    the largest size asked for, which the context length and ``MAX_SCORES`` bound."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The buffer ``name`` in that shape; its content is whatever was there. Valid until the name is taken again."""
        size = 1
        for length in shape:
            size *= length
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=self._dtype, device=self._device)
        return buffer[:size].view(shape)
