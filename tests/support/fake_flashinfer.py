"""Stands in for the ``flashinfer`` package on a CPU: the three wrappers we use, written out in float64, strict about what they get.

What they compute follows FlashInfer's documentation: arrays of int32; a segment's length from its pages and its last page's length,
0 without pages; the causal mask is aligned to the end; a cascade masks only its last level, and merges by log-sum-exps in base 2.
"""

import math
import sys
from typing import Any

import pytest
import torch

Pages = tuple[torch.Tensor, torch.Tensor]


def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put the stand-in where ``import flashinfer`` finds it; returns it."""
    module = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return module


class BatchPrefillWithPagedKVCacheWrapper:
    """One list of segments, each with its run of queries."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert not float_workspace_buffer.any()
        assert kv_layout == "NHD"
        self.plans = 0

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        for array in arrays:
            assert array.dtype == torch.int32
            assert array.ndim == 1
            assert array.is_contiguous()
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert qo_indptr[0] == paged_kv_indptr[0] == 0
        assert paged_kv_indptr[-1] == len(paged_kv_indices)
        pages = paged_kv_indptr.diff()
        assert ((paged_kv_last_page_len >= 1) == (pages > 0)).all()
        assert (paged_kv_last_page_len <= page_size).all()
        self.lengths = ((pages - 1).clamp(min=0) * page_size + paged_kv_last_page_len).tolist()
        self.qo, self.kv = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.indices = paged_kv_indices.long()
        self.heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self.causal, self.page_size = causal, page_size
        self.scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self.dtypes = (q_data_type, kv_data_type or q_data_type)
        self.plans += 1

    def run(self, q: torch.Tensor, paged_kv_cache: Pages) -> torch.Tensor:
        return self.state(q, paged_kv_cache)[0].to(q.dtype)

    def state(self, q: torch.Tensor, paged_kv_cache: Pages) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and log-sum-exps in base 2, float64; 0 and -inf for a segment without pages."""
        heads, kv_heads, head_dim = self.heads
        assert q.shape == (self.qo[-1], heads, head_dim)
        assert (q.dtype, paged_kv_cache[0].dtype) == self.dtypes
        assert paged_kv_cache[0].shape[1:] == (self.page_size, kv_heads, head_dim)
        values = torch.zeros(q.shape, dtype=torch.float64)
        lse = torch.full((len(q), heads), -torch.inf, dtype=torch.float64)
        for s, length in enumerate(self.lengths):
            own = self.indices[self.kv[s] : self.kv[s + 1]]
            k, v = (x[own].flatten(0, 1)[:length].double() for x in paged_kv_cache)
            k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
            count = self.qo[s + 1] - self.qo[s]
            for i, row in enumerate(range(self.qo[s], self.qo[s + 1])):
                visible = length - (count - 1 - i) if self.causal else length
                if visible:
                    scores = torch.einsum("hd,khd->hk", q[row].double(), k[:visible]) * self.scale
                    values[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v[:visible])
                    lse[row] = scores.logsumexp(-1) / math.log(2)
        return values, lse


class BatchDecodeWithPagedKVCacheWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """One query for each segment. In graph mode a plan is copied into the caller's buffers, and only they are read by a run."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self.use_tensor_cores = use_tensor_cores
        self.buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if use_cuda_graph:
            buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
            indptr, indices, last = (buffer for buffer in buffers if buffer is not None)
            assert {buffer.dtype for buffer in (indptr, indices, last)} == {torch.int32}
            assert len(indptr) == len(last) + 1
            assert backend == "fa2"
            self.buffers = (indptr, indices, last)

    def plan(  # type: ignore[override]  # as in the real one, it takes no qo_indptr
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        each = torch.arange(len(indptr), dtype=torch.int32)
        super().plan(
            each, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **options
        )
        if self.buffers is not None:
            assert len(last_page_len) == len(self.buffers[2]), "the number of sequences is fixed"
            assert len(indices) <= len(self.buffers[1])
            self.buffers[0].copy_(indptr)
            self.buffers[1][: len(indices)].copy_(indices)
            self.buffers[2].copy_(last_page_len)

    def run(self, q: torch.Tensor, paged_kv_cache: Pages) -> torch.Tensor:
        if self.buffers is not None:
            indptr, indices, last = self.buffers
            self.lengths = ((indptr.diff() - 1) * self.page_size + last).tolist()
            self.kv, self.indices = indptr.tolist(), indices.long()
        return super().run(q, paged_kv_cache)


class MultiLevelCascadeAttentionWrapper:
    """One list of segments per level, over the same queries."""

    def __init__(self, num_levels: int, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self.levels = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout) for _ in range(num_levels)
        ]
        self.plans = 0

    def plan(
        self,
        qo_indptr_arr: list[torch.Tensor],
        paged_kv_indptr_arr: list[torch.Tensor],
        paged_kv_indices_arr: list[torch.Tensor],
        paged_kv_last_page_len: list[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        causal: bool = False,
        **options: Any,
    ) -> None:
        arrays = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        assert len({int(qo_indptr[-1]) for qo_indptr in qo_indptr_arr}) == 1
        for index, (level, qo, kv, pages, last) in enumerate(zip(self.levels, *arrays, strict=True)):
            heads = (num_qo_heads, num_kv_heads, head_dim)
            masked = causal and index == len(self.levels) - 1
            level.plan(qo, kv, pages, last, *heads, page_size, causal=masked, **options)
        self.plans += 1

    def run(self, q: torch.Tensor, paged_kv_cache: Pages) -> torch.Tensor:
        states = [level.state(q, paged_kv_cache) for level in self.levels]
        values = torch.stack([state[0] for state in states])
        weights = torch.softmax(torch.stack([state[1] for state in states]) * math.log(2), dim=0)
        return (values * weights.unsqueeze(-1)).sum(0).to(q.dtype)
