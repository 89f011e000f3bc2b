"""Any order of pins, renewals, ends, inserts, evictions and flushes at the engine's desk agrees with a plain dictionary of ids."""

import math
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.pins import PinBudget
from prefixmesh.cache.radix_cache import RadixCache, RadixOptions
from prefixmesh.tokens import count, pack
from prefixmesh.worker.prefix_desk import PrefixDesk
from prefixmesh.worker.prefix_messages import (
    ListPins,
    PinPrefix,
    PrefixAnswer,
    PrefixName,
    UnpinPrefix,
)
from tests.support.cache_kit import NS_A, NS_B, insert_prompt

PAGES = 16
BUDGET = PinBudget(pages_in_all=8, pages_per_owner=5, pins_per_owner=3, pins_in_all=4)

ids = st.sampled_from(["a", "b", "c", "d", "e"])
owners = st.sampled_from(["acme", "globex"])
prompts = st.tuples(
    st.sampled_from([NS_A, NS_A, NS_B]),
    st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=5).map(pack),
).map(lambda drawn: RadixKey(*drawn))


class Known(NamedTuple):
    """What an id stands for in the model, and when it ends."""

    key: RadixKey
    owner: str
    end: float

    @property
    def wish(self) -> tuple[RadixKey, str]:
        return self.key, self.owner


class PinBookMachine(RuleBasedStateMachine):
    """A desk over a real tree of one-token pages, and what a dictionary says that it must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(PAGES)
        self.cache = RadixCache(self.allocator, 1, RadixOptions(block_size=2, pin_budget=BUDGET))
        self.desk = PrefixDesk(self.cache)
        self.known: dict[str, Known] = {}
        self.now = 0.0
        self.seen: tuple[int, object] = (0, [])

    @rule(pin_id=ids, key=prompts, owner=owners, ttl=st.sampled_from([0.0, 1.0, 2.0, 5.0]))
    def pin(self, pin_id: str, key: RadixKey, owner: str, ttl: float) -> None:
        self.end_in_model()
        wanted = Known(key, owner, self.now + ttl if ttl else math.inf)
        known = self.known.get(pin_id)
        command = PinPrefix(question=1, pin_id=pin_id, prefix=PrefixName(*key), owner=owner, ttl_s=ttl)
        answer = self.ask(command)
        if known is not None and known.wish != wanted.wish:
            assert (answer.error, answer.field) == ("invalid", "pin_id")
        elif not self.fits(wanted):
            assert answer.error == "over_budget"
        else:
            assert answer.error is None, answer
            assert answer.made == (known is None)
            self.known[pin_id] = wanted

    @rule(data=st.data(), ttl=st.sampled_from([0.0, 1.0, 2.0, 5.0]), same_id=st.booleans(), pin_id=ids)
    def pin_again(self, data: st.DataObject, ttl: float, same_id: bool, pin_id: str) -> None:
        """What somebody has pinned, by its own id or by one more."""
        if self.known:
            other = data.draw(st.sampled_from(sorted(self.known)))
            known = self.known[other]
            self.pin(other if same_id else pin_id, known.key, known.owner, ttl)

    @rule(pin_id=ids)
    def unpin(self, pin_id: str) -> None:
        self.end_in_model()
        answer = self.ask(UnpinPrefix(question=1, pin_id=pin_id))
        assert bool(answer.pins) == (self.known.pop(pin_id, None) is not None)

    @rule(by=st.sampled_from([0.5, 1.0, 3.0]), told=st.booleans())
    def time_passes(self, by: float, told: bool) -> None:
        """The engine's loop looks at the clock, or something else comes first."""
        self.now += by
        if told:
            self.desk.expire(self.now)
            self.end_in_model()

    @rule(key=prompts)
    def insert(self, key: RadixKey) -> None:
        """A prompt is computed; what is in the way and may go is evicted for it. The tree lets go of what has ended by itself."""
        tokens = [int(token) for token in memoryview(key.tokens).cast("I")]
        missing = len(tokens) - self.allocator.free_pages
        if missing > 0:
            self.cache.evict(missing)
        insert_prompt(self.cache, self.allocator, tokens, namespace=key.namespace, now=self.now)
        self.end_in_model()

    @rule(pages=st.integers(1, PAGES))
    def evict(self, pages: int) -> None:
        self.cache.evict(pages)

    @rule()
    def flush(self) -> None:
        self.cache.flush()
        assert self.allocator.free_pages == PAGES

    @rule()
    def evict_all_that_may_go(self) -> None:
        """What is left is what the pins hold, and nothing else: no lock of an id that has gone, none twice."""
        self.desk.expire(self.now)
        self.end_in_model()
        self.cache.evict(PAGES)
        prefixes = {
            (known.key.namespace, known.key.tokens[: 4 * tokens])
            for known in self.known.values()
            for tokens in range(1, self.cache.peek(known.key) + 1)
        }
        assert self.allocator.free_pages == PAGES - len(prefixes)

    @invariant()
    def the_list_is_the_dictionary(self) -> None:
        """Looked at without asking the desk, which would let go of what has ended."""
        listed = self.desk._pins.pins() if self.desk._pins is not None else []
        told = {one.pin_id: (one.status.owner, one.status.expires_at or math.inf) for one in listed}
        assert told == {pin_id: (known.owner, known.end) for pin_id, known in self.known.items()}
        for one in listed:
            key = self.known[one.pin_id].key
            assert one.status.held_tokens == self.cache.peek(key)
            assert one.status.pages == count(key.tokens)
        counts = self.desk.counts()
        charged = {known.wish for known in self.known.values()}
        assert counts.charged_pages == sum(count(key.tokens) for key, _ in charged)
        self.version_tells(counts.version, listed)

    def version_tells(self, version: int, listed: object) -> None:
        before, was = self.seen
        assert version >= before
        assert version > before or listed == was, "something changed, and the version did not tell"
        self.seen = version, listed

    def fits(self, wanted: Known) -> bool:
        wishes = {known.wish for known in self.known.values()}
        if wanted.wish in wishes:
            return True
        mine = [key for key, owner in wishes if owner == wanted.owner]
        pages = count(wanted.key.tokens)
        return (
            len(mine) < 3
            and len(wishes) < 4
            and sum(count(key.tokens) for key in mine) + pages <= 5
            and sum(count(key.tokens) for key, _ in wishes) + pages <= 8
        )

    def end_in_model(self) -> None:
        self.known = {pin_id: known for pin_id, known in self.known.items() if known.end > self.now}

    def ask(self, command: PinPrefix | UnpinPrefix | ListPins) -> PrefixAnswer:
        answer = self.desk.handle(command, self.now)
        self.desk.check_invariants()
        self.cache.check_invariants()
        return answer


def run(examples: int, steps: int, **more: Any) -> None:
    how = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        **more,
    )
    run_state_machine_as_test(PinBookMachine, settings=how)


def test_the_desk_agrees_with_a_dictionary_of_ids() -> None:
    run(examples=25, steps=25)


@pytest.mark.deep
@pytest.mark.slow
def test_the_desk_agrees_with_a_dictionary_of_ids_in_long_runs() -> None:
    run(examples=300, steps=60)
