"""Small tokenizers made on the spot: byte-level ones and SentencePiece-like ones, for tests of the text room."""

from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from prefixmesh.text.backend import METASPACE, byte_level_alphabet
from prefixmesh.text.gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, build_gguf_tokenizer
from prefixmesh.text.tokenizer import Tokenizer

CONTROL_TOKENS = ("<|bos|>", "<|turn|>", "<|end|>")


def byte_level_backend(
    merges: Sequence[tuple[str, str]] = (), special: Sequence[AddedToken] | None = None, **model: Any
) -> Backend:
    """A byte-level vocabulary: 256 bytes, the merges, the control tokens (ids last)."""
    tokens = [*byte_level_alphabet(), *(left + right for left, right in merges)]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={token: rank for rank, token in enumerate(tokens)}, merges=list(merges), **model)
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
        if special is None
        else list(special)
    )
    return backend


def wrap(backend: Backend, *, adds_bos: bool = False, bos: str | None = "<|bos|>") -> Tokenizer:
    """Our tokenizer around a backend."""
    return Tokenizer(
        backend,
        bos_token_id=None if bos is None else backend.token_to_id(bos),
        eos_token_ids=(),
        adds_bos=adds_bos,
        digest="test",
    )


def sentencepiece_metadata(
    pieces: Sequence[str] = ("▁he", "llo", "he", "ll", "▁", "h", "e", "l", "o", "w", "▁hello"), **changes: Any
) -> dict[str, Any]:
    """GGUF key/values of a SentencePiece vocabulary: unknown, two control tokens, 256 bytes, then the pieces, best first."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        **changes,
    }


def sentencepiece_tokenizer(**changes: Any) -> Tokenizer:
    """A tokenizer over ``sentencepiece_metadata``."""
    pipeline = build_gguf_tokenizer(sentencepiece_metadata(**changes))
    return wrap(pipeline.backend, adds_bos=pipeline.adds_bos, bos="<s>")


def metaspace_backend(prepend_scheme: str) -> Backend:
    """A vocabulary in the newer Hugging Face form: the prefix is the pre-tokenizer's business."""
    backend = build_gguf_tokenizer(sentencepiece_metadata()).backend
    plain = tokenizers.Tokenizer(backend.model)
    plain.pre_tokenizer = pre_tokenizers.Metaspace(METASPACE, prepend_scheme, split=False)
    plain.decoder = decoders.Sequence(
        [
            decoders.Replace(METASPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    plain.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return plain
