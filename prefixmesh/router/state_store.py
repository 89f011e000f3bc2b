"""What routers must remember beyond their own lives: the interface of its keepers.

A store holds small values under keys, each with a version that no later write ever repeats, so that a writer can make its write depend
on what it has read. It knows nothing of what the values mean. Caches are not in it: workers themselves are the truth about those.

Nothing on a request's path may wait for a store. Its readers keep what they have read and are told of changes (``watch``).
"""

from collections.abc import AsyncGenerator
from typing import Final, NamedTuple, Protocol

from prefixmesh.errors import InvalidRequestError

MAX_KEY_BYTES: Final = 1024
"""A key is a kind and a name, such as an address, or a tenant of 128 signs, percent-encoded, and a pin's name."""

MAX_VALUE_BYTES: Final = 8 * 2**20
"""A pin of two million tokens; what is larger is not a setting."""

MAX_ENTRIES: Final = 65_536
"""Pins, adapters and workers of the largest fleets; beyond it somebody writes in a loop."""

ABSENT: Final = 0
"""As an expected version: the key must not be there. No entry has it."""


class Entry(NamedTuple):
    """A value as it was written last."""

    key: str
    value: bytes
    version: int


class Change(NamedTuple):
    """What became of a key."""

    key: str
    value: bytes | None
    """None: it is not there any more."""

    version: int


class StateStore(Protocol):
    """Every keeper passes ``tests/contract/test_state_store_contract.py``. Calls raise UnavailableError while the keeper cannot do its work;
    then nothing has changed, unless a keeper elsewhere was only late to say so: then watches tell of the write."""

    async def get(self, key: str) -> Entry | None:
        """The entry of ``key``; None when there is none."""
        ...

    async def entries(self, prefix: str) -> list[Entry]:
        """All entries whose keys begin with ``prefix``, sorted by key."""
        ...

    async def put(self, key: str, value: bytes, *, expect: int | None = None) -> int | None:
        """Write, and return the new version, once the value will survive. With ``expect`` only if the key has that version (``ABSENT``: if it
        is not there); None when it has not, and then nothing changes.

        Raises InvalidRequestError for a key or a value beyond the limits, BudgetError when there are too many.
        """
        ...

    async def delete(self, key: str, *, expect: int | None = None) -> bool:
        """Remove a key, with ``expect`` only at that version; whether it was removed."""
        ...

    def watch(self, prefix: str) -> AsyncGenerator[Change]:
        """What is there under ``prefix`` now, as changes, and then what changes. Several changes of one key may come as the last of them; a
        reader that is slow misses nothing else, and keeps no writer waiting. Close it when done (``aclosing``)."""
        ...

    async def now(self) -> float:
        """Seconds since 1970 by the keeper's clock, which all who share the state read alike, however their own clocks differ."""
        ...

    @property
    def is_shared(self) -> bool:
        """Whether other routers may use the state at the same time."""
        ...

    async def close(self) -> None:
        """Let go of what it holds; watches end."""
        ...


def check_key(key: str) -> None:
    """Raises InvalidRequestError for a key that no store takes."""
    size = len(key.encode())
    if not 1 <= size <= MAX_KEY_BYTES:
        raise InvalidRequestError("key", f"must be 1 to {MAX_KEY_BYTES} bytes, got {size}")


def check_value(value: bytes) -> None:
    """Raises InvalidRequestError for a value that no store takes."""
    if len(value) > MAX_VALUE_BYTES:
        raise InvalidRequestError("value", f"must be at most {MAX_VALUE_BYTES} bytes, got {len(value)}")
