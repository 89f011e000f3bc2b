"""A canary pool per tier: whatever is copied, demoted, restored, pinned, shared in public or flushed, on either tier every page of
the tree holds what its place in the tree says, and every request reads its own.

And the canary can fail: copies that nothing protects, that are believed though they failed or that mix up their pages, and a
public prefix that shows a private tail are each found, with all invariant checks off.
"""

from collections.abc import Callable

import pytest

from prefixmesh.cache.base import MatchResult, RadixKey
from prefixmesh.cache.eviction import EvictionPolicy
from prefixmesh.cache.node import TreeNode
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.cache.transfers import HostRead, Offload, Restore, Transfers
from prefixmesh.ids import Namespace
from tests.support.canary_pool import CanaryCopy, CanaryError
from tests.support.canary_tiers import TierOptions, TierRun

REQUESTS = 2000
MANY_REQUESTS = 10_000


def serve(run: TierRun) -> None:
    """The run reads nothing wrong, leaves nothing behind, and was as hard as it claims: floors per request served."""
    run.serve()
    run.settle()
    floor = run.options.requests // 1000
    counts, cache = run.counts, run.cache
    for what, least in {
        "requests": 1000,
        "public": 100,
        "matched tokens": 3000,
        "preemptions": 8,
        "aborts": 30,
        "aborts while restoring": 3,
        "offloads": 300,
        "restores": 70,
        "fetches": 50,
        "reads": 20,
        "failed copies": 80,
        "pins": 25,
        "unpins": 12,
        "expired pins": 8,
        "pins beyond budget": 5,
        "pinned tokens read": 150,
        "tokens pinned on the host": 15,
        "refused after a flush": 1,
    }.items():
        assert counts[what] >= least * floor, what
    # F51: nothing that is kept for ever eats into the room for what is asked for.
    first, second = run.hit_rates()
    assert 0.2 < first < 0.9
    assert abs(second - first) < 0.06, (first, second)
    assert counts["flushes in flight"] >= 1
    assert counts["restores without room"] >= 1
    assert cache.duplicate_pages >= 500 * floor
    assert cache.evicted_pages >= 1500 * floor
    assert cache.transfers.duplicate_pages >= 250 * floor
    assert run.host.copied >= 1000 * floor * run.options.page_size
    assert run.host.freed_pages >= 1200 * floor
    assert run.device.copied >= 100 * floor * run.options.page_size


@pytest.mark.parametrize(("page_size", "policy"), [(1, "lru"), (2, "lfu"), (4, "priority"), (16, "lru")])
def test_nothing_wrong_is_read_from_either_tier(page_size: int, policy: EvictionPolicy) -> None:
    serve(TierRun(TierOptions(requests=REQUESTS, page_size=page_size, policy=policy)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("page_size", "policy"), [(1, "lru"), (16, "priority")])
def test_nothing_wrong_is_read_from_either_tier_for_long(page_size: int, policy: EvictionPolicy) -> None:
    serve(TierRun(TierOptions(requests=MANY_REQUESTS, page_size=page_size, policy=policy, seed=2)))


# Planted bugs.


def plant_unprotected_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """An offload that lets its source be evicted while it is read."""
    right = Transfers.begin_offload

    def begin_offload(self: Transfers, node: object) -> Offload | None:
        offload = right(self, node)  # type: ignore[arg-type]
        if offload is not None:
            assert offload.device_lock is not None
            self._accounts.release(offload.device_lock)
            offload.device_lock = self._accounts.lock(self._accounts.root)
        return offload

    monkeypatch.setattr(Transfers, "begin_offload", begin_offload)


def plant_believed_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not copied is attached all the same."""
    monkeypatch.setattr(Transfers, "abort_offload", Transfers.finish_offload)
    monkeypatch.setattr(Transfers, "fail_restore", Transfers.finish_restore)


def plant_early_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree has the copy when it is asked for, and not when it has been made."""
    right_begin, right_finish = Transfers.begin_offload, Transfers.finish_offload

    def begin_offload(self: Transfers, node: object) -> Offload | None:
        offload = right_begin(self, node)  # type: ignore[arg-type]
        if offload is not None:
            right_finish(self, offload)
        return offload

    monkeypatch.setattr(Transfers, "begin_offload", begin_offload)
    monkeypatch.setattr(Transfers, "finish_offload", lambda self, copy: None)
    monkeypatch.setattr(Transfers, "abort_offload", lambda self, copy: None)


def plant_believed_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What never came from elsewhere is cached all the same."""
    monkeypatch.setattr(Transfers, "fail_fetch", lambda self, copy: self.finish_fetch(copy, 0.0))


def plant_unlocked_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of the host that lets what it reads be evicted."""
    right = Transfers.begin_read

    def begin_read(self: Transfers, node: TreeNode) -> HostRead | None:
        read = right(self, node)
        if read is not None and read.host_lock is not None:
            self._host.release(read.host_lock, self._accounts.gone, self._accounts.serial)
            read.host_lock = None
        return read

    monkeypatch.setattr(Transfers, "begin_read", begin_read)


def plant_mixed_up_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore's pages arrive in another order."""
    right = Transfers.begin_restore

    def begin_restore(
        self: Transfers, match: MatchResult, owner: str = "", tokens: int | None = None
    ) -> Restore | None:
        restore = right(self, match, owner, tokens)
        if restore is not None:
            restore.host_pages = restore.host_pages[::-1].copy()
        return restore

    monkeypatch.setattr(Transfers, "begin_restore", begin_restore)


def plant_open_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A match goes on in the public namespace behind a public prefix."""
    right = RadixCache.match_prefix

    def match_prefix(self: RadixCache, key: RadixKey, now: float, priority: int = 0) -> MatchResult:
        return right(self, key._replace(boundary_tokens=0, tail=Namespace(b"")), now, priority)

    monkeypatch.setattr(RadixCache, "match_prefix", match_prefix)


def plant_unfinished_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary's own guard: the bytes of a copy never come."""
    monkeypatch.setattr(CanaryCopy, "finish", CanaryCopy.cancel)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (plant_unprotected_source, "no copy's source"),
        (plant_believed_failures, "holds nothing yet"),
        (plant_early_acknowledgement, "a copy's in flight|no copy's|holds nothing yet"),
        (plant_mixed_up_pages, "holds token"),
        (plant_believed_fetches, "holds nothing yet"),
        (plant_unlocked_reads, "no copy's source"),
        (plant_open_tails, "holds token"),
        (plant_unfinished_copies, "holds nothing yet"),
    ],
)
def test_the_canary_finds_a_planted_bug(
    plant: Callable[[pytest.MonkeyPatch], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    run = TierRun(TierOptions(requests=REQUESTS, check_every=REQUESTS))
    with pytest.raises(CanaryError, match=message):
        run.serve()
