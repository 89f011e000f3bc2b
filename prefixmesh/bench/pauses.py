"""The longest pause: the longest single call in a mixed run on a large tree, collections included.

A request is match, lock, evict, insert, release, each timed by itself. It goes on from a leaf taken at random (evicted by now,
or not), every eighth match ends inside an edge and splits it, every 64th request brings 4,096 new tokens. For a thousand requests
nothing is evicted and the tree grows, for the next thousand twice as much is: while a tree keeps its size, the automatic garbage
collection has no cause to run.

What counts is CPU time of the thread: when another process takes the core away, that is no pause of the cache's. (The wall clock's
longest is told beside it.) A collection counts as a pause wherever it falls, in a timed call or between two of them.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns, thread_time_ns
from typing import Any, Final, TypeVar

import numpy as np

from prefixmesh.bench.timing import Sample, clock_cost_ns, summarise
from prefixmesh.bench.trees import LEAF_TOKENS, NOW, Grove
from prefixmesh.cache.base import RadixKey
from prefixmesh.tokens import TOKEN_BYTES

PHASE_REQUESTS: Final = 1_000
"""Of growth, then of shrinking: 1 % of the tree and more, and enough for collections to come by themselves."""

REQUESTS_PER_STEP: Final = 8
"""Requests after which the collector is told that a step has ended."""

LONG_EVERY: Final = 64
LONG_TOKENS: Final = 4_096
SPLIT_EVERY: Final = 8
CUT_TOKENS: Final = 32
"""Half a leaf, in whole pages of either size."""

_OLDEST: Final = 2
"""The generation that holds everything."""

_T = TypeVar("_T")


class PauseMeter:
    """Times calls and collections."""

    def __init__(self) -> None:
        self.cpu_ns: list[int] = []
        self.longest_of_ns: dict[str, int] = {}
        """By the name of what was called."""
        self.longest_wall_ns = 0
        self.longest_collection_ns = 0
        self.full_collections = 0
        self._collection_began = 0

    def call(self, function: Callable[..., _T], *arguments: object, **named: object) -> _T:
        """Call and time it."""
        wall, cpu = perf_counter_ns(), thread_time_ns()
        result = function(*arguments, **named)
        took = thread_time_ns() - cpu
        self.longest_wall_ns = max(self.longest_wall_ns, perf_counter_ns() - wall)
        self.cpu_ns.append(took)
        self.longest_of_ns[function.__name__] = max(took, self.longest_of_ns.get(function.__name__, 0))
        return result

    @contextmanager
    def watching_collections(self) -> Iterator[None]:
        """While inside, collections are timed as well."""
        gc.callbacks.append(self._on_collection)
        try:
            yield
        finally:
            gc.callbacks.remove(self._on_collection)

    def sample(self) -> Sample:
        """Of all calls, in ms; the longest is that of calls and collections."""
        calls = summarise(self.cpu_ns, clock_cost_ns(thread_time_ns))
        longest = max(*self.cpu_ns, self.longest_collection_ns)
        return Sample(calls.median / 1e3, (calls.p99 or 0.0) / 1e3, longest / 1e6, calls.calls)

    def notes(self) -> dict[str, float]:
        """Where the longest were, in ms."""
        by_name = {f"longest_{name}_ms": took / 1e6 for name, took in sorted(self.longest_of_ns.items())}
        return {
            **by_name,
            "longest_collection_ms": self.longest_collection_ns / 1e6,
            "full_collections": self.full_collections,
            "longest_by_the_wall_clock_ms": self.longest_wall_ns / 1e6,
        }

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._collection_began = thread_time_ns()
            return
        took = thread_time_ns() - self._collection_began
        self.longest_collection_ns = max(self.longest_collection_ns, took)
        self.full_collections += info["generation"] == _OLDEST


def run_mixed(grove: Grove, requests: int, after_step: Callable[[], None]) -> PauseMeter:
    """So many requests, with four timed calls each in a phase of growth and five in one of shrinking."""
    meter = PauseMeter()
    with meter.watching_collections():
        for number in range(requests):
            _serve(grove, number, meter)
            if number % REQUESTS_PER_STEP == 0:
                after_step()
    return meter


def _serve(grove: Grove, number: int, meter: PauseMeter) -> None:
    cache = grove.tree.cache
    owner, tokens = grove.leaf(int(grove.rng.integers(grove.planted)))
    if number % SPLIT_EVERY == 0:
        tokens = tokens[: -CUT_TOKENS * TOKEN_BYTES]
    key = RadixKey(
        owner.namespace, tokens + grove.tokens(LEAF_TOKENS if number % LONG_EVERY else LONG_TOKENS)
    )
    match = meter.call(cache.match_prefix, key, NOW)
    receipt = meter.call(cache.lock, match.last_device_node)
    missing = len(key.tokens) // TOKEN_BYTES // grove.page_size - len(match.device_indices)
    if number // PHASE_REQUESTS % 2:
        meter.call(cache.evict, 2 * missing, owner.name)
    table = np.concatenate((match.device_indices, grove.tree.take(missing, owner)))
    meter.call(cache.insert, key, table, NOW, owner=owner.name)
    meter.call(cache.release, receipt)
