"""What those who decode on a worker read once, because several of them share it: the engine's cascade in block form. Pure.

The rule is the engine's own (``worker.cascade_plan``, whose test holds the two to each other): sequences that begin alike are a group, which
pays from *sequences x shared tokens* on; what pays is read once, and inside of it a group that shares more may pay again, three levels deep. A
start that does not pay alone is read with the longer ones of the groups in it that do.

What is simpler here: only whole blocks of prompts are shared, and of those what the cache has as one (so that ``off`` shares nothing, and
``hash`` whole blocks of 16 tokens). Prompts that are computed read as ever, beside those who decode. Merging takes no time. The bound is
measured on GPUs when a worker starts; here it is the documented one of CPUs (``CASCADE_HEAD_READS``).

A block's name stands for all before it, so two chains agree up to a place exactly when they agree at it. Kept in the order in which their
names sort, each with the number of blocks that it has in common with the one before it, groups are runs: the shortest number in a run is
what all of it share.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from prefixmesh.ids import Fingerprint
from prefixmesh.sim.replay_job import Job
from prefixmesh.worker.cascade_plan import CascadeRule

CASCADE_HEAD_READS: Final = 12_288
"""Sequences x shared tokens x KV heads from which on a cascade pays: the bound of CPUs (``worker.model.cascade_bound``), in the place of one
that each GPU measures for itself."""


def cascade_min_reads(kv_heads: int) -> int:
    """The bound on sequences x shared tokens on a device that has so many KV heads."""
    return -(-CASCADE_HEAD_READS // kv_heads)


class SharedReads:
    """Those who decode, and what of their KV need not be read again for each."""

    def __init__(self, block_size: int, rule: CascadeRule) -> None:
        self._block_size = block_size
        self._rule = rule
        self._chains: list[_Chain] = []
        # Blocks that each has in common with the one before it; 0 of the first.
        self._common: list[int] = []
        self._of: dict[int, _Chain] = {}
        self._saved: int | None = 0

    def add(self, job: Job) -> None:
        """It decodes from now on. O(sequences + log sequences * log blocks)."""
        chain = _Chain(job.locked[: job.request.input_length // self._block_size])
        self._of[job.number] = chain
        place = bisect_left(self._chains, chain)
        self._chains.insert(place, chain)
        self._common.insert(place, 0)
        self._compare(place)
        self._compare(place + 1)
        self._saved = None

    def remove(self, job: Job) -> None:
        """It has its answer. O(sequences + log sequences * log blocks)."""
        place = bisect_left(self._chains, self._of.pop(job.number))
        # The first of equal chains is as good as this one.
        del self._chains[place], self._common[place]
        self._compare(place)
        self._saved = None

    @property
    def saved_tokens(self) -> int:
        """Tokens of KV that a step reads less than if each read all of its own. After a change O(sequences) for each group that pays or may."""
        if self._saved is None:
            self._saved = _saved_blocks(self._common, self._block_size, self._rule)
        return self._saved * self._block_size

    def _compare(self, place: int) -> None:
        if place < len(self._chains):
            before = self._chains[place - 1].names if place else ()
            self._common[place] = _agreed(before, self._chains[place].names)


class _Chain:
    """Names of a prompt's blocks, which sort with those that begin alike beside each other."""

    __slots__ = ("names",)

    def __init__(self, names: Sequence[Fingerprint]) -> None:
        self.names = names

    def __lt__(self, other: "_Chain") -> bool:
        one, two = self.names, other.names
        place = _agreed(one, two)
        if place == min(len(one), len(two)):
            return len(one) < len(two)
        return one[place] < two[place]


def _agreed(one: Sequence[Fingerprint], two: Sequence[Fingerprint]) -> int:
    """Leading blocks that two chains have in common. O(log blocks)."""
    low, high = 0, min(len(one), len(two))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == two[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _saved_blocks(common: Sequence[int], block_size: int, rule: CascadeRule) -> int:
    """Of chains in their order: blocks that groups read once, for each sequence of a group but one."""
    saved = 0
    groups = [(0, len(common), 0, 0, 0)]
    while groups:
        first, last, agreed, covered, level = groups.pop()
        sequences = last - first
        if level < rule.max_shared_levels and _pays(sequences, agreed - covered, block_size, rule):
            saved += (sequences - 1) * (agreed - covered)
            covered, level = agreed, level + 1
        if level == rule.max_shared_levels:
            continue
        begin = first
        for end in range(first + 1, last + 1):
            if end < last and common[end] > agreed:
                continue
            shared = common[begin + 1 : end]
            # Nobody in it shares more than the two that share most.
            if shared and _pays(end - begin, max(shared) - covered, block_size, rule):
                groups.append((begin, end, min(shared), covered, level))
            begin = end
    return saved


def _pays(sequences: int, blocks: int, block_size: int, rule: CascadeRule) -> bool:
    return sequences > 1 and blocks > 0 and sequences * blocks * block_size >= rule.min_reads
