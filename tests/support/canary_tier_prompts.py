"""Prompts of two tenants that begin alike: in a tenant's namespace, in the public one, and public prefixes with private tails.

Everybody draws from the same few texts over a tiny alphabet, so that equal tokens in several namespaces are the rule.
"""

import hashlib
import random
from typing import Final

from prefixmesh.cache.base import RadixKey
from prefixmesh.ids import Namespace
from prefixmesh.tokens import TOKEN_BYTES, pack

PUBLIC: Final = Namespace(b"p" * 16)
TENANTS: Final = {"a": Namespace(b"a" * 16), "b": Namespace(b"b" * 16)}


class TierPrompts:
    """A seeded source of keys and who pays for them. Lengths are tokens."""

    def __init__(self, rng: random.Random, page_size: int, block_size: int, longest: int) -> None:
        self._rng, self._page_size, self._longest = rng, page_size, longest
        self._publics = [self._text(blocks * block_size) for blocks in (1, 3, 3)]
        self._publics[2][:page_size] = self._publics[1][:page_size]  # two of them part after a page
        self._texts = [
            [],
            *self._publics,
            *([*public, *self._text(3 * page_size + 1)] for public in self._publics),
        ]

    def ask(self) -> tuple[RadixKey, str]:
        """A known text, whole or cut, and something new behind it; and the owner, nobody for what is public."""
        rng, size = self._rng, self._page_size
        text = rng.choice(self._texts)
        text = text if rng.random() < 0.6 else text[: rng.randint(0, len(text))]
        tokens = (text + self._text(rng.randint(1, 6 * size)))[: self._longest]
        tokens = tokens if len(tokens) > size else tokens + self._text(size)
        owner = rng.choice(("a", "a", "b", "b", "b"))
        kind = rng.random()
        if kind < 0.15:
            return RadixKey(PUBLIC, pack(tokens)), ""
        prefixes = [public for public in self._publics if tokens[: len(public)] == public]
        if kind < 0.7 and prefixes:
            public = rng.choice(prefixes)
            tail = Namespace(hashlib.blake2b(TENANTS[owner] + pack(public), digest_size=16).digest())
            return RadixKey(PUBLIC, pack(tokens), len(public), tail), owner
        return RadixKey(TENANTS[owner], pack(tokens)), owner

    def learn(self, tokens: list[int]) -> None:
        """Somebody may go on from here; an older text is forgotten for it."""
        self._texts[self._rng.randrange(len(self._publics), len(self._texts))] = tokens

    def _text(self, length: int) -> list[int]:
        return self._rng.choices(range(self._rng.choice((1, 2, 3))), k=length)


def cut(key: RadixKey, tokens: int) -> RadixKey:
    """The first so many tokens of a key; a boundary beyond them is none."""
    shorter = key._replace(tokens=key.tokens[: tokens * TOKEN_BYTES])
    if tokens <= key.boundary_tokens:
        return shorter._replace(boundary_tokens=0, tail=Namespace(b""))
    return shorter
