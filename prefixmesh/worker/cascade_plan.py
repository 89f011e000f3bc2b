"""The plan of cascade attention: which sequences of a step read the same pages, told as levels. Pure numpy, no torch.

Sequences that share a prefix name the same pages in the same places of their page tables, because the prefix cache hands out
its pages and keeps one copy of equal tokens. So the page tables *are* the radix paths, and this file reads nothing else: what
two requests read at the same page index is the same memory, whatever the tree has done since (split, flushed, or none at all).

Only whole pages before a sequence's new tokens are shared: every query of the sequence sees them in full, so no mask is needed
there. What is left, the new tokens among it, is the sequence's own part, and only that is causal::

    page tables (page size 1)            depth-first order and levels
    a: 1 2 3 4 | 7                       rows:      a  b  d  c
    b: 1 2 3 4 | 8                       level 0: [ 1  2      ]        a, b and d read pages 1 2 once
    c: 9       | 5                       level 1: [ 3 4 ] -- --        a and b read 3 4 once; nothing for d and c
    d: 1 2     | 6                       own:       7  8  6  9 5       each its own, causal

A level names a segment for every query, an empty one where it has nothing to read, so that the last element of each level's
``qo_indptr`` is the number of queries: the form that FlashInfer's multi-level wrapper takes. The results of a query's segments
are merged by their log-sum-exps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from prefixmesh.worker.batch_plan import BatchPlan, IntArray

MAX_SHARED_LEVELS: Final = 3
"""Shared levels at most (system prompt, document, conversation): each costs every query another merge. Deeper shared prefixes
are read per sequence."""


class CascadeRule(NamedTuple):
    """When a group is worth a segment of its own."""

    min_reads: int
    """Sequences times tokens: fewer KV tokens than that are read as fast by each sequence for itself. A sequence counts once
    however many queries it has in the step, since what sharing saves is reading."""

    max_shared_levels: int = MAX_SHARED_LEVELS


@dataclass(frozen=True, slots=True)
class CascadeLevel:
    """``S`` segments, each a run of queries and the pages they all read; every array is int32."""

    qo_indptr: IntArray
    """[S+1] segment ``s`` is for the places ``qo_indptr[s]:qo_indptr[s+1]`` of the cascade's order."""

    kv_indptr: IntArray
    """[S+1] it reads the pages ``kv_indices[kv_indptr[s]:kv_indptr[s+1]]``; equal where it reads nothing."""

    kv_indices: IntArray
    """Page indices of all segments, one after the other."""

    last_page_len: IntArray
    """[S] tokens used in the segment's last page; 0 for a segment that reads nothing."""


@dataclass(frozen=True, slots=True)
class CascadePlan:
    """A step's queries in depth-first order of what they share, and what they read, level by level."""

    rows: IntArray
    """[T] the step's row at each place of the order."""

    sequences: IntArray
    """[B] the step's sequence at each place; the own level has a segment for each, in this order."""

    in_order: bool
    """Whether the order is the step's own, so that nothing need be moved."""

    shared: tuple[CascadeLevel, ...]
    """Outermost first, at least one; full pages only, seen by every query of the segment."""

    own: CascadeLevel
    """The rest of each sequence, never empty, and causal: its last query sees all of it."""

    @property
    def levels(self) -> tuple[CascadeLevel, ...]:
        """All levels, the own one last."""
        return (*self.shared, self.own)


class _Group(NamedTuple):
    """Sequences that agree in the pages before ``agreed``, of which those before ``covered`` have segments."""

    members: list[int]
    agreed: int
    covered: int
    level: int


class _Segment(NamedTuple):
    """Places ``first:last`` of the order (sequences) share the pages ``start:end`` of any member's table."""

    first: int
    last: int
    member: int
    start: int
    end: int


def build_cascade(plan: BatchPlan, page_size: int, rule: CascadeRule) -> CascadePlan | None:
    """The cascade of a step, or None when no group reaches ``rule.min_reads``. Changes nothing.

    Cost O(pages), one copy and comparisons of memory: 0.1 ms for 32 sequences that share 2,048 pages, 0.04 ms when they share none.
    """
    tables = _PageTables(plan, page_size)
    order, segments = _divide(tables, page_size, rule)
    if not segments[0]:
        return None
    sequences = np.array(order, dtype=np.int32)
    counts = np.diff(plan.qo_indptr)[sequences]
    places = _indptr(counts)  # of sequences' first queries
    # Row of the step for each place: the sequence's first row, and then its distance from the sequence's first place.
    rows = np.repeat(plan.qo_indptr[sequences] - places[:-1], counts) + np.arange(places[-1], dtype=np.int32)
    return CascadePlan(
        rows=rows,
        sequences=sequences,
        in_order=order == list(range(len(order))),
        shared=tuple(_shared_level(level, tables, places, page_size) for level in segments if level),
        own=_own_level(plan, tables, segments, sequences, places),
    )


class _PageTables:
    """The step's page tables, and how much of each may be shared."""

    def __init__(self, plan: BatchPlan, page_size: int) -> None:
        self.indices = plan.kv_indices
        self.starts: list[int] = plan.kv_indptr.tolist()
        # The first new token's position is the number of tokens before it; only pages that end there or before are whole.
        self.shareable: list[int] = (plan.positions[plan.qo_indptr[:-1]] // page_size).tolist()
        # Slices of bytes compare as memory, ten times as fast as numpy's arrays of this size.
        self._bytes = plan.kv_indices.tobytes()
        self._width = plan.kv_indices.itemsize

    def pages(self, sequence: int, start: int, end: int) -> IntArray:
        """Pages ``start:end`` of a sequence's table."""
        base = self.starts[sequence]
        pages: IntArray = self.indices[base + start : base + end]
        return pages

    def agreed(self, members: list[int], start: int) -> int:
        """The first place from ``start`` on where ``members`` do not all name the same shareable page."""
        first = members[0]
        if len(members) == 1:
            return start
        end = min(self.shareable[member] for member in members)
        for member in members[1:]:
            if self._raw(member, start, end) != self._raw(first, start, end):
                unlike = self.pages(member, start, end) != self.pages(first, start, end)
                end = start + int(unlike.argmax())
        return end

    def _raw(self, sequence: int, start: int, end: int) -> bytes:
        base = self.starts[sequence]
        return self._bytes[(base + start) * self._width : (base + end) * self._width]

    def split(self, members: list[int], at: int) -> Iterator[list[int]]:
        """Members that name the same page at ``at``, in order of their first; who has no shareable page there is alone."""
        groups: dict[int, list[int]] = {}
        for member in members:
            alone = self.shareable[member] <= at
            key = ~member if alone else int(self.indices[self.starts[member] + at])
            groups.setdefault(key, []).append(member)
        yield from groups.values()


def _divide(tables: _PageTables, page_size: int, rule: CascadeRule) -> tuple[list[int], list[list[_Segment]]]:
    """The sequences in depth-first order, and each shared level's segments in that order."""
    order: list[int] = []
    segments: list[list[_Segment]] = [[] for _ in range(max(1, rule.max_shared_levels))]
    stack = [_Group(list(range(len(tables.shareable))), 0, 0, 0)]
    while stack:
        members, agreed, covered, level = stack.pop()
        if level < rule.max_shared_levels and _pays(len(members), agreed - covered, page_size, rule):
            # The order is depth-first, so the members' places are the next ones, whatever order they get among themselves.
            here = len(order)
            segments[level].append(_Segment(here, here + len(members), members[0], covered, agreed))
            covered, level = agreed, level + 1
        if level == rule.max_shared_levels or not _may_pay(tables, members, covered, page_size, rule):
            order += members
            continue
        groups = [
            _Group(child, tables.agreed(child, agreed), covered, level)
            for child in tables.split(members, agreed)
        ]
        stack += reversed(groups)
    return order, segments


def _pays(members: int, pages: int, page_size: int, rule: CascadeRule) -> bool:
    return members > 1 and pages > 0 and members * pages * page_size >= rule.min_reads


def _may_pay(
    tables: _PageTables, members: list[int], covered: int, page_size: int, rule: CascadeRule
) -> bool:
    """Whether these, or some of them, could still reach the bound: no two share more than the second longest has."""
    if len(members) < 2:
        return False
    longest = sorted(tables.shareable[member] for member in members)[-2]
    return _pays(len(members), longest - covered, page_size, rule)


def _shared_level(
    segments: list[_Segment], tables: _PageTables, places: IntArray, page_size: int
) -> CascadeLevel:
    """Arrays of one level; the queries between its segments get empty ones."""
    bounds, counts, pages = [0], [], []
    for segment in segments:
        first, last = int(places[segment.first]), int(places[segment.last])
        if first > bounds[-1]:
            bounds.append(first)
            counts.append(0)
        bounds.append(last)
        counts.append(segment.end - segment.start)
        pages.append(tables.pages(segment.member, segment.start, segment.end))
    if bounds[-1] < places[-1]:
        bounds.append(int(places[-1]))
        counts.append(0)
    page_counts = np.array(counts, dtype=np.int32)
    return CascadeLevel(
        qo_indptr=np.array(bounds, dtype=np.int32),
        kv_indptr=_indptr(page_counts),
        kv_indices=np.concatenate(pages),
        last_page_len=np.where(page_counts > 0, np.int32(page_size), np.int32(0)),
    )


def _own_level(
    plan: BatchPlan,
    tables: _PageTables,
    segments: list[list[_Segment]],
    sequences: IntArray,
    places: IntArray,
) -> CascadeLevel:
    """Arrays of the last level: each sequence's pages from the end of its deepest segment."""
    starts = [0] * len(sequences)
    for level in segments:
        for segment in level:
            starts[segment.first : segment.last] = [segment.end] * (segment.last - segment.first)
    totals = np.diff(plan.kv_indptr)[sequences]
    pages = [
        tables.pages(sequence, start, total)
        for sequence, start, total in zip(sequences.tolist(), starts, totals.tolist(), strict=True)
    ]
    return CascadeLevel(
        qo_indptr=places,
        kv_indptr=_indptr(totals - np.array(starts, dtype=np.int32)),
        kv_indices=np.concatenate(pages),
        last_page_len=plan.last_page_len[sequences],
    )


def _indptr(counts: IntArray) -> IntArray:
    indptr = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    return indptr
