"""Cascade plans against a naive expansion: whatever is shared, every query reads exactly its own sequence's pages, in order."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.worker.batch_plan import BatchPlan
from prefixmesh.worker.cascade_plan import CascadeLevel, CascadePlan, CascadeRule, build_cascade
from tests.support.plans import PagedSequence, Piece, make_plan

EVERYTHING = CascadeRule(min_reads=1, max_shared_levels=100)
ARRAYS = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len")


def plan_of(tables: Sequence[tuple[list[int], int, int]], page_size: int) -> BatchPlan:
    """A plan for (pages, tokens computed before, new tokens)."""
    return make_plan(
        [
            Piece(PagedSequence(tokens=[0] * (seen + new), pages=pages, computed=seen), new)
            for pages, seen, new in tables
        ],
        page_size,
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[BatchPlan, int]:
    """Sequences that branch off each other at any page, as in a radix tree, computed to any point."""
    page_size = draw(st.sampled_from([1, 2, 16]))
    fresh = iter(range(10_000))
    tables: list[tuple[list[int], int, int]] = []
    for index in range(draw(st.integers(1, 8))):
        shared: list[int] = []
        branches: bool = draw(st.booleans())
        if tables and branches:
            parent = tables[draw(st.integers(0, index - 1))][0]
            shared = parent[: draw(st.integers(0, len(parent)))]
        own = draw(st.integers(0 if shared else 1, 4))
        pages = shared + [next(fresh) for _ in range(own)]
        total = (len(pages) - 1) * page_size + draw(st.integers(1, page_size))
        new = draw(st.one_of(st.just(1), st.integers(1, total)))
        tables.append((pages, total - new, new))
    return plan_of(tables, page_size), page_size


def segment_of(level: CascadeLevel, place: int) -> int:
    return int(np.searchsorted(level.qo_indptr, place, side="right")) - 1


def pages_of(level: CascadeLevel, segment: int) -> list[int]:
    read: list[int] = level.kv_indices[level.kv_indptr[segment] : level.kv_indptr[segment + 1]].tolist()
    return read


def expected_reads(plan: BatchPlan) -> list[tuple[list[int], int]]:
    """For each row of the step: its sequence's pages, and the sequence."""
    reads = []
    for b in range(len(plan.qo_indptr) - 1):
        pages = plan.kv_indices[plan.kv_indptr[b] : plan.kv_indptr[b + 1]].tolist()
        reads += [(pages, b)] * int(plan.qo_indptr[b + 1] - plan.qo_indptr[b])
    return reads


def check_reads(plan: BatchPlan, cascade: CascadePlan, page_size: int) -> None:
    """Every query's segments, level after level, are its sequence's pages; shared ones are full, and before its own tokens."""
    expected = expected_reads(plan)
    assert sorted(cascade.rows.tolist()) == list(range(len(expected)))
    for place, row in enumerate(cascade.rows.tolist()):
        pages, sequence = expected[row]
        read: list[int] = []
        for level in cascade.shared:
            segment = segment_of(level, place)
            mine = pages_of(level, segment)
            assert level.last_page_len[segment] == (page_size if mine else 0)
            read += mine
        assert len(read) * page_size <= plan.positions[plan.qo_indptr[sequence]]
        own = segment_of(cascade.own, place)
        assert cascade.sequences[own] == sequence
        assert cascade.own.last_page_len[own] == plan.last_page_len[sequence]
        assert place - cascade.own.qo_indptr[own] == row - plan.qo_indptr[sequence]
        assert read + pages_of(cascade.own, own) == pages


def check_form(plan: BatchPlan, cascade: CascadePlan) -> None:
    """int32, every level covers all queries, the own level covers each sequence and leaves none without KV."""
    total = plan.qo_indptr[-1]
    for level in cascade.levels:
        for name in ARRAYS:
            assert getattr(level, name).dtype == np.int32, name
        assert level.qo_indptr[0] == level.kv_indptr[0] == 0
        assert level.qo_indptr[-1] == total
        assert level.kv_indptr[-1] == len(level.kv_indices)
        assert len(level.qo_indptr) == len(level.kv_indptr) == len(level.last_page_len) + 1
        assert (np.diff(level.qo_indptr) > 0).all()
    assert (np.diff(cascade.own.kv_indptr) > 0).all()
    assert cascade.rows.dtype == cascade.sequences.dtype == np.int32
    assert cascade.in_order == (cascade.rows.tolist() == list(range(total)))


@settings(max_examples=300, deadline=None)
@given(batch=batches(), min_reads=st.integers(1, 60), levels=st.integers(1, 4))
def test_every_query_reads_exactly_its_own_pages(
    batch: tuple[BatchPlan, int], min_reads: int, levels: int
) -> None:
    plan, page_size = batch
    cascade = build_cascade(plan, page_size, CascadeRule(min_reads, levels))
    if cascade is not None:
        check_form(plan, cascade)
        check_reads(plan, cascade, page_size)
        assert 1 <= len(cascade.shared) <= levels


@settings(max_examples=300, deadline=None)
@given(batch=batches(), min_reads=st.integers(1, 60))
def test_only_groups_that_pay_are_shared(batch: tuple[BatchPlan, int], min_reads: int) -> None:
    """Each segment serves two sequences or more, and saves enough reading."""
    plan, page_size = batch
    cascade = build_cascade(plan, page_size, CascadeRule(min_reads))
    for level in cascade.shared if cascade else ():
        for segment, pages in enumerate(np.diff(level.kv_indptr).tolist()):
            first, last = level.qo_indptr[segment], level.qo_indptr[segment + 1]
            inside = cascade.own.qo_indptr[:-1] if cascade else ()
            members = sum(first <= place < last for place in inside)
            assert not pages or (members >= 2 and members * pages * page_size >= min_reads)


@settings(max_examples=300, deadline=None)
@given(batch=batches())
def test_without_a_bound_nothing_shared_is_read_twice(batch: tuple[BatchPlan, int]) -> None:
    """The pages read are those of the radix tree of what may be shared, once each, and each sequence's rest."""
    plan, page_size = batch
    cascade = build_cascade(plan, page_size, EVERYTHING)
    prefixes: set[tuple[int, ...]] = set()
    rest = 0
    for b in range(len(plan.qo_indptr) - 1):
        pages = plan.kv_indices[plan.kv_indptr[b] : plan.kv_indptr[b + 1]].tolist()
        shareable = int(plan.positions[plan.qo_indptr[b]]) // page_size
        prefixes |= {tuple(pages[:end]) for end in range(1, shareable + 1)}
        rest += len(pages) - shareable
    read = len(plan.kv_indices) if cascade is None else sum(len(x.kv_indices) for x in cascade.levels)
    assert read == len(prefixes) + rest


def test_the_drawing_of_the_module() -> None:
    """Four decoding requests, two levels, in depth-first order."""
    tables = [([1, 2, 3, 4, 7], 4, 1), ([1, 2, 3, 4, 8], 4, 1), ([9, 5], 1, 1), ([1, 2, 6], 2, 1)]
    cascade = build_cascade(plan_of(tables, 1), 1, EVERYTHING)
    assert cascade is not None
    assert cascade.rows.tolist() == [0, 1, 3, 2]
    assert not cascade.in_order
    outer, inner = cascade.shared
    assert outer.qo_indptr.tolist() == [0, 3, 4]
    assert outer.kv_indptr.tolist() == [0, 2, 2]
    assert outer.kv_indices.tolist() == [1, 2]
    assert outer.last_page_len.tolist() == [1, 0]
    assert inner.qo_indptr.tolist() == [0, 2, 4]
    assert inner.kv_indices.tolist() == [3, 4]
    assert cascade.own.qo_indptr.tolist() == [0, 1, 2, 3, 4]
    assert cascade.own.kv_indices.tolist() == [7, 8, 6, 9, 5]


def test_a_page_that_is_partly_new_is_not_shared() -> None:
    """Page size 16: of 40 computed tokens two pages are whole; the third is each sequence's own even if both name it."""
    cascade = build_cascade(plan_of([([1, 2, 3], 40, 1), ([1, 2, 3], 40, 1)], 16), 16, EVERYTHING)
    assert cascade is not None
    assert cascade.shared[0].kv_indices.tolist() == [1, 2]
    assert cascade.own.kv_indices.tolist() == [3, 3]
    assert cascade.own.last_page_len.tolist() == [9, 9]


def test_a_small_trunk_goes_with_its_branches() -> None:
    """A shared start that does not pay alone is read with the longer prefixes of the groups that do."""
    trunk = [0, 1]
    left, right = list(range(10, 30)), list(range(40, 60))
    tables = [(trunk + branch + [100 + i], 22, 1) for i, branch in enumerate([left, right, left, right])]
    cascade = build_cascade(plan_of(tables, 1), 1, CascadeRule(min_reads=40))
    assert cascade is not None
    assert cascade.sequences.tolist() == [0, 2, 1, 3]
    (level,) = cascade.shared
    assert pages_of(level, 0) == trunk + left
    assert pages_of(level, 1) == trunk + right


@pytest.mark.parametrize(
    "tables",
    [
        [([1, 2, 3], 2, 1)],
        [([1, 2, 3], 2, 1), ([4, 5, 6], 2, 1)],
        [([1, 2, 3], 0, 3), ([1, 2, 3], 0, 3)],
        [([1, 2, 3], 2, 1), ([1, 2, 4], 2, 1)],
    ],
    ids=["one sequence", "nothing shared", "nothing computed", "too little shared"],
)
def test_no_cascade_without_a_group_that_pays(tables: list[tuple[list[int], int, int]]) -> None:
    assert build_cascade(plan_of(tables, 1), 1, CascadeRule(min_reads=5)) is None


def test_a_long_chain_of_branches() -> None:
    """Each sequence goes one page further along the longest one's path: as many levels as there are branches."""
    count = 200
    tables = [([*range(end), 5000 + end], end, 1) for end in range(1, count + 1)]
    plan = plan_of(tables, 1)
    cascade = build_cascade(plan, 1, CascadeRule(min_reads=1, max_shared_levels=count))
    assert cascade is not None
    check_reads(plan, cascade, 1)
    assert len(cascade.shared) == count - 1
