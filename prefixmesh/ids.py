"""The small identities that must never be mixed, as distinct types.

All are plain values at run time; mypy keeps them apart. Tokens themselves are in ``prefixmesh.tokens``.
"""

from typing import NewType

WorkerId = NewType("WorkerId", str)
"""The name of a worker's place in the fleet; a restarted worker keeps it and takes a new incarnation."""

TenantId = NewType("TenantId", str)
"""Who a caller is, as its credentials say."""

RequestId = NewType("RequestId", str)
"""The server's name for one request, unique in the fleet; a caller's own id is only for logs."""

Fingerprint = NewType("Fingerprint", int)
"""XXH3-64 of a prefix that ends at a block boundary. It may route; only equal tokens may hit."""

Incarnation = NewType("Incarnation", int)
"""A random 64-bit number for one life of a worker process; compared for equality only."""

Namespace = NewType("Namespace", bytes)
"""The 16-byte digest that keeps equal tokens of different tenants, adapters or revisions apart."""

Epoch = NewType("Epoch", int)
"""A random 64-bit number for one life of a worker's cache; a flush begins a new one. Compared for equality only."""
