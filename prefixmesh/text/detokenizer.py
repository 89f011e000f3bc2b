"""From a stream of tokens to a stream of text that never has to be taken back.

Two things may be unfinished at the end of what has come: a character (its bytes can span tokens), and a stop string. Both are
held back, and nothing else is. Each token costs its own bytes and characters, however long the answer already is.
"""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prefixmesh.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What new tokens add to an answer."""

    text: str
    """Text that is certain; may be empty."""

    stopped: bool
    """Whether a stop string is complete. The answer ends before it, and ``text`` is the last."""

    tokens_used: int
    """How many of the tokens pushed belong to the answer: all of them, or those up to the one that completed the stop string."""


class IncrementalDetokenizer:
    """One answer's text. What ``push`` and ``finish`` give, joined, is ``tokenizer.decode`` of all tokens up to the stop string.

    When several stop strings overlap, the one that is complete first counts, so that the text does not depend on how
    many tokens come at a time. What the first ``min_tokens`` tokens add is not searched.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._search = _StopSearch(stop)
        self._strip_first = tokenizer.strips_first_space
        self._stopped = False
        self._unsearched_left = min_tokens

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met; what is pushed after that is ignored."""
        return self._stopped

    def push(self, token_ids: Iterable[int]) -> TextDelta:
        """Take the next tokens; O(their characters times the number of stop strings)."""
        certain: list[str] = []
        used = 0
        for token_id in token_ids:
            if self._stopped:
                break
            used += 1
            certain.append(self._advance(self._decoder.decode(self._tokenizer.piece(token_id))))
            self._unsearched_left -= 1
        return TextDelta("".join(certain), self._stopped, used)

    def finish(self) -> str:
        """The rest of an answer that ended without a stop string; bytes of a character that never came become U+FFFD."""
        if self._stopped:
            return ""
        text = self._advance(self._decoder.decode(b"", final=True))
        return text if self._stopped else text + self._search.give_up()

    def _advance(self, text: str) -> str:
        if self._strip_first and text:
            self._strip_first = False
            text = text.removeprefix(" ")
        if not text or self._unsearched_left > 0:
            return text
        found = self._search.feed(text)
        self._stopped = found.stopped
        return found.text


@dataclass(frozen=True, slots=True)
class _Found:
    text: str
    stopped: bool


class _StopSearch:
    """Looks for all stop strings at once, a character at a time (Knuth, Morris, Pratt 1977, one automaton for each).

    An automaton's state is how many characters of its string the text ends with; the highest state is exactly what must
    be held back.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._patterns = [(pattern, _failures(pattern)) for pattern in stop]
        self._first_chars = frozenset(pattern[0] for pattern in stop)
        self._states = [0] * len(stop)
        self._held = ""

    def feed(self, text: str) -> _Found:
        """Text that can no longer be part of a stop string, up to the first that is complete."""
        if not self._held and self._first_chars.isdisjoint(text):
            return _Found(text, stopped=False)
        pending = self._held + text
        for at, char in enumerate(text, start=len(self._held)):
            matched = self._step(char)
            if matched:
                self._held = ""
                return _Found(pending[: at + 1 - matched], stopped=True)
        keep = max(self._states)
        self._held = pending[len(pending) - keep :]
        return _Found(pending[: len(pending) - keep], stopped=False)

    def give_up(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> int:
        """Advance every automaton; the length of the longest string that is now complete, or 0."""
        longest = 0
        for index, (pattern, failures) in enumerate(self._patterns):
            state = self._states[index]
            while state and pattern[state] != char:
                state = failures[state - 1]
            if pattern[state] == char:
                state += 1
            if state == len(pattern):
                # Only the longest matters, and after a match nothing is fed any more: the state may stay out of range.
                longest = max(longest, state)
            self._states[index] = state
        return longest


def _failures(pattern: str) -> list[int]:
    """For each prefix of the pattern, the length of its longest proper prefix that is also its end."""
    table = [0] * len(pattern)
    state = 0
    for index in range(1, len(pattern)):
        while state and pattern[state] != pattern[index]:
            state = table[state - 1]
        if pattern[state] == pattern[index]:
            state += 1
        table[index] = state
    return table
