"""Routing by public prefixes: which of the places where a prompt may live counts on which worker, and what is expected of it."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.public import PublicPrefix, choose_key, key_fingerprints, public_boundary
from prefixmesh.ids import Fingerprint, Namespace, TenantId
from prefixmesh.proto import codec
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.matched_tokens import MatchedTokens, best_of
from prefixmesh.router.pins.wishes import PinVersion
from prefixmesh.router.placement import PLAIN, PublicChain, RouteRequest
from prefixmesh.router.prepare import MAX_NAMED_BLOCKS, PreparedRequest, RequestPreparer
from prefixmesh.router.public_prefixes import PublicPrefixes
from prefixmesh.router.routing import RouterCore
from prefixmesh.tokens import TOKEN_BYTES, pack
from tests.support.public_kit import ACME, GLOBEX, PUBLIC, SECRET
from tests.support.router_kit import tiny_model, token_request
from tests.support.simulated_fleet import BLOCK, NOW, ToldCache, add_ready, facts, make_core

CONTEXT = (MAX_NAMED_BLOCKS + 10) * BLOCK
W0, W1, W2 = Endpoint("w0"), Endpoint("w1"), Endpoint("w2")
PINNED = list(range(10 * BLOCK))
LONGER = list(range(20 * BLOCK))
PROMPT = [*LONGER, *range(5000, 5000 + 10 * BLOCK + 5)]


def boundary(tokens: Sequence[int]) -> PublicPrefix:
    cut = public_boundary(PUBLIC, pack(tokens), page_size=1)
    assert cut is not None
    return cut


PIN, LONG_PIN = boundary(PINNED), boundary(LONGER)


def names(tenant: Namespace, pin: PublicPrefix | None, ids: Sequence[int] = PROMPT) -> list[Fingerprint]:
    """What a worker tells of where all of a prompt is cached there: in the tenant's own namespace, or behind a pin."""
    key = RadixKey(tenant, pack(ids)) if pin is None else pin.key(tenant, pack(ids))
    return list(key_fingerprints(key, BLOCK))


def asked(tenant: Namespace, *pins: PublicPrefix, ids: Sequence[int] = PROMPT) -> RouteRequest:
    """A tenant's request, with these candidates, the longest first."""
    return RouteRequest(
        fingerprints=names(tenant, None, ids),
        public=tuple(PublicChain(pin, names(tenant, pin, ids)) for pin in pins),
        prompt_tokens=len(ids),
        max_tokens=16,
    )


def fleet(**held: list[Fingerprint]) -> RouterCore:
    """Workers that have told of these blocks."""
    core = make_core(0)
    for name, blocks in held.items():
        cache = ToldCache(core, add_ready(core, name))
        cache.open(NOW)
        cache.store(blocks, NOW)
        cache.report(NOW)
    return core


def held_by(core: RouterCore, request: RouteRequest) -> dict[str, int]:
    """Blocks of a request that are counted for each worker."""
    told = core.explain(request, NOW).candidates
    return {entry.endpoint: (terms.device_tokens + terms.host_tokens) // BLOCK for entry, terms in told}


def test_a_public_prefix_counts_for_every_tenant_and_a_tail_for_its_own() -> None:
    """w0 has the pin, w1 ACME's whole prompt behind it, w2 all in ACME's plain namespace."""
    core = fleet(w0=names(PUBLIC, None, PINNED), w1=names(ACME, PIN), w2=names(ACME, None))
    whole = len(PROMPT) // BLOCK
    assert held_by(core, asked(ACME, PIN)) == {"w0": 10, "w1": whole, "w2": whole}
    assert held_by(core, asked(GLOBEX, PIN)) == {"w0": 10, "w1": 10, "w2": 0}
    assert held_by(core, asked(ACME)) == {"w0": 0, "w1": 0, "w2": whole}
    assert held_by(core, asked(GLOBEX)) == {"w0": 0, "w1": 0, "w2": 0}


def test_with_several_candidates_each_worker_counts_with_its_best() -> None:
    core = fleet(w0=names(PUBLIC, None, LONGER), w1=names(ACME, PIN), w2=names(ACME, None)[:15])
    request = asked(ACME, LONG_PIN, PIN)
    assert held_by(core, request) == {"w0": 20, "w1": 30, "w2": 15}
    placement = core.route(request, NOW)
    assert placement.endpoint == W1
    assert placement.decision.chain == 2
    assert placement.predicted_cached_tokens == 30 * BLOCK
    away = core.route(request, NOW, exclude={W1})
    assert (away.endpoint, away.decision.chain) == (W0, 1)
    last = core.route(request, NOW, exclude={W0, W1})
    assert (last.endpoint, last.decision.chain) == (W2, PLAIN)
    core.check_invariants()


def test_what_is_expected_is_expected_where_the_worker_will_put_it() -> None:
    """Nobody has anything: a burst of tenants with one new pin meets on the worker that computes it, and shares only the pin there."""
    core = fleet(w0=[], w1=[])
    first = core.route(asked(ACME, PIN), NOW)
    assert first.decision.chain == 1
    assert first.fingerprints == names(ACME, PIN)
    other = {"w0": "w1", "w1": "w0"}[first.endpoint]
    assert held_by(core, asked(GLOBEX, PIN)) == {first.endpoint: 10, other: 0}
    assert held_by(core, asked(ACME, PIN)) == {first.endpoint: 30, other: 0}
    assert held_by(core, asked(ACME)) == {"w0": 0, "w1": 0}
    core.accepted(first, 0, NOW)
    core.finished(first, NOW)
    assert held_by(core, asked(ACME, PIN)) == {first.endpoint: 30, other: 0}
    core.tick(NOW + 10)
    assert held_by(core, asked(ACME, PIN)) == {"w0": 0, "w1": 0}
    core.check_invariants()


def test_a_failed_request_that_was_admitted_leaves_what_it_computed_where_it_lives() -> None:
    core = fleet(w0=[])
    placement = core.route(asked(ACME, PIN), NOW)
    core.accepted(placement, 0, NOW)
    core.failed(placement, NOW)
    assert held_by(core, asked(ACME, PIN)) == {"w0": 30}
    assert held_by(core, asked(GLOBEX, PIN)) == {"w0": 10}


def test_a_request_without_candidates_is_routed_as_ever() -> None:
    core = fleet(w0=[], w1=names(ACME, None))
    placement = core.route(asked(ACME), NOW)
    assert (placement.endpoint, placement.decision.chain, placement.request.candidates) == (W1, PLAIN, ())


@pytest.mark.parametrize(
    ("held", "chain"),
    [(names(ACME, PIN), 1), (names(ACME, None), PLAIN)],
    ids=["behind the pin", "in its own namespace"],
)
def test_who_copies_is_told_where_the_holder_has_it(held: list[Fingerprint], chain: int) -> None:
    """A request that cannot go to the holder: the source names the boundary, and what is expected stands under that chain."""
    core = fleet(w0=held, w1=[])
    for name in ("w0", "w1"):
        endpoint = Endpoint(name)
        core.described(endpoint, replace(facts(name), kv_layout="a"), NOW)
        entry = core.registry.get(endpoint)
        assert entry is not None
        core.fleet.columns.copies.set_rate(entry.row, 0.001)
    placement = core.route(asked(ACME, PIN), NOW, exclude={W0})
    assert (placement.endpoint, placement.decision.chain) == (W1, chain)
    (source,) = placement.sources
    assert (source.address, source.tokens) == (W0, 30 * BLOCK)
    assert source.boundary_tokens == (PIN.boundary_tokens if chain else 0)


COUNTS = st.lists(st.integers(0, 3), min_size=4, max_size=4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(device=st.lists(COUNTS, min_size=2, max_size=4), host=st.lists(COUNTS, min_size=4, max_size=4))
def test_the_best_chain_is_the_key_that_a_worker_would_choose(
    device: list[list[int]], host: list[list[int]]
) -> None:
    """For each row, against ``choose_key`` with a peek that counts both tiers."""
    ids = list(range(4))
    pins = [boundary_of(ids[:size]) for size in range(len(device) - 1, 0, -1)]
    matched = [
        MatchedTokens(np.array(row, dtype=float), np.array(row, dtype=float) + more)
        for row, more in zip(device, host, strict=False)
    ]
    best = best_of(matched[0], matched[1:])
    for row in range(4):
        counts = {pin.boundary_tokens: matched[number].total[row] for number, pin in enumerate(pins, 1)}
        counts[0] = matched[0].total[row]
        key = choose_key(
            lambda key, counts=counts: int(counts[key.boundary_tokens]),  # type: ignore[misc]
            ACME,
            pack([*ids, 9, 9, 9]),
            pins,
            page_size=1,
            block_size=1,
        )
        number = best.chain(row)
        chosen = pins[number - 1].boundary_tokens if number else 0
        assert chosen == key.boundary_tokens
        assert (best.device[row], best.total[row]) == (
            matched[number].device[row],
            matched[number].total[row],
        )


def boundary_of(ids: list[int]) -> PublicPrefix:
    cut = public_boundary(PUBLIC, pack(ids), page_size=1, block_size=1)
    assert cut is not None
    return cut


def test_nobody_would_load_back_where_no_chain_is_on_a_host() -> None:
    """Then one column serves for both, which saves a decision its terms."""
    zeros, some = np.zeros(3), np.array([0.0, 64.0, 0.0])
    best = best_of(MatchedTokens(some, some), [MatchedTokens(zeros, zeros)])
    assert best.device is best.total


def pinned(*prefixes: list[int]) -> PublicPrefixes:
    table = PublicPrefixes(BLOCK)
    table.set(
        [
            PinVersion(
                generation=1, namespace=PUBLIC, tokens=pack(ids), fingerprints=names(PUBLIC, None, ids)
            )
            for ids in prefixes
        ],
        16,
    )
    return table


async def prepare(
    preparer: RequestPreparer, ids: Sequence[int], tenant: str = "acme", digest: str = ""
) -> PreparedRequest:
    message = token_request(ids)
    return await preparer.prepare(
        codec.decode_generate(message),
        message,
        TenantId(tenant),
        adapter_digest=digest,
        context_length=CONTEXT,
    )


def preparer_of(public: PublicPrefixes | None) -> "closing[RequestPreparer]":
    return closing(
        RequestPreparer(
            tiny_model(context_length=CONTEXT),
            namespace_key=SECRET,
            isolation="tenant",
            block_size=BLOCK,
            public=public,
        )
    )


IDS = [token % 200 for token in PROMPT]
"""Of the tiny model's vocabulary."""

PIN_IDS, LONG_IDS = IDS[: len(PINNED)], IDS[: len(LONGER)]


async def test_a_prepared_request_carries_every_place_where_it_may_live() -> None:
    with preparer_of(pinned(PIN_IDS, LONG_IDS)) as preparer:
        prepared = await prepare(preparer, IDS)
        plain = preparer.namespace(TenantId("acme"), "")
        other = await prepare(preparer, [7, *IDS])
    longer, shorter = boundary(LONG_IDS), boundary(PIN_IDS)
    assert prepared.route.candidates == (longer, shorter)
    assert prepared.route.chain(PLAIN) == names(plain, None, IDS)
    assert prepared.route.chain(1) == names(plain, longer, IDS)
    assert prepared.route.chain(2) == names(plain, shorter, IDS)
    assert other.route.public == ()


async def test_an_adapters_request_knows_its_own_contents_pins_alone() -> None:
    """F47: the same name with other weights has another digest, and none of the old ones' pins."""
    table, lora = PublicPrefixes(BLOCK), Namespace(b"l" * 16)
    of_lora = PinVersion(
        generation=1, namespace=lora, tokens=pack(PIN_IDS), fingerprints=(), adapter_digest="old"
    )
    of_base = PinVersion(generation=1, namespace=PUBLIC, tokens=pack(LONG_IDS), fingerprints=())
    table.set([of_lora, of_base], 16)
    with preparer_of(table) as preparer:
        found = [
            [(one.namespace, one.boundary_tokens) for one in prepared.route.candidates]
            for prepared in [await prepare(preparer, IDS, digest=digest) for digest in ("", "old", "new")]
        ]
    assert found == [[(PUBLIC, len(LONGER))], [(lora, len(PINNED))], []]


@pytest.mark.parametrize("prompt_tokens", [len(PINNED), len(PINNED) + 30, len(PINNED) + 70])
async def test_an_answer_goes_on_from_where_its_prompt_lives(prompt_tokens: int) -> None:
    """Also where the prompt is just the public prefix: the answer is the tenant's tail from its first token on."""
    ids, answer = IDS[:prompt_tokens], list(range(100))
    with preparer_of(pinned(PIN_IDS)) as preparer:
        prepared = await prepare(preparer, ids)
        plain = preparer.namespace(TenantId("acme"), "")
        named = [preparer.name_answer(prepared, pack(answer), chain=chain) for chain in (PLAIN, 1)]
    computed = [*ids, *answer[:-1]]
    assert list(named[0]) == names(plain, None, computed)
    assert list(named[1]) == names(plain, boundary(PIN_IDS), computed)


async def test_no_more_blocks_are_named_behind_a_boundary_than_of_any_prompt() -> None:
    ids = [0] * (BLOCK * (MAX_NAMED_BLOCKS + 3))
    with preparer_of(pinned([0] * (BLOCK * (MAX_NAMED_BLOCKS + 1)), ids[: 2 * BLOCK])) as preparer:
        prepared = await prepare(preparer, ids)
    lengths = [len(prepared.route.chain(number)) for number in range(3)]
    assert lengths == [MAX_NAMED_BLOCKS] * 3
    assert len(prepared.prompt.tokens) == len(ids) * TOKEN_BYTES
