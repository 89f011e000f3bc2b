"""The tokenizer inside a GGUF file, rebuilt as a ``tokenizers`` pipeline.

GGUF keeps the vocabulary and the merges, and only the *name* of the pre-tokenizer, after llama.cpp's table (``llama-vocab.cpp``).
The rule behind a name decides the tokens (``2024`` is one, two or four of them), so a name that is not known here is an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from prefixmesh.errors import ModelFileError
from prefixmesh.text.backend import METASPACE

_T = TypeVar("_T")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""GGUF's token types."""

MAX_PIECE_CHARS: Final = 256
"""Longest SentencePiece token whose merges are rebuilt: each is split at every place, so a huge one would cost its square."""

_LLAMA3_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN: Final = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _PreTokenizer:
    """How text is cut into words before merging."""

    pattern: str | None = None
    """A regular expression whose matches are the words; None is GPT-2's, which the library has built in."""

    single_digits: bool = False
    """Whether every digit is cut off before that."""

    ignore_merges: bool = False
    """Whether a word that is a token is taken as it is, even if the merges lead elsewhere."""

    adds_bos: bool = False
    """What holds when the file does not say."""

    composes: bool = False
    """Whether text is brought to Unicode's composed form (NFC) first."""


_GPT2: Final = _PreTokenizer()
_DIGITS: Final = _PreTokenizer(single_digits=True)
_LLAMA3: Final = _PreTokenizer(pattern=_LLAMA3_PATTERN, ignore_merges=True, adds_bos=True)
_QWEN2: Final = _PreTokenizer(pattern=_QWEN2_PATTERN, composes=True)

PRE_TOKENIZERS: Final[Mapping[str, _PreTokenizer]] = MappingProxyType(
    {
        "default": _GPT2,
        "gpt-2": _GPT2,
        "gpt2": _GPT2,
        "smollm": _DIGITS,
        "starcoder": _DIGITS,
        "refact": _DIGITS,
        "codeshell": _DIGITS,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
        "llama-bpe": _LLAMA3,
        "qwen2": _QWEN2,
        "deepseek-r1-qwen": _QWEN2,
    }
)


@dataclass(frozen=True, slots=True)
class GgufPipeline:
    """A rebuilt tokenizer and whether it begins a text with its BOS token."""

    backend: tokenizers.Tokenizer
    adds_bos: bool


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> GgufPipeline:
    """Rebuild the tokenizer of a GGUF file's key/values; 0.1 s for 49,152 tokens. Raises ModelFileError naming the key."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    types = _list(metadata, "tokenizer.ggml.token_type", int, [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ModelFileError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    if len(set(tokens)) != len(tokens):
        raise ModelFileError("tokenizer.ggml.tokens has the same token twice")
    try:
        if model == "gpt2":
            backend, default_bos = _byte_level(metadata, tokens)
        elif model == "llama":
            backend, default_bos = _sentencepiece(metadata, tokens, types)
        else:
            raise ModelFileError(f"tokenizer.ggml.model is {model!r}; supported: gpt2, llama")
    except ModelFileError:
        raise
    except Exception as error:  # the library raises bare Exception for merges that do not fit the vocabulary
        raise ModelFileError(f"the GGUF file's vocabulary does not make a tokenizer: {error}") from error
    _add_tokens(backend, tokens, types)
    return GgufPipeline(backend, metadata.get("tokenizer.ggml.add_bos_token", default_bos) is True)


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[tokenizers.Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelFileError(f"tokenizer.ggml.pre is {name!r}; supported: {known}")
    merges: list[tuple[str, str]] = []
    for merge in _list(metadata, "tokenizer.ggml.merges", str):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=rule.ignore_merges,
        )
    )
    if rule.composes:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if rule.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rule.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, rule.adds_bos


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    scores = _list(metadata, "tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ModelFileError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=merges_from_scores(tokens, scores, types),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    to_metaspace = normalizers.Replace(" ", METASPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(METASPACE), to_metaspace]) if prefix else to_metaspace
    )
    steps = [decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend, True


def merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose union has the best score; as a list of merges, best first.

    The same list as Hugging Face's conversion makes. Control tokens take no part: plain text must never merge into one.
    """
    usable = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (NORMAL, USER_DEFINED) and len(token) <= MAX_PIECE_CHARS
    }
    found: list[tuple[float, int, int, int]] = []
    for whole, whole_id in usable.items():
        for cut in range(1, len(whole)):
            left, right = usable.get(whole[:cut]), usable.get(whole[cut:])
            if left is not None and right is not None:
                found.append((-scores[whole_id], whole_id, left, right))
    found.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in found]


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Tokens that are cut out of a text before anything else: control tokens, and those a user defined."""
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind == CONTROL and token
    ]
    # A user-defined run of spaces is written with the space's stand-in, and is found by merging like any other.
    defined = [
        AddedToken(token, special=False, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind == USER_DEFINED and token and METASPACE not in token
    ]
    backend.add_special_tokens(special)
    backend.add_tokens(defined)


def _list(metadata: Mapping[str, Any], key: str, kind: type[_T], default: list[_T] | None = None) -> list[_T]:
    value = metadata.get(key, default)
    if not isinstance(value, list) or (value and not isinstance(value[0], kind)):
        raise ModelFileError(f"the GGUF file lacks a good {key}")
    return value
