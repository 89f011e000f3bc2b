"""The ``torch`` backend: exact attention over a paged pool, each sequence for itself or, where a shared prefix pays, as a cascade.

Plain: a sequence that computes several tokens (prefill) is a list of slots read by rows; sequences that compute one token
(decode) form padded groups of singles. Cascade: the same for each sequence's own part, one more list of slots per shared segment
that all its queries read together, and a merge by log-sum-exp. Sequences of a cascade step that share nothing stay plain.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from prefixmesh.model_files.model_config import ModelConfig
from prefixmesh.worker.batch_plan import BatchPlan, IntArray
from prefixmesh.worker.cascade_plan import CascadeLevel, CascadePlan, CascadeRule, build_cascade
from prefixmesh.worker.model.attention_groups import group_by_length, kv_lengths, segment_slots
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.model.paged_products import PagedProducts, Part, Slots

CPU_GROUP_TOKENS: Final = 4096
"""Padded tokens per decode group on a CPU, so that the gathered K and V stay in cache."""

GPU_GROUP_TOKENS: Final = 2**16
"""The same on a GPU, where fewer and larger launches pay; bounds the gathered copies, to 256 MiB with 8 KV heads of 128 in bfloat16."""

MIN_SLACK: Final = 128
"""Padding that always costs less than another group."""

_LN_2: Final = math.log(2)

_Segments = BatchPlan | CascadeLevel
IndexArray = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Queries ``start:end`` over one list of slots."""

    start: int
    end: int
    tokens: int
    slots: Slots

    block_rows: int
    causal: bool


@dataclass(frozen=True, slots=True)
class _Singles:
    """Sequences with one query each, padded to the longest."""

    rows: torch.Tensor
    """[G] int64, where their queries stand."""

    tokens: int
    slots: Slots
    """[G, tokens]. Padding points to the sequence's own first token, so that it is finite."""

    mask: torch.Tensor | None
    """[G, 1, 1, tokens] 0 or -inf, in the model's dtype; None when all are equally long."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What is to be multiplied for some sequences, whose queries are counted in one order."""

    rows: list[_Rows]
    singles: list[_Singles]


@dataclass(frozen=True, slots=True)
class _Cascade:
    """The sequences of a step that share something."""

    rows: torch.Tensor
    """[n] int64 the step's rows, in the cascade's order; what follows counts in it."""

    own: _Work
    shared: list[_Rows]


class TorchAttention:
    """The ``torch`` backend. ``rule`` says which groups share; None never cascades."""

    def __init__(self, config: ModelConfig, pool: KVPool, rule: CascadeRule | None = None) -> None:
        self._page_size = pool.page_size
        self._dtype, self._device = pool.dtype, pool.device
        self._rule = rule
        self._products = PagedProducts(config, pool)
        self._group_tokens = CPU_GROUP_TOKENS if pool.device.type == "cpu" else GPU_GROUP_TOKENS
        self._plain = _Work([], [])
        self._cascade: _Cascade | None = None
        self._tokens = 0

    def prepare(self, plan: BatchPlan) -> None:
        """Work out what is shared, slots, blocks, groups and masks; O(tokens of KV read)."""
        self._tokens = len(plan.token_ids)
        cascade = None if self._rule is None else build_cascade(plan, self._page_size, self._rule)
        if cascade is None:
            self._cascade = None
            self._plain = self._work(plan, np.arange(len(plan.last_page_len)), plan.qo_indptr)
            return
        sharing = self._sharing(cascade)
        own, starts = cascade.own, cascade.own.qo_indptr[:-1]
        alone = np.flatnonzero(~sharing[starts])
        self._plain = self._work(own, alone, plan.qo_indptr[cascade.sequences])
        # In the cascade only those who share are counted: place p of its order is place compact[p] of them.
        compact = np.concatenate([[0], np.cumsum(sharing)])
        self._cascade = _Cascade(
            rows=torch.tensor(cascade.rows[sharing], dtype=torch.int64, device=self._device),
            own=self._work(own, np.flatnonzero(sharing[starts]), compact[starts]),
            shared=[
                self._rows(
                    level,
                    segment,
                    compact[level.qo_indptr[segment : segment + 2]],
                    causal=False,
                )
                for level in cascade.shared
                for segment in np.flatnonzero(level.last_page_len).tolist()
            ],
        )

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """[T, num_heads, head_dim] -> the same; zeros for rows that are no token's."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if len(q) > self._tokens:
            out[self._tokens :] = 0
        if self._tokens == 1 and self._products.wide:
            self._products.one(q[:1], layer, self._plain.singles[0].slots, out[:1])
            return out
        by_head = out.view(len(q), self._products.kv_heads, -1, self._products.head_dim)
        for rows in self._plain.rows:
            kv = self._products.gather(layer, rows.slots, rows.tokens)
            for start, end, visible in _blocks(rows):
                mixed = self._products.rows(q[start:end], kv, visible, causal=True)
                by_head[start:end] = mixed.permute(2, 0, 1, 3)
        for singles in self._plain.singles:
            out.index_copy_(0, singles.rows, self._mixed(singles, layer, q.index_select(0, singles.rows)))
        if self._cascade is not None:
            merged = self._merged(self._cascade, layer, q.index_select(0, self._cascade.rows))
            out.index_copy_(0, self._cascade.rows, merged.to(q.dtype))
        return out

    def _mixed(self, singles: _Singles, layer: int, q: torch.Tensor) -> torch.Tensor:
        if len(q) == 1 and self._products.wide:
            return self._products.one(q, layer, singles.slots, torch.empty_like(q))
        kv = self._products.gather(layer, singles.slots, singles.tokens)
        return self._products.singles(q, kv, singles.mask)

    def _merged(self, cascade: _Cascade, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Own parts first, then what is shared merged into them, in float32."""
        products = self._products
        heads = (len(q), products.kv_heads, products.group)
        state = Part(
            torch.empty(*heads, products.head_dim, dtype=torch.float32, device=q.device),
            torch.empty(heads, dtype=torch.float32, device=q.device),
        )
        for rows in cascade.own.rows:
            kv = products.gather(layer, rows.slots, rows.tokens)
            for start, end, visible in _blocks(rows):
                part = products.rows_part(q[start:end], kv, visible, causal=True)
                state.values[start:end] = part.values.permute(2, 0, 1, 3)
                state.lse[start:end] = part.lse.permute(2, 0, 1)
        for singles in cascade.own.singles:
            kv = products.gather(layer, singles.slots, singles.tokens)
            part = products.singles_part(q.index_select(0, singles.rows), kv, singles.mask)
            state.values.index_copy_(0, singles.rows, part.values.view(-1, *state.values.shape[1:]))
            state.lse.index_copy_(0, singles.rows, part.lse.view(-1, *heads[1:]))
        for rows in cascade.shared:
            kv = products.gather(layer, rows.slots, rows.tokens)
            for start, end, visible in _blocks(rows):
                part = products.rows_part(q[start:end], kv, visible, causal=False)
                into = Part(state.values[start:end], state.lse[start:end])
                merge_part(into, Part(part.values.permute(2, 0, 1, 3), part.lse.permute(2, 0, 1)))
        return state.values.view(q.shape)

    def _sharing(self, cascade: CascadePlan) -> IndexArray:
        """[T] whether the query at each place of the order has a shared segment."""
        sharing = np.zeros(len(cascade.rows), dtype=np.bool_)
        for level in cascade.shared:
            sharing |= np.repeat(level.last_page_len > 0, np.diff(level.qo_indptr))
        return sharing

    def _work(self, segments: _Segments, chosen: IndexArray, starts: IndexArray) -> _Work:
        """The causal work of the ``chosen`` of ``segments``; segment ``s`` has its queries from ``starts[s]`` on."""
        counts, lengths = np.diff(segments.qo_indptr), kv_lengths(segments, self._page_size)
        several = chosen[counts[chosen] > 1]
        single = chosen[counts[chosen] == 1]
        groups = group_by_length(lengths[single].tolist(), self._group_tokens, MIN_SLACK)
        return _Work(
            rows=[
                self._rows(
                    segments,
                    segment,
                    starts[segment] + np.array([0, counts[segment]]),
                    causal=True,
                )
                for segment in several.tolist()
            ],
            singles=[self._singles(segments, single[group], lengths, starts) for group in groups],
        )

    def _rows(self, segments: _Segments, segment: int, bounds: IndexArray, *, causal: bool) -> _Rows:
        tokens = int(kv_lengths(segments, self._page_size)[segment])
        slots = segment_slots(segments, segment, tokens, self._page_size)
        return _Rows(
            start=int(bounds[0]),
            end=int(bounds[1]),
            tokens=tokens,
            slots=Slots(slots, self._device),
            block_rows=self._products.block_rows(tokens),
            causal=causal,
        )

    def _singles(
        self, segments: _Segments, chosen: IndexArray, lengths: IntArray, starts: IndexArray
    ) -> _Singles:
        own = lengths[chosen]
        longest = int(own[0])
        slots = np.empty((len(chosen), longest), dtype=np.int32)
        for row, (segment, length) in enumerate(zip(chosen.tolist(), own.tolist(), strict=True)):
            slots[row, :length] = segment_slots(segments, segment, length, self._page_size)
            slots[row, length:] = slots[row, 0]
        mask = None
        if own[-1] != longest:
            hidden = torch.tensor(np.arange(longest) >= own[:, None], device=self._device)
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
            mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None, :]
        return _Singles(
            rows=torch.tensor(starts[chosen], dtype=torch.int64, device=self._device),
            tokens=longest,
            slots=Slots(slots, self._device),
            mask=mask,
        )


def _blocks(rows: _Rows) -> Iterator[tuple[int, int, int]]:
    """``(start, end, visible)``: blocks of the queries, and how many keys the last query of each sees."""
    for start in range(rows.start, rows.end, rows.block_rows):
        end = min(start + rows.block_rows, rows.end)
        yield start, end, rows.tokens - (rows.end - end if rows.causal else 0)


def merge_part(into: Part, other: Part) -> None:
    """Attention over both parts' KV, from each one's and its log-sum-exp in base 2. Changes ``into``, in float32.

    The weights are 2**lse of each over the sum; a part that saw nothing has -inf, and weighs nothing.
    """
    weight = torch.sigmoid((other.lse - into.lse).mul_(_LN_2))
    into.values.lerp_(other.values, weight.unsqueeze(-1))
    torch.logaddexp2(into.lse, other.lse, out=into.lse)
