"""Bytes that the router's index takes for a token that somebody holds, at a fleet of 64.

Resident memory of a process of its own, before and after the fleet is there: rounding by the allocators, tables that are not full and
what the sets of holders take are all in it. A token that several workers hold counts once.
"""

import gc
import multiprocessing
import os
from pathlib import Path

from prefixmesh.bench.index_fleet import BenchFleet
from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE


def index_bytes_per_token(workers: int, blocks: int) -> float:
    """Build such a fleet in another process and see what it takes there. O(blocks), a few µs each."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (workers, blocks)) / (blocks * DEFAULT_BLOCK_SIZE)


def _measure(workers: int, blocks: int) -> int:
    BenchFleet(workers, 1)  # whatever is made once
    gc.collect()
    before = _resident_bytes()
    fleet = BenchFleet(workers, blocks)
    gc.collect()
    took = _resident_bytes() - before
    assert len(fleet.index) == blocks, fleet.index
    return took


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
