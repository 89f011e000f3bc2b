"""Two synthetic loads: two tenants' conversations, in the order in which their turns come.

Each tenant's conversations open with its system prompt of 1,000 tokens. *Chats* are as long as those of LMSYS-Chat-1M are on average
(its paper's table of statistics: 69.5 tokens a question, 214.5 an answer, 2.0 turns). *Long* ones have questions of 60 to 300
tokens, answers of 100 to 300, and 2 to 10 turns: prompts of 2,400 tokens in the mean. All lengths are evenly spread.

Several hundred conversations are open at once, the next turn is that of any of them, and one that ends gives way to a new one. What
the ended ones leave soon fills a pool of a million tokens: from then on something must go in every turn, and of the long ones some turns
find less than the one before them left. Tokens are random, everything from one seed. Keys are made here and not on the cache's
time: making them is the request's part.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from prefixmesh.bench.trees import OWNERS, SEED, Owner
from prefixmesh.cache.base import RadixKey
from prefixmesh.tokens import TOKEN_BYTES

SYSTEM_TOKENS: Final = 1_000


class Talk(NamedTuple):
    """How long conversations are: bounds of even spreads."""

    question_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]
    turns: tuple[int, int]


CHATS: Final = Talk((20, 119), (80, 349), (1, 3))
LONG: Final = Talk((60, 300), (100, 300), (2, 10))


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

    def __init__(self, page_size: int, open_at_once: int, talk: Talk) -> None:
        self._talk = talk
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
        return _Conversation(OWNERS[tenant], self._systems[tenant], self._between(self._talk.turns))

    def _next_turn(self, conversation: _Conversation) -> Turn:
        prompt = conversation.said + self._tokens(self._talk.question_tokens)
        said = prompt + self._tokens(self._talk.answer_tokens)
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
