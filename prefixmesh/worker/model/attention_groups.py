"""Which sequences of a step attend together, and which slots of the pool each reads. Pure numpy."""

from collections.abc import Sequence

import numpy as np

from prefixmesh.worker.batch_plan import BatchPlan, IntArray


def kv_lengths(plan: BatchPlan, page_size: int) -> IntArray:
    """[B] tokens of KV of each sequence, this step's included; O(B)."""
    pages = np.diff(plan.kv_indptr)
    lengths: IntArray = ((pages - 1) * page_size + plan.last_page_len).astype(np.int32)
    return lengths


def sequence_slots(plan: BatchPlan, sequence: int, kv_length: int, page_size: int) -> IntArray:
    """[kv_length] slots that hold a sequence's tokens, in order; O(kv_length)."""
    pages: IntArray = plan.kv_indices[plan.kv_indptr[sequence] : plan.kv_indptr[sequence + 1]]
    if page_size == 1:
        return pages
    offsets: IntArray = np.arange(page_size, dtype=np.int32)
    slots: IntArray = np.add.outer(pages * np.int32(page_size), offsets).ravel()
    return slots[:kv_length]


def group_by_length(lengths: Sequence[int], max_tokens: int, min_slack: int) -> list[list[int]]:
    """Split sequences into groups that are padded to their longest member; indices into ``lengths``, longest first.

    A group takes at most ``max_tokens`` padded tokens (one sequence always fits), and no member is padded by more than a
    quarter of the longest or ``min_slack`` tokens, whichever is more. Greedy over the sorted lengths; O(n log n).
    """
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = groups and (len(groups[-1]) + 1) * longest <= max_tokens
        if fits and longest - lengths[index] <= max(min_slack, longest // 4):
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = lengths[index]
    return groups
