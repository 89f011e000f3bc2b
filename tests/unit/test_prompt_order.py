"""The rows of who waits and prefills, against the slow truth: every pair of prompts compared, every cached prefix kept as a set."""

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.cache.base import RadixKey
from prefixmesh.ids import Namespace
from prefixmesh.worker.prompt_order import PromptOrder, Role, shared_tokens
from prefixmesh.worker.request import Request
from tests.support.scheduling import NAMESPACE_A, NAMESPACE_B, make_request

PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=9)
TAILS = [Namespace(tail * 16) for tail in (b"s", b"t", b"u")]
PLACES = [
    RadixKey(Namespace(NAMESPACE_A), b""),
    RadixKey(Namespace(NAMESPACE_B), b""),
    RadixKey(Namespace(NAMESPACE_A), b"", 2, TAILS[0]),
    RadixKey(Namespace(NAMESPACE_A), b"", 2, TAILS[1]),
    RadixKey(Namespace(NAMESPACE_A), b"", 4, TAILS[2]),
]
"""Where KV may live: in two namespaces, and behind two public prefixes of one of them."""

PAIRS = st.tuples(PROMPTS, st.sampled_from([*PLACES, PLACES[0]]))
Path = list[tuple[bool, bytes, int]]


def path_of(request: Request) -> Path:
    """Each token with the namespace it lives in, where that is not the root; tails come first."""
    boundary = request.boundary_tokens or request.length
    known = request.ids[: request.length].tolist()
    public: Path = [(True, b"", token) for token in known[:boundary]]
    return public + [(False, request.tail, token) for token in known[boundary:]]


def naive_shared(one: Request, other: Request) -> int:
    if one.root != other.root:
        return 0
    for count, (mine, theirs) in enumerate(zip(path_of(one), path_of(other), strict=False)):
        if mine != theirs:
            return count
    return min(one.length, other.length)


def placed(request: Request, place: RadixKey) -> Request:
    request.live_under(place)
    return request


def fill(order: PromptOrder, prompts: list[tuple[list[int], RadixKey]], page_size: int = 1) -> list[Request]:
    requests = [
        placed(make_request(prompt, number=number, page_size=page_size), place)
        for number, (prompt, place) in enumerate(prompts, 1)
    ]
    for request in requests:
        order.add(request, Role.WAITING, 0, 0)
    return requests


def check_rows(order: PromptOrder, requests: list[Request]) -> None:
    rows = [order.request_at(row) for row in range(len(order))]
    keys = [(request.root, path_of(request)) for request in rows]
    assert keys == sorted(keys)
    assert {request.number for request in rows} == {request.number for request in requests}
    assert order.numbers.tolist() == [request.number for request in rows]
    assert order.common.tolist() == [
        naive_shared(rows[row - 1], request) if row else 0 for row, request in enumerate(rows)
    ]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(prompts=st.lists(PAIRS, max_size=12), data=st.data())
def test_rows_are_sorted_and_know_what_neighbours_share(
    prompts: list[tuple[list[int], RadixKey]], data: st.DataObject
) -> None:
    """Whatever comes and goes, in whichever order."""
    order = PromptOrder(1)
    requests = fill(order, prompts)
    check_rows(order, requests)
    while requests:
        leaving = requests.pop(data.draw(st.integers(0, len(requests) - 1)))
        order.remove(leaving)
        order.remove(leaving)
        check_rows(order, requests)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    prompts=st.lists(PAIRS, min_size=2, max_size=10),
    page_size=st.sampled_from([1, 2]),
    holders=st.sets(st.integers(0, 9), max_size=3),
    offered=st.integers(0, 4),
    min_tokens=st.integers(1, 4),
)
def test_who_is_held_is_who_would_find_enough(
    prompts: list[tuple[list[int], RadixKey]],
    page_size: int,
    holders: set[int],
    offered: int,
    min_tokens: int,
) -> None:
    """By comparing each with each holder."""
    order = PromptOrder(page_size)
    requests = fill(order, prompts, page_size)
    holding = [request for index, request in enumerate(requests) if index in holders]
    for holder in holding:
        order.set_role(holder, Role.PREFILLING)
        holder.shared_pages = min(offered, holder.length // page_size)

    def waits(request: Request, holder: Request) -> bool:
        limit = (request.length - 1) // page_size * page_size
        promised = min(naive_shared(request, holder) // page_size * page_size, limit)
        gain = promised - holder.shared_pages * page_size
        return gain >= min_tokens or (gain > 0 and promised == limit)

    held = order.held(holding, min_tokens)
    for request in requests:
        expected = request not in holding and any(waits(request, holder) for holder in holding)
        assert held[order.row_of(request)] == expected


class SlowCache:
    """Cached prefixes, each kept whole; a page at a time."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.prefixes: set[tuple[bytes, tuple[tuple[bool, bytes, int], ...]]] = set()

    def insert(self, request: Request, size_tokens: int) -> None:
        for end in range(self._page_size, size_tokens + 1, self._page_size):
            self.prefixes.add((request.root, tuple(path_of(request)[:end])))

    def drop(self, index: int) -> None:
        """A leaf."""
        leaves = sorted(
            (namespace, tokens)
            for namespace, tokens in self.prefixes
            if not any(
                n == namespace and t[: len(tokens)] == tokens and len(t) > len(tokens)
                for n, t in self.prefixes
            )
        )
        if leaves:
            self.prefixes.remove(leaves[index % len(leaves)])

    def peek(self, request: Request) -> int:
        size = 0
        limit = (request.length - 1) // self._page_size * self._page_size
        while size < limit:
            longer = tuple(path_of(request)[: size + self._page_size])
            if (request.root, longer) not in self.prefixes:
                break
            size += self._page_size
        return size


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    prompts=st.lists(PAIRS, min_size=2, max_size=8),
    page_size=st.sampled_from([1, 2]),
    acts=st.lists(
        st.tuples(st.sampled_from(["offer", "offer", "drop", "look"]), st.integers(0, 7), st.integers(0, 9)),
        max_size=12,
    ),
    stranger=PAIRS,
)
def test_what_is_thought_to_be_cached_is_never_too_little(
    prompts: list[tuple[list[int], RadixKey]],
    page_size: int,
    acts: list[tuple[str, int, int]],
    stranger: tuple[list[int], RadixKey],
) -> None:
    """Exact while things only come; after evictions too much at most, and exact again for whoever is looked at."""
    order, cache = PromptOrder(page_size), SlowCache(page_size)
    requests = fill(order, prompts, page_size)
    outsider = placed(make_request(stranger[0], number=99, page_size=page_size), stranger[1])
    evicted = False
    for act, who, size in acts:
        request = [*requests, outsider][who % (len(requests) + 1)]
        if act == "offer":
            begin = cache.peek(request)
            end = max(begin, min(size, request.length) // page_size * page_size)
            cache.insert(request, end)
            order.offered(request, begin, end)
            if request is not outsider:
                row = order.row_of(request)
                order.found(row, cache.peek(request))
        elif act == "drop":
            cache.drop(size)
            evicted = True
        elif request is not outsider:
            row = order.row_of(request)
            order.found(row, cache.peek(request))
            assert order.cached_tokens(request) == cache.peek(request)
        for other in requests:
            if evicted:
                assert order.cached_tokens(other) >= cache.peek(other)
            else:
                assert order.cached_tokens(other) == cache.peek(other)


def test_one_look_tells_all_relatives_what_is_gone() -> None:
    """A shared prefix was evicted: the thousand others that share it are not looked at one by one."""
    order = PromptOrder(1)
    prefix = list(range(20))
    requests = fill(order, [([*prefix, i % 50, i // 50], PLACES[0]) for i in range(1000)])
    order.offered(make_request(prefix), 0, 20)
    assert {order.cached_tokens(request) for request in requests} == {20}
    order.found(order.row_of(requests[500]), 5)
    assert {order.cached_tokens(request) for request in requests} == {5}


def test_namespaces_share_nothing() -> None:
    one, other = make_request([1, 2, 3]), make_request([1, 2, 3], namespace=NAMESPACE_B)
    assert (shared_tokens(one, one), shared_tokens(one, other)) == (3, 0)


def test_behind_a_public_prefix_only_one_tail_goes_on_together() -> None:
    """Two tenants share what is public, and not the equal tokens behind it; whoever stays public shares no tail's."""
    prompt = [1, 2, 3, 4, 5]
    acme, globex, longer = (placed(make_request(prompt), place) for place in PLACES[2:])
    pin = make_request(prompt)
    assert [shared_tokens(acme, other) for other in (acme, globex, longer, pin)] == [5, 2, 2, 2]
    assert (shared_tokens(longer, pin), shared_tokens(longer, globex)) == (4, 2)
