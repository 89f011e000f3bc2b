"""Public prefixes with private tails through the whole scheduler: who computes, who shares, who pays, and what a request keeps."""

from collections.abc import Sequence

import pytest

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.namespace import derive_namespace
from prefixmesh.cache.owners import Quota
from prefixmesh.cache.public import PublicPrefix, public_boundary
from prefixmesh.cache.radix_cache import RadixOptions
from prefixmesh.ids import Namespace
from prefixmesh.tokens import pack
from prefixmesh.worker.prompt_order import shared_tokens
from tests.support.disk_bench import DiskBench
from tests.support.fake_model import expected_output
from tests.support.public_kit import ACME, GLOBEX, PUBLIC, SECRET
from tests.support.scheduling import Bench, make_request
from tests.support.tier_bench import TierBench

BLOCK = 4
PINNED = list(range(8))
OWN = [20, 21, 22, 23, 24]
PROMPT = [*PINNED, *OWN]
SHARED = derive_namespace(
    SECRET, tenant="", adapter_digest="", model_revision="r", caller_key="", isolation="shared"
)
OPTIONS = RadixOptions(block_size=BLOCK)


def prefix(
    tokens: Sequence[int] = PINNED, namespace: Namespace = PUBLIC, block_size: int = BLOCK
) -> PublicPrefix:
    cut = public_boundary(namespace, pack(tokens), page_size=1, block_size=block_size)
    assert cut is not None
    return cut


PIN, LONGER = prefix(), prefix(PROMPT[:12])


class Office(Bench):
    """Requests of tenants with a radix cache of small blocks."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**({"options": OPTIONS, "total_pages": 200, "hold_min": 1} | settings))  # type: ignore[arg-type]

    def serve(
        self,
        name: str,
        namespace: Namespace,
        prompt: Sequence[int] = PROMPT,
        public: Sequence[PublicPrefix] = (PIN,),
        max_tokens: int = 3,
        owner: str = "",
    ) -> int:
        """One request alone; how much of its prompt was cached."""
        self.submit(name, prompt, max_tokens, namespace=namespace, public=public, owner=owner)
        self.run()
        assert self.output(name) == expected_output(prompt, max_tokens)
        return self.cached(name)


@pytest.mark.parametrize("first", [ACME, GLOBEX, SHARED], ids=["acme", "globex", "shared"])
def test_whoever_comes_first_computes_the_public_prefix_for_all(first: Namespace) -> None:
    """And nothing behind it: the other tenant's equal tokens are computed again, its own are found."""
    office = Office()
    second = GLOBEX if first != GLOBEX else ACME
    assert office.serve("first", first) == 0
    assert office.serve("second", second) == len(PINNED)
    assert office.serve("first again", first) == office.serve("second again", second) == len(PROMPT) - 1


def test_without_a_candidate_a_tenant_sees_nothing_public_and_nothing_of_others() -> None:
    office = Office()
    office.serve("first", ACME)
    assert office.serve("plain", GLOBEX, public=()) == 0
    assert office.serve("plain again", GLOBEX, public=()) == len(PROMPT) - 1


@pytest.mark.parametrize("kind", ["radix", "hash"])
def test_the_caches_of_any_kind_keep_tenants_apart_behind_the_boundary(kind: str) -> None:
    """Blocks of 64: what the hash cache takes."""
    pinned = [token % 50 for token in range(64)]
    prompt = [*pinned, *range(17)]
    pin = prefix(pinned, block_size=64)
    office = Office(kind=kind, options=RadixOptions(), context_length=1000)
    cached = [office.serve(f"r{i}", who, prompt, (pin,)) for i, who in enumerate((ACME, GLOBEX, ACME))]
    assert cached == [0, 64, 80]


def test_a_new_pin_leaves_tenants_what_they_had_and_they_come_over_with_a_new_conversation() -> None:
    office = Office()
    office.serve("before", ACME, public=())
    assert office.serve("after", ACME, public=(PIN,)) == len(PROMPT) - 1
    other = [*PINNED, 30, 31]
    assert office.serve("another", ACME, other) == len(PINNED)  # by the plain key; both have as much
    assert office.serve("newcomer", GLOBEX, other) == 0
    assert office.serve("newcomer again", GLOBEX, PROMPT) == len(PINNED)


def test_a_longer_pin_does_not_cost_tenants_their_old_tails() -> None:
    office = Office()
    office.serve("before", ACME, public=(PIN,))
    assert office.serve("after", ACME, public=(LONGER, PIN)) == len(PROMPT) - 1
    assert office.serve("newcomer", GLOBEX, public=(LONGER, PIN)) == len(PINNED)
    # The newcomer went behind the shorter one, since more of that was there; what is warmed later is found by all.
    office.serve("warm", PUBLIC, PROMPT[:12], public=(), max_tokens=0)
    assert office.serve("third", SHARED, public=(LONGER, PIN)) == 12


def test_two_adapters_have_each_their_own_public_prefix() -> None:
    office = Office()
    lora = Namespace(b"l" * 16)
    office.serve("base", ACME)
    assert office.serve("lora", Namespace(b"m" * 16), public=(prefix(namespace=lora),)) == 0
    assert office.serve("lora again", Namespace(b"n" * 16), public=(prefix(namespace=lora),)) == len(PINNED)


def test_without_its_pin_a_tail_is_not_reached_and_goes_as_anything_unused() -> None:
    office = Office(total_pages=20)
    office.serve("with", ACME)
    assert office.serve("without", ACME, public=()) == 0
    assert office.serve("other", GLOBEX, [40] * 15, public=()) == 0
    assert office.scheduler.kv.free_pages + office.scheduler.kv.evictable_pages == 20


@pytest.mark.parametrize("chunk", [3, 512])
def test_tenants_who_come_together_compute_the_public_prefix_once(chunk: int) -> None:
    """Those who wait are held until it is there; then each computes what is its own."""
    office = Office(chunk=chunk)
    tenants = [Namespace(bytes([index]) * 16) for index in range(1, 6)]
    for index, namespace in enumerate(tenants):
        office.submit(f"r{index}", PROMPT, 2, namespace=namespace, public=(PIN,))
    office.run()
    assert [office.cached(f"r{index}") for index in range(5)] == [0, 8, 8, 8, 8]
    # All prompts' own tokens, the public ones once, and one more each for the second token.
    assert office.computed_tokens() == len(PINNED) + 5 * len(OWN) + 5


def test_branches_of_one_call_live_alike() -> None:
    office = Office()
    office.serve("before", ACME, [*PINNED, 33], public=())
    for branch in range(4):
        office.submit(f"r{branch}", PROMPT, 4, namespace=ACME, public=(PIN, LONGER), is_follower=branch > 0)
    office.step()
    office.step()
    places = {(request.root, request.boundary_tokens, request.tail) for request in office.scheduler.running}
    assert len(office.scheduler.running) == 4
    assert places == {(ACME, 0, b"")}, "most of it is cached in its own namespace"
    office.run()


def test_a_request_keeps_its_place_through_preemption() -> None:
    """Even when more is cached elsewhere by then: its own pages are in the tree under the key that it began with."""
    office = Office(total_pages=30, decode_room=0, hold_min=512)
    office.submit("a", PROMPT, 12, namespace=ACME, public=(PIN,), owner="acme")
    office.submit("b", PROMPT, 12, namespace=GLOBEX, public=(PIN,), owner="globex")
    office.run()
    assert office.scheduler.preemptions > 0
    for name in "ab":
        assert office.output(name) == expected_output(PROMPT, 12)
    answer = expected_output(PROMPT, 12)
    kept = office.cache.peek(PIN.key(ACME, pack([*PROMPT, *answer])))
    assert kept > len(PINNED)
    assert office.cache.peek(RadixKey(ACME, pack(PROMPT))) == 0


def test_the_public_part_is_nobodys_and_the_tail_its_tenants() -> None:
    """A tenant's ceiling counts what it has added, and what it computed for all is not on its account."""
    office = Office(
        options=RadixOptions(block_size=BLOCK, quotas={"acme": Quota(floor_pages=4)}), total_pages=40
    )
    office.serve("r", ACME, owner="acme")
    # Fifteen pages, of which seven are the tail's: prompt and answer, but for the last token.
    assert [office.cache.evictable_for(owner) for owner in ("acme", "globex")] == [15, 15 - 4]
    # What is public stays with the tail that hangs below it.
    assert office.cache.evict(40, "globex") == 7 - 4
    assert office.serve("acme again", ACME) == len(PROMPT) - 1


def test_what_a_tenant_asked_for_is_counted_as_its_own_wherever_it_was_found() -> None:
    office = Office()
    office.serve("first", ACME)
    office.serve("second", GLOBEX)
    ledger = office.scheduler.ledger
    acme, globex = ledger.row(ACME), ledger.row(GLOBEX)
    assert ledger.row(PUBLIC) is None
    assert acme is not None
    assert globex is not None
    assert (acme.hit_tokens.device, globex.hit_tokens.device) == (0, len(PINNED))
    # What others have behind the boundary is not counted as cached elsewhere: it could never be shared.
    assert (globex.miss_tokens.other_namespace, globex.miss_tokens.never_seen) == (0, 4)


def test_requests_of_the_workers_own_live_exactly_where_they_say() -> None:
    """A tenant's pin that begins like a public one: warmed under its tail, found by the tenant alone."""
    office = Office()
    key = PIN.key(ACME, pack(PROMPT))
    request = make_request(PROMPT, namespace=PUBLIC)
    request.live_under(key)
    assert request.key(len(PROMPT)) == key
    assert shared_tokens(request, make_request(PROMPT, namespace=PUBLIC)) == len(PINNED)
    office.submit("warm", PROMPT, 0, namespace=PUBLIC, boundary_tokens=key.boundary_tokens, tail=key.tail)
    office.run()
    assert office.serve("acme", ACME) == len(PROMPT) - 1
    assert office.serve("globex", GLOBEX) == len(PINNED)


def test_a_prompt_that_is_the_public_prefix_answers_behind_it() -> None:
    """Its last token is computed, publicly; the answer is the tenant's."""
    office = Office()
    assert office.serve("first", ACME, PINNED) == 0
    assert office.serve("second", GLOBEX, PINNED) == len(PINNED) - 1
    answer = expected_output(PINNED, 3)
    assert office.serve("next turn", ACME, [*PINNED, *answer, 7]) == len(PINNED) + 2
    assert office.serve("not theirs", GLOBEX, [*PINNED, *answer[:2], 8]) == len(PINNED) + 2
    assert office.serve("of nobody", SHARED, [*PINNED, *answer[:2], 9]) == len(PINNED)


def test_a_tail_comes_back_from_the_host_to_its_tenant_and_the_public_part_to_all() -> None:
    pin = prefix(block_size=2)
    bench = TierBench()
    bench.serve("warm", PROMPT, namespace=ACME, public=(pin,))
    bench.evict()
    assert bench.cache.evictable_pages == 0
    theirs = bench.serve("globex", PROMPT, namespace=GLOBEX, public=(pin,))
    assert (theirs.cached_tokens, theirs.host_tokens) == (len(PINNED), len(PINNED))
    bench.evict()
    mine = bench.serve("acme", PROMPT, namespace=ACME, public=(pin,))
    assert (mine.cached_tokens, mine.host_tokens) == (len(PROMPT) - 1, len(PROMPT) - 1)
    bench.check_at_rest()


def test_what_the_host_has_counts_when_a_place_is_chosen() -> None:
    """The plain key has more on the host than the public one on the device."""
    pin = prefix(block_size=2)
    bench = TierBench(device_pages=40)
    bench.serve("plain", PROMPT, namespace=ACME, public=())
    bench.evict()
    bench.serve("public", [*PINNED, 40], namespace=GLOBEX, public=(pin,))
    again = bench.serve("again", PROMPT, namespace=ACME, public=(pin,))
    assert (again.cached_tokens, again.host_tokens) == (len(PROMPT) - 1, len(PROMPT) - 1)
    bench.check_at_rest()


def test_public_prefix_and_tails_come_back_from_the_disk_each_to_whom_it_belongs() -> None:
    pin = prefix(block_size=2)
    bench = DiskBench(device_pages=64)
    bench.serve("warm", PROMPT, namespace=ACME, public=(pin,))
    bench.evict_all()
    assert bench.cache.node_count == 0
    theirs = bench.serve("globex", PROMPT, namespace=GLOBEX, public=(pin,))
    assert (theirs.cached_tokens, theirs.disk_tokens) == (len(PINNED), len(PINNED))
    bench.evict_all()
    mine = bench.serve("acme", PROMPT, namespace=ACME, public=(pin,))
    assert (mine.cached_tokens, mine.disk_tokens) == (12, 12)
    bench.check_at_rest()
