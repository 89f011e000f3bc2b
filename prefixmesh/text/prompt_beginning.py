"""How much of a prompt's tokens every longer prompt that begins with it has, too: as much of it can be cached for all of them.

The last tokens of a text may become others when the text goes on: "don" and "'t", a space and the word behind it. How far back that can
reach depends on the tokenizer, so it is tried: the text is tokenised with several continuations, and what they do not share is left out,
and so is the last word, whatever they show. What is tried proves nothing about other continuations; a token too many costs no answer
its truth, only some tokens their use.
"""

from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from prefixmesh.requests import ChatMessage
from prefixmesh.tokens import TOKEN_BYTES, count, unpack

PROBED_CHARS: Final = 2048
"""Of a text's end, which is tokenised once for each continuation. No tokenizer that is served looks further back: words are shorter."""

LONGEST_WORD: Final = 64
"""Characters. Writing without spaces has no last word; there only what the continuations show is left out."""

CONTINUATIONS: Final = (
    "a",
    "s",
    " a",
    " ",
    "  ",
    "\n",
    "\n\n",
    "1",
    "23",
    ".",
    "'s",
    "é",
    "\u0301",
    "的",
    "あ",
    "_",
    "(",
)
"""Of a text: letters, white space, digits, signs, a mark that joins the character before it, scripts without spaces."""

NEXT_MESSAGES: Final[tuple[ChatMessage, ...]] = tuple(
    ChatMessage(role, content) for role in ("user", "assistant") for content in ("a", "\n1", " é")
)
"""Of a chat. Templates differ in which roles may follow each other: those that one refuses tell nothing."""


def shared_tokens(one: bytes, others: Iterable[bytes]) -> bytes:
    """The leading tokens of ``one`` that all ``others`` have, packed. O(length of each)."""
    for other in others:
        shorter = min(len(one), len(other))
        if one[:shorter] == other[:shorter]:
            one = one[:shorter]
            continue
        differs = np.flatnonzero(unpack(one[:shorter]) != unpack(other[:shorter]))
        one = one[: int(differs[0]) * TOKEN_BYTES]
    return one


def unsettled_tokens(text: str, tokenise: Callable[[str], bytes]) -> int:
    """How many of a text's last tokens may be others when the text goes on. ``tokenise`` gives packed tokens. O(1) tokenisings of the text's
    last ``PROBED_CHARS``."""
    tail = text[-PROBED_CHARS:]
    tokens = tokenise(tail)
    longer = [tokenise(tail + more) for more in CONTINUATIONS]
    cut = _last_word(tail)
    if len(tail) - cut <= LONGEST_WORD:
        longer.append(tokenise(tail[:cut]))
    return count(tokens) - count(shared_tokens(tokens, longer))


def _last_word(text: str) -> int:
    """Where the white space before the last word begins; 0 where there is no word before it."""
    words = text.rsplit(maxsplit=1)
    return len(words[0]) if len(words) > 1 else 0
