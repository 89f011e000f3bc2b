"""Which sequences of a step attend together, and which slots of the pool each reads. Pure numpy."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from prefixmesh.worker.batch_plan import IntArray


class PagedSegments(Protocol):
    """Lists of pages, one after the other: a ``BatchPlan``'s sequences, or the segments of a ``CascadeLevel``."""

    @property
    def kv_indptr(self) -> IntArray:
        """[S+1] where each segment's pages begin."""
        ...

    @property
    def kv_indices(self) -> IntArray:
        """Page indices of all segments."""
        ...

    @property
    def last_page_len(self) -> IntArray:
        """[S] tokens used in each segment's last page."""
        ...


def kv_lengths(segments: PagedSegments, page_size: int) -> IntArray:
    """[S] tokens of KV of each segment; O(S)."""
    pages = np.diff(segments.kv_indptr)
    lengths: IntArray = np.where(pages > 0, (pages - 1) * page_size + segments.last_page_len, 0)
    return lengths.astype(np.int32)


def segment_slots(segments: PagedSegments, segment: int, length: int, page_size: int) -> IntArray:
    """[length] slots that hold a segment's first ``length`` tokens, in order; O(length)."""
    pages: IntArray = segments.kv_indices[segments.kv_indptr[segment] : segments.kv_indptr[segment + 1]]
    if page_size == 1:
        return pages
    offsets: IntArray = np.arange(page_size, dtype=np.int32)
    slots: IntArray = np.add.outer(pages * np.int32(page_size), offsets).ravel()
    return slots[:length]


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
