"""Any order of pins, removals, expiries, inserts, evictions and flushes agrees with a naive model of them."""

import math

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.pins import PinBudget
from prefixmesh.errors import AccessDeniedError, BudgetError, NotFoundError
from prefixmesh.ids import Namespace
from prefixmesh.tokens import pack
from tests.support.cache_kit import NS_A, NS_B
from tests.support.token_tree import Prefix, TokenTree

PAGE = 2
BUDGET = PinBudget(pages_per_owner=7, pages_in_all=10, pins_per_owner=4, pins_in_all=6)

owners = st.sampled_from(["acme", "globex"])
prompts = st.tuples(
    st.sampled_from([NS_A, NS_A, NS_B]), st.lists(st.sampled_from([0, 0, 1]), min_size=PAGE, max_size=9)
)
Prompt = tuple[Namespace, list[int]]


class PinMachine(RuleBasedStateMachine):
    """A tree that pins, beside a set of cached prefixes and a dictionary of wishes."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = TokenTree(PAGE, BUDGET)
        self.pins = self.tree.pins
        self.cached: set[Prefix] = set()
        self.wishes: dict[tuple[Prefix, str], float] = {}
        """Each with the time of its end."""
        self.now = 0.0

    @initialize(first=prompts, second=prompts, owner=owners)
    def begin_with_something(self, first: Prompt, second: Prompt, owner: str) -> None:
        self.insert(first)
        self.pin(second, owner, None)

    @rule(prompt=prompts)
    def insert(self, prompt: Prompt) -> None:
        self.expire_in_model()
        self.tree.insert(key(prompt), self.now)
        self.cached |= set(prefixes(wish(prompt)))

    @rule(prompt=prompts, owner=owners, ttl=st.sampled_from([None, 1, 2, 5]))
    def pin(self, prompt: Prompt, owner: str, ttl: float | None) -> None:
        self.expire_in_model()
        name = (wish(prompt), owner)
        if name not in self.wishes and not self.fits(owner, len(name[0][1]) // PAGE):
            with pytest.raises(BudgetError, match=owner):
                self.pins.add(key(prompt), owner, self.now, ttl)
            return
        self.wishes[name] = math.inf if ttl is None else self.now + ttl
        status = self.pins.add(key(prompt), owner, self.now, ttl)
        assert status == self.pins.status(key(prompt), owner)

    @rule(prompt=prompts, owner=owners)
    def unpin(self, prompt: Prompt, owner: str) -> None:
        self.remove(wish(prompt), owner)

    @rule(owner=owners, data=st.data())
    def unpin_what_is_pinned(self, owner: str, data: st.DataObject) -> None:
        if self.wishes:
            self.remove(data.draw(st.sampled_from(sorted(self.wishes)))[0], owner)

    @rule(by=st.sampled_from([0, 1, 3]), told=st.booleans())
    def time_passes(self, by: float, told: bool) -> None:
        self.now += by
        if told:
            gone = self.pins.expire(self.now)
            before = set(self.wishes)
            self.expire_in_model()
            assert len(gone) == len(before - set(self.wishes))
            assert [pin.expires_at for pin in gone] == sorted(pin.expires_at or 0.0 for pin in gone)

    @rule(pages=st.integers(1, 8))
    def evict(self, pages: int) -> None:
        protected = self.protected()
        evictable = len(self.cached - protected)
        self.tree.evict(pages)
        left = self.tree.cached()
        assert protected <= left <= self.cached
        assert len(self.cached) - len(left) == min(pages, evictable)
        self.cached = left

    @rule(now=st.sampled_from([False] * 7 + [True]))
    def flush(self, now: bool) -> None:
        if now:
            self.tree.flush()
            self.cached = set()

    @invariant()
    def the_table_agrees_with_itself_and_the_tree(self) -> None:
        self.pins.check_invariants()
        assert self.tree.pinned() == self.pins.pinned_pages

    @invariant()
    def the_table_agrees_with_the_model(self) -> None:
        assert self.tree.cached() == self.cached
        assert self.pins.pinned_pages == len(self.protected())
        assert len(self.pins) == len(self.wishes)
        for (prefix, owner), end in self.wishes.items():
            status = self.pins.status(RadixKey(Namespace(prefix[0]), pack(prefix[1])), owner)
            assert status is not None
            held = len(self.held(prefix)) * PAGE
            assert (status.held_tokens, status.missing_tokens) == (held, len(prefix[1]) - held)
            assert status.expires_at == (None if end == math.inf else end)
            assert status.pages == len(prefix[1]) // PAGE
        assert self.pins.next_expiry == min(self.wishes.values(), default=math.inf)

    def remove(self, prefix: Prefix, owner: str) -> None:
        self.expire_in_model()
        args = RadixKey(Namespace(prefix[0]), pack(prefix[1])), owner, self.now
        if self.wishes.pop((prefix, owner), None) is not None:
            self.pins.remove(*args)
            return
        others = any(pinned == prefix for pinned, _ in self.wishes)
        with pytest.raises(AccessDeniedError if others else NotFoundError):
            self.pins.remove(*args)

    def fits(self, owner: str, pages: int) -> bool:
        sizes = [(pinned_by, len(prefix[1]) // PAGE) for prefix, pinned_by in self.wishes]
        own = [size for pinned_by, size in sizes if pinned_by == owner]
        return (
            sum(own) + pages <= 7
            and sum(size for _, size in sizes) + pages <= 10
            and len(own) < 4
            and len(sizes) < 6
        )

    def expire_in_model(self) -> None:
        self.wishes = {name: end for name, end in self.wishes.items() if end > self.now}

    def held(self, prefix: Prefix) -> set[Prefix]:
        return set(prefixes(prefix)) & self.cached

    def protected(self) -> set[Prefix]:
        return {part for prefix, _ in self.wishes for part in self.held(prefix)}


def key(prompt: Prompt) -> RadixKey:
    return RadixKey(prompt[0], pack(prompt[1]))


def wish(prompt: Prompt) -> Prefix:
    return prompt[0], tuple(prompt[1][: len(prompt[1]) // PAGE * PAGE])


def prefixes(prefix: Prefix) -> list[Prefix]:
    return [(prefix[0], prefix[1][:end]) for end in range(PAGE, len(prefix[1]) + 1, PAGE)]


def run_machine(examples: int, steps: int, *, repeatable: bool) -> None:
    run_state_machine_as_test(
        PinMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=repeatable,
            report_multiple_bugs=False,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_order_of_calls_agrees_with_the_naive_model() -> None:
    """The same few examples each time."""
    run_machine(60, 40, repeatable=True)


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_orders_of_calls_agree_with_the_naive_model() -> None:
    """Many, and others each time."""
    run_machine(2000, 50, repeatable=False)
