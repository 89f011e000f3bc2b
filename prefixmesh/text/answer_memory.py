"""The ids of recent answers, so that a chat's history becomes the tokens that were generated, not a re-tokenising of their text.

Re-tokenising an answer can give other ids than the model chose (``["Par", "is"]`` for ``["Paris"]``), and from there on nothing
of the conversation would be found in a prefix cache. Pure; see ``ids_memory`` for what is kept and what leaves.

An answer is known by what is certain to be the same: the namespace, the rendered conversation up to the answer's first character,
and the answer's text. The digests are not secret and not guessable as such; the namespace in them keeps tenants apart.
"""

import hashlib

from prefixmesh.ids import Namespace
from prefixmesh.text.ids_memory import KEY_BYTES, IdsMemory


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


class AnswerMemory(IdsMemory):
    """Answers' packed ids by ``answer_key``. Not synchronised: one thread's, or under a lock."""
