"""The canary pool's own guards: each kind of wrong read, write, free and copy raises, and says what was expected and found."""

from collections.abc import Sequence

import numpy as np
import pytest

from prefixmesh.cache.base import PageIndices, RadixKey
from tests.support.cache_kit import NS_A, NS_B, as_pages, take
from tests.support.canary_pool import CanaryAllocator, CanaryCopy, CanaryError, CanaryPool, Chain, copy, mix

PAGE = 2


class Tier:
    """A pool of 8 pages of two tokens, and its allocator."""

    def __init__(self, name: str = "device") -> None:
        self.pool = CanaryPool(8, PAGE, name)
        self.allocator = CanaryAllocator(self.pool)

    def compute(self, tokens: Sequence[int], *, writer: int = 0, namespace: bytes = NS_A) -> PageIndices:
        """Pages of ``writer`` with the KV of ``tokens``."""
        pages = take(self.allocator, len(tokens) // PAGE)
        self.pool.write(self.pool.slots(pages), chain(tokens, namespace).rows(0, len(tokens)), writer)
        return pages

    def cached(self, tokens: Sequence[int]) -> PageIndices:
        """Pages of the cache with the KV of ``tokens``."""
        pages = self.compute(tokens)
        self.pool.publish(pages)
        return pages


def chain(tokens: Sequence[int], namespace: bytes = NS_A) -> Chain:
    return Chain(namespace, np.array(tokens, dtype=np.uint32))


@pytest.fixture
def tier() -> Tier:
    return Tier()


@pytest.fixture
def host() -> Tier:
    return Tier("host")


def test_a_digest_depends_on_namespace_order_and_everything_before() -> None:
    """And is the same whether computed at once or token by token."""
    whole = chain([5, 6, 7, 8])
    others = [chain([5, 6, 7, 8], NS_B), chain([6, 5, 7, 8]), chain([4, 6, 7, 8]), chain([0, 5, 6, 7])]
    assert all(other.digests[3] != whole.digests[3] for other in others)
    grown = Chain(NS_A, np.array([5, 6, 7], dtype=np.uint32), capacity=4)
    grown.append(8, (grown.digests[2:3] + mix(np.array([3]), np.array([8])))[0])
    assert np.array_equal(grown.digests, whole.digests)


def test_a_private_tail_has_its_own_namespace_from_the_boundary_on() -> None:
    tokens = np.arange(6, dtype=np.uint32)
    public, tail = Chain(NS_A, tokens), Chain(NS_A, tokens, boundary=4, tail=NS_B)
    assert np.array_equal(public.digests[:4], tail.digests[:4])
    assert not (public.digests[4:] == tail.digests[4:]).any()
    assert np.array_equal(tail.namespaces(3, 6), tail.rows(3, 6).namespaces)
    assert tail.namespaces(3, 6).tolist() == [public.namespace, tail.tail, tail.tail]


def test_a_key_is_a_chain() -> None:
    key = RadixKey(NS_A, np.arange(4, dtype=np.uint32).tobytes())
    assert np.array_equal(Chain.of_key(key).digests, chain(range(4)).digests)


def test_the_writer_and_after_publication_everybody_reads(tier: Tier) -> None:
    pages = tier.compute([1, 2, 3, 4], writer=7)
    tier.pool.read_pages(pages, chain([1, 2, 3, 4]), reader=7)
    tier.pool.publish(pages)
    tier.pool.read_pages(pages, chain([1, 2, 3, 4, 5]), reader=8)
    tier.pool.read_pages(pages[1:], chain([1, 2, 3, 4]), start=2)
    assert (tier.pool.writes, tier.pool.reads) == (4, 10)


@pytest.mark.parametrize(
    ("expected", "namespace", "message"),
    [
        (
            [1, 2, 3, 5],
            NS_A,
            r"expected token 5 at position 3 .* page 1 offset 1 .* holds token 4 at position 3",
        ),
        ([1, 1, 3, 4], NS_A, r"expected token 1 at position 1 .* holds token 2 at position 1"),
        ([1, 2, 3, 4], NS_B, r"expected token 1 at position 0 .* holds token 1 at position 0"),
    ],
)
def test_a_read_of_another_token_prefix_or_namespace_raises(
    tier: Tier, expected: list[int], namespace: bytes, message: str
) -> None:
    pages = tier.cached([1, 2, 3, 4])
    with pytest.raises(CanaryError, match=message):
        tier.pool.read_pages(pages, chain(expected, namespace))


def test_a_read_behind_another_prefix_raises_though_the_token_is_equal(tier: Tier) -> None:
    pages = tier.cached([1, 2, 3, 4])
    with pytest.raises(CanaryError, match=r"expected token 3 at position 2 .* holds token 3 at position 2"):
        tier.pool.read_pages(pages[1:], chain([2, 2, 3, 4]), start=2)


def test_a_read_of_another_ones_private_page_raises(tier: Tier) -> None:
    pages = tier.compute([1, 2], writer=7)
    with pytest.raises(CanaryError, match=r"read by 8 .* private page of 7"):
        tier.pool.read_pages(pages, chain([1, 2]), reader=8)


def test_a_read_of_poison_or_of_nothing_raises(tier: Tier) -> None:
    pages = tier.cached([1, 2])
    tier.allocator.free(pages)
    with pytest.raises(CanaryError, match=r"generation 1, free.* holds poison"):
        tier.pool.read_pages(pages, chain([1, 2]))
    assert np.array_equal(take(tier.allocator, 1), pages)
    with pytest.raises(CanaryError, match=r"generation 2, claimed by nobody.* holds nothing yet"):
        tier.pool.read_pages(pages, chain([1, 2]))


def test_only_the_first_writer_of_a_private_page_writes_to_it(tier: Tier) -> None:
    [page] = take(tier.allocator, 1)
    one = chain([1, 2])
    tier.pool.write(np.array([page * PAGE]), one.rows(0, 1), 7)
    with pytest.raises(CanaryError, match=r"written by 8 .* private page of 7"):
        tier.pool.write(np.array([page * PAGE + 1]), one.rows(1, 2), 8)
    with pytest.raises(CanaryError, match="should be unwritten"):
        tier.pool.write(np.array([page * PAGE]), one.rows(0, 1), 7)
    tier.pool.write(np.array([page * PAGE + 1]), one.rows(1, 2), 7)


def test_nobody_writes_to_what_is_cached_or_free(tier: Tier) -> None:
    cached = tier.cached([1, 2])
    for slot in (int(cached[0]) * PAGE, 5 * PAGE):
        with pytest.raises(CanaryError, match="its writer's own"):
            tier.pool.write(np.array([slot]), chain([1]).rows(0, 1), 0)


def test_two_writers_of_one_page_in_one_step_raise(tier: Tier) -> None:
    [page] = take(tier.allocator, 1)
    slots = np.array([page * PAGE, page * PAGE + 1])
    with pytest.raises(CanaryError, match="one writer's"):
        tier.pool.write(slots, chain([1, 2]).rows(0, 2), np.array([7, 8]))


def test_a_double_free_and_a_missed_poison_raise(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = tier.compute([1, 2])
    tier.allocator.free(pages)
    with pytest.raises(CanaryError, match="is freed that should be somebody's"):
        tier.allocator.free(pages)
    monkeypatch.setattr(CanaryPool, "poison", lambda self, pages: None)
    tier.allocator.free(take(tier.allocator, 1))
    with pytest.raises(CanaryError, match="given out that should be free"):
        tier.allocator.allocate(1)


def test_nothing_unwritten_is_published(tier: Tier) -> None:
    with pytest.raises(CanaryError, match="is cached that should be written"):
        tier.pool.publish(take(tier.allocator, 1))


def test_a_copy_is_readable_when_it_has_ended(tier: Tier, host: Tier) -> None:
    source, target = tier.cached([1, 2, 3, 4]), take(host.allocator, 2)
    flight = CanaryCopy(tier.pool, source, host.pool, target)
    tier.pool.read_pages(source, chain([1, 2, 3, 4]))
    with pytest.raises(CanaryError, match=r"host page 0 .*a copy's in flight.* holds nothing yet"):
        host.pool.read_pages(target, chain([1, 2, 3, 4]))
    flight.finish()
    host.pool.read_pages(target, chain([1, 2, 3, 4]))
    assert host.pool.copied == 4
    with pytest.raises(CanaryError, match="ends twice"):
        flight.cancel()


def test_neither_end_of_a_copy_in_flight_is_freed(tier: Tier, host: Tier) -> None:
    source, target = tier.cached([1, 2]), take(host.allocator, 1)
    flight = CanaryCopy(tier.pool, source, host.pool, target)
    with pytest.raises(CanaryError, match="no copy's source"):
        tier.pool.poison(source)
    with pytest.raises(CanaryError, match="no copy's destination"):
        host.pool.poison(target)
    flight.cancel()
    tier.allocator.free(source)
    host.allocator.free(target)
    assert tier.pool.free_pages == host.pool.free_pages == 8


def test_a_copy_reads_what_is_cached_and_writes_what_is_its_own(tier: Tier, host: Tier) -> None:
    private, cached = tier.compute([1, 2]), tier.cached([3, 4])
    with pytest.raises(CanaryError, match="copied from that should be cached"):
        copy(tier.pool, private, host.pool, take(host.allocator, 1))
    with pytest.raises(CanaryError, match="copied to that should be claimed by nobody"):
        copy(tier.pool, cached, host.pool, as_pages([5]))
    with pytest.raises(CanaryError, match="1 pages into 2"):
        copy(tier.pool, cached, host.pool, take(host.allocator, 2))


def test_a_copy_of_what_changed_meanwhile_raises(tier: Tier, host: Tier) -> None:
    source, target = tier.cached([1, 2]), take(host.allocator, 1)
    flight = CanaryCopy(tier.pool, source, host.pool, target)
    tier.pool.digests[int(source[0]) * PAGE] += np.uint64(1)
    with pytest.raises(CanaryError, match="the same from begin to end"):
        flight.finish()
