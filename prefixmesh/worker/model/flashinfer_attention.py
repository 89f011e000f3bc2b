"""The ``flashinfer`` backend: paged attention and cascades by FlashInfer's kernels, on GPUs.

It hands over the very arrays of ``BatchPlan`` and ``CascadePlan``, which are in FlashInfer's form, and computes nothing itself:

===============================  =========================================
a step in which something pays   ``MultiLevelCascadeAttentionWrapper``
all sequences decode             ``BatchDecodeWithPagedKVCacheWrapper``
any other                        ``BatchPrefillWithPagedKVCacheWrapper``
a recorded size of decodes       ``BatchDecodeWithPagedKVCacheWrapper`` in its CUDA graph mode, one for each size
===============================  =========================================

The library is imported when a backend is made, never before: none of it runs without a GPU. The index arrays stay on the CPU,
where the wrappers' ``plan`` reads them; it copies to the device what the kernels need.
"""

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import torch

from prefixmesh.errors import ConfigError
from prefixmesh.model_files.model_config import ModelConfig
from prefixmesh.worker.batch_plan import BatchPlan, IntArray
from prefixmesh.worker.cascade_plan import CascadePlan, CascadeRule, build_cascade
from prefixmesh.worker.model.attention import AttentionBackend
from prefixmesh.worker.model.kv_pool import KVPool

WORKSPACE_BYTES: Final = 128 * 2**20
"""What FlashInfer recommends for the partial results of long sequences that it splits."""

HEAD_DIMS: Final = (64, 128, 256)
"""Head sizes its general kernels are made for."""

DTYPES: Final = (torch.float16, torch.bfloat16)

MAX_GRAPH_PAGES: Final = 2**22
"""Page indices that a recorded step may read, in an array of 16 MiB: 64 sequences of 65,536 pages. Larger steps are not replayed."""

CUDA_CORE_GROUP: Final = 3
"""Up to so many query heads for a KV head its decode kernel without tensor cores is used: more fill a tensor core's rows."""

_LAYOUT: Final = "NHD"


def unsupported(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Why the backend cannot serve this model here, in words; empty when it can. Imports nothing."""
    if device.type != "cuda":
        return f"flashinfer needs a CUDA device, not {device}"
    if dtype not in DTYPES:
        return f"flashinfer computes in float16 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    if config.head_dim not in HEAD_DIMS:
        return (
            f"flashinfer has kernels for head sizes {', '.join(map(str, HEAD_DIMS))}, not {config.head_dim}"
        )
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed (the extra prefixmesh[gpu])"
    return ""


class FlashInferAttention:
    """The ``flashinfer`` backend. ``rule`` says which groups share; None never cascades.

    ``ConfigError`` when the library is missing. Its kernels may be compiled at the first use of a shape, which takes minutes.
    """

    def __init__(
        self,
        config: ModelConfig,
        pool: KVPool,
        rule: CascadeRule | None = None,
        beside: "FlashInferAttention | None" = None,
    ) -> None:
        """``beside`` is a backend over the same pool that is never used at the same time: its workspaces serve both."""
        self._library = _load()
        self._pool = pool
        self._rule = rule
        self._heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        self._options: dict[str, Any] = {
            "sm_scale": config.head_dim**-0.5,
            "q_data_type": pool.dtype,
            "kv_data_type": pool.dtype,
        }
        self._workspace: torch.Tensor = self._new_workspace() if beside is None else beside._workspace
        self._prefill = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, _LAYOUT)
        # A workspace of its own: some decode kernels keep counters in it, which must be zero at first and nobody else's.
        self._decode_workspace: torch.Tensor = (
            self._new_workspace() if beside is None else beside._decode_workspace
        )
        self._tensor_cores = config.num_heads // config.num_kv_heads > CUDA_CORE_GROUP
        self._decode = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._decode_workspace, _LAYOUT, use_tensor_cores=self._tensor_cores
        )
        self._graph_indices: torch.Tensor | None = None
        """[MAX_GRAPH_PAGES] the page indices that recorded steps read; one array for all sizes, since one is replayed at a time."""

        self._cascades: dict[int, Any] = {}
        """By the number of levels, made when first needed: at most ``max_shared_levels`` of them."""

        self._active: Any = None
        self._rows: torch.Tensor | None = None
        """[T] int64 the cascade's order, when it is not the step's own."""

    def prepare(self, plan: BatchPlan) -> None:
        """Plan the step's kernels; the library copies the index arrays to the device."""
        cascade = None if self._rule is None else build_cascade(plan, self._pool.page_size, self._rule)
        self._rows = None
        if cascade is not None:
            self._plan_cascade(cascade)
        elif len(plan.token_ids) == len(plan.last_page_len):
            self._active = self._decode
            self._plan_decode(self._decode, plan)
        else:
            self._active = self._prefill
            self._prefill.plan(
                *(_tensor(x) for x in (plan.qo_indptr, plan.kv_indptr, plan.kv_indices, plan.last_page_len)),
                *self._heads,
                self._pool.page_size,
                causal=True,
                **self._options,
            )

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """[T, num_heads, head_dim] -> the same."""
        pages = self._pool.pages(layer)
        if self._rows is None:
            out: torch.Tensor = self._active.run(q, pages)
            return out
        ordered = self._active.run(q.index_select(0, self._rows), pages)
        return torch.empty_like(q).index_copy_(0, self._rows, ordered)

    @property
    def max_graph_pages(self) -> int:
        """Most pages of all sequences of a recorded step together."""
        return MAX_GRAPH_PAGES

    def decode_of_size(self, size: int) -> AttentionBackend:
        """Attention for recorded steps of exactly ``size`` decodes (``decode_graphs``). The library keeps 8 MiB on the device and as
        much pinned memory for each."""
        device = self._pool.device
        if self._graph_indices is None:
            self._graph_indices = torch.zeros(MAX_GRAPH_PAGES, dtype=torch.int32, device=device)
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._decode_workspace,
            _LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=self._tensor_cores,
            paged_kv_indptr_buffer=torch.zeros(size + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buffer=self._graph_indices,
            paged_kv_last_page_len_buffer=torch.zeros(size, dtype=torch.int32, device=device),
            backend="fa2",  # by name: what was recorded cannot follow another choice of a later plan
        )
        return _DecodeOfSize(wrapper, self._plan_decode, self._pool)

    def _plan_decode(self, wrapper: Any, plan: BatchPlan) -> None:
        wrapper.plan(
            *(_tensor(x) for x in (plan.kv_indptr, plan.kv_indices, plan.last_page_len)),
            *self._heads,
            self._pool.page_size,
            **self._options,
        )

    def _plan_cascade(self, cascade: CascadePlan) -> None:
        """Shared levels first and the own one last, which is the only one the library masks."""
        levels = cascade.levels
        wrapper = self._cascades.get(len(levels))
        if wrapper is None:
            wrapper = self._cascades[len(levels)] = self._library.MultiLevelCascadeAttentionWrapper(
                len(levels), self._workspace, _LAYOUT
            )
        wrapper.plan(
            [_tensor(level.qo_indptr) for level in levels],
            [_tensor(level.kv_indptr) for level in levels],
            [_tensor(level.kv_indices) for level in levels],
            [_tensor(level.last_page_len) for level in levels],
            *self._heads,
            self._pool.page_size,
            causal=True,
            **self._options,
        )
        self._active = wrapper
        if not cascade.in_order:
            self._rows = torch.tensor(cascade.rows, dtype=torch.int64, device=self._pool.device)

    def _new_workspace(self) -> torch.Tensor:
        return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._pool.device)


class _DecodeOfSize:
    """``AttentionBackend`` for a fixed number of decodes, whose arrays stay where they are."""

    def __init__(self, wrapper: Any, plan_decode: Callable[[Any, BatchPlan], None], pool: KVPool) -> None:
        self._wrapper = wrapper
        self._plan_decode = plan_decode
        self._pool = pool

    def prepare(self, plan: BatchPlan) -> None:
        """Copy the plan into the wrapper's arrays and have it divide the work anew."""
        self._plan_decode(self._wrapper, plan)

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """[size, num_heads, head_dim] -> the same."""
        out: torch.Tensor = self._wrapper.run(q, self._pool.pages(layer))
        return out


def _load() -> ModuleType:
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise ConfigError(
            f"flashinfer cannot be used: {error} (the extra prefixmesh[gpu] brings it)"
        ) from error


def _tensor(array: IntArray) -> torch.Tensor:
    return torch.from_numpy(array)
