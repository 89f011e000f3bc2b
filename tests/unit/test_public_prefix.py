"""Which public prefix a prompt takes: the one under which most of it is cached."""

import itertools
import math

import pytest

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.cache.misses import missed_fingerprints
from prefixmesh.cache.namespace import tail_namespace
from prefixmesh.cache.public import (
    MAX_CANDIDATES,
    PublicPrefix,
    choose_key,
    key_fingerprints,
    public_boundary,
)
from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Fingerprint
from prefixmesh.tokens import TOKEN_BYTES, pack
from tests.support.public_kit import ACME, GLOBEX, PUBLIC, SHAPES, Shape, Worker, tenant

SMALL = Shape(2, 4)


class Peeks:
    """Says how much is cached under each boundary, and counts who asks."""

    def __init__(self, cached: dict[int, int] | None = None) -> None:
        self.cached = cached or {}
        self.asked: list[int] = []

    def __call__(self, key: RadixKey) -> int:
        self.asked.append(key.boundary_tokens)
        return self.cached.get(key.boundary_tokens, 0)

    def choose(self, tokens: list[int], candidates: list[PublicPrefix], shape: Shape = SMALL) -> RadixKey:
        return choose_key(self, ACME, pack(tokens), candidates, page_size=shape.page, block_size=shape.block)


def candidate(tokens: list[int], shape: Shape = SMALL) -> PublicPrefix:
    prefix = public_boundary(PUBLIC, pack(tokens), page_size=shape.page, block_size=shape.block)
    assert prefix is not None
    return prefix


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("extra", [0, 1])
def test_a_boundary_is_cut_to_whole_blocks_and_whole_pages(shape: Shape, extra: int) -> None:
    """Its name is that of the public block that ends there; less than one of both is no boundary."""
    for units in range(3):
        tokens = [*shape.units(units), *range(9000, 9000 + (shape.unit - 1) * extra)]
        prefix = public_boundary(PUBLIC, pack(tokens), page_size=shape.page, block_size=shape.block)
        if not units:
            assert prefix is None
            continue
        assert prefix is not None
        assert prefix.boundary_tokens == units * shape.unit
        assert prefix.boundary_tokens % shape.page == prefix.boundary_tokens % shape.block == 0
        assert prefix.fingerprint == block_fingerprints(PUBLIC, pack(shape.units(units)), shape.block)[-1]


def test_the_key_of_a_prefix_has_the_tail_of_tenant_and_boundary() -> None:
    short, long = candidate(list(range(4))), candidate(list(range(8)))
    tokens = pack(range(20))
    keys = [prefix.key(space, tokens) for prefix in (short, long) for space in (ACME, GLOBEX)]
    assert len({key.tail for key in keys}) == 4
    assert keys[0] == RadixKey(PUBLIC, tokens, 4, tail_namespace(ACME, short.fingerprint))


def test_without_a_candidate_the_key_is_the_tenants_plain_one_and_nobody_is_asked() -> None:
    peeks = Peeks()
    assert peeks.choose([1, 2, 3], []) == RadixKey(ACME, pack([1, 2, 3]))
    assert peeks.asked == []


@pytest.mark.parametrize(
    "wrong",
    [
        candidate([9, *range(1, 8)]),
        candidate([*range(7), 9]),
        candidate(list(range(12))),
        candidate(list(range(8)))._replace(fingerprint=Fingerprint(1)),
        candidate(list(range(8)))._replace(namespace=GLOBEX),
        candidate(list(range(8)))._replace(boundary_tokens=4),
        candidate(list(range(8)))._replace(boundary_tokens=6),
        candidate(list(range(8)))._replace(boundary_tokens=7),
        candidate(list(range(8)))._replace(boundary_tokens=0),
        candidate(list(range(8)))._replace(boundary_tokens=-8),
        candidate(list(range(8)))._replace(boundary_tokens=2**40),
    ],
    ids=[
        "other_first_token",
        "other_last_token",
        "longer_than_the_prompt",
        "other_name",
        "other_namespace",
        "shorter_than_its_name",
        "whole_pages_only",
        "neither_blocks_nor_pages",
        "no_tokens",
        "negative",
        "huge",
    ],
)
def test_a_candidate_that_does_not_fit_is_passed_over(wrong: PublicPrefix) -> None:
    """Alone it leaves the plain key, unasked; beside one that fits, it leaves that."""
    peeks = Peeks()
    prompt = list(range(11))
    assert peeks.choose(prompt, [wrong]) == RadixKey(ACME, pack(prompt))
    assert peeks.asked == []
    assert peeks.choose(prompt, [wrong, candidate(prompt[:4])]).boundary_tokens == 4


@pytest.mark.parametrize(
    ("shape", "boundary"), [(Shape(2, 4), 6), (Shape(4, 2), 6), (Shape(4, 6), 12 + 6)], ids=str
)
def test_a_boundary_that_is_not_whole_here_is_passed_over_though_its_name_be_right(
    shape: Shape, boundary: int
) -> None:
    """As a worker with another page size might be sent it: whole pages but half a block, whole blocks but half a page."""
    prompt = list(range(30))
    names = block_fingerprints(PUBLIC, pack(prompt), shape.block)
    wrong = PublicPrefix(PUBLIC, boundary, names[boundary // shape.block - 1])
    assert Peeks({boundary: 28}).choose(prompt, [wrong], shape).boundary_tokens == 0


def test_the_last_token_of_a_prompt_counts_though_it_must_be_computed() -> None:
    """A prompt that is the pin and no more takes it; one token less, and it does not."""
    pin = candidate(list(range(8)))
    assert Peeks().choose(list(range(8)), [pin]).boundary_tokens == 8
    assert Peeks().choose(list(range(7)), [pin]).boundary_tokens == 0


@pytest.mark.parametrize(
    ("cached", "taken"),
    [
        ({}, 12),
        ({0: 4, 4: 4, 8: 4, 12: 4}, 12),
        ({0: 14, 4: 14, 8: 14, 12: 12}, 8),
        ({0: 14, 4: 14, 8: 8, 12: 12}, 4),
        ({0: 14, 4: 12, 8: 12, 12: 12}, 0),
        ({0: 20, 4: 20, 8: 20, 12: 20}, 12),
        ({0: 20, 4: 18, 8: 18, 12: 18}, 0),
    ],
)
def test_most_cached_tokens_win_and_among_equals_the_longest_boundary(
    cached: dict[int, int], taken: int
) -> None:
    """In whatever order the ticket has the candidates. A cold prompt takes the longest: what it computes serves the most."""
    prompt = list(range(21))
    for candidates in itertools.permutations([candidate(prompt[:end]) for end in (4, 8, 12)]):
        assert Peeks(cached).choose(prompt, list(candidates)).boundary_tokens == taken


def test_nobody_is_asked_once_all_whole_pages_are_found() -> None:
    """21 tokens are 20 in pages of 2; the longest boundary is asked first and the plain namespace last."""
    prompt = list(range(21))
    candidates = [candidate(prompt[:end]) for end in (4, 8, 12)]
    for cached, asked in (({12: 20}, [12]), ({8: 20}, [12, 8]), ({8: 18}, [12, 8, 4, 0])):
        peeks = Peeks(cached)
        peeks.choose(prompt, candidates)
        assert peeks.asked == asked


def test_only_so_many_candidates_are_tried_and_they_are_the_longest() -> None:
    """A ticket that carries more costs no more."""
    prompt = list(range(200))
    candidates = [candidate(prompt[: 4 * blocks]) for blocks in range(1, 31)]
    peeks = Peeks()
    assert peeks.choose(prompt, candidates).boundary_tokens == 120
    assert peeks.asked == [*range(120, 120 - 4 * MAX_CANDIDATES, -4), 0]


def test_those_that_are_too_long_for_the_prompt_take_no_place_of_others() -> None:
    prompt = list(range(200))
    candidates = [candidate(prompt[: 4 * blocks]) for blocks in range(1, 31)]
    peeks = Peeks()
    assert peeks.choose(prompt[:15], candidates).boundary_tokens == 12
    assert peeks.asked == [12, 8, 4, 0]


def test_candidates_of_two_public_namespaces_are_compared_each_in_its_own() -> None:
    """An adapter's public prefix is not another's, though the tokens be the same."""
    prompt = list(range(20))
    other = public_boundary(tenant("other"), pack(prompt[:8]), page_size=2, block_size=4)
    assert other is not None
    key = Peeks({8: 16}).choose(prompt, [candidate(prompt[:4]), other])
    assert (key.namespace, key.boundary_tokens) == (tenant("other"), 8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_new_or_longer_pin_costs_a_tenant_none_of_its_old_tails(shape: Shape) -> None:
    """Plain KV stays in use after a pin came, a tail behind the short pin after a longer one came; only what is better is taken."""
    worker = Worker(shape)
    pinned = shape.units(2)
    prompt = [*pinned, *shape.pages(3, 1000), 7]
    whole = len(prompt) // shape.page * shape.page
    short, long = worker.prefix(pinned[: shape.unit]), worker.prefix(pinned)
    worker.compute(worker.key(ACME, prompt, []), "acme")
    plain = worker.key(ACME, prompt, [short, long])
    assert (plain.boundary_tokens, worker.matched(plain)) == (0, whole)
    worker.cache.flush()
    worker.compute(worker.key(ACME, prompt, [short]), "acme")
    again = worker.key(ACME, prompt, [long, short])
    assert (again.boundary_tokens, worker.matched(again)) == (shape.unit, whole)
    worker.compute(worker.key(GLOBEX, prompt, [short, long]), "globex")
    assert worker.key(GLOBEX, prompt, [short, long]).boundary_tokens == 2 * shape.unit
    assert worker.key(ACME, prompt, [short, long]).boundary_tokens == shape.unit
    worker.cache.evict((whole - shape.unit) // shape.page)  # acme's tail, which was used least recently
    assert worker.key(ACME, prompt, [short, long]).boundary_tokens == 2 * shape.unit


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_choosing_changes_nothing(shape: Shape) -> None:
    """No split, no time, no hit, no order."""
    worker = Worker(shape)
    pinned = shape.units(3)
    worker.compute(RadixKey(PUBLIC, pack(pinned)))
    before = worker.cache.render()
    order = list(worker.cache._accounts.lines.payer("").line)
    candidates = [worker.prefix(pinned[: shape.unit * units]) for units in (1, 2)]
    assert worker.key(ACME, [*pinned, 5], candidates).boundary_tokens == 2 * shape.unit
    assert worker.cache.render() == before
    assert list(worker.cache._accounts.lines.payer("").line) == order


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_names_of_a_key_are_those_the_cache_tells_of(shape: Shape) -> None:
    """And those that a miss is explained by; with and without a boundary, and where nothing is behind it."""
    prompt = [*shape.units(2), *shape.units(1, 5000), *shape.pages(1, 7000)]
    for tokens in (prompt, prompt[: 2 * shape.unit], prompt[: shape.unit]):
        for candidates in ([], [shape.units(1)], [shape.units(2)]):
            worker = Worker(shape)
            key = worker.key(ACME, tokens, [worker.prefix(pin) for pin in candidates])
            worker.compute(key)
            names = key_fingerprints(key, shape.block)
            assert worker.heard.blocks[Tier.DEVICE].keys() == set(names)
            assert names == missed_fingerprints(key, 0, shape.block)
            assert len(set(names)) == len(names) == len(key.tokens) // TOKEN_BYTES // shape.block


def test_units_are_the_least_that_pages_and_blocks_both_divide() -> None:
    """256-token pages and blocks of 96 meet at 768."""
    prefix = public_boundary(PUBLIC, pack(range(1600)), page_size=256, block_size=96)
    assert prefix is not None
    assert prefix.boundary_tokens == 2 * math.lcm(256, 96) == 1536
