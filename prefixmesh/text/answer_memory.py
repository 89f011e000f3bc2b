"""The ids of recent answers, so that a chat's history becomes the tokens that were generated, not a re-tokenising of their text.

Re-tokenising an answer can give other ids than the model chose (``["Par", "is"]`` for ``["Paris"]``), and from there on nothing
of the conversation would be found in a prefix cache. A pure core: no clock, no thread; least recently used entries leave first.

An answer is known by what is certain to be the same: the namespace, the rendered conversation up to the answer's first character,
and the answer's text. The digests are not secret and not guessable as such; the namespace in them keeps tenants apart.
"""

import hashlib
from collections import OrderedDict
from typing import Final

from prefixmesh.ids import Namespace

KEY_BYTES: Final = 32
"""Digests of 256 bits: equal ones mean equal texts, for callers who try to make them collide too."""

ENTRY_OVERHEAD_BYTES: Final = 250
"""What a dict entry, a key and a bytes object take besides the ids (measured: 240 on CPython 3.11)."""


class HistoryDigest:
    """A running digest of a conversation, so that the keys of all its answers cost one pass over the text."""

    def __init__(self) -> None:
        self._state = hashlib.blake2b(digest_size=KEY_BYTES, person=b"history")

    def add(self, text: str) -> None:
        """Go on with the next piece of the conversation; how it is cut into pieces makes no difference."""
        self._state.update(text.encode("utf-8", "surrogatepass"))

    def digest(self) -> bytes:
        """The digest of everything so far."""
        return self._state.digest()


def answer_key(namespace: Namespace, history: bytes, answer: str) -> bytes:
    """The key of an answer that comes, in a namespace, after the history with this digest."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"answer")
    # Every field but the last has its length before it, so no other triple reads the same.
    for field in (namespace, history):
        digest.update(len(field).to_bytes(8, "little") + field)
    digest.update(answer.encode("utf-8", "surrogatepass"))
    return digest.digest()


class AnswerMemory:
    """Packed ids by ``answer_key``, at most ``max_bytes`` of them in all. Not synchronised: one thread's, or under a lock."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<AnswerMemory {len(self._entries)} answers | {self._bytes} of {self._max_bytes} bytes>"

    @property
    def used_bytes(self) -> int:
        """What the entries count for."""
        return self._bytes

    def remember(self, key: bytes, packed: bytes) -> None:
        """Keep an answer's ids, as the most recent; O(1) amortised. One larger than the whole memory is not kept."""
        self._drop(key)
        cost = _cost(packed)
        if cost > self._max_bytes:
            return
        self._entries[key] = packed
        self._bytes += cost
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def recall(self, key: bytes) -> bytes | None:
        """An answer's ids, or None; O(1). It becomes the most recent: a conversation that goes on keeps all its answers."""
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
