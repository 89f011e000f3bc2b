"""F38: any order of operations leaves the invariants true and the answers of a naive model.

Each run ends with a look at how often it was in deep water: what is listed in ``DEPTH`` must have happened that often.
"""

import pytest
from hypothesis import strategies as st

from prefixmesh.cache.hash_cache import HASH_BLOCK_SIZE, HashCache
from prefixmesh.cache.radix_cache import RadixCache
from tests.support.cache_machine import CacheMachine
from tests.support.machine_runs import run_machine, run_rounds
from tests.support.naive_tiers import NaiveTiers
from tests.support.tier_machine import TierMachine
from tests.support.tier_rescues import RescuingMachine


class OneTier(CacheMachine):
    """The tree without a host tier."""

    page_size = unit = 2
    total_pages = 14
    max_units = 6

    def make_cache(self, data: st.DataObject) -> None:
        self.cache = RadixCache(self.pool, self.page_size)
        self.model = NaiveTiers(self.unit)


class HashBlocks(CacheMachine):
    """The hash cache: what is kept or dropped together is a block of two pages."""

    page_size = 8
    unit = HASH_BLOCK_SIZE
    max_units = 5
    total_pages = 30

    def make_cache(self, data: st.DataObject) -> None:
        self.cache = HashCache(self.pool, self.page_size)
        self.model = NaiveTiers(self.unit)


class TiersPage1(TierMachine):
    """Pages of one token."""


class TiersPage2(TierMachine):
    """Pages of two tokens: most prompts end inside a page; with blocks of three, so do blocks."""

    page_size = unit = 2
    block_sizes = (4, 3)
    total_pages = 16
    host_total = 12
    max_units = 6


class TiersPage3(TierMachine):
    """Pages of three tokens: not a power of two, which the tree does not need."""

    page_size = unit = 3
    block_sizes = (3, 2)
    total_pages = 14
    host_total = 10
    max_units = 5


class Rescues(RescuingMachine):
    """Two tiers of which the host is never large enough."""

    page_size = unit = 2
    block_sizes = (4, 3)
    total_pages = 16
    host_total = 10
    max_units = 6


DEPTH = {
    "insert of duplicates": 5,
    "insert of what a flush cut off": 5,
    "flush under locks": 10,
    "release of what a flush cut off": 5,
    "all left, all free": 10,
}
TIERS_DEPTH = DEPTH | {
    "Offload arrived": 200,
    "Offload arrived and met what it brought": 20,
    "Offload arrived after a flush": 5,
    "Offload failed": 10,
    "Restore arrived": 20,
    "Restore arrived and met what it brought": 10,
    "Restore failed": 1,
    "Fetch arrived": 20,
    "Fetch arrived and met what it brought": 5,
    "Fetch failed": 5,
    "HostRead arrived": 10,
    "DEVICE eviction that left a copy": 200,
    "HOST eviction that left a copy": 20,
    "a long leaf trimmed on the DEVICE": 100,
    "a long leaf trimmed on the HOST": 20,
    "a pin beyond the budget": 20,
    "a pin expired": 5,
    "a pin grew": 5,
    "a pin of the host grew": 1,
    "what is pinned on the host is there alone": 10,
    "a pin that held nothing came to hold something": 5,
    "a second end of a copy": 5,
    "a part of a match was brought back": 5,
    "a part of a prompt was backed up": 5,
    "a split of what is being copied": 20,
    "another's pin was not removed": 5,
    "insert over what only the host has": 20,
    "the host kept what ranks higher": 1,
    "two owners pin one prefix": 5,
}
RESCUES_DEPTH = {
    "a rescue began": 20,
    "a rescue gave up its pages": 10,
    "a copy was shed": 5,
    "a rescue pushed out what was older": 1,
}
MACHINES: dict[type[CacheMachine], tuple[int, dict[str, int]]] = {
    OneTier: (4, DEPTH),
    HashBlocks: (3, {}),
    TiersPage1: (14, TIERS_DEPTH),
    TiersPage2: (10, TIERS_DEPTH),
    TiersPage3: (10, TIERS_DEPTH),
    Rescues: (10, RESCUES_DEPTH),
}
"""How many rounds ``make test`` has time for, and what must happen in them."""
SLOW = [TiersPage1, TiersPage2, TiersPage3, Rescues]


@pytest.mark.timeout(600)  # only a failure needs it, to find a short example
@pytest.mark.parametrize(
    "machine", [pytest.param(machine, marks=[pytest.mark.slow] * (machine in SLOW)) for machine in MACHINES]
)
def test_any_order_of_operations_agrees_with_the_naive_model(machine: type[CacheMachine]) -> None:
    """F38 (first form): the same examples each time, so that a change of the code is the only thing that can fail."""
    run_rounds(machine, *MACHINES[machine])


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("machine", MACHINES)
def test_many_orders_of_operations_agree_with_the_naive_model(machine: type[CacheMachine]) -> None:
    """F38: many, and others each time."""
    run_machine(machine, examples=2000, repeatable=False)
