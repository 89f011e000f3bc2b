"""Looking into a ``tokenizers`` pipeline: what bytes each token stands for, and what it does at the beginning of a text.

The library encodes fast but decodes whole sequences only, and cannot say "this text goes on from what came before". Both are
read here once from the pipeline's own description, so that decoding needs a table lookup per token and a text can be encoded in
pieces. A pipeline with steps that are not understood is refused rather than decoded almost right.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

from prefixmesh.errors import ModelFileError

METASPACE: Final = "\u2581"
"""What SentencePiece vocabularies write for a space."""

NFC_SHRINK: Final = 3
"""Composition makes a text at most three times shorter in bytes (three Hangul letters to one syllable, KELVIN SIGN to K)."""

NFKC_SHRINK: Final = 4
"""Compatibility composition: a mathematical letter of four bytes becomes one of one byte."""


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """What a vocabulary's tokens stand for."""

    pieces: tuple[bytes, ...]
    """Bytes by id; empty for special tokens and for ids that have no token."""

    strips_first_space: bool
    """Whether decoding drops one space at the very beginning (the one that encoding puts there)."""


@dataclass(frozen=True, slots=True)
class PrefixRule:
    """What a pipeline puts before a text."""

    continuing: tokenizers.Tokenizer
    """Encodes a text that goes on from tokens before it: nothing is put in front. The plain one where there is no rule."""

    only_first: bool
    """Whether the prefix comes before the first text only, and not after each special token."""


def read_token_bytes(backend: tokenizers.Tokenizer) -> TokenBytes:
    """The table of a pipeline, O(vocabulary). Raises ModelFileError when its decoder is of an unknown kind."""
    kinds = list(_steps(describe_step(backend.decoder), "decoders"))
    names = [kind["type"] for kind in kinds]
    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    if names == ["ByteLevel"]:
        byte_of = byte_level_alphabet()
        for token, token_id in vocabulary.items():
            try:
                pieces[token_id] = bytes([byte_of[char] for char in token])
            except KeyError:  # a token outside the alphabet stands for itself
                pieces[token_id] = token.encode()
        strips = False
    elif names and all(map(_is_sentencepiece_step, kinds)):
        has_bytes = "ByteFallback" in names
        for token, token_id in vocabulary.items():
            pieces[token_id] = _sentencepiece_bytes(token, has_bytes=has_bytes)
        strips = any(
            kind["type"] == "Strip" or kind.get("prepend_scheme", "never") != "never" for kind in kinds
        )
    else:
        raise ModelFileError(f"the tokenizer's decoder is not supported: {', '.join(names) or 'none'}")
    for token_id, extra in added.items():
        pieces[token_id] = b"" if extra.special else extra.content.encode()
    return TokenBytes(tuple(pieces), strips)


def plain_copy(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer over the same model, shared and not copied, that takes special tokens' text for plain text."""
    plain = _same_model(backend)
    plain.normalizer = backend.normalizer
    plain.pre_tokenizer = backend.pre_tokenizer
    return plain


def read_prefix_rule(backend: tokenizers.Tokenizer, plain: tokenizers.Tokenizer) -> PrefixRule:
    """How to encode the continuation of a text."""
    normalizer, pre_tokenizer = describe_step(backend.normalizer), describe_step(backend.pre_tokenizer)
    kept = [step for step in _steps(normalizer, "normalizers") if step["type"] != "Prepend"]
    changed = len(kept) != len(list(_steps(normalizer, "normalizers")))
    only_first = False
    splits = list(_steps(pre_tokenizer, "pretokenizers"))
    for step in splits:
        if step["type"] == "Metaspace" and step.get("prepend_scheme") != "never":
            only_first = step.get("prepend_scheme") == "first"
            step["prepend_scheme"] = "never"
            changed = True
        if step["type"] == "ByteLevel" and step.get("add_prefix_space"):
            step["add_prefix_space"] = False
            changed = True
    if not changed:
        return PrefixRule(plain, only_first)
    continuing = _same_model(backend)
    # The library builds a step from its description only as part of a whole tokenizer.
    shell = tokenizers.Tokenizer.from_str(
        json.dumps(
            {
                "model": {"type": "BPE", "vocab": {}, "merges": []},
                "normalizer": {"type": "Sequence", "normalizers": kept} if kept else None,
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits} if splits else None,
            }
        )
    )
    if kept:
        continuing.normalizer = shell.normalizer
    if splits:
        continuing.pre_tokenizer = shell.pre_tokenizer
    return PrefixRule(continuing, only_first)


def normalizer_shrink(backend: tokenizers.Tokenizer) -> int | None:
    """How many times shorter normalising may make a text's bytes at most; None when that cannot be said."""
    factor = 1
    for step in _steps(describe_step(backend.normalizer), "normalizers"):
        match step:
            case {"type": "NFC"}:
                factor *= NFC_SHRINK
            case {"type": "NFKC"}:
                factor *= NFKC_SHRINK
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(
                new.encode()
            ) >= len(old.encode()):
                pass
            case _:
                return None
    return factor


def describe_step(
    step: normalizers.Normalizer | pre_tokenizers.PreTokenizer | decoders.Decoder | None,
) -> dict[str, Any] | None:
    """A pipeline step as the JSON object that ``tokenizer.json`` has for it."""
    if step is None:
        return None
    state = step.__getstate__()
    described: dict[str, Any] = json.loads(state)
    return described


def byte_level_alphabet() -> Mapping[str, int]:
    """GPT-2's way to write each byte as a printable character: printable Latin-1 as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + rank): byte for rank, byte in enumerate(others)
    }


def _same_model(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    other = tokenizers.Tokenizer(backend.model)
    # In the order of their ids, so that they get the same ones; special ones too, then told to be ignored in text.
    for token_id, token in sorted(backend.get_added_tokens_decoder().items()):
        (other.add_special_tokens if token.special else other.add_tokens)([token])
        if other.token_to_id(token.content) != token_id:
            raise ModelFileError(f"the added token {token.content!r} has the odd id {token_id}")
    other.encode_special_tokens = True
    return other


def _steps(described: dict[str, Any] | None, key: str) -> Iterator[dict[str, Any]]:
    """The steps of a possibly nested sequence, in order."""
    if described is None:
        return
    if described["type"] == "Sequence":
        for inner in described[key]:
            yield from _steps(inner, key)
    else:
        yield described


def _is_sentencepiece_step(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "ByteFallback" | "Fuse"}:
            return True
        case {"type": "Replace", "pattern": {"String": pattern}, "content": " "}:
            return bool(pattern == METASPACE)
        case {"type": "Metaspace", "replacement": replacement}:
            return bool(replacement == METASPACE)
        case {"type": "Strip", "content": " ", "start": 0 | 1, "stop": 0}:
            return True
        case _:
            return False


def _sentencepiece_bytes(token: str, *, has_bytes: bool) -> bytes:
    if has_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(METASPACE, " ").encode()
