"""F38 with owners: whoever pays, whatever floors and ceilings there are, exactly the naive model's pages go."""

from collections import Counter
from collections.abc import Callable
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from prefixmesh.cache.base import InsertResult
from prefixmesh.cache.node import TreeNode
from prefixmesh.cache.owners import Quota
from prefixmesh.cache.radix_cache import RadixCache, RadixOptions
from prefixmesh.cache.tier import Tier
from prefixmesh.cache.transfers import Copy as CopyInFlight
from prefixmesh.cache.transfers import Fetch
from tests.support.cache_machine import MORE_THAN_ALL, CacheMachine, as_pages
from tests.support.machine_runs import run_machine, run_rounds
from tests.support.naive_quotas import NaiveQuotas
from tests.support.naive_tiers import Prefix, Prompt
from tests.support.tier_machine import POLICIES, Job, TierMachine
from tests.support.tier_machine_prompts import all_prompts
from tests.support.tree_reader import read_tree

OWNERS = ("", "acme", "globex", "initech")
OWNER = st.sampled_from(OWNERS)
QUOTAS: list[dict[str, Quota]] = [
    {"acme": Quota(floor_pages=4)},
    {"acme": Quota(floor_pages=3, ceiling_pages=6), "globex": Quota(ceiling_pages=4)},
    {"acme": Quota(ceiling_pages=2), "globex": Quota(ceiling_pages=3), "": Quota(floor_pages=3)},
    {"acme": Quota(floor_pages=5), "globex": Quota(floor_pages=5), "initech": Quota(ceiling_pages=0)},
]

DEPTH = {
    "a floor kept something": 20,
    "one above its ceiling gave": 20,
    "somebody at its ceiling gave its own": 5,
    "something passed over for what continues it": 20,
}


class QuotaMachine(CacheMachine):
    """Owners take turns; anybody's tokens may continue anybody else's."""

    block_size: ClassVar[int] = 2
    cache: RadixCache
    model: NaiveQuotas

    def make_cache(self, data: st.DataObject) -> None:
        policy = data.draw(POLICIES)
        quotas = data.draw(st.sampled_from(QUOTAS))
        options = RadixOptions(policy=policy, quotas=quotas, block_size=self.block_size)
        self.cache = RadixCache(self.pool, self.page_size, options)
        self.model = NaiveQuotas(self.unit, policy, quotas=quotas)

    @rule(owner=OWNER, data=st.data())
    def fill(self, owner: str, data: st.DataObject) -> None:
        """Somebody has a prompt computed, and goes on asking."""
        self.owner = owner
        self.insert_whole(self.draw_prompt(data))

    @rule(owner=OWNER, pages=st.integers(1, 8))
    def want_room(self, owner: str, pages: int) -> None:
        """Somebody wants pages, and goes on asking."""
        self.owner = owner
        self.checked_evict(Tier.DEVICE, pages)

    def others(self) -> list[Callable[[st.DataObject], None]]:
        return [self.flush, self.all_leave, self.peek, self.release_again, *[self.nothing] * 6]

    def nothing(self, data: st.DataObject) -> None:
        """Leave things as they are: more is learned from a full cache."""

    def ask_insert(self, prompt: Prompt, pages: list[int]) -> InsertResult:
        return self.cache.insert(prompt.key(), as_pages(pages), self.now, owner=self.owner)

    def note_insert(self, prompt: Prompt) -> None:
        self.model.insert_for(self.owner, prompt, self.now)

    def evict_in_cache(self, tier: Tier, pages: int) -> int:
        return self.cache.evict(pages, self.owner)

    def evict_in_model(self, tier: Tier, units: int) -> list[Prefix]:
        model, who = self.model, self.owner
        above, own = set(model.above), model.pages_of(who)
        would_be_above = own <= model.ceiling(who) < own + units
        payers = dict(model.payer)
        node_of = {prefix: place.node for prefix, place in read_tree(self.cache).items()}
        gone = model.evict_for(who, units, node_of)
        gave = {payers[prefix] for prefix in gone}
        self.note("one above its ceiling gave", not above.isdisjoint(gave))
        self.note("somebody at its ceiling gave its own", would_be_above and who in gave)
        self.note("a floor kept something", len(gone) < units and bool(model.sheltered_from(who)))
        self.note("something passed over for what continues it", model.passed_over)
        return gone

    def all_prompts(self) -> list[Prompt]:
        return all_prompts(self.unit, self.max_units, self.block_size)

    def evict_all(self) -> None:
        evict_for_all(self)

    def the_cache_holds_what_the_model_holds(self) -> None:
        device, locked = self.model.on[Tier.DEVICE], self.model.protected(Tier.DEVICE)
        for owner in OWNERS:
            sheltered = self.model.sheltered_from(owner)
            assert self.cache.evictable_for(owner) == len(device) - len(locked) - sheltered
        self.check_contents()

    def check_contents(self) -> None:
        places = read_tree(self.cache)
        assert places.keys() == self.model.on[Tier.DEVICE].keys()
        for prefix, place in places.items():
            assert place.node.payer.name == self.model.payer[prefix]
            assert place.node.lock_ref == self.model.locks[Tier.DEVICE][prefix]


class QuotaPage2(QuotaMachine):
    """Pages of two tokens."""

    page_size = unit = 2
    total_pages = 16
    max_units = 6


class QuotaTiers(TierMachine):
    """Owners with quotas on both tiers, and all else that a cache has. Whose turn it is when, the other machines ask; here, that
    only such goes as may, and that nothing stays that could have gone."""

    def make_cache(self, data: st.DataObject) -> None:
        self.quotas = {tier: data.draw(st.sampled_from(QUOTAS)) for tier in Tier}
        self.payer: dict[Prefix, str] = {}
        super().make_cache(data)

    @rule(owner=OWNER)
    def let_another_pay(self, owner: str) -> None:
        """Who asks from now on is somebody else."""
        self.owner = owner

    def note_insert(self, prompt: Prompt) -> None:
        for prefix in prompt.prefixes(self.unit):
            if prefix not in self.model.all_prefixes():
                self.payer[prefix] = "" if len(prefix[1]) <= prompt.boundary else self.owner
        super().note_insert(prompt)

    def note_fetched(self, job: Job) -> None:
        assert isinstance(job.job, Fetch)
        for prefix in job.copy.copied:
            if prefix not in self.model.all_prefixes():
                public = len(prefix[1]) <= job.job.key.boundary_tokens
                self.payer[prefix] = "" if public else job.job.owner
        super().note_fetched(job)

    def checked_evict(self, tier: Tier, pages: int) -> None:
        freed = self.evict_in_cache(tier, pages)
        assert len(self.adopt(tier)) == freed <= max(pages, 0)
        if freed < pages:
            assert self.evict_in_cache(tier, pages) == 0

    def evict_all(self) -> None:
        evict_for_all(self)

    def begin_offload(self, prompt: Prompt, node: TreeNode) -> None:
        """Whoever pays for something on the device wants room for its copy."""
        asking, self.owner = self.owner, self.payer.get(prompt.prefix(len(prompt.tokens)), "")
        super().begin_offload(prompt, node)
        self.owner = asking

    def offload_with_room(
        self, wanted: list[Prefix], begin: Callable[[], CopyInFlight | None]
    ) -> tuple[CopyInFlight | None, int]:
        left = self.cache.transfers.left_pages
        job = begin()
        self.adopt(Tier.HOST)
        room = len(wanted) - (self.cache.transfers.left_pages - left)
        assert job is None or len(job.host_pages) == room
        return job, room

    def begin_with_room(
        self, target: Tier, missing: int, begin: Callable[[], CopyInFlight | None]
    ) -> CopyInFlight | None:
        job = begin()
        gone = self.adopt(target)
        assert job is None or len(gone) == max(missing, 0)
        return job

    def adopt(self, tier: Tier) -> set[Prefix]:
        """What has gone from a tier goes from the model, if it was right that it went."""
        model, owner = self.model, self.owner
        places = read_tree(self.cache)
        stayed = {prefix for prefix, place in places.items() if place.page(tier) is not None}
        gone = model.on[tier].keys() - stayed
        assert gone.isdisjoint(model.protected(tier))
        for prefix in gone:
            model.forget(tier, prefix)
        left = Counter(self.payer[prefix] for prefix in model.on[tier])
        for who in {self.payer[prefix] for prefix in gone} - {owner}:
            assert left[who] >= self.quotas[tier].get(who, Quota()).floor_pages
        self.note(f"{tier.name} pages went for another", any(self.payer[prefix] != owner for prefix in gone))
        return gone

    def the_cache_holds_what_the_model_holds(self) -> None:
        device, cut_off = self.model.on[Tier.DEVICE], self.model.cut_off[Tier.DEVICE]
        assert self.cache.evictable_pages + self.cache.protected_pages == len(device) + len(cut_off)
        self.check_contents()

    def check_contents(self) -> None:
        super().check_contents()
        for prefix, place in read_tree(self.cache).items():
            assert place.node.payer.name == self.payer[prefix]


def evict_for_all(machine: CacheMachine) -> None:
    """Everybody gives up its own, until nobody has any."""
    for machine.owner in (*OWNERS, *OWNERS):
        for tier in machine.tiers:
            machine.checked_evict(tier, MORE_THAN_ALL)


MACHINES: dict[type[CacheMachine], tuple[int, dict[str, int]]] = {
    QuotaMachine: (8, DEPTH),
    QuotaPage2: (6, DEPTH),
    QuotaTiers: (6, {"DEVICE pages went for another": 50, "HOST pages went for another": 10}),
}
"""How many rounds ``make test`` has time for, and what must happen in them."""
SLOW = [QuotaPage2, QuotaTiers]


@pytest.mark.timeout(600)  # only a failure needs it, to find a short example
@pytest.mark.parametrize(
    "machine", [pytest.param(machine, marks=[pytest.mark.slow] * (machine in SLOW)) for machine in MACHINES]
)
def test_what_goes_is_whose_turn_it_is(machine: type[CacheMachine]) -> None:
    """F38 with owners: the same examples each time."""
    run_rounds(machine, *MACHINES[machine])


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("machine", MACHINES)
def test_whoever_wants_room_gets_what_the_naive_model_says(machine: type[CacheMachine]) -> None:
    """F38 with owners: many, and others each time."""
    run_machine(machine, examples=2000, repeatable=False)
