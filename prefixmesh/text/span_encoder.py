"""Tokenising a conversation whose parts are trusted differently, to the same ids as tokenising its whole text.

A tokenizer cuts a text at special tokens and tokenises what lies between on its own. So nothing is changed by doing the same
here: collect text until a special token of the *template* comes, tokenise the collected text as plain, go on. A content does not
begin or end a piece (merges may cross its borders); only special tokens and remembered answers do.

::

    <|im_start|> user\\nHello <|im_end|> \\n <|im_start|> assistant\\n ⟨ids of the answer⟩ <|im_end|> …
    special      one piece    special   pc  special     one piece     as remembered       special
"""

from collections.abc import Sequence
from typing import Literal

from prefixmesh.text.tokenizer import Tokenizer

_Before = Literal["nothing", "special", "answer"]


class SpanEncoder:
    """Takes the parts of one conversation in order; ``finish`` gives its tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids_of_special = {token.content: ids for ids, token in tokenizer.special_tokens.items()}
        self._ids: list[int] = []
        self._pending: list[str] = []
        self._before: _Before = "nothing"
        self._eats_space = False

    def template(self, text: str) -> None:
        """The template's own text: special tokens in it are meant."""
        pattern = self._tokenizer.special_pattern
        at = 0
        for found in pattern.finditer(text) if pattern else ():
            self._pending.append(text[at : found.start()])
            self._special(self._ids_of_special[found.group()])
            at = found.end()
        self._pending.append(text[at:])

    def content(self, text: str) -> None:
        """A message's text: plain, whatever it says."""
        self._pending.append(text)

    def answer(self, ids: Sequence[int]) -> None:
        """An answer as it was generated. The text before it is tokenised as it was when it ended the prompt."""
        self._flush()
        self._ids.extend(ids)
        self._before = "answer"

    def finish(self) -> list[int]:
        """The tokens of everything."""
        self._flush()
        return self._ids

    def _special(self, token_id: int) -> None:
        token = self._tokenizer.special_tokens[token_id]
        self._flush(trim_end=token.lstrip)
        self._ids.append(token_id)
        self._before = "special"
        self._eats_space = token.rstrip

    def _flush(self, *, trim_end: bool = False) -> None:
        text = "".join(self._pending)
        self._pending.clear()
        # Some vocabularies have special tokens that swallow the white space beside them.
        if self._eats_space:
            text = text.lstrip()
        if trim_end:
            text = text.rstrip()
        self._eats_space = False
        if not text:
            return
        goes_on = self._before == "answer" or (
            self._before == "special" and self._tokenizer.prefix_only_first
        )
        self._ids += self._tokenizer.encode_plain(text, continuing=goes_on)
