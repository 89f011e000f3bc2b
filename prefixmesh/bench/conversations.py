"""A synthetic load: two tenants' conversations, in the order in which their turns come.

Each tenant's conversations open with its system prompt of 1,000 tokens. A user's turn has 60 to 300 tokens and an answer 100 to
300, evenly spread, and a conversation 2 to 10 turns. 600 conversations are open at once, the next turn is that of any of them, and
one that ends gives way to a new one. The open ones are 770,000 tokens, and what the ended ones leave soon fills a pool of a million:
from then on something must go in every turn, and some turns find less than the one before them left. Prompts have 2,400 tokens
in the mean.

Tokens are random, everything from one seed. Keys are made here and not on the cache's time: making them is the request's part.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from prefixmesh.bench.trees import OWNERS, SEED, Owner
from prefixmesh.cache.base import RadixKey
from prefixmesh.tokens import TOKEN_BYTES

SYSTEM_TOKENS: Final = 1_000
USER_TOKENS: Final = (60, 300)
ANSWER_TOKENS: Final = (100, 300)
TURNS: Final = (2, 10)


class Turn(NamedTuple):
    """One request: its keys, and how many pages it needs."""

    owner: Owner
    match_key: RadixKey
    """All but the prompt's last token, in whole pages: one must be computed."""

    prompt_key: RadixKey
    answer_key: RadixKey
    """Prompt and answer without the last token, whose KV nobody has computed."""

    pages: int
    prompt_tokens: int


class _Conversation:
    """What has been said, and how often more will be."""

    def __init__(self, owner: Owner, system: bytes, turns: int) -> None:
        self.owner = owner
        self.said = system
        self.turns = turns


class Conversations:
    """Turns without end; the same ones for the same seed."""

    def __init__(self, page_size: int, open_at_once: int) -> None:
        self._page_size = page_size
        self._rng = np.random.default_rng(SEED)
        self._systems = [self._rng.bytes(SYSTEM_TOKENS * TOKEN_BYTES) for _ in OWNERS]
        self._open = [self._new(index) for index in range(open_at_once)]

    def turns(self, count: int) -> Iterator[Turn]:
        """The next ``count`` of them, each made when it is asked for."""
        for _ in range(count):
            index = int(self._rng.integers(len(self._open)))
            conversation = self._open[index]
            yield self._next_turn(conversation)
            if not conversation.turns:
                self._open[index] = self._new(index)

    def _new(self, index: int) -> _Conversation:
        tenant = index % len(OWNERS)
        return _Conversation(OWNERS[tenant], self._systems[tenant], self._between(TURNS))

    def _next_turn(self, conversation: _Conversation) -> Turn:
        prompt = conversation.said + self._tokens(USER_TOKENS)
        said = prompt + self._tokens(ANSWER_TOKENS)
        conversation.said = said
        conversation.turns -= 1
        return Turn(
            conversation.owner,
            self._key(conversation.owner, prompt[:-TOKEN_BYTES]),
            self._key(conversation.owner, prompt),
            self._key(conversation.owner, said[:-TOKEN_BYTES]),
            -(-len(said) // (self._page_size * TOKEN_BYTES)),
            len(prompt) // TOKEN_BYTES,
        )

    def _key(self, owner: Owner, packed: bytes) -> RadixKey:
        """Whole pages of ``packed``, in memory of its own."""
        page_bytes = self._page_size * TOKEN_BYTES
        return RadixKey(owner.namespace, bytes(bytearray(packed[: len(packed) // page_bytes * page_bytes])))

    def _tokens(self, between: tuple[int, int]) -> bytes:
        return self._rng.bytes(self._between(between) * TOKEN_BYTES)

    def _between(self, bounds: tuple[int, int]) -> int:
        least, most = bounds
        return int(self._rng.integers(least, most + 1))
