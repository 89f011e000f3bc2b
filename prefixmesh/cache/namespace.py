"""Namespaces: the digest that keeps equal tokens of different tenants, adapters and model revisions apart.

A keyed BLAKE2b-128 over tagged, length-prefixed fields, so that digests are equal if and only if the tuples are, and
nobody without the fleet secret can compute or forge one (a caller who could would learn what others have cached).
"""

import hashlib
from typing import Final, Literal

from prefixmesh.ids import Namespace

NAMESPACE_BYTES: Final = 16
Isolation = Literal["tenant", "shared"]


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
    digest = hashlib.blake2b(key=key, digest_size=NAMESPACE_BYTES)
    owner = tenant if isolation == "tenant" else ""
    for tag, value in (
        (b"isolation", isolation),
        (b"tenant", owner),
        (b"adapter", adapter_digest),
        (b"revision", model_revision),
        (b"caller_key", caller_key),
    ):
        encoded = value.encode("utf-8", "surrogatepass")
        digest.update(len(tag).to_bytes(4, "little") + tag + len(encoded).to_bytes(8, "little") + encoded)
    return Namespace(digest.digest())


def short_digest(namespace: bytes) -> str:
    """The first 4 bytes in hexadecimal: enough to tell namespaces apart in a log, too little to address KV."""
    return namespace[:4].hex()
