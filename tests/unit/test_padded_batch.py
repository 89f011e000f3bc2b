"""Decode steps padded to a few sizes: what is added touches nobody's pages and changes nobody's arrays."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.worker.padded_batch import (
    MAX_GRAPH_SEQUENCES,
    dummies_only,
    fitting_size,
    only_decodes,
    pad_decodes,
    padded_sizes,
)
from tests.support.plans import PagedSequence, Piece, make_plan


def test_sizes_rise_to_the_largest_step() -> None:
    """Small ones one by one, then ever coarser; the largest step always has its size, up to the bound."""
    assert padded_sizes(1) == (1,)
    assert padded_sizes(3) == (1, 2, 3)
    assert padded_sizes(10) == (1, 2, 4, 8, 10)
    assert padded_sizes(64) == (1, 2, 4, *range(8, 65, 8))
    assert padded_sizes(10_000)[-1] == MAX_GRAPH_SEQUENCES
    assert len(padded_sizes(10_000)) == 19


@settings(derandomize=True)
@given(st.integers(1, 400), st.integers(1, 400))
def test_a_step_gets_the_least_size_that_holds_it(sequences: int, most: int) -> None:
    """Few dummies, and none where there are too many sequences."""
    sizes = padded_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    size = fitting_size(sequences, sizes)
    if sequences > sizes[-1]:
        assert size is None
        return
    assert size is not None
    assert sequences <= size
    assert size - sequences <= max(1, 3 if sequences < 8 else 7 if sequences < 64 else sequences // 4)


@settings(derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    more=st.integers(0, 5),
    page_size=st.sampled_from([1, 4, 16]),
)
def test_dummies_read_and_write_the_scratch_page_alone(lengths: list[int], more: int, page_size: int) -> None:
    """The step's own arrays come first, unchanged; every dummy is a whole sequence of one token in the scratch page."""
    sequences, page = [], 0
    for length in lengths:
        pages = -(-length // page_size)
        sequences.append(
            PagedSequence(tokens=[7] * length, pages=list(range(page, page + pages)), computed=length - 1)
        )
        page += pages
    plan, count, scratch = make_plan([Piece(each, 1) for each in sequences], page_size), len(lengths), page
    padded = pad_decodes(plan, count + more, scratch, page_size)
    for name in plan.__dataclass_fields__.keys() - {"adapter_slots"}:
        was, now = getattr(plan, name), getattr(padded, name)
        assert now.dtype == np.int32
        assert now[: len(was)].tolist() == was.tolist()
    assert only_decodes(padded)
    assert padded.qo_indptr.tolist() == list(range(count + more + 1))
    for dummy in range(count, count + more):
        own = padded.kv_indices[padded.kv_indptr[dummy] : padded.kv_indptr[dummy + 1]]
        assert own.tolist() == [scratch]
        assert padded.last_page_len[dummy] == 1
        assert padded.positions[dummy] == 0
        assert padded.out_slots[dummy] == scratch * page_size
        assert padded.logit_rows[dummy] == dummy
    assert padded.kv_indptr[-1] == len(padded.kv_indices)


def test_a_size_is_recorded_with_dummies_alone() -> None:
    plan = dummies_only(3, 9, 4)
    assert only_decodes(plan)
    assert plan.kv_indices.tolist() == [9, 9, 9]
    assert plan.out_slots.tolist() == [36, 36, 36]
    assert plan.kv_indptr.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [2, 3])
def test_a_step_with_a_chunk_is_not_all_decoding(count: int) -> None:
    """Nor is one in which somebody does not sample, or has an adapter."""
    decoding = PagedSequence(tokens=[7] * 3, pages=[0, 1, 2], computed=2)
    prompt = PagedSequence(tokens=[7] * 3, pages=[3, 4, 5])
    plan = make_plan([Piece(decoding, 1)], 1)
    assert only_decodes(plan)
    assert not only_decodes(replace(plan, adapter_slots=np.array([0], dtype=np.int32)))
    assert not only_decodes(make_plan([Piece(decoding, 1), Piece(prompt, count)], 1))
    assert not only_decodes(make_plan([Piece(decoding, 1), Piece(prompt, 1, wants_logits=False)], 1))
