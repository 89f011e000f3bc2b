"""Prompts as many users send them, from a seed: shared system prompts, conversations, bursts of one prompt, long documents.

All namespaces draw from the same few texts, so that equal tokens in two of them are the rule and not the exception.
"""

import random
from dataclasses import dataclass, field
from typing import Final

from prefixmesh import tokens
from prefixmesh.cache.public import PublicPrefix, public_boundary
from prefixmesh.ids import Namespace
from prefixmesh.worker.messages import EngineSampling, Submit
from tests.support.fake_model import FAKE_VOCAB

PUBLIC: Final = Namespace(b"p" * 16)
NAMESPACES: Final = (b"a" * 16, b"b" * 16, b"c" * 16)
MAX_CONVERSATIONS: Final = 48
"""Few enough that most are taken up again, many enough that the pool cannot hold them all."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    command: Submit
    prompt: list[int]
    conversation: "Conversation"


@dataclass(slots=True, eq=False)
class Conversation:
    """What one user and the model have said so far."""

    namespace: bytes
    history: list[int]


@dataclass(slots=True)
class Workload:
    """A seeded source of requests. ``longest`` is the most tokens of prompt and answer together."""

    rng: random.Random
    longest: int
    page_size: int = 1
    public_blocks: int = 0
    """Tokens in a block: system prompts are cut to whole ones, and pages, and public then. 0: nothing is."""

    system_prompts: list[list[int]] = field(init=False)
    conversations: list[Conversation] = field(default_factory=list)
    made: int = 0

    def __post_init__(self) -> None:
        self.system_prompts = [self._text(self.rng.randint(6, self.longest // 5)) for _ in range(4)]

    def burst(self) -> list[Ask]:
        """What arrives at one moment: one request, several with one and the same prompt, or such in several namespaces."""
        kind = self.rng.random()
        conversation = self._conversation()
        prompt = self._prompt(conversation, long=kind > 0.93)
        if kind < 0.65 or kind > 0.93:
            return [self._ask(conversation, prompt)]
        if kind < 0.85:
            return [self._ask(conversation, prompt) for _ in range(self.rng.randint(2, 5))]
        return [self._ask(Conversation(namespace, []), prompt) for namespace in NAMESPACES]

    def answered(self, ask: Ask, answer: list[int]) -> None:
        """The next turn of the conversation builds on this; of several answers to one prompt, on the last."""
        ask.conversation.history = ask.prompt + answer

    def _conversation(self) -> Conversation:
        if len(self.conversations) < MAX_CONVERSATIONS:
            self.conversations.append(
                Conversation(self.rng.choice(NAMESPACES), list(self.rng.choice(self.system_prompts)))
            )
            return self.conversations[-1]
        place = self.rng.randrange(MAX_CONVERSATIONS)
        conversation = self.conversations[place]
        if len(conversation.history) > self.longest * 0.7 or self.rng.random() < 0.1:
            self.conversations.pop(place)
            return self._conversation()
        return conversation

    def _prompt(self, conversation: Conversation, *, long: bool) -> list[int]:
        history = conversation.history
        if self.rng.random() < 0.15:  # an earlier turn is edited: the new text leaves the old one anywhere
            history = history[: self.rng.randint(1, max(1, len(history)))]
        room = self.longest - 40 - len(history)
        turn = self._text(min(room, self.rng.randint(room // 2, room) if long else self.rng.randint(1, 24)))
        return history + turn

    def _ask(self, conversation: Conversation, prompt: list[int]) -> Ask:
        self.made += 1
        rare = self.rng.random()
        sampling = EngineSampling(
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=0,
            max_tokens=0 if rare < 0.05 else self.rng.choice((1, 4, 12, 40)),
            stop_token_ids=(3, 7) if rare > 0.8 else (),
        )
        command = Submit(
            request_id=f"r{self.made}",
            namespace=conversation.namespace,
            tokens=tokens.pack(prompt),
            sampling=sampling,
            public=self._public(prompt),
        )
        return Ask(command, prompt, conversation)

    def _public(self, prompt: list[int]) -> tuple[PublicPrefix, ...]:
        """Now and then a router does not know of a pin yet, or not any more; and all know of some that fit other prompts."""
        if not self.public_blocks or self.rng.random() < 0.2:
            return ()
        prefixes = list(self.system_prompts)
        if self.rng.random() < 0.3:  # somebody pins more than that
            prefixes.append(prompt[: len(prompt) // 2])
        made = (
            public_boundary(
                PUBLIC, tokens.pack(prefix), page_size=self.page_size, block_size=self.public_blocks
            )
            for prefix in prefixes
        )
        return tuple(prefix for prefix in made if prefix is not None)

    def _text(self, length: int) -> list[int]:
        """Mostly of few different tokens, so that texts agree by chance for a while."""
        alphabet = self.rng.choice((2, 2, FAKE_VOCAB))
        return self.rng.choices(range(alphabet), k=max(1, length))
