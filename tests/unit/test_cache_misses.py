"""Why a token was not found: every cause, on a cache of nothing but sets."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.cache.ledger import Lookup, Misses
from prefixmesh.cache.misses import MissFinder, classify, last_fingerprint, missed_fingerprints
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import RadixCache, RadixOptions
from prefixmesh.cache.seen_blocks import SeenBlocks
from prefixmesh.errors import InternalError
from prefixmesh.ids import Fingerprint, Namespace
from prefixmesh.tokens import pack
from tests.support.cache_kit import NS_A, NS_B, insert_prompt, key_of, take

BLOCK = 4
TAIL = Namespace(b"t" * 16)
TOKENS = list(range(100, 120))
"""Five blocks."""


class FakeCache:
    """Prompts per namespace; tells ``seen`` what a radix tree would tell."""

    def __init__(self) -> None:
        self.prompts: dict[Namespace, bytes] = {}
        self.seen = SeenBlocks(BLOCK)
        self.finder = MissFinder(self.peek, self.seen)
        self.peeks = 0

    def store(self, tokens: list[int], namespace: Namespace) -> None:
        self.prompts[namespace] = pack(tokens)
        names = block_fingerprints(namespace, pack(tokens), BLOCK)
        if names:
            self.seen.first_stored(namespace, pack(tokens[:BLOCK]), names[0])

    def evict(self, namespace: Namespace, keep: int = 0) -> None:
        """Down to ``keep`` tokens, from the end."""
        packed = self.prompts[namespace]
        self.prompts[namespace] = packed[: keep * 4]
        self.seen.left(keep, block_fingerprints(namespace, packed, BLOCK)[keep // BLOCK :])

    def flush(self) -> None:
        self.prompts.clear()
        self.seen.cleared()

    def peek(self, key: RadixKey) -> int:
        self.peeks += 1
        held = self.prompts.get(key.namespace, b"")
        length = 0
        while key.tokens[: (length + 1) * 4] == held[: (length + 1) * 4] and length * 4 < len(held):
            length += 1
        return length

    def misses(self, tokens: list[int], namespace: Namespace = NS_A) -> Misses:
        """As a request would ask, page size 1: all but the last token."""
        key = key_of(tokens[:-1], namespace)
        found = self.peek(key)
        self.peeks = 0
        lookup = self.finder.explain(key, len(tokens), found)
        assert lookup[:3] == (len(tokens), found, 0)
        assert sum(lookup.misses) == len(tokens) - found
        return lookup.misses


def test_what_was_never_cached_was_never_seen() -> None:
    assert FakeCache().misses(TOKENS) == Misses(never_seen=19, tail=1)


def test_the_last_token_and_what_is_short_of_a_page_are_the_tail() -> None:
    """Also when everything that can be cached is."""
    cache = FakeCache()
    cache.store(TOKENS, NS_A)
    assert cache.misses(TOKENS) == Misses(tail=1)
    assert cache.finder.explain(key_of(TOKENS[:16]), 19, 16).misses == Misses(tail=3)


def test_what_was_evicted_before_it_was_asked_for_again_is_told() -> None:
    """Up to the last whole block, and the piece after it, which has no name of its own."""
    cache = FakeCache()
    cache.store(TOKENS, NS_A)
    cache.evict(NS_A)
    assert cache.misses(TOKENS) == Misses(evicted=19, tail=1)
    assert cache.misses([*TOKENS[:8], 1, 2, 3, 4, 5]) == Misses(evicted=8, never_seen=4, tail=1)


def test_a_trimmed_prompt_lacks_only_its_end() -> None:
    """The block that the cut goes through was evicted; the part of it that is left is found."""
    cache = FakeCache()
    cache.store(TOKENS, NS_A)
    cache.evict(NS_A, keep=6)
    assert cache.misses(TOKENS) == Misses(evicted=13, tail=1)


def test_eviction_in_another_namespace_explains_nothing_here() -> None:
    """Equal tokens have other names there."""
    cache = FakeCache()
    cache.store(TOKENS, NS_B)
    cache.evict(NS_B)
    assert cache.misses(TOKENS) == Misses(never_seen=19, tail=1)


def test_equal_tokens_in_another_namespace_are_told() -> None:
    """As far as they are equal, which is to the token; own evictions come first."""
    cache = FakeCache()
    cache.store(TOKENS[:10], NS_B)
    assert cache.misses(TOKENS) == Misses(other_namespace=10, never_seen=9, tail=1)
    cache.store(TOKENS[:8], NS_A)
    assert cache.misses(TOKENS) == Misses(other_namespace=2, never_seen=9, tail=1)
    cache.evict(NS_A)
    assert cache.misses(TOKENS) == Misses(evicted=8, other_namespace=2, never_seen=9, tail=1)


def test_a_namespace_that_has_lost_the_first_block_is_not_asked() -> None:
    """Nor is one whose prompt begins otherwise, or the request's own."""
    cache = FakeCache()
    cache.store(TOKENS, NS_B)
    cache.evict(NS_B)
    cache.store([1, *TOKENS], NS_B)
    cache.store([*TOKENS[:4], 9, 9], NS_A)
    assert cache.misses(TOKENS) == Misses(never_seen=15, tail=1)
    assert cache.peeks == 0


def test_few_namespaces_are_asked_however_many_hold_the_tokens() -> None:
    """The ones that stored them last; and none after one that holds all."""
    cache = FakeCache()
    others = [Namespace(bytes([number]) * 16) for number in range(20)]
    for namespace in others:
        cache.store(TOKENS[:8], namespace)
    assert cache.misses(TOKENS) == Misses(other_namespace=8, never_seen=11, tail=1)
    assert cache.peeks == 8
    cache.store(TOKENS, others[0])
    assert cache.misses(TOKENS) == Misses(other_namespace=19, tail=1)
    assert cache.peeks == 1


def test_the_longest_match_elsewhere_counts() -> None:
    """Not the one stored last."""
    cache = FakeCache()
    cache.store(TOKENS[:10], NS_B)
    cache.store(TOKENS[:6], TAIL)
    assert cache.misses(TOKENS) == Misses(other_namespace=10, never_seen=9, tail=1)


def test_a_flush_explains_nothing() -> None:
    """It is no eviction, and other namespaces have lost their KV too."""
    cache = FakeCache()
    cache.store(TOKENS, NS_A)
    cache.store(TOKENS, NS_B)
    cache.evict(NS_A)
    cache.flush()
    assert cache.misses(TOKENS) == Misses(never_seen=19, tail=1)


def test_a_prefix_shorter_than_a_block_leaves_no_trace() -> None:
    cache = FakeCache()
    cache.store(TOKENS[:3], NS_A)
    cache.store(TOKENS[:3], NS_B)
    cache.evict(NS_A)
    assert cache.misses(TOKENS[:4]) == Misses(never_seen=3, tail=1)


def test_a_cache_that_tells_nothing_explains_nothing() -> None:
    """Hash and off: all that is missed but the tail was never seen."""
    finder = MissFinder(lambda key: 99, None)
    assert finder.explain(key_of(TOKENS[:16]), 20, 4, 8) == Lookup(20, 4, 8, Misses(never_seen=4, tail=4))


def test_what_the_host_holds_is_found() -> None:
    cache = FakeCache()
    cache.store(TOKENS, NS_A)
    cache.evict(NS_A)
    lookup = cache.finder.explain(key_of(TOKENS[:19]), 20, 4, 8)
    assert lookup == Lookup(20, 4, 8, Misses(evicted=7, tail=1))


def test_what_was_fetched_from_the_disk_is_found() -> None:
    """It is on the device by then, and told apart from what was there before."""
    cache = FakeCache()
    cache.store(TOKENS, NS_A)
    cache.evict(NS_A)
    lookup = cache.finder.explain(key_of(TOKENS[:19]), 20, 4, disk_tokens=8)
    assert lookup == Lookup(20, 4, 0, Misses(evicted=7, tail=1), disk_tokens=8)
    assert cache.finder.explain(key_of(TOKENS[:19]), 20, 4, disk_tokens=15).misses == Misses(tail=1)


@pytest.mark.parametrize(
    ("prompt", "device", "host", "disk"),
    [(20, 15, 5, 0), (20, -1, 5, 0), (20, 5, -1, 0), (18, 5, 0, 0), (20, 10, 5, 5), (20, 5, 5, -1)],
)
def test_more_found_than_asked_for_is_refused(prompt: int, device: int, host: int, disk: int) -> None:
    with pytest.raises(InternalError):
        FakeCache().finder.explain(key_of(TOKENS[:19]), prompt, device, host, disk_tokens=disk)


def test_behind_a_boundary_the_tail_has_its_own_names() -> None:
    """What was evicted from the private tail, or from the public prefix, is recognised by its part's namespace."""
    cache = FakeCache()
    key = RadixKey(NS_B, pack(TOKENS), 8, TAIL)
    tail = block_fingerprints(TAIL, pack(TOKENS[8:]), BLOCK)
    cache.seen.left(8, tail[1:])
    # Its parent would have gone later, and is not remembered: then nobody asks for what lies behind it.
    assert cache.finder.explain(key, 21, 8).misses == Misses(never_seen=12, tail=1)
    cache.seen.left(8, tail[:1])
    assert cache.finder.explain(key, 21, 8).misses == Misses(evicted=12, tail=1)
    cache.seen.left(0, block_fingerprints(NS_B, pack(TOKENS[:8]), BLOCK))
    assert cache.finder.explain(key, 21, 0).misses == Misses(evicted=20, tail=1)
    cache.store(TOKENS[:10], NS_A)
    assert cache.finder.explain(key, 21, 0).misses == Misses(evicted=20, tail=1)
    cache.seen.evicted.clear()
    assert cache.finder.explain(key, 21, 0).misses == Misses(other_namespace=10, never_seen=10, tail=1)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    length=st.integers(0, 20),
    found=st.integers(0, 20),
    boundary=st.integers(0, 4),
    block_size=st.integers(1, 4),
)
def test_the_names_of_what_was_missed_need_not_hash_what_was_found(
    length: int, found: int, boundary: int, block_size: int
) -> None:
    """From the last block found on, or from nothing: the same names, also across a boundary."""
    boundary = min(boundary, length // block_size) * block_size
    packed = pack(TOKENS[:length])
    key = RadixKey(NS_A, packed, boundary, TAIL) if boundary else RadixKey(NS_A, packed)
    cut = boundary * 4
    names = [
        *block_fingerprints(NS_A, packed[:cut], block_size),
        *block_fingerprints(TAIL, packed[cut:], block_size),
    ]
    if not boundary:
        names = block_fingerprints(NS_A, packed, block_size)
    found = min(found, length)
    before = found // block_size
    last_block = names[before - 1] if before else None
    assert missed_fingerprints(key, found, block_size) == names[before:]
    assert missed_fingerprints(key, found, block_size, last_block) == names[before:]


class Node:
    """As much of a tree's node as the way up needs."""

    def __init__(self, parent: "Node | None", *hash_value: int) -> None:
        self.parent = parent
        self.hash_value = hash_value


def test_the_last_block_found_may_end_further_up() -> None:
    """An edge in which no block ends tells nothing; the root has none."""
    root = Node(None)
    deep = Node(Node(Node(root, 1, 2)))
    assert last_fingerprint(deep) == 2  # type: ignore[arg-type]
    assert last_fingerprint(Node(root)) is None  # type: ignore[arg-type]


@st.composite
def situations(draw: st.DrawFn) -> dict[str, int | set[int]]:
    block_size = draw(st.integers(1, 4))
    key_tokens = draw(st.integers(0, 14))
    return {
        "block_size": block_size,
        "key_tokens": key_tokens,
        "prompt_tokens": key_tokens + draw(st.integers(1, 4)),
        "found_tokens": draw(st.integers(0, key_tokens)),
        "other": draw(st.integers(0, 16)),
        "evicted": draw(st.sets(st.integers(0, key_tokens // block_size))),
    }


@settings(derandomize=True, max_examples=500, deadline=None)
@given(situations())
def test_the_causes_are_those_of_each_token(situation: dict[str, int]) -> None:
    """Against the rule said token by token; block *i*'s name is *i*."""
    block_size, key_tokens, found = (situation[name] for name in ("block_size", "key_tokens", "found_tokens"))
    evicted: set[Fingerprint] = situation["evicted"]  # type: ignore[assignment]
    whole = key_tokens // block_size
    missed_blocks = range(found // block_size, whole)
    expected = [0, 0, 0, situation["prompt_tokens"] - key_tokens]
    for token in range(found, key_tokens):
        block = min(token // block_size, whole - 1)
        if block in missed_blocks and block in evicted:
            expected[1] += 1
        elif token < situation["other"]:
            expected[2] += 1
        else:
            expected[0] += 1
    misses = classify(
        prompt_tokens=situation["prompt_tokens"],
        key_tokens=key_tokens,
        found_tokens=found,
        block_size=block_size,
        fingerprints=[Fingerprint(block) for block in missed_blocks],
        evicted=evicted,
        other_namespace_tokens=situation["other"],
    )
    assert misses == Misses(*expected)


def ask(cache: RadixCache, key: RadixKey) -> Misses:
    """What a request with one token more than ``key`` would record; the same with and without the last block's name."""
    finder = MissFinder(cache.peek, cache.seen)
    match = cache.match_prefix(key, 0.0)
    found = match.matched_tokens, match.host_hit_length
    lookup = finder.explain(key, len(key.tokens) // 4 + 1, *found, last_fingerprint(match.last_host_node))
    assert lookup == finder.explain(key, len(key.tokens) // 4 + 1, *found)
    return lookup.misses


def test_a_radix_cache_tells_what_is_needed() -> None:
    """Each cause as the tree itself brings it about, a trim and a flush among them."""
    allocator = PageAllocator(100)
    cache = RadixCache(allocator, 1, RadixOptions(block_size=BLOCK))
    insert_prompt(cache, allocator, TOKENS, namespace=NS_A)
    cache.evict(5)
    assert ask(cache, key_of(TOKENS)) == Misses(evicted=5, tail=1)
    assert ask(cache, key_of([*TOKENS[:10], 1, 2, 3])) == Misses(never_seen=3, tail=1)
    insert_prompt(cache, allocator, TOKENS[:9], namespace=NS_B)
    assert ask(cache, key_of(TOKENS, NS_B)) == Misses(other_namespace=6, never_seen=5, tail=1)
    cache.evict(100)
    assert ask(cache, key_of(TOKENS, NS_B)) == Misses(evicted=8, never_seen=12, tail=1)
    cache.flush()
    assert ask(cache, key_of(TOKENS)) == Misses(never_seen=20, tail=1)
    cache.check_invariants()


def test_a_radix_cache_tells_of_private_tails() -> None:
    """A tail that was evicted is EVICTED, and the public prefix before it is found."""
    allocator = PageAllocator(100)
    cache = RadixCache(allocator, 2, RadixOptions(block_size=BLOCK))
    key = RadixKey(NS_B, pack(TOKENS), 8, TAIL)
    cache.insert(key, take(allocator, 10), 0.0)
    assert ask(cache, key) == Misses(tail=1)
    cache.evict(4)
    assert ask(cache, key) == Misses(evicted=8, tail=1)
    assert ask(cache, key._replace(tail=NS_A)) == Misses(never_seen=12, tail=1)
    assert ask(cache, key_of(TOKENS)) == Misses(other_namespace=8, never_seen=12, tail=1)


prompts = st.tuples(st.sampled_from([NS_A, NS_B]), st.lists(st.integers(0, 1), max_size=12))


@settings(derandomize=True, max_examples=150, deadline=None)
@given(
    sizes=st.sampled_from([(1, 2), (2, 2), (2, 4), (3, 3)]),
    steps=st.lists(st.tuples(prompts, st.integers(0, 4)), max_size=25),
)
def test_evicted_is_what_was_inserted_once_and_is_missed(
    sizes: tuple[int, int], steps: list[tuple[tuple[Namespace, list[int]], int]]
) -> None:
    """In any order of inserts, splits and evictions; the model is the set of all whole blocks' prefixes ever inserted."""
    page_size, block_size = sizes
    allocator = PageAllocator(200)
    cache = RadixCache(allocator, page_size, RadixOptions(block_size=block_size))
    ever: set[tuple[Namespace, tuple[int, ...]]] = set()
    for (namespace, tokens), pages in steps:
        whole = len(tokens) // page_size * page_size
        key = key_of(tokens[:whole], namespace)
        found = cache.peek(key)
        ends = range((found // block_size + 1) * block_size, whole + 1, block_size)
        known = {end for end in ends if (namespace, tuple(tokens[:end])) in ever}
        blocks = [
            min((token // block_size + 1) * block_size, ends[-1]) if ends else 0
            for token in range(found, whole)
        ]
        assert ask(cache, key).evicted == sum(end in known for end in blocks)
        insert_prompt(cache, allocator, tokens, namespace=namespace)
        ever |= {(namespace, tuple(tokens[:end])) for end in range(block_size, whole + 1, block_size)}
        cache.evict(pages)
        cache.check_invariants()
