"""The torch backend against attention written out in float64, one query at a time."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.model_files.model_config import ModelConfig
from prefixmesh.worker.model import torch_attention
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.model.torch_attention import TorchAttention
from tests.support.plans import PagedSequence, Piece, make_plan

CPU = torch.device("cpu")
HEAD_DIM = 8


def config_of(heads: int, kv_heads: int) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        hidden_size=heads * HEAD_DIM,
        intermediate_size=8,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        vocab_size=16,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
        context_length=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_ids=(),
    )


def naive(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: int) -> torch.Tensor:
    """Row by row: token ``seen + i`` sees the first ``seen + i + 1`` keys."""
    group = q.shape[1] // keys.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    rows = []
    for i, row in enumerate(q.double()):
        visible = seen + i + 1
        scores = torch.einsum("hd,khd->hk", row, k[:visible]) * HEAD_DIM**-0.5
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v[:visible]))
    return torch.stack(rows)


class Setting:
    """A pool full of random K/V (the unused part NaN) and sequences on scattered pages of it."""

    def __init__(
        self,
        work: Sequence[tuple[int, int]],
        *,
        page_size: int = 1,
        heads: int = 6,
        kv_heads: int = 2,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        torch_rng = torch.Generator().manual_seed(seed)
        needed = [-(-(seen + new) // page_size) for seen, new in work]
        order = rng.permutation(sum(needed) + 3).tolist()
        self.config = config_of(heads, kv_heads)
        self.pool = KVPool(self.config, len(order), page_size, dtype, CPU)
        self.pool.storage.fill_(torch.nan)
        self.sequences, pieces = [], []
        for (seen, new), pages in zip(work, needed, strict=True):
            sequence = PagedSequence(
                tokens=[0] * (seen + new), pages=[order.pop() for _ in range(pages)], computed=seen
            )
            self.sequences.append(sequence)
            pieces.append(Piece(sequence, new))
        self.work = work
        self.page_size = page_size
        self.plan = make_plan(pieces, page_size)
        total = sum(new for _, new in work)
        self.q = torch.randn(total, heads, HEAD_DIM, generator=torch_rng).to(dtype) * 2
        for sequence in self.sequences:
            slots = self.slots(sequence)
            self.pool.storage.view(2, 2, -1, kv_heads, HEAD_DIM)[:, :, slots] = torch.randn(
                2, 2, len(slots), kv_heads, HEAD_DIM, generator=torch_rng
            ).to(dtype)

    def slots(self, sequence: PagedSequence) -> torch.Tensor:
        positions = range(len(sequence.tokens))
        size = self.page_size
        return torch.tensor([sequence.pages[p // size] * size + p % size for p in positions])

    def expected(self, layer: int) -> torch.Tensor:
        parts, start = [], 0
        for sequence, (seen, new) in zip(self.sequences, self.work, strict=True):
            slots = self.slots(sequence)
            keys, values = self.pool.keys(layer)[slots], self.pool.values(layer)[slots]
            parts.append(naive(self.q[start : start + new], keys, values, seen))
            start += new
        return torch.cat(parts)

    def actual(self, layer: int) -> torch.Tensor:
        backend = TorchAttention(self.config, self.pool)
        backend.prepare(self.plan)
        with torch.inference_mode():
            return backend.forward(layer, self.q)

    def check(self, tolerance: float = 1e-5) -> None:
        for layer in range(2):
            torch.testing.assert_close(
                self.actual(layer).double(), self.expected(layer), atol=tolerance, rtol=0
            )


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_prefill_decode_and_both_mixed(page_size: int, heads: int, kv_heads: int) -> None:
    """Cold and warm prefills and decodes of many lengths in one step; NaN in memory nobody wrote never leaks."""
    work = [(0, 5), (9, 1), (30, 70), (0, 1), (140, 1), (150, 1), (3, 64), (0, 129)]
    Setting(work, page_size=page_size, heads=heads, kv_heads=kv_heads).check()


@given(
    work=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 80)), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 2, 16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_any_batch(work: list[tuple[int, int]], page_size: int, seed: int) -> None:
    """Any mix of sequences gives what each would give alone, written out."""
    Setting(work, page_size=page_size, seed=seed).check()


def test_long_contexts_keep_their_memory_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """When scores would not fit the bound, blocks get smaller and the result stays exact."""
    monkeypatch.setattr(torch_attention, "MAX_SCORES", 6 * 20 * 300)
    setting = Setting([(200, 100), (0, 70)])
    backend = TorchAttention(setting.config, setting.pool)
    backend.prepare(setting.plan)
    assert [prefill.block_rows for prefill in backend._prefills] == [20, 64]
    setting.check()


def test_decodes_are_batched() -> None:
    """32 decodes of like lengths are one group with one mask, not 32 calls; equal ones need no mask."""
    setting = Setting([(90 + i % 3, 1) for i in range(32)])
    backend = TorchAttention(setting.config, setting.pool)
    backend.prepare(setting.plan)
    assert [len(group.rows) for group in backend._decodes] == [32]
    equal = Setting([(90, 1)] * 4)
    backend = TorchAttention(equal.config, equal.pool)
    backend.prepare(equal.plan)
    assert [group.mask for group in backend._decodes] == [None]


def test_bfloat16_stays_within_its_rounding() -> None:
    """bfloat16 has 8 bits of mantissa: values of about 1 come back to about 2 %."""
    Setting([(0, 40), (100, 1), (60, 64)], dtype=torch.bfloat16).check(tolerance=0.05)
