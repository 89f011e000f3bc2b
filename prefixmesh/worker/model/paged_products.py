"""The ways in which queries meet paged K and V in plain torch operations, for CPUs and for proof.

- *Rows*: several queries over one list of slots (a prefill's chunk, or all queries of a group over what they share). They go
  through blocks of query rows: the query heads that share a KV head become rows of one product, so K and V are never repeated; a
  block's scores stay in cache; keys after the block are not touched, and only the block's own triangle needs a mask.
- *Singles*: sequences with one query each, gathered into padded groups; each (sequence, KV head) is one product of a batch.
- *One*: a single query alone. All its heads are one product with K as it lies in the pool, each head's row zero where other KV
  heads' elements are; of the product with V each head keeps its own. That multiplies by mostly zeros, and is quicker as long as
  reading is what takes the time: nothing is put head by head, and where the slots follow each other nothing is gathered at all.

Rows and singles gather K and V token by token, as they lie, and put them head by head: that is quicker than gathering each head's
rows from memory, and products over neighbouring tokens are up to four times as quick as over every third one.

Either gives the attention itself, or, for parts that are merged later, the attention and its log-sum-exp in base 2. On a CPU this is
two to three times as fast as ``scaled_dot_product_attention`` in bfloat16, for prefills and for decodes, which multiplies in smaller
blocks; in float32 about as fast. In bfloat16, scores and probabilities are rounded to bfloat16 between the products (sums are kept
in float32), as in Hugging Face's eager attention.
"""

import math
from typing import Final, NamedTuple

import numpy as np
import torch

from prefixmesh.model_files.model_config import ModelConfig
from prefixmesh.worker.batch_plan import IntArray
from prefixmesh.worker.model.kv_pool import KVPool

MAX_BLOCK_ROWS: Final = 128
"""Query tokens per block. More rows make fewer and larger products, but multiply more of the triangle that nobody sees, 64 keys a row here.
1,500 tokens, the whole pass: 1,354 ms with 128 (of repeats in turns, the least), 1,417 with 64, 1,351 with 256."""

MIN_BLOCK_ROWS: Final = 8
"""Fewer rows than this leave the processor's registers half empty."""

MAX_WIDE_HEADS: Final = 4
"""KV heads up to which a single query is multiplied with all of them at once; the zeros' share grows with them. Measured for 1,500
tokens, bfloat16, gathering included: 3 KV heads 90 us against 265, 8 about equal."""

MAX_SCORES: Final = 2**22
"""Scores held at once (twice: before and after softmax): 8 MiB each in bfloat16, however long the context."""

_LOG2_E: Final = math.log2(math.e)


class Scratch:
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


class Slots:
    """Where some tokens' K and V lie."""

    def __init__(self, slots: IntArray, device: torch.device) -> None:
        self.count = slots.size
        first = int(slots.flat[0]) if slots.size else 0
        follow = bool((slots.reshape(-1) == np.arange(first, first + slots.size, dtype=np.int32)).all())
        self._run = slice(first, first + slots.size) if follow else None
        self._index = None if follow else torch.from_numpy(slots.reshape(-1)).to(device)

    def take(self, source: torch.Tensor, scratch: Scratch, name: str) -> torch.Tensor:
        """[count, num_kv_heads, head_dim] of ``source`` [slots, num_kv_heads, head_dim]: itself where the slots follow each other,
        else a copy in the scratch memory ``name``."""
        if self._index is None:
            return source[self._run]
        own = scratch.take(name, (self.count, *source.shape[1:]))
        return torch.index_select(source, 0, self._index, out=own)


class Gathered(NamedTuple):
    """K and V of some slots, head by head, ``[batch * num_kv_heads, tokens, head_dim]``; valid until the next gathering."""

    keys: torch.Tensor
    values: torch.Tensor


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
        self._scratch = Scratch(pool.dtype, pool.device)
        heads, width = config.num_heads, config.num_kv_heads * config.head_dim
        self._wide_queries = torch.zeros(heads, width, dtype=pool.dtype, device=pool.device)
        wide = self._wide_queries.view(self.kv_heads, self.group, self.kv_heads, self.head_dim)
        self._wide_own = _own_heads(wide)
        self._exact = Scratch(torch.float32, pool.device)
        self.wide = self.kv_heads <= MAX_WIDE_HEADS
        """Whether ``one`` is the way for a single query alone."""

        # Added to a block's own triangle: twice as fast as filling by a mask.
        future = torch.full(
            (MAX_BLOCK_ROWS, MAX_BLOCK_ROWS), -torch.inf, dtype=pool.dtype, device=pool.device
        )
        self._future = future.triu_(1)

    def block_rows(self, tokens: int) -> int:
        """Rows per block over so many keys, within ``MAX_SCORES``."""
        fitting = MAX_SCORES // (self.kv_heads * self.group * tokens)
        return max(MIN_BLOCK_ROWS, min(MAX_BLOCK_ROWS, fitting))

    def gather(self, layer: int, slots: Slots, tokens: int) -> Gathered:
        """K and V of a layer at ``slots``, batches of ``tokens``."""
        return Gathered(
            self._by_head("keys", self._pool.keys(layer), slots, tokens),
            self._by_head("values", self._pool.values(layer), slots, tokens),
        )

    def rows(self, q: torch.Tensor, kv: Gathered, visible: int, *, causal: bool) -> torch.Tensor:
        """A block of queries ``q`` [rows, num_heads, head_dim] over the first ``visible`` keys; when ``causal``, the last key is
        the last row's own, and earlier rows see as many fewer. Returns [num_kv_heads, group, rows, head_dim]."""
        scores = self._row_scores(q, kv, visible, self._scale, causal=causal)
        return self._mix(self._shares(scores), kv.values[:, :visible]).view(
            self.kv_heads, self.group, len(q), -1
        )

    def rows_part(self, q: torch.Tensor, kv: Gathered, visible: int, *, causal: bool) -> Part:
        """As ``rows``, with the log-sum-exp."""
        scores = self._row_scores(q, kv, visible, self._scale * _LOG2_E, causal=causal)
        part = self._part(scores, kv.values[:, :visible])
        shape = (self.kv_heads, self.group, len(q))
        return Part(part.values.view(*shape, self.head_dim), part.lse.view(shape))

    def singles(self, q: torch.Tensor, kv: Gathered, mask: torch.Tensor | None) -> torch.Tensor:
        """One query each, ``q`` [count, num_heads, head_dim], over as many lists of slots; ``mask`` [count, 1, 1, tokens] is added
        to the scores. Returns the same shape."""
        scores = self._single_scores(q, kv, mask, self._scale)
        return self._mix(self._shares(scores), kv.values).view(q.shape)

    def singles_part(self, q: torch.Tensor, kv: Gathered, mask: torch.Tensor | None) -> Part:
        """As ``singles``, with the log-sum-exp."""
        part = self._part(self._single_scores(q, kv, mask, self._scale * _LOG2_E), kv.values)
        return Part(part.values.view(q.shape), part.lse.view(q.shape[:2]))

    def one(self, q: torch.Tensor, layer: int, slots: Slots, out: torch.Tensor) -> torch.Tensor:
        """One query ``q`` [1, num_heads, head_dim] over ``slots``, into ``out`` of the same shape. Returns ``out``."""
        heads, width = self.kv_heads * self.group, self.kv_heads * self.head_dim
        own = self._wide_own
        torch.mul(q.view(own.shape), self._scale, out=own)
        scores = self._scratch.take("scores", (heads, slots.count))
        keys = slots.take(self._pool.keys(layer), self._scratch, "taken").view(-1, width)
        torch.mm(self._wide_queries, keys.t(), out=scores)
        values = slots.take(self._pool.values(layer), self._scratch, "taken").view(-1, width)
        mixed = self._scratch.take("mixed", (heads, width))
        torch.mm(self._shares(scores), values, out=mixed)
        by_head = mixed.view(self.kv_heads, self.group, self.kv_heads, self.head_dim)
        out.view(own.shape).copy_(_own_heads(by_head))
        return out

    def _by_head(self, name: str, source: torch.Tensor, slots: Slots, tokens: int) -> torch.Tensor:
        taken = slots.take(source, self._scratch, "taken").view(-1, tokens, self.kv_heads, self.head_dim)
        by_head = self._scratch.take(name, (len(taken) * self.kv_heads, tokens, self.head_dim))
        by_head.view(-1, self.kv_heads, tokens, self.head_dim).copy_(taken.transpose(1, 2))
        return by_head

    def _single_scores(
        self, q: torch.Tensor, kv: Gathered, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        block = self._scratch.take("queries", (len(kv.keys), self.group, self.head_dim))
        torch.mul(q.view(block.shape), scale, out=block)
        scores = self._scratch.take("scores", (len(kv.keys), self.group, kv.keys.shape[1]))
        torch.bmm(block, kv.keys.transpose(1, 2), out=scores)
        if mask is not None:
            scores.view(len(q), self.kv_heads, self.group, -1).add_(mask)
        return scores

    def _row_scores(
        self, q: torch.Tensor, kv: Gathered, visible: int, scale: float, *, causal: bool
    ) -> torch.Tensor:
        rows = len(q)
        block = self._scratch.take("queries", (self.kv_heads, self.group * rows, self.head_dim))
        by_head = q.view(rows, self.kv_heads, self.group, self.head_dim).permute(1, 2, 0, 3)
        torch.mul(by_head, scale, out=block.view(by_head.shape))
        scores = self._scratch.take("scores", (self.kv_heads, self.group * rows, visible))
        torch.bmm(block, kv.keys[:, :visible].transpose(1, 2), out=scores)
        if causal and rows > 1:
            own_keys = scores.view(self.kv_heads * self.group, rows, visible)[:, :, visible - rows :]
            own_keys.add_(self._future[:rows, :rows])
        return scores

    def _shares(self, scores: torch.Tensor) -> torch.Tensor:
        return torch.softmax(scores, dim=-1, out=self._scratch.take("shares", tuple(scores.shape)))

    def _part(self, scores: torch.Tensor, values: torch.Tensor) -> Part:
        """Softmax over scores in base 2, unnormalised until after the product, which is what gives the log-sum-exp. In float32,
        which is quicker than bfloat16 but for the products."""
        weights = scores
        if scores.dtype != torch.float32:
            weights = self._exact.take("weights", tuple(scores.shape)).copy_(scores)
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


def _own_heads(wide: torch.Tensor) -> torch.Tensor:
    """Of ``wide`` [num_kv_heads, group, num_kv_heads, head_dim] what each query head has at its own KV head: a view of
    [num_kv_heads, group, head_dim]."""
    return wide.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
