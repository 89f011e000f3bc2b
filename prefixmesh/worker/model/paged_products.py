"""The two ways in which queries meet paged K and V in plain torch operations, for CPUs and for proof.

- *Rows*: several queries over one list of slots (a prefill's chunk, or all queries of a group over what they share). They go
  through blocks of query rows: the query heads that share a KV head become rows of one product, so K and V are never repeated; a
  block's scores stay in cache; keys after the block are not touched, and only the block's own triangle needs a mask.
- *Singles*: sequences with one query each, gathered into padded groups; each (sequence, KV head) is one product of a batch.

What is computed whole gathers K and V token by token. Parts of a cascade gather them head by head, ``[batch * num_kv_heads,
tokens, head_dim]``, by slots multiplied out beforehand (``head_slots``): their products, many and short or one and wide, then read
them where they lie.

Either gives the attention itself, or, for parts that are merged later, the attention and its log-sum-exp in base 2. On a CPU rows
are about twice as fast as ``scaled_dot_product_attention`` at 1,500 tokens, which multiplies in float32 and repeats K and V per
head; for whole singles it is the quicker one below some 1,000 tokens, and is used. In bfloat16, scores and probabilities of all
others are rounded to bfloat16 between the products (sums are kept in float32), as in Hugging Face's eager attention.
"""

import math
from typing import Final, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from prefixmesh.model_files.model_config import ModelConfig
from prefixmesh.worker.batch_plan import IntArray
from prefixmesh.worker.model.kv_pool import KVPool

MAX_BLOCK_ROWS: Final = 64
"""Query tokens per block. 64 keeps the scores of 1,500 keys near the size of a core's cache and wastes 32 keys a row on the
triangle; larger blocks measured no faster."""

MIN_BLOCK_ROWS: Final = 8
"""Fewer rows than this leave the processor's registers half empty."""

MAX_SCORES: Final = 2**22
"""Scores held at once (twice: before and after softmax): 8 MiB each in bfloat16, however long the context."""

_LOG2_E: Final = math.log2(math.e)


class Gathered(NamedTuple):
    """K and V of some slots; valid until the next gathering."""

    keys_t: torch.Tensor
    """[batch * num_kv_heads, head_dim, tokens]"""

    values: torch.Tensor
    """[batch * num_kv_heads, tokens, head_dim]"""


class Part(NamedTuple):
    """Attention over a part of the KV, ``[num_kv_heads, group, rows, head_dim]`` for rows, ``[count, num_heads, head_dim]`` for
    singles, and its log-sum-exp in base 2, float32 of the same shape without the last dimension."""

    values: torch.Tensor
    lse: torch.Tensor


class PagedProducts:
    """The products of one model's heads over one pool. Its results are valid until it is asked again."""

    def __init__(self, config: ModelConfig, pool: KVPool) -> None:
        self.kv_heads = config.num_kv_heads
        self.group = config.num_heads // config.num_kv_heads
        self.head_dim = config.head_dim
        self._pool = pool
        self._scale = config.head_dim**-0.5
        self._scratch = _Scratch(pool.dtype, pool.device)
        self._wide = _Scratch(torch.float32, pool.device)
        self._heads: IntArray = np.arange(self.kv_heads, dtype=np.int32)[:, None]
        future = torch.ones(MAX_BLOCK_ROWS, MAX_BLOCK_ROWS, dtype=torch.bool, device=pool.device)
        self._future = future.triu_(1)

    def head_slots(self, slots: IntArray) -> IntArray:
        """Slots ``[batch, tokens]`` or ``[tokens]`` as rows of the pool seen head by head."""
        return slots[..., None, :] * np.int32(self.kv_heads) + self._heads

    def block_rows(self, tokens: int) -> int:
        """Rows per block over so many keys, within ``MAX_SCORES``."""
        fitting = MAX_SCORES // (self.kv_heads * self.group * tokens)
        return max(MIN_BLOCK_ROWS, min(MAX_BLOCK_ROWS, fitting))

    def gather(self, layer: int, slots: torch.Tensor) -> Gathered:
        """K and V of a layer at ``slots`` [tokens], as a batch of 1: K is copied twice, the second time transposed, since every
        block multiplies it."""
        shape = (self.kv_heads, self.head_dim, len(slots))
        keys = self._take("keys", self._pool.keys(layer), slots)
        keys_t = self._scratch.take("keys_transposed", shape).copy_(keys.permute(1, 2, 0))
        return Gathered(keys_t, self._take("values", self._pool.values(layer), slots).transpose(0, 1))

    def gather_heads(
        self, layer: int, head_slots: torch.Tensor, tokens: int, *, several_blocks: bool = False
    ) -> Gathered:
        """K and V of a layer at ``head_slots``: one copy of each, and another one of K, transposed, when several blocks multiply
        it."""
        keys = self._take("keys", self._pool.keys(layer).view(-1, self.head_dim), head_slots)
        values = self._take("values", self._pool.values(layer).view(-1, self.head_dim), head_slots)
        shape = (-1, tokens, self.head_dim)
        keys_t = keys.view(shape).transpose(1, 2)
        if several_blocks:
            keys_t = self._scratch.take("keys_transposed", tuple(keys_t.shape)).copy_(keys_t)
        return Gathered(keys_t, values.view(shape))

    def rows(self, q: torch.Tensor, kv: Gathered, visible: int, *, causal: bool) -> torch.Tensor:
        """A block of queries ``q`` [rows, num_heads, head_dim] over the first ``visible`` keys; when ``causal``, the last key is
        the last row's own, and earlier rows see as many fewer. Returns [num_kv_heads, group, rows, head_dim]."""
        scores = self._row_scores(q, kv, visible, self._scale, causal=causal)
        shares = torch.softmax(scores, dim=-1, out=self._scratch.take("shares", tuple(scores.shape)))
        return self._mix(shares, kv.values[:, :visible]).view(self.kv_heads, self.group, len(q), -1)

    def rows_part(self, q: torch.Tensor, kv: Gathered, visible: int, *, causal: bool) -> Part:
        """As ``rows``, with the log-sum-exp."""
        scores = self._row_scores(q, kv, visible, self._scale * _LOG2_E, causal=causal)
        part = self._part(scores, kv.values[:, :visible])
        shape = (self.kv_heads, self.group, len(q))
        return Part(part.values.view(*shape, self.head_dim), part.lse.view(shape))

    def singles(
        self, q: torch.Tensor, layer: int, slots: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """One query each, ``q`` [count, num_heads, head_dim], over ``slots`` [count * tokens]; ``mask`` [count, 1, 1, tokens] is
        added to the scores."""
        count = len(q)
        shape = (count, -1, self.kv_heads, self.head_dim)
        return functional.scaled_dot_product_attention(
            q.view(count, self.kv_heads, self.group, self.head_dim),
            self._take("keys", self._pool.keys(layer), slots).view(shape).transpose(1, 2),
            self._take("values", self._pool.values(layer), slots).view(shape).transpose(1, 2),
            attn_mask=mask,
            scale=self._scale,
        ).reshape(q.shape)

    def singles_part(self, q: torch.Tensor, kv: Gathered, mask: torch.Tensor | None) -> Part:
        """As ``singles``, with the log-sum-exp."""
        count, tokens = len(q), kv.values.shape[1]
        block = self._scratch.take("queries", (count * self.kv_heads, self.group, self.head_dim))
        torch.mul(q.view(block.shape), self._scale * _LOG2_E, out=block)
        scores = self._scratch.take("scores", (count * self.kv_heads, self.group, tokens))
        torch.bmm(block, kv.keys_t, out=scores)
        if mask is not None:
            scores.view(count, self.kv_heads, self.group, tokens).add_(mask)
        part = self._part(scores, kv.values)
        return Part(part.values.view(q.shape), part.lse.view(q.shape[:2]))

    def _take(self, name: str, source: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        own = self._scratch.take(name, (len(slots), *source.shape[1:]))
        return torch.index_select(source, 0, slots, out=own)

    def _row_scores(
        self, q: torch.Tensor, kv: Gathered, visible: int, scale: float, *, causal: bool
    ) -> torch.Tensor:
        rows = len(q)
        block = self._scratch.take("queries", (self.kv_heads, self.group * rows, self.head_dim))
        by_head = q.view(rows, self.kv_heads, self.group, self.head_dim).permute(1, 2, 0, 3)
        block.view(by_head.shape).copy_(by_head).mul_(scale)
        scores = self._scratch.take("scores", (self.kv_heads, self.group * rows, visible))
        torch.bmm(block, kv.keys_t[:, :, :visible], out=scores)
        if causal:
            own_keys = scores.view(self.kv_heads * self.group, rows, visible)[:, :, visible - rows :]
            own_keys.masked_fill_(self._future[:rows, :rows], -torch.inf)
        return scores

    def _part(self, scores: torch.Tensor, values: torch.Tensor) -> Part:
        """Softmax over scores in base 2, unnormalised until after the product, which is what gives the log-sum-exp. In float32,
        which is quicker than bfloat16 but for the products."""
        weights = scores
        if scores.dtype != torch.float32:
            weights = self._wide.take("weights", tuple(scores.shape)).copy_(scores)
        peak = weights.amax(-1, keepdim=True)
        total = weights.sub_(peak).exp2_().sum(-1, keepdim=True)
        if weights is not scores:
            scores.copy_(weights)
        mixed = self._mix(scores, values).float().div_(total)
        return Part(mixed, total.log2_().add_(peak).squeeze(-1))

    def _mix(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        mixed = self._scratch.take("mixed", (*weights.shape[:2], self.head_dim))
        torch.bmm(weights, values, out=mixed)
        return mixed


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
