"""Text to tokens and back, for the models that are served.

**Special tokens in text.** A control token such as ``<|im_end|>`` can be written out in ordinary text. Whether that text
*becomes* the control token is the caller's choice here (``allow_special``), because it is a question of trust: a chat template's
own text may end a turn, a user's message inside it must not.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import tokenizers

from prefixmesh.errors import ModelFileError
from prefixmesh.model_files.gguf_metadata import read_gguf_metadata
from prefixmesh.model_files.model_config import (
    gguf_eos_token_ids,
    gguf_token_id,
    read_json_object,
    read_model_config,
)
from prefixmesh.model_files.source import ModelFiles
from prefixmesh.text.backend import (
    normalizer_shrink,
    plain_copy,
    read_prefix_rule,
    read_token_bytes,
)
from prefixmesh.text.gguf_tokenizer import build_gguf_tokenizer

DIGEST_BYTES: Final = 16

PROBE_CHARS: Final = 16_384
"""Piece of a long text that is tokenised to learn whether the whole can fit: a few milliseconds."""

PROBE_SLACK: Final = 2
"""Cutting a text into pieces for a probe can make tokens that the whole would not have: a few at each cut, never as many again."""


class Tokenizer:
    """Encodes and decodes; immutable and safe to share between threads (encoding gives up the interpreter lock)."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
        adds_bos: bool,
        digest: str,
    ) -> None:
        backend.no_truncation()  # a tokenizer.json may carry its training's settings
        backend.no_padding()
        self._backend = backend
        self._plain = plain_copy(backend)
        self._prefix = read_prefix_rule(backend, self._plain)
        table = read_token_bytes(backend)
        added = backend.get_added_tokens_decoder()
        special = {token_id: token for token_id, token in added.items() if token.special}
        self.vocab_size: int = len(table.pieces)
        """One more than the highest id. A model may have more rows than that; they have no text."""

        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.adds_bos = adds_bos and bos_token_id is not None
        self.special_tokens = special
        """Control tokens by id, as the library describes them."""

        self.special_ids: frozenset[int] = frozenset(special)
        self.special_pattern: re.Pattern[str] | None = _any_of(token.content for token in special.values())
        """Finds special tokens that are written out in a text, the longest at each place; None when there are none."""

        self.cuts_at_specials: bool = all(_cuts_anywhere(token, backend) for token in special.values())
        """Whether a text means a special token wherever it spells one: then it may be cut there before it is tokenised."""

        self.pieces: tuple[bytes, ...] = table.pieces
        """What each token adds to the text, in bytes; empty for special tokens. A character may span several."""

        self.strips_first_space: bool = table.strips_first_space
        """Whether decoding drops one space at the very beginning."""

        self.digest = digest
        """Equal for tokenizers that give equal tokens: hexadecimal."""

        self.prefix_only_first: bool = self._prefix.only_first
        """Whether the space that some models put before a text comes at its very beginning only."""

        self.max_bytes_per_token: int | None = _max_bytes_per_token(backend, table.pieces)
        """No text of n tokens is longer than n times this; None when the model's normaliser can shorten text without bound."""

    def to_json(self) -> str:
        """The whole tokenizer as the text of a ``tokenizer.json``; also one that was read from elsewhere."""
        return self._backend.to_str()

    def encode(self, text: str, *, allow_special: bool, add_bos: bool) -> list[int]:
        """Tokens of a text; O(length).

        ``allow_special`` lets special tokens that are written out in the text become those tokens; without it they are
        ordinary characters. ``add_bos`` puts the BOS token first if the model wants one and the text does not begin with it.
        """
        ids = (
            self._backend.encode(text, add_special_tokens=False).ids
            if allow_special
            else self.encode_plain(text)
        )
        if add_bos and self.adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def encode_plain(self, text: str, *, continuing: bool = False) -> list[int]:
        """Tokens of a text without any special token, whatever it says.

        ``continuing`` means that tokens come before it which are not special, so nothing is put in front.
        """
        backend = self._prefix.continuing if continuing else self._plain
        ids = backend.encode(text, add_special_tokens=False).ids
        if not self.special_ids.isdisjoint(ids):
            # Merges that lead to a control token: no vocabulary we know has them, but one may be made to.
            one_by_one = (backend.encode(char, add_special_tokens=False).ids for char in text)
            ids = [token_id for part in one_by_one for token_id in part if token_id not in self.special_ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a token sequence; special tokens and unknown ids have none. Bytes that are no UTF-8 become U+FFFD."""
        text = b"".join(map(self.piece, ids)).decode("utf-8", "replace")
        return text[1:] if self.strips_first_space and text.startswith(" ") else text

    def piece(self, token_id: int) -> bytes:
        """What one token adds to the text; empty for special and unknown ids."""
        return self.pieces[token_id] if 0 <= token_id < self.vocab_size else b""

    def surely_exceeds(self, text: str, limit: int, *, allow_special: bool) -> bool:
        """Whether a text certainly has more tokens than ``limit``; stops as soon as that is clear, at O(limit) cost."""
        counted = 0
        for start in range(0, len(text), PROBE_CHARS):
            part = text[start : start + PROBE_CHARS]
            counted += len(self.encode(part, allow_special=allow_special, add_bos=False))
            if counted > limit * PROBE_SLACK:
                return True
        return False


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Load a model's tokenizer. Raises ModelFileError when it is missing, malformed or of a kind that is not supported."""
    return _load_gguf(files) if files.kind == "gguf" else _load_hf(files)


def _load_gguf(files: ModelFiles) -> Tokenizer:
    metadata = read_gguf_metadata(files.path)
    pipeline = build_gguf_tokenizer(metadata)
    fields = {key: value for key, value in metadata.items() if key.startswith("tokenizer.ggml.")}
    return Tokenizer(
        pipeline.backend,
        bos_token_id=gguf_token_id(files.path, metadata, "bos"),
        eos_token_ids=gguf_eos_token_ids(files.path, metadata),
        adds_bos=pipeline.adds_bos,
        digest=_digest(part for key in sorted(fields) for part in (key, json.dumps(fields[key]))),
    )


def _load_hf(files: ModelFiles) -> Tokenizer:
    path = files.path / "tokenizer.json"
    try:
        text = path.read_text("utf-8")
        backend = tokenizers.Tokenizer.from_str(text)
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error}") from error
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{path} is not a good tokenizer: {error}") from error
    config = read_model_config(files)
    settings_path = files.path / "tokenizer_config.json"
    settings = read_json_object(settings_path) if settings_path.is_file() else {}
    bos_token_id = _named_token(backend, settings, "bos_token")
    if bos_token_id is None:
        bos_token_id = config.bos_token_id
    eos_token_id = _named_token(backend, settings, "eos_token")
    eos = config.eos_token_ids or (() if eos_token_id is None else (eos_token_id,))
    adds_bos = settings.get("add_bos_token")
    if not isinstance(adds_bos, bool):
        adds_bos = bos_token_id is not None and backend.encode("").ids[:1] == [bos_token_id]
    return Tokenizer(
        backend,
        bos_token_id=bos_token_id,
        eos_token_ids=eos,
        adds_bos=adds_bos,
        digest=_digest((text, str(bos_token_id), str(adds_bos))),
    )


def _named_token(backend: tokenizers.Tokenizer, settings: dict[str, Any], key: str) -> int | None:
    token = token_text(settings, key)
    return backend.token_to_id(token) if token else None


def token_text(settings: dict[str, Any], key: str) -> str:
    """A token that ``tokenizer_config.json`` names, as text or as an object with a ``content``; empty when it names none."""
    value = settings.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _max_bytes_per_token(backend: tokenizers.Tokenizer, pieces: Sequence[bytes]) -> int | None:
    shrink = normalizer_shrink(backend)
    if shrink is None:
        return None
    added = (len(token.content.encode()) for token in backend.get_added_tokens_decoder().values())
    longest = max(map(len, pieces), default=1)
    return shrink * max(longest, *added, 1)


def _cuts_anywhere(token: tokenizers.AddedToken, backend: tokenizers.Tokenizer) -> bool:
    """Whether a token is found by its very characters: not only between words, and not in what a normaliser made of the text."""
    return not token.single_word and (not token.normalized or backend.normalizer is None)


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
