"""Namespaces: equal digests for equal tuples, and for nothing else (F46), in every process (F43)."""

import hashlib
import itertools

import pytest

from prefixmesh.cache.namespace import (
    NAMESPACE_BYTES,
    Isolation,
    derive_namespace,
    public_namespace,
    short_digest,
    tail_namespace,
)
from prefixmesh.ids import Fingerprint, Namespace

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


def public(adapter: str = "", revision: str = "r") -> Namespace:
    return public_namespace(KEY, adapter_digest=adapter, model_revision=revision)


def test_the_public_namespace_is_the_adapters_and_the_revisions() -> None:
    """One for each, whatever the isolation; ("ab", "c") and ("a", "bc") differ; another fleet has others."""
    pairs = list(itertools.product(("", "a", "ab", "b", "bc"), repeat=2))
    assert len({public(adapter, revision) for adapter, revision in pairs}) == len(pairs)
    assert public() == public()
    assert len(public()) == NAMESPACE_BYTES
    assert public() != public_namespace(bytes(32), adapter_digest="", model_revision="r")


def test_no_tenant_and_no_caller_key_leads_to_the_public_namespace() -> None:
    """F46: reserved words, empty names, names that spell out the fields: under either isolation, and one that does not exist."""
    words = ("", "public", "public:", "prefixmesh/pub", "\x00", "r", "adapter", "isolation", "tenant")
    isolations: tuple[Isolation, ...] = ("tenant", "shared", "public", "")  # type: ignore[assignment]
    tenants = {
        derive(tenant, adapter, "r", caller, isolation)
        for tenant, adapter, caller in itertools.product(words, repeat=3)
        for isolation in isolations
    }
    assert tenants.isdisjoint({public(), *(public(word) for word in words)})


def test_the_public_namespace_is_another_function_than_a_tenants() -> None:
    """Equal fields under the same key would not meet either: the personalisation is part of the digest."""
    fields = b"".join(
        len(tag).to_bytes(4, "little") + tag + len(value).to_bytes(8, "little") + value
        for tag, value in ((b"adapter", b"a"), (b"revision", b"r"))
    )
    digest = hashlib.blake2b(fields, key=KEY, digest_size=NAMESPACE_BYTES, person=b"prefixmesh/pub").digest()
    assert public("a") == digest
    assert hashlib.blake2b(fields, key=KEY, digest_size=NAMESPACE_BYTES).digest() != digest


def test_every_tenant_and_every_boundary_has_a_tail_of_its_own() -> None:
    """Also a caller key, an adapter, a revision: whatever makes another namespace makes other tails."""
    namespaces = [derive(), derive("u"), derive(caller="c"), derive("t", "a"), derive(revision="q"), public()]
    boundaries = [Fingerprint(value) for value in (0, 1, 2**63, 2**64 - 1)]
    tails = [
        tail_namespace(namespace, boundary)
        for namespace, boundary in itertools.product(namespaces, boundaries)
    ]
    assert len(set(tails)) == len(tails)
    assert {len(tail) for tail in tails} == {NAMESPACE_BYTES}
    assert tails[0] == tail_namespace(derive(), Fingerprint(0))


def test_a_tail_is_never_a_namespace_of_another_kind() -> None:
    """Not even without a key, over the same bytes: it is another function. Nor is the tail of a tail the tail."""
    namespace, boundary = derive(), Fingerprint(7)
    tail = tail_namespace(namespace, boundary)
    same_bytes = namespace + boundary.to_bytes(8, "little")
    for person in (b"", b"prefixmesh/pub"):
        assert hashlib.blake2b(same_bytes, digest_size=NAMESPACE_BYTES, person=person).digest() != tail
    assert tail_namespace(tail, boundary) not in (tail, namespace)
    with pytest.raises(OverflowError):
        tail_namespace(namespace, Fingerprint(2**64))


def test_the_short_digest_is_four_bytes_of_hexadecimal() -> None:
    assert short_digest(bytes(range(16))) == "00010203"
