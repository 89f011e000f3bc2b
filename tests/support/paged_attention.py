"""A pool full of random K and V with sequences on scattered, partly shared pages, and attention over it written out."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from prefixmesh.model_files.model_config import ModelConfig
from prefixmesh.worker.model.attention import AttentionBackend
from prefixmesh.worker.model.kv_pool import KVPool
from tests.support.plans import PagedSequence, Piece, make_plan

LAYERS = 2


class Sharer(NamedTuple):
    """A sequence that takes its first ``shared_pages`` pages from an earlier one, and computes ``new`` tokens after ``seen``."""

    parent: int
    shared_pages: int
    seen: int
    new: int


def alone(seen: int, new: int) -> Sharer:
    """A sequence that shares nothing."""
    return Sharer(0, 0, seen, new)


def config_of(heads: int, kv_heads: int, head_dim: int = 8) -> ModelConfig:
    """What attention needs to know of a model; the rest is filler."""
    return ModelConfig(
        architecture="llama",
        hidden_size=heads * head_dim,
        intermediate_size=8,
        num_layers=LAYERS,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=16,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
        context_length=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_ids=(),
    )


class PagedSetting:
    """A pool whose used part is random and whose unused part is NaN, sequences on it, and queries."""

    def __init__(
        self,
        work: Sequence[Sharer],
        *,
        page_size: int = 1,
        heads: int = 6,
        kv_heads: int = 2,
        head_dim: int = 8,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        totals = [item.seen + item.new for item in work]
        order = np.random.default_rng(seed).permutation(sum(-(-n // page_size) for n in totals) + 3).tolist()
        self.config = config_of(heads, kv_heads, head_dim)
        self.pool = KVPool(self.config, len(order), page_size, dtype, torch.device(device))
        self.pool.storage.fill_(torch.nan)
        self.work = work
        self.sequences: list[PagedSequence] = []
        for item, total in zip(work, totals, strict=True):
            pages = self.sequences[item.parent].pages[: item.shared_pages] if item.shared_pages else []
            pages = pages + [order.pop() for _ in range(-(-total // page_size) - len(pages))]
            self.sequences.append(PagedSequence(tokens=[0] * total, pages=pages, computed=item.seen))
        pieces = [Piece(sequence, item.new) for sequence, item in zip(self.sequences, work, strict=True)]
        self.plan = make_plan(pieces, page_size)
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(sum(item.new for item in work), heads, head_dim, generator=generator) * 2
        self.q = q.to(dtype).to(device)
        by_slot = self.pool.storage.view(LAYERS, 2, -1, kv_heads, head_dim)
        for sequence in self.sequences:
            slots = self.slots(sequence)
            random = torch.randn(LAYERS, 2, len(slots), kv_heads, head_dim, generator=generator)
            by_slot[:, :, slots] = random.to(dtype).to(device)

    def slots(self, sequence: PagedSequence) -> torch.Tensor:
        """Where a sequence's tokens lie."""
        size = self.pool.page_size
        places = [sequence.pages[p // size] * size + p % size for p in range(len(sequence.tokens))]
        return torch.tensor(places, device=self.pool.device)

    def expected(self, layer: int) -> torch.Tensor:
        """Attention of each sequence for itself, in float64."""
        parts, start = [], 0
        for sequence, item in zip(self.sequences, self.work, strict=True):
            slots = self.slots(sequence)
            keys, values = self.pool.keys(layer)[slots], self.pool.values(layer)[slots]
            parts.append(naive(self.q[start : start + item.new], keys, values, item.seen))
            start += item.new
        return torch.cat(parts)

    def actual(self, backend: AttentionBackend, layer: int) -> torch.Tensor:
        """What ``backend``, made over this pool, answers."""
        backend.prepare(self.plan)
        with torch.inference_mode():
            return backend.forward(layer, self.q)

    def check(self, backend: AttentionBackend, tolerance: float) -> None:
        """``backend`` agrees with what is written out, on every layer."""
        for layer in range(LAYERS):
            actual, expected = self.actual(backend, layer).double(), self.expected(layer)
            torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


def naive(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: int) -> torch.Tensor:
    """Row by row: token ``seen + i`` sees the first ``seen + i + 1`` keys."""
    group = q.shape[1] // keys.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    rows = []
    for i, row in enumerate(q.double()):
        visible = seen + i + 1
        scores = torch.einsum("hd,khd->hk", row, k[:visible]) * q.shape[2] ** -0.5
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v[:visible]))
    return torch.stack(rows)
