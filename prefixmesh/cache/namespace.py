"""Namespaces: the digest that keeps equal tokens of different tenants, adapters and model revisions apart.

A keyed BLAKE2b-128 over tagged, length-prefixed fields, so that digests are equal if and only if the tuples are, and
nobody without the fleet secret can compute or forge one (a caller who could would learn what others have cached).

There are three kinds: a tenant's, the public one of a model (which is nobody's), and the tail that a tenant has behind a public
prefix. Each kind is another function, by BLAKE2b's personalisation, so that no field of one kind, whatever it says, can give a
digest of another.
"""

import hashlib
from collections.abc import Iterable
from typing import Final, Literal

from prefixmesh.ids import Fingerprint, Namespace

NAMESPACE_BYTES: Final = 16
Isolation = Literal["tenant", "shared"]

_PUBLIC: Final = b"prefixmesh/pub"
_TAIL: Final = b"prefixmesh/tail"
"""Personalisations (at most 16 bytes). A tenant's namespace has none."""


def derive_namespace(
    key: bytes,
    *,
    tenant: str,
    adapter_digest: str,
    model_revision: str,
    caller_key: str,
    isolation: Isolation = "tenant",
) -> Namespace:
    """Digest of ``(tenant, adapter content digest, model revision, caller key)``; O(length of the fields).

    Under ``shared`` isolation all tenants are one trust domain and the tenant does not enter the digest; a tag says which of
    the two modes a digest belongs to, so they never meet.
    """
    owner = tenant if isolation == "tenant" else ""
    fields = (
        (b"isolation", isolation),
        (b"tenant", owner),
        (b"adapter", adapter_digest),
        (b"revision", model_revision),
        (b"caller_key", caller_key),
    )
    return Namespace(hashlib.blake2b(_encode(fields), key=key, digest_size=NAMESPACE_BYTES).digest())


def public_namespace(key: bytes, *, adapter_digest: str, model_revision: str) -> Namespace:
    """Where the public prefixes of a model revision, with one adapter or none (``""``), live; O(length of the fields).

    The same under both isolations, and no tenant's: neither a name nor a caller key can lead here.
    """
    fields = ((b"adapter", adapter_digest), (b"revision", model_revision))
    digest = hashlib.blake2b(_encode(fields), key=key, digest_size=NAMESPACE_BYTES, person=_PUBLIC)
    return Namespace(digest.digest())


def tail_namespace(namespace: Namespace, boundary: Fingerprint) -> Namespace:
    """Where a tenant's tokens live behind a public prefix: another place for each of its namespaces and each boundary. O(1).

    No key is needed: whoever does not know the tenant's namespace cannot make it, and it tells nothing about that.

    Args:
        namespace: the tenant's, which it would use without the public prefix.
        boundary: the name of the public block that ends at the boundary, and so of the whole public prefix.
    """
    digest = hashlib.blake2b(digest_size=NAMESPACE_BYTES, person=_TAIL)
    digest.update(namespace)
    digest.update(boundary.to_bytes(8, "little"))
    return Namespace(digest.digest())


def short_digest(namespace: bytes) -> str:
    """The first 4 bytes in hexadecimal: enough to tell namespaces apart in a log, too little to address KV."""
    return namespace[:4].hex()


def _encode(fields: Iterable[tuple[bytes, str]]) -> bytes:
    """Tagged, length-prefixed fields: equal bytes for equal tuples only. A lone surrogate is a character like any."""
    encoded = [(tag, value.encode("utf-8", "surrogatepass")) for tag, value in fields]
    return b"".join(
        len(tag).to_bytes(4, "little") + tag + len(value).to_bytes(8, "little") + value
        for tag, value in encoded
    )
