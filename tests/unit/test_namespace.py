"""Namespaces: equal digests for equal tuples, and for nothing else (F46), in every process (F43)."""

import itertools

import pytest

from prefixmesh.cache.namespace import NAMESPACE_BYTES, Isolation, derive_namespace, short_digest
from prefixmesh.ids import Namespace

KEY = bytes(range(32))


def derive(
    tenant: str = "t",
    adapter: str = "",
    revision: str = "r",
    caller: str = "",
    isolation: Isolation = "tenant",
) -> Namespace:
    return derive_namespace(
        KEY,
        tenant=tenant,
        adapter_digest=adapter,
        model_revision=revision,
        caller_key=caller,
        isolation=isolation,
    )


def test_equal_tuples_have_equal_digests_of_16_bytes() -> None:
    assert derive("t", "a", "r", "c") == derive("t", "a", "r", "c")
    assert len(derive()) == NAMESPACE_BYTES == 16


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (derive("ab", caller="c"), derive("a", caller="bc")),
        (derive(adapter="ab", caller="c"), derive(adapter="a", caller="bc")),
        (derive("ab", revision="c"), derive("a", revision="bc")),
        (derive(adapter="x"), derive(caller="x")),
        (derive(adapter="x", caller=""), derive(adapter="", caller="x")),
        (derive(caller="public"), derive()),
        (derive(caller="isolation"), derive()),
        (derive(caller="tenant:t"), derive()),
        (derive(caller="adapter\x00x"), derive(adapter="x")),
        (derive(caller="caller_key"), derive()),
        (derive(tenant="", isolation="tenant"), derive(tenant="", isolation="shared")),
        (derive("t"), derive("t ")),
        (derive("\u00e9"), derive("e\u0301")),
    ],
    ids=[
        "tenant_and_key_moved_by_one",
        "adapter_and_key_moved_by_one",
        "tenant_and_revision_moved_by_one",
        "adapter_id_as_caller_key",
        "fields_swapped",
        "reserved_word_public",
        "reserved_word_isolation",
        "reserved_word_tenant",
        "reserved_word_adapter",
        "reserved_word_caller_key",
        "the_two_isolations",
        "trailing_blank",
        "composed_and_decomposed",
    ],
)
def test_different_tuples_have_different_digests(one: Namespace, other: Namespace) -> None:
    """F46 (digests): fields are tagged and carry their lengths, so no two tuples run together."""
    assert one != other


def test_no_two_of_all_short_tuples_collide() -> None:
    """Every tuple of four fields over a few tricky words, pairwise."""
    words = ("", "a", "ab", "b", "tenant", "a\x00", "public:")
    digests = {derive(a, b, c, d) for a, b, c, d in itertools.product(words, repeat=4)}
    assert len(digests) == len(words) ** 4


def test_shared_isolation_ignores_the_tenant_and_nothing_else() -> None:
    """One trust domain: two tenants meet, two adapters, revisions or caller keys do not."""
    base = derive("t1", "a", "r", "c", isolation="shared")
    assert derive("t2", "a", "r", "c", isolation="shared") == base
    assert derive("t1", "b", "r", "c", isolation="shared") != base
    assert derive("t1", "a", "s", "c", isolation="shared") != base
    assert derive("t1", "a", "r", "d", isolation="shared") != base
    assert derive("t1", "a", "r", "c", isolation="tenant") != base


def test_another_fleet_secret_gives_other_digests() -> None:
    """F33 and forging: a new revision and a new key each begin new namespaces."""
    other = derive_namespace(bytes(32), tenant="t", adapter_digest="", model_revision="r", caller_key="")
    assert other != derive()
    assert derive(revision="r2") != derive(revision="r")


def test_any_string_is_allowed_as_a_callers_key() -> None:
    """A lone surrogate, a NUL and a megabyte are strings like any other."""
    keys = ("\ud800", "\x00", "x" * 1_000_000, "😀")
    assert len({derive(caller=key) for key in keys}) == len(keys)


def test_the_short_digest_is_four_bytes_of_hexadecimal() -> None:
    assert short_digest(bytes(range(16))) == "00010203"
