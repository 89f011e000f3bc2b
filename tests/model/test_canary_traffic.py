"""Mixed traffic over a canary pool: whatever is shared, chunked, evicted, preempted, aborted or flushed, no request ever reads a
slot that does not hold its own tokens, behind its own prefix, in its own namespace.

And the canary can fail: each of several planted bugs is found by a read, a write or a free, with all invariant checks off.
"""

from collections.abc import Callable

import numpy as np
import pytest

from prefixmesh.cache.base import RadixKey
from prefixmesh.errors import InvariantError
from prefixmesh.ids import Namespace
from prefixmesh.worker.kv_manager import KvManager
from prefixmesh.worker.request import Request
from tests.support.canary_pool import CanaryError, CanaryPool, Chain
from tests.support.canary_traffic import CanaryRun, TrafficOptions
from tests.support.canary_workload import NAMESPACES

REQUESTS = 2000
MANY_REQUESTS = 50_000


def serve(run: CanaryRun) -> None:
    """The run reads nothing wrong, leaves nothing behind, and was as hard as it claims: floors per request served."""
    tally = run.serve()
    run.settle()
    floor = run.options.requests // 1000
    assert tally.submitted >= run.options.requests
    assert tally.ends["length"] >= 500 * floor
    assert min(tally.ends[reason] for reason in ("stop", "failed", "aborted")) >= 20 * floor
    assert tally.ends["refused"] >= floor
    assert min(tally.aborts[phase] for phase in ("waiting", "prefilling", "decoding")) >= 15 * floor
    assert tally.aborts["preempted"] >= floor
    assert tally.in_flight_aborts >= floor
    assert tally.preemptions >= 15 * floor
    assert tally.chunked_prefills >= 300 * floor
    assert tally.flushes >= floor
    assert tally.cached_tokens >= 20_000 * floor
    page_size = run.options.page_size
    assert run.cache.duplicate_pages >= 1000 * floor // page_size
    assert run.cache.evicted_pages >= 20_000 * floor // page_size


@pytest.mark.parametrize("page_size", [*(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4)), 16])
def test_mixed_traffic_reads_nothing_wrong(page_size: int) -> None:
    serve(CanaryRun(TrafficOptions(requests=REQUESTS, page_size=page_size)))


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16])
def test_traffic_behind_public_prefixes_reads_nothing_of_another_tail(page_size: int) -> None:
    """Every tenant reads what is public, whoever computed it; behind it, and in its own namespace, only its own."""
    run = CanaryRun(
        TrafficOptions(requests=REQUESTS, page_size=page_size, public_blocks=8, seed=3, check_every=100)
    )
    tally = run.serve()
    run.settle()
    assert run.model.shared_places >= REQUESTS // 10
    assert tally.preemptions >= REQUESTS // 100
    assert tally.flushes >= 1
    assert tally.cached_tokens >= 20 * REQUESTS


@pytest.mark.slow
def test_ten_thousand_requests_read_nothing_wrong() -> None:
    serve(CanaryRun(TrafficOptions(requests=MANY_REQUESTS // 5, page_size=1, seed=2, check_every=500)))


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.timeout(900)  # over a minute each on a core that has nothing else to do
@pytest.mark.parametrize("page_size", [1, 16])
def test_fifty_thousand_requests_read_nothing_wrong(page_size: int) -> None:
    options = TrafficOptions(requests=MANY_REQUESTS, page_size=page_size, seed=2, check_every=500)
    serve(CanaryRun(options))


def test_one_seed_is_one_run() -> None:
    """Else nothing that it finds could be found again."""
    runs = [CanaryRun(TrafficOptions(requests=200, seed=7)) for _ in range(2)]
    assert runs[0].serve() == runs[1].serve()
    assert runs[0].pool.reads == runs[1].pool.reads > 0


def test_a_page_that_was_freed_and_came_back_with_equal_kv_is_found() -> None:
    """Somebody else may have computed the very same: what a request reads is right then, and its hold on it is not."""
    run = CanaryRun(TrafficOptions(requests=1, failure_rate=0))
    run.arrive()
    while not run.scheduler.running or run.scheduler.running[0].computed < 4:
        run.step()
    request, pool = run.scheduler.running[0], run.pool
    page, chain = request.page_table[:1], Chain(request.namespace, request.ids[:1].astype(np.uint32))
    pool.read_pages(page, chain)
    pool.poison(page)
    pool.give_out(page)
    pool.write(page, chain.rows(0, 1), 999)
    pool.publish(page)
    with pytest.raises(CanaryError, match="a running request's page was freed"):
        run.step()


# Planted bugs.


def release_one_page_too_many(self: KvManager, request: Request, *, keep: bool, now: float) -> None:
    """``KvManager.release`` that frees the last shared page with the private ones."""
    if keep:
        self.commit(request, now)
    freed = request.page_table[max(0, request.shared_pages - 1) : request.pages].copy()
    request.pages = request.shared_pages = request.computed = 0
    self._release_receipt(request)
    self._allocator.free(freed)


def release_nothing_but_the_lock(self: KvManager, request: Request, *, keep: bool, now: float) -> None:
    """``KvManager.release`` that forgets the private pages."""
    if keep:
        self.commit(request, now)
    request.pages = request.shared_pages = request.computed = 0
    self._release_receipt(request)


def plant_skipped_rewrite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit leaves the freed duplicates in the page table."""
    right = KvManager.commit

    def commit(self: KvManager, request: Request, now: float) -> None:
        before = request.page_table.copy()
        right(self, request, now)
        request.page_table[:] = before

    monkeypatch.setattr(KvManager, "commit", commit)


def plant_freed_shared_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvManager, "release", release_one_page_too_many)


def plant_wrong_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matches look among the first namespace's prefixes, whoever asks."""
    right = Request.match_key

    def match_key(request: Request, page_size: int) -> RadixKey:
        return right(request, page_size)._replace(namespace=Namespace(NAMESPACES[0]))

    monkeypatch.setattr(Request, "match_key", match_key)


def plant_forgotten_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is matched and what is inserted is not protected."""
    right_admit, right_commit = KvManager.admit, KvManager.commit

    def admit(self: KvManager, request: Request, reserve_pages: int, now: float) -> bool:
        admitted = right_admit(self, request, reserve_pages, now)
        self._release_receipt(request)
        return admitted

    def commit(self: KvManager, request: Request, now: float) -> None:
        right_commit(self, request, now)
        self._release_receipt(request)

    monkeypatch.setattr(KvManager, "admit", admit)
    monkeypatch.setattr(KvManager, "commit", commit)


def plant_incomplete_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's last page enters the cache before it is full of KV."""
    right = KvManager.commit

    def commit(self: KvManager, request: Request, now: float) -> None:
        computed = request.computed
        if request.pages * self.page_size <= request.length:
            request.computed = request.pages * self.page_size
        right(self, request, now)
        request.computed = computed

    monkeypatch.setattr(KvManager, "commit", commit)


def plant_recomputed_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last matched token is computed again, into a page that others read."""
    right = KvManager.admit

    def admit(self: KvManager, request: Request, reserve_pages: int, now: float) -> bool:
        admitted = right(self, request, reserve_pages, now)
        if admitted and request.computed:
            request.computed -= 1
        return admitted

    monkeypatch.setattr(KvManager, "admit", admit)


def plant_swapped_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A match is put into the page table in another order: the right tokens, at wrong positions."""
    right = KvManager.admit

    def admit(self: KvManager, request: Request, reserve_pages: int, now: float) -> bool:
        admitted = right(self, request, reserve_pages, now)
        if admitted and request.shared_pages > 1:
            shared = request.page_table[: request.shared_pages]
            shared[:] = np.roll(shared, 1)
        return admitted

    monkeypatch.setattr(KvManager, "admit", admit)


def plant_skipped_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary's own guard."""
    monkeypatch.setattr(CanaryPool, "poison", lambda self, pages: None)


@pytest.mark.parametrize(
    ("plant", "page_size", "message"),
    [
        (plant_skipped_rewrite, 1, "holds"),
        (plant_skipped_rewrite, 16, "holds"),
        (plant_freed_shared_page, 1, "holds"),
        (plant_freed_shared_page, 16, "holds"),
        (plant_wrong_namespace, 1, "holds"),
        (plant_wrong_namespace, 16, "holds"),
        (plant_forgotten_lock, 1, "holds"),
        (plant_forgotten_lock, 16, "holds"),
        (plant_incomplete_page, 16, "holds nothing yet"),
        (plant_recomputed_token, 1, "is written by .* cached"),
        (plant_recomputed_token, 16, "is written by .* cached"),
        (plant_swapped_pages, 1, "holds token"),
        (plant_swapped_pages, 16, "holds token"),
        (plant_skipped_poison, 1, "given out that should be free"),
    ],
)
def test_the_canary_finds_a_planted_bug(
    plant: Callable[[pytest.MonkeyPatch], None],
    page_size: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    run = CanaryRun(TrafficOptions(requests=REQUESTS, page_size=page_size, check_every=0))
    with pytest.raises(CanaryError, match=message):
        run.serve()


def test_the_end_of_the_run_finds_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody reads any more only the books can miss."""
    monkeypatch.setattr(KvManager, "release", release_nothing_but_the_lock)
    run = CanaryRun(TrafficOptions(requests=20, pool_tokens=10_000, check_every=0))
    run.serve()
    with pytest.raises(InvariantError, match="free"):
        run.settle()
