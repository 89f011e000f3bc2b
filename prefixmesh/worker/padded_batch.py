"""Decode steps rounded up to a few sizes, so that a GPU can replay what it recorded for each. Pure numpy, no torch.

A recorded step has fixed shapes. So a step of ``n`` sequences that all decode gets further ones until it has the next recorded size.
These *dummies* read one token and write one: both in a scratch page that the allocator never gives out, so that no request's KV
is touched and nothing they compute is looked at::

    sequences of the step        dummies
    a       b       c            .       .           size 5
    5 2 8   1 6     3            S       S           pages; S is the scratch page
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from prefixmesh.worker.batch_plan import BatchPlan, IntArray

MAX_GRAPH_SEQUENCES: Final = 256
"""Larger steps compute long enough that a GPU does not wait for its launches; each recorded size costs time at start and memory."""

_SMALL_SIZES: Final = (1, 2, 4)

_STEPS: Final = ((64, 8), (128, 16), (MAX_GRAPH_SEQUENCES, 32))
"""Up to so many sequences, sizes are so far apart: dummies are then at most a third of a larger step and mostly less than a tenth,
and 19 sizes reach ``MAX_GRAPH_SEQUENCES``."""


def padded_sizes(max_sequences: int) -> tuple[int, ...]:
    """The sizes to record for steps of at most ``max_sequences`` (1 or more), rising: 1, 2, 4, 8, 16, 24, ...; the last one holds
    the largest step, or is ``MAX_GRAPH_SEQUENCES``."""
    largest = min(max_sequences, MAX_GRAPH_SEQUENCES)
    sizes = list(_SMALL_SIZES)
    start = 0
    for end, step in _STEPS:
        sizes += range(start + step, end + 1, step)
        start = end
    return (*(size for size in sizes if size < largest), largest)


def fitting_size(sequences: int, sizes: Sequence[int]) -> int | None:
    """The least of the rising ``sizes`` that holds so many sequences; None when none does. O(sizes)."""
    return next((size for size in sizes if size >= sequences), None)


def only_decodes(plan: BatchPlan) -> bool:
    """Whether each sequence computes one token, by the base model, and samples from it, so that every array follows from the number
    of sequences and their pages. A prompt's last token, computed alone, counts."""
    sequences = len(plan.last_page_len)
    return plan.adapter_slots is None and len(plan.token_ids) == sequences == len(plan.logit_rows)


def pad_decodes(plan: BatchPlan, size: int, scratch_page: int, page_size: int) -> BatchPlan:
    """``plan``, of which ``only_decodes`` is true, with dummies after its sequences until there are ``size``. O(pages), one copy."""
    dummies = size - len(plan.last_page_len)
    if not dummies:
        return plan
    each = np.arange(size + 1, dtype=np.int32)
    more_pages = plan.kv_indptr[-1] + np.arange(1, dummies + 1, dtype=np.int32)
    return replace(
        plan,
        token_ids=_extended(plan.token_ids, dummies, 0),
        positions=_extended(plan.positions, dummies, 0),
        out_slots=_extended(plan.out_slots, dummies, scratch_page * page_size),
        qo_indptr=each,
        kv_indptr=np.concatenate([plan.kv_indptr, more_pages]),
        kv_indices=_extended(plan.kv_indices, dummies, scratch_page),
        last_page_len=_extended(plan.last_page_len, dummies, 1),
        logit_rows=each[:-1],
    )


def dummies_only(size: int, scratch_page: int, page_size: int) -> BatchPlan:
    """A step of ``size`` dummies: what a size is recorded with."""
    empty = np.zeros(0, dtype=np.int32)
    start = np.zeros(1, dtype=np.int32)
    nothing = BatchPlan(
        token_ids=empty,
        positions=empty,
        out_slots=empty,
        qo_indptr=start,
        kv_indptr=start,
        kv_indices=empty,
        last_page_len=empty,
        logit_rows=empty,
    )
    return pad_decodes(nothing, size, scratch_page, page_size)


def _extended(array: IntArray, count: int, value: int) -> IntArray:
    return np.concatenate([array, np.full(count, value, dtype=np.int32)])
