"""Packed token ids by key, bounded by bytes: what the memories of answers and of tokenised pieces are made of. Pure.

No clock, no thread: the least recently used entries leave first, and whoever shares one between threads takes a lock.
"""

from collections import OrderedDict
from typing import Final

KEY_BYTES: Final = 32
"""Digests of 256 bits: equal ones mean equal texts, for callers who try to make them collide too."""

ENTRY_OVERHEAD_BYTES: Final = 250
"""What a dict entry, a key and a bytes object take besides the ids (measured: 240 on CPython 3.11)."""


class IdsMemory:
    """Packed ids by a digest, at most ``max_bytes`` of them in all. Not synchronised: one thread's, or under a lock."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {len(self._entries)} entries | {self._bytes} of {self._max_bytes} bytes>"
        )

    @property
    def used_bytes(self) -> int:
        """What the entries count for."""
        return self._bytes

    def remember(self, key: bytes, packed: bytes) -> None:
        """Keep ids, as the most recent; O(1) amortised. An entry larger than the whole memory is not kept."""
        self._drop(key)
        cost = _cost(packed)
        if cost > self._max_bytes:
            return
        self._entries[key] = packed
        self._bytes += cost
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def recall(self, key: bytes) -> bytes | None:
        """The ids of a key, or None; O(1). They become the most recent: a conversation that goes on keeps all that is its own."""
        packed = self._entries.get(key)
        if packed is not None:
            self._entries.move_to_end(key)
        return packed

    def _drop(self, key: bytes) -> None:
        packed = self._entries.pop(key, None)
        if packed is not None:
            self._bytes -= _cost(packed)


def _cost(packed: bytes) -> int:
    return len(packed) + ENTRY_OVERHEAD_BYTES
