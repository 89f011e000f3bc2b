"""Public and private prompts in any mix, beside a set of whole token tuples: what matches, what is chosen, who pays."""

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.cache.base import RadixKey
from prefixmesh.tokens import unpack
from tests.support.cache_kit import take
from tests.support.public_kit import ACME, GLOBEX, PUBLIC, Shape, Worker, cut, tenant

Space = tuple[bytes, bytes]


class Naive:
    """Every cached page by (where it lives, all tokens up to its end): a set, and nothing else."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.cached: set[tuple[Space, tuple[int, ...]]] = set()

    def ends(self, key: RadixKey) -> list[tuple[Space, tuple[int, ...]]]:
        """All whole pages of a key, first to last."""
        tokens = tuple(unpack(key.tokens).tolist())
        ends = range(self.page, len(tokens) + 1, self.page)
        behind = (key.namespace, key.tail)
        front = (key.namespace, b"")
        at = key.boundary_tokens
        return [(behind if at and end > at else front, tokens[:end]) for end in ends]

    def matched(self, key: RadixKey) -> int:
        """Tokens of the leading pages that are cached."""
        found = 0
        for end in self.ends(key):
            if end not in self.cached:
                break
            found += self.page
        return found


SMALL_SHAPES = [Shape(1, 2), Shape(2, 2), Shape(4, 2), Shape(2, 3), Shape(1, 1)]


class Mix:
    """Prompts of three tenants and of the administrator over two token ids, beside the naive set."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.shape = data.draw(st.sampled_from(SMALL_SHAPES))
        self.worker, self.naive = Worker(self.shape, pages=120), Naive(self.shape.page)
        stems = st.lists(st.integers(0, 1), max_size=3 * self.shape.unit)
        self.stems = data.draw(st.lists(stems, max_size=4), label="pinned")
        long_enough = [stem for stem in self.stems if len(stem) >= self.shape.unit]
        self.pins = [(self.worker.prefix(stem), stem) for stem in long_enough]
        self.keys: list[RadixKey] = []

    def request(self) -> tuple[bytes, RadixKey]:
        """Somebody's prompt with some of the pins in its ticket, and the key that it chooses, which the set finds best too."""
        who = self.data.draw(st.sampled_from([ACME, GLOBEX, tenant("other"), PUBLIC]))
        rest = st.lists(st.integers(0, 1), max_size=2 * self.shape.unit)
        tokens = [*self.data.draw(st.sampled_from([[], *self.stems])), *self.data.draw(rest)]
        pins = self.data.draw(st.sampled_from([self.pins, self.pins[:1], []])) if who != PUBLIC else []
        key = self.worker.key(who, tokens, [prefix for prefix, _ in pins])
        possible = [RadixKey(who, key.tokens)]
        for prefix, stem in pins:
            if tokens[: prefix.boundary_tokens] == stem[: prefix.boundary_tokens]:
                possible.append(prefix.key(who, key.tokens))
        best = max(possible, key=lambda other: (self.naive.matched(other), other.boundary_tokens))
        assert key == best
        self.keys.append(key)
        return who, key

    def evict(self, pages: int) -> None:
        """The set keeps what the tree can still be asked for."""
        self.worker.cache.evict(pages)
        left: set[tuple[Space, tuple[int, ...]]] = set()
        for key in self.keys:
            left.update(self.naive.ends(key)[: self.worker.cache.peek(key) // self.shape.page])
        assert len(left) == len(self.worker.cache.owned_pages())
        assert left <= self.naive.cached
        self.naive.cached = left

    def step(self) -> None:
        """One request, and what becomes of it."""
        who, key = self.request()
        assert self.worker.matched(key) == self.naive.matched(key)
        match self.data.draw(st.sampled_from(["compute", "compute", "chunk", "duplicate", "look", "evict"])):
            case "look":
                return
            case "evict":
                self.evict(self.data.draw(st.integers(0, 6)))
                return
            case "chunk":
                key = cut(key, self.data.draw(st.integers(0, len(key.tokens) // 4)))
                self.worker.compute(key, who.hex())
            case "duplicate":
                pages = take(self.worker.pool, len(key.tokens) // 4 // self.shape.page)
                self.worker.cache.insert(key, pages, 0.0, owner=who.hex())
            case _:
                self.worker.compute(key, who.hex())
        ends = self.naive.ends(key)
        self.naive.cached.update(ends)
        assert self.worker.matched(key) == len(ends) * self.shape.page


@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_public_and_private_prompts_in_any_mix_match_what_a_set_says(data: st.DataObject) -> None:
    """Candidates as tickets carry them; matches, inserts whole, in chunks and with duplicates, evictions."""
    mix = Mix(data)
    for _ in range(data.draw(st.integers(1, 20))):
        mix.step()
        if mix.worker.pool.free_pages < 40:
            mix.evict(40)
    own = [space for space, _ in mix.naive.cached if space != (PUBLIC, b"")]
    paid = mix.worker.paid_by("") + mix.worker.paid_by(PUBLIC.hex())
    assert paid == len(mix.naive.cached) - len(own)
    for who in (ACME, GLOBEX):
        tails = {prefix.key(who, b"").tail for prefix, _ in mix.pins}
        spaces = [space for space in own if space[0] == who or space[1] in tails]
        assert mix.worker.paid_by(who.hex()) == len(spaces)
