"""From the requests of a step to what is computed: the arrays of a forward pass, and the figures that rates are learned from. Pure numpy; cost per step O(tokens + pages read)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from prefixmesh.worker.batch_plan import BatchPlan, IntArray
from prefixmesh.worker.request import Request
from prefixmesh.worker.tiers.load_backs import Load


class StepPart(NamedTuple):
    """One request's share of a step."""

    request: Request
    new_tokens: int
    """How many of its tokens are computed, from ``request.computed`` on."""

    samples: bool
    """Whether its last row gives the next token."""


@dataclass(frozen=True, slots=True)
class Step:
    """What to compute now."""

    parts: tuple[StepPart, ...]
    plan: BatchPlan
    sampled: tuple[Request, ...]
    """The requests of the plan's ``logit_rows``, in that order."""

    prefill_tokens: int
    prefill_squares: int
    """Sum of ``b**2 - a**2`` over prefills from position ``a`` up to ``b``: what attention's share of the step grows with."""

    decoding: int
    """How many of the parts decode."""

    loads: tuple[Load, ...] = ()
    """What brings KV that the step reads and that has not all come yet."""


def build_step(parts: Sequence[StepPart], decoding: int, page_size: int) -> Step:
    """The step that computes ``parts``, of which the first ``decoding`` decode."""
    prefills = parts[decoding:]
    return Step(
        parts=tuple(parts),
        plan=build_plan(parts, page_size),
        sampled=tuple(part.request for part in parts if part.samples),
        prefill_tokens=sum(part.new_tokens for part in prefills),
        prefill_squares=sum(
            part.new_tokens * (2 * part.request.computed + part.new_tokens) for part in prefills
        ),
        decoding=decoding,
        loads=tuple(part.request.load for part in prefills if part.request.load is not None),
    )


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
