"""What must hold of a scheduler between any two calls, recomputed from nothing. For tests, and on demand in production."""

from collections.abc import Sequence

import numpy as np

from prefixmesh.cache.base import PageIndices
from prefixmesh.worker.admission import AdmissionQueue
from prefixmesh.worker.kv_manager import KvManager
from prefixmesh.worker.request import Phase, Request
from prefixmesh.worker.running_batch import RunningBatch


def broken_rules(
    kv: KvManager, batch: RunningBatch, queue: AdmissionQueue, *, known: int, max_running: int
) -> list[str]:
    """Names of the rules that do not hold; ``known`` is how many requests the scheduler knows. Raises InvariantError for the
    cache's and the allocator's own. O(pool)."""
    running = list(batch)
    private = [request.page_table[request.own_from : request.pages] for request in running]
    pages = np.concatenate(private) if private else np.zeros(0, dtype=np.int32)
    kv.check_invariants(pages)
    groups = _page_groups(kv, running, pages) | {
        "the batch knows what each does": {*batch.prefilling, *batch.loading}
        == set(_in_phase(running, Phase.PREFILLING))
        and set(batch.decoding) == set(_in_phase(running, Phase.DECODING))
        and len(batch.prefilling) + len(batch.loading) + len(batch.decoding) == len(running),
        "who waits for KV has a copy that brings it": all(
            request.load is not None for request in batch.loading
        )
        and all(_loads_what_it_says(request) for request in running),
        "nobody owns more than was expected": all(
            request.promised_pages >= request.pages for request in running
        ),
        "who waits owns nothing": all(
            request.receipt is None and request.pages == 0 and request.load is None
            for request in queue.requests()
        ),
        "queue and batch are within their bounds": queue.check_bounds() and len(running) <= max_running,
        "every request is in one place": len(running) + len(queue) == known,
    }
    return [name for name, holds in groups.items() if not holds]


def _page_groups(kv: KvManager, running: Sequence[Request], private: PageIndices) -> dict[str, bool]:
    counted = kv.free_pages + kv.evictable_pages + kv.protected_pages + kv.copying_pages + len(private)
    return {
        "free + evictable + protected + copying + private == total": counted == kv.total_pages,
        "a private page has one owner": len(np.unique(private)) == len(private),
        "running requests hold a lock and the pages of what is computed": all(
            request.receipt is not None
            and request.own_from * kv.page_size <= request.computed
            and request.computed <= min(request.length, request.pages * kv.page_size)
            for request in running
        ),
        "a decoding request lacks only its last token's KV": all(
            request.computed == request.length - 1 for request in _in_phase(running, Phase.DECODING)
        ),
        "only the running hold locks, one each": kv.receipts_out == len(running),
    }


def _loads_what_it_says(request: Request) -> bool:
    if request.load is None:
        return not request.loading_pages
    loading = request.page_table[request.shared_pages : request.own_from]
    return np.array_equal(loading, request.load.copy.device_pages)


def _in_phase(running: Sequence[Request], phase: Phase) -> list[Request]:
    return [request for request in running if request.phase is phase]
