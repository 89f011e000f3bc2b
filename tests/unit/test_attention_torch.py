"""The torch backend, each sequence for itself, against attention written out in float64, one query at a time."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.worker.model import paged_products
from prefixmesh.worker.model.paged_products import Scratch
from prefixmesh.worker.model.torch_attention import TorchAttention
from tests.support.paged_attention import PagedSetting, alone

TOLERANCE = 1e-5


def setting_of(work: list[tuple[int, int]], **options: Any) -> PagedSetting:
    """Sequences of (tokens seen, tokens new) that share nothing."""
    return PagedSetting([alone(seen, new) for seen, new in work], **options)


def check(setting: PagedSetting, tolerance: float = TOLERANCE) -> None:
    setting.check(TorchAttention(setting.config, setting.pool), tolerance)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_prefill_decode_and_both_mixed(page_size: int, heads: int, kv_heads: int) -> None:
    """Cold and warm prefills and decodes of many lengths in one step; NaN in memory nobody wrote never leaks."""
    work = [(0, 5), (9, 1), (30, 70), (0, 1), (140, 1), (150, 1), (3, 64), (0, 129)]
    check(setting_of(work, page_size=page_size, heads=heads, kv_heads=kv_heads))


@given(
    work=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 80)), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 2, 16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_any_batch(work: list[tuple[int, int]], page_size: int, seed: int) -> None:
    """Any mix of sequences gives what each would give alone, written out."""
    check(setting_of(work, page_size=page_size, seed=seed))


def test_long_contexts_keep_their_memory_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """When scores would not fit the bound, blocks get smaller and the result stays exact."""
    monkeypatch.setattr(paged_products, "MAX_SCORES", 6 * 20 * 300)
    setting = setting_of([(200, 100), (0, 40)])
    backend = TorchAttention(setting.config, setting.pool)
    backend.prepare(setting.plan)
    assert [rows.block_rows for rows in backend._plain.rows] == [20, paged_products.MAX_BLOCK_ROWS]
    check(setting)


def test_decodes_are_batched() -> None:
    """32 decodes of like lengths are one group with one mask, not 32 calls; equal ones need no mask."""
    setting = setting_of([(90 + i % 3, 1) for i in range(32)])
    backend = TorchAttention(setting.config, setting.pool)
    backend.prepare(setting.plan)
    assert [len(group.rows) for group in backend._plain.singles] == [32]
    equal = setting_of([(90, 1)] * 4)
    backend = TorchAttention(equal.config, equal.pool)
    backend.prepare(equal.plan)
    assert [group.mask for group in backend._plain.singles] == [None]


def test_bfloat16_stays_within_its_rounding() -> None:
    """bfloat16 has 8 bits of mantissa: values of about 1 come back to about 2 %."""
    check(setting_of([(0, 40), (100, 1), (60, 64)], dtype=torch.bfloat16), tolerance=0.05)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (10, 5)])
@pytest.mark.parametrize("neighbours", [True, False])
def test_a_lone_query_reads_neighbouring_slots_where_they_lie(
    heads: int, kv_heads: int, neighbours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One decoding sequence, its pages in a row or scattered, with few and with many KV heads: the same attention."""
    if neighbours:
        monkeypatch.setattr(
            np.random, "default_rng", lambda seed: SimpleNamespace(permutation=lambda n: np.arange(n)[::-1])
        )
    setting = setting_of([(140, 1)], heads=heads, kv_heads=kv_heads)
    backend = TorchAttention(setting.config, setting.pool)
    backend.prepare(setting.plan)
    (alone_in_its_group,) = backend._plain.singles
    taken = alone_in_its_group.slots.take(
        setting.pool.keys(0), Scratch(torch.float32, torch.device("cpu")), ""
    )
    assert (taken.data_ptr() == setting.pool.keys(0)[setting.sequences[0].pages[0]].data_ptr()) == neighbours
    check(setting)


@pytest.mark.parametrize("work", [[(140, 1)], [(140, 1), (30, 1)], [(0, 3)]])
def test_rows_that_are_no_tokens_disturb_nobody(work: list[tuple[int, int]]) -> None:
    """A step that was filled up: the tokens' rows are attention, the others zero whatever their queries are."""
    setting = setting_of(work)
    tokens = len(setting.q)
    setting.q = torch.cat((setting.q, torch.full((4 - tokens, *setting.q.shape[1:]), torch.nan)))
    for layer in (0, 1):
        found = setting.actual(TorchAttention(setting.config, setting.pool), layer)
        torch.testing.assert_close(found[:tokens].double(), setting.expected(layer), atol=TOLERANCE, rtol=0)
        assert torch.equal(found[tokens:], torch.zeros_like(found[tokens:]))
