"""From the requests of a step to the arrays of a forward pass. Pure numpy; cost per step O(tokens + pages read)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prefixmesh.worker.batch_plan import BatchPlan, IntArray
from prefixmesh.worker.request import Request


class StepPart(NamedTuple):
    """One request's share of a step."""

    request: Request
    new_tokens: int
    """How many of its tokens are computed, from ``request.computed`` on."""

    samples: bool
    """Whether its last row gives the next token."""


def build_plan(parts: Sequence[StepPart], page_size: int) -> BatchPlan:
    """The plan for ``parts``, in their order; every request must own the pages that it writes."""
    counts = np.array([part.new_tokens for part in parts], dtype=np.int32)
    starts = np.array([part.request.computed for part in parts], dtype=np.int32)
    kv_lens = starts + counts
    page_counts = -(-kv_lens // page_size)
    qo_indptr = _indptr(counts)
    kv_indptr = _indptr(page_counts)
    kv_indices = np.concatenate(
        [part.request.page_table[:count] for part, count in zip(parts, page_counts.tolist(), strict=True)]
    )
    token_ids = np.concatenate(
        [part.request.ids[part.request.computed : part.request.computed + part.new_tokens] for part in parts]
    )
    total = int(qo_indptr[-1])
    # A row's place in its own sequence, and then the page of that place among the sequence's pages.
    positions = np.arange(total, dtype=np.int32) + np.repeat(starts - qo_indptr[:-1], counts)
    page_of_row = kv_indices[np.repeat(kv_indptr[:-1], counts) + positions // page_size]
    samples = np.array([part.samples for part in parts], dtype=np.bool_)
    return BatchPlan(
        token_ids=token_ids,
        positions=positions,
        out_slots=page_of_row * np.int32(page_size) + positions % page_size,
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        last_page_len=(kv_lens - 1) % page_size + 1,
        logit_rows=qo_indptr[1:][samples] - 1,
    )


def _indptr(counts: IntArray) -> IntArray:
    indptr = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    return indptr
