"""The life of two requests, told with the scheduler that serves them: `X Y Z 1 2 3` and `X Y Z 4 5 6`, page size 1."""

from typing import NamedTuple

from prefixmesh.ids import Namespace
from tests.support.cache_kit import key_of
from tests.support.fake_model import expected_output
from tests.support.scheduling import NAMESPACE_A, NAMESPACE_B, Bench

X, Y, Z = 40, 41, 42
FIRST, SECOND = [X, Y, Z, 1, 2, 3], [X, Y, Z, 4, 5, 6]
POOL = 16


def users_of(bench: Bench, tokens: list[int]) -> int:
    """How many requests hold the node in which these cached tokens end."""
    match = bench.cache.match_prefix(key_of(tokens, Namespace(NAMESPACE_A)), bench.now)
    assert match.matched_tokens == len(tokens)
    return match.last_device_node.lock_ref


def cached_of(bench: Bench, tokens: list[int]) -> int:
    return bench.cache.peek(key_of(tokens, Namespace(NAMESPACE_A)))


class Cached(NamedTuple):
    """How much is cached of the whole first request, the whole second, and what they share."""

    first: int
    second: int
    shared: int


def look(bench: Bench, first: list[int], second: list[int]) -> Cached:
    return Cached(cached_of(bench, first), cached_of(bench, second), cached_of(bench, first[:3]))


def crowd(bench: Bench, token: int, beyond_free: int) -> None:
    """Another tenant's prompt that needs so many pages more than are free."""
    prompt = [token] * (bench.allocator.free_pages + beyond_free)
    bench.submit(f"crowd-{token}", prompt, max_tokens=0, namespace=NAMESPACE_B)
    bench.run()


def test_two_requests_share_split_protect_and_leave_in_order() -> None:
    """0 cached, then 3; no KV of X Y Z is copied; the shared parent counts two users, then one, then none; eviction takes the
    first's leaf, the second's, and the parent, which its children alone had protected by then."""
    bench = Bench(total_pages=POOL, page_size=1, chunk=1, hold_min=1000, decode_room=0)
    bench.submit("first", FIRST, max_tokens=3)
    for _ in range(len(FIRST)):
        bench.step()
    assert bench.cached("first") == 0
    (one,) = bench.scheduler.running
    pages_of_xyz = one.page_table[:3].tolist()
    assert users_of(bench, FIRST) == 1

    # The second arrives: three cached tokens in the same pages, and new pages for the other three alone.
    taken = POOL - bench.allocator.free_pages
    bench.submit("second", SECOND, max_tokens=2)
    bench.step()
    assert bench.cached("second") == 3
    _, other = bench.scheduler.running
    assert other.page_table[:3].tolist() == one.page_table[:3].tolist() == pages_of_xyz
    assert POOL - bench.allocator.free_pages == taken + 3 + 1, "the first's answer grew by one"
    assert users_of(bench, [X, Y, Z]) == 2

    # The first finishes while the second still prefills: only the first's leaf may go.
    while len(bench.scheduler.running) == 2:
        bench.step()
    assert other.computed < len(SECOND), "the second still prefills"
    assert users_of(bench, [X, Y, Z]) == 1
    first = [*FIRST, *bench.output("first")][:-1]
    kv = bench.scheduler.kv
    assert (kv.evictable_pages, kv.protected_pages) == (len(first) - 3, other.shared_pages)

    # The second finishes.
    bench.run()
    second = [*SECOND, *bench.output("second")][:-1]
    assert users_of(bench, [X, Y, Z]) == 0
    assert kv.protected_pages == 0
    assert look(bench, first, second) == Cached(len(first), len(second), 3)

    # Memory runs out, a little more each time: the first's leaf, the second's, the parent.
    crowd(bench, 9, len(first) - 3)
    assert look(bench, first, second) == Cached(3, len(second), 3)
    crowd(bench, 8, len(second) - 3)
    assert look(bench, first, second) == Cached(3, 3, 3)
    crowd(bench, 7, 3)
    assert look(bench, first, second) == Cached(0, 0, 0)
    assert bench.output("first") == expected_output(FIRST, 3)
    assert bench.output("second") == expected_output(SECOND, 2)


def test_eviction_takes_the_leaves_in_order_and_then_the_parent() -> None:
    """Page by page: nothing of the second goes before all of the first's leaf has, nothing of X Y Z before both."""
    bench = Bench(total_pages=POOL, page_size=1)
    for name, prompt in (("first", FIRST), ("second", SECOND)):
        bench.submit(name, prompt, max_tokens=0)
        bench.run()
    seen = []
    while bench.cache.evict(1):
        seen.append(look(bench, FIRST, SECOND))
    assert seen == [
        *(Cached(left, 6, 3) for left in (5, 4, 3)),
        *(Cached(3, left, 3) for left in (5, 4, 3)),
        *(Cached(left, left, left) for left in (2, 1, 0)),
    ]


def test_nothing_the_second_reads_goes_while_it_prefills() -> None:
    """Everything is asked of the cache in the middle of the second's prefill; it gives the first's leaf, and the second's
    answer is the undisturbed one."""
    bench = Bench(total_pages=POOL, page_size=1, chunk=1, hold_min=1000)
    bench.submit("first", FIRST, max_tokens=0)
    bench.run()
    bench.submit("second", SECOND, max_tokens=2)
    bench.step()
    assert bench.cache.evict(POOL) == 3
    assert cached_of(bench, FIRST) == 3
    bench.run()
    assert bench.output("second") == expected_output(SECOND, 2)
