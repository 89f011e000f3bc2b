"""Tokenising a conversation whose parts are trusted differently, to the same ids as tokenising its whole text.

A tokenizer cuts a text at special tokens and tokenises what lies between on its own. So nothing is changed by doing the same
here: collect text until a special token of the *template* comes, tokenise the collected text as plain, go on. A content does not
begin or end a piece (merges may cross its borders); only special tokens and remembered answers do.

::

    <|im_start|> user\\nHello <|im_end|> \\n <|im_start|> assistant\\n ⟨ids of the answer⟩ <|im_end|> …
    special      one piece    special   pc  special     one piece     as remembered       special
"""

from typing import Literal

from prefixmesh.ids import Namespace
from prefixmesh.text.piece_encoder import PieceEncoder
from prefixmesh.text.tokenizer import Tokenizer
from prefixmesh.tokens import pack

_Before = Literal["nothing", "special", "answer"]


class SpanEncoder:
    """Takes the parts of one conversation in order; ``finish`` gives its tokens."""

    def __init__(self, tokenizer: Tokenizer, pieces: PieceEncoder, namespace: Namespace) -> None:
        self._tokenizer = tokenizer
        self._pieces = pieces
        self._namespace = namespace
        self._ids_of_special = {token.content: ids for ids, token in tokenizer.special_tokens.items()}
        self._packed: list[bytes] = []
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

    def answer(self, packed: bytes) -> None:
        """An answer as it was generated. The text before it is tokenised as it was when it ended the prompt."""
        self._flush()
        self._packed.append(packed)
        self._before = "answer"

    def finish(self) -> bytes:
        """The packed tokens of everything."""
        self._flush()
        return b"".join(self._packed)

    def _special(self, token_id: int) -> None:
        token = self._tokenizer.special_tokens[token_id]
        self._flush(trim_end=token.lstrip)
        self._packed.append(pack([token_id]))
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
        self._packed.append(self._pieces.encode(self._namespace, text, continuing=goes_on))
