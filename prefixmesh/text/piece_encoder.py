"""Tokenising the pieces that a prompt is cut into at special tokens, and remembering what the long ones became.

A tokenizer never merges across a special token, so what stands between two of them is tokenised the same whatever comes before or
behind: a conversation that comes back one turn longer, or another one with the same system prompt, is tokenised in its new pieces only.
Nothing is ever cut anywhere else: half a piece may have other tokens than the whole one.

What is remembered is known by a digest of the namespace and the text. The namespace is in it because a prompt that is tokenised sooner
tells its sender that somebody has sent the same before: within a namespace a prefix cache tells as much, across two nothing may.
"""

import hashlib
import threading
from typing import Final

from prefixmesh.ids import Namespace
from prefixmesh.text.ids_memory import KEY_BYTES, IdsMemory
from prefixmesh.text.tokenizer import Tokenizer
from prefixmesh.tokens import count, pack

PIECE_MEMORY_BYTES: Final = 64 * 2**20
"""Most bytes of remembered pieces: some sixteen million tokens, as many as of remembered answers."""

MIN_REMEMBERED_CHARS: Final = 128
"""Shorter pieces are tokenised in 25 µs or less: the digest and the entry would cost as much as they save."""


class PieceEncoder:
    """Tokenises for one tokenizer. May be used by several threads."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = PIECE_MEMORY_BYTES) -> None:
        """``max_bytes`` 0 remembers nothing."""
        self._tokenizer = tokenizer
        self._memory = IdsMemory(max_bytes)
        self._lock = threading.Lock()
        self.recalled_tokens = 0
        """Tokens that did not have to be made, since the beginning."""

    def encode(self, namespace: Namespace, text: str, *, continuing: bool = False) -> bytes:
        """Packed tokens of a piece, without any special token, whatever it says; as ``Tokenizer.encode_plain``.

        O(text) either way: a hundredth of the time for one that is remembered.
        """
        if len(text) < MIN_REMEMBERED_CHARS:
            return pack(self._tokenizer.encode_plain(text, continuing=continuing))
        key = _key(namespace, text, continuing=continuing)
        with self._lock:
            packed = self._memory.recall(key)
            if packed is not None:
                self.recalled_tokens += count(packed)
                return packed
        packed = pack(self._tokenizer.encode_plain(text, continuing=continuing))
        with self._lock:
            self._memory.remember(key, packed)
        return packed

    def __repr__(self) -> str:
        return f"<PieceEncoder {self._memory!r}>"


def _key(namespace: Namespace, text: str, *, continuing: bool) -> bytes:
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"piece")
    # Namespaces are all of one length, so no other triple reads the same.
    digest.update(namespace + bytes([continuing]))
    digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.digest()
