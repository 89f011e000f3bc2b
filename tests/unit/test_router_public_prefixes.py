"""Which public prefixes a prompt begins with, as the pins come, grow and go."""

import pytest

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.cache.namespace import public_namespace
from prefixmesh.cache.public import MAX_CANDIDATES, key_fingerprints
from prefixmesh.ids import Namespace
from prefixmesh.router.pins.wishes import PinVersion
from prefixmesh.router.public_prefixes import MAX_FORMER, PublicPrefixes
from prefixmesh.tokens import TOKEN_BYTES, pack
from tests.support.public_kit import ACME, PUBLIC, SECRET

BLOCK = 4
PROMPT = list(range(100, 200))
LORA = public_namespace(SECRET, adapter_digest="lora", model_revision="r")


def version(tokens: list[int], namespace: Namespace = PUBLIC, digest: str = "") -> PinVersion:
    packed = pack(tokens)
    names = block_fingerprints(namespace, packed, BLOCK)
    return PinVersion(
        generation=1, namespace=namespace, tokens=packed, fingerprints=names, adapter_digest=digest
    )


def boundaries(table: PublicPrefixes, tokens: list[int] = PROMPT, digest: str = "") -> list[int]:
    return [known.prefix.boundary_tokens for known in table.fitting(digest, pack(tokens))]


@pytest.mark.parametrize(("page", "boundary"), [(1, 20), (2, 20), (16, 16)])
def test_a_pin_is_cut_to_blocks_and_to_the_largest_page(page: int, boundary: int) -> None:
    table = PublicPrefixes(BLOCK)
    assert table.set([version(PROMPT[:22])], page)
    assert boundaries(table) == [boundary]
    assert boundaries(table, PROMPT[:boundary]) == [boundary]
    assert boundaries(table, PROMPT[: boundary - 1]) == []


def test_a_prompt_has_the_pins_that_it_begins_with_and_the_longest_first() -> None:
    table = PublicPrefixes(BLOCK)
    other = [*PROMPT[:8], 7, 7, 7, 7]
    table.set([version(PROMPT[:8]), version(PROMPT[:16]), version(other), version(PROMPT[1:9])], 1)
    assert boundaries(table) == [16, 8]
    assert boundaries(table, [*other, 1]) == [12, 8]
    assert boundaries(table, [1, *PROMPT]) == []


def test_no_more_pins_than_are_tried_fit_one_prompt() -> None:
    table = PublicPrefixes(BLOCK)
    table.set([version(PROMPT[: BLOCK * blocks]) for blocks in range(1, MAX_CANDIDATES + 3)], 1)
    longest = MAX_CANDIDATES + 2
    assert boundaries(table) == [BLOCK * blocks for blocks in range(longest, 2, -1)]


def test_each_adapter_has_its_own() -> None:
    table = PublicPrefixes(BLOCK)
    table.set([version(PROMPT[:8]), version(PROMPT[:16], LORA, "lora")], 1)
    assert (boundaries(table), boundaries(table, digest="lora")) == ([8], [16])
    assert boundaries(table, digest="other") == []
    (known,) = table.fitting("lora", pack(PROMPT))
    assert known.prefix.namespace == LORA


@pytest.mark.parametrize("length", [3, 0])
def test_less_than_a_block_is_no_public_prefix(length: int) -> None:
    table = PublicPrefixes(BLOCK)
    table.set([version(PROMPT[:length])], 1)
    assert (len(table), boundaries(table)) == (0, [])


def test_a_longer_pin_leaves_the_boundary_that_it_takes_the_place_of() -> None:
    """Tenants find what they have behind it. A shorter one leaves nothing of what is no longer public, and none leaves nothing."""
    table = PublicPrefixes(BLOCK)
    for blocks in (2, 3, 4, 5):
        assert table.set([version(PROMPT[: BLOCK * blocks])], 1)
    assert boundaries(table) == [20, 16, 12]
    assert len(table) == 1 + MAX_FORMER
    table.set([version(PROMPT[:12])], 1)
    assert boundaries(table) == [12]
    table.set([version([*PROMPT[:11], 0, *PROMPT[12:16]])], 1)
    assert boundaries(table) == []
    table.set([], 1)
    assert (len(table), boundaries(table)) == (0, [])


def test_a_former_boundary_where_a_new_worker_cannot_divide_is_given_up() -> None:
    table = PublicPrefixes(BLOCK)
    table.set([version(PROMPT[:36])], 4)
    table.set([version(PROMPT[:36])], 16)
    assert boundaries(table) == [32]


def test_only_what_is_new_is_news() -> None:
    table = PublicPrefixes(BLOCK)
    assert not table.set([], 0)
    assert table.set([version(PROMPT[:8])], 1)
    assert not table.set([version(PROMPT[:8])], 1)
    assert table.set([version(PROMPT[:8])], 8)


@pytest.mark.parametrize("length", [8, 9, 12, 31])
def test_a_chain_names_what_a_worker_tells_of(length: int) -> None:
    """The blocks of the key that the worker would choose; cut short, its first ones."""
    table = PublicPrefixes(BLOCK)
    table.set([version(PROMPT[:8])], 1)
    packed = pack(PROMPT[:length])
    (known,) = table.fitting("", packed)
    key = known.prefix.key(ACME, packed)
    assert isinstance(key, RadixKey)
    assert list(known.chain(ACME, packed, BLOCK)) == key_fingerprints(key, BLOCK)
    assert list(known.chain(ACME, packed[: BLOCK * TOKEN_BYTES], BLOCK)) == key_fingerprints(key, BLOCK)[:1]
