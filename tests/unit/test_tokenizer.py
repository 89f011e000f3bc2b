"""Tokenizers from GGUF files and Hugging Face folders: the right tokens, and never a control token from plain text."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers

from prefixmesh.errors import ModelFileError
from prefixmesh.model_files.source import ModelFiles, resolve_model
from prefixmesh.text.gguf_tokenizer import PRE_TOKENIZERS, build_gguf_tokenizer
from prefixmesh.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.texts import random_texts
from tests.support.tokenizer_kit import (
    byte_level_backend,
    metaspace_backend,
    sentencepiece_metadata,
    sentencepiece_tokenizer,
    wrap,
)


@pytest.fixture(scope="module")
def smollm2(smollm2_files: ModelFiles) -> Tokenizer:
    return load_tokenizer(smollm2_files)


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    """A Hugging Face folder around a small byte-level tokenizer."""
    backend = byte_level_backend([("h", "e")])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": backend.get_vocab_size(),
        "max_position_embeddings": 64,
        "eos_token_id": backend.token_to_id("<|end|>"),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<|bos|>"}, "add_bos_token": True})
    )
    return tmp_path


def test_the_default_model_describes_itself(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_ids) == (49152, 1, (2,))
    assert smollm2.special_ids == frozenset(range(17))
    assert not smollm2.adds_bos


def test_the_default_models_known_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.encode("The capital of France", allow_special=False, add_bos=True) == [
        504,
        3575,
        282,
        4649,
    ]


def test_every_digit_is_a_token_of_its_own_for_the_default_model(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("20246", allow_special=False, add_bos=False)
    assert [smollm2.decode([token_id]) for token_id in ids] == list("20246")


def test_a_thousand_strings_survive_encoding_and_decoding(smollm2: Tokenizer) -> None:
    """F61: CJK, emoji with joiners, Hangul, Arabic, combining marks, code, digits."""
    for text in random_texts(1000):
        assert smollm2.decode(smollm2.encode(text, allow_special=False, add_bos=False)) == text


def test_decoding_agrees_with_the_library_for_any_ids(smollm2: Tokenizer) -> None:
    backend = smollm2._backend
    for start in range(0, smollm2.vocab_size, 97):
        ids = list(range(start, min(start + 40, smollm2.vocab_size)))
        assert smollm2.decode(ids) == backend.decode(ids, skip_special_tokens=True)


def test_ids_without_a_token_have_no_text(smollm2: Tokenizer) -> None:
    assert smollm2.decode([49152, 10**9, -1]) == ""


def test_special_tokens_in_text_are_control_tokens_only_where_that_is_allowed(smollm2: Tokenizer) -> None:
    text = "a<|im_end|>\n<|im_start|>system\nb"
    assert {1, 2} <= set(smollm2.encode(text, allow_special=True, add_bos=False))
    plain = smollm2.encode(text, allow_special=False, add_bos=False)
    assert smollm2.special_ids.isdisjoint(plain)
    assert smollm2.decode(plain) == text


def test_merges_that_lead_to_a_control_token_are_undone() -> None:
    special = [AddedToken("<s>", special=True, normalized=False)]
    tokenizer = wrap(byte_level_backend([("<", "s"), ("<s", ">")], special, ignore_merges=True), bos=None)
    tokenizer._plain.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    assert tokenizer.encode("<s>", allow_special=True, add_bos=False) == [257]
    ids = tokenizer.encode("<s>", allow_special=False, add_bos=False)
    assert [tokenizer.piece(token_id) for token_id in ids] == [b"<", b"s", b">"]


def test_bos_is_added_once_where_the_model_wants_it() -> None:
    tokenizer = wrap(byte_level_backend(), adds_bos=True)
    bos = tokenizer.bos_token_id
    assert tokenizer.encode("a", allow_special=True, add_bos=True)[0] == bos
    assert tokenizer.encode("<|bos|>a", allow_special=True, add_bos=True).count(bos or -1) == 1
    assert tokenizer.encode("a", allow_special=True, add_bos=False)[0] != bos
    assert wrap(byte_level_backend()).encode("a", allow_special=True, add_bos=True)[0] != bos


def test_added_tokens_that_are_not_special_keep_their_text_and_id() -> None:
    backend = byte_level_backend()
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    tokenizer = wrap(backend)
    for allow_special in (True, False):
        ids = tokenizer.encode("a<tool><|end|>", allow_special=allow_special, add_bos=False)
        assert backend.token_to_id("<tool>") in ids
        assert tokenizer.decode(ids) == ("a<tool>" if allow_special else "a<tool><|end|>")


@functools.cache
def _of_kind(kind: str) -> Tokenizer:
    if kind == "sentencepiece":
        return sentencepiece_tokenizer()
    backend = byte_level_backend([("h", "e")])
    if kind == "composing":
        backend.normalizer = normalizers.NFC()
    return wrap(backend)


@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("kind", ["byte-level", "composing", "sentencepiece"])
def test_no_text_is_longer_than_its_tokens_allow(kind: str, text: str) -> None:
    """F62: the bound by which a text is refused without tokenising it."""
    tokenizer = _of_kind(kind)
    ids = tokenizer.encode(text, allow_special=True, add_bos=False)
    assert tokenizer.max_bytes_per_token is not None
    assert len(text.encode()) <= len(ids) * tokenizer.max_bytes_per_token


def test_a_normaliser_that_may_shorten_text_without_bound_gives_no_such_bound() -> None:
    backend = byte_level_backend()
    backend.normalizer = normalizers.Strip()
    assert wrap(backend).max_bytes_per_token is None


def test_a_text_far_too_long_is_known_without_tokenising_it_whole(
    smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F62: what is counted stops soon after the limit."""
    seen: list[int] = []
    encode = smollm2.encode

    def counting(text: str, **options: Any) -> list[int]:
        seen.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(smollm2, "encode", counting)
    assert smollm2.surely_exceeds("word and " * 100_000, 1000, allow_special=True)
    assert sum(seen) < 40_000
    assert not smollm2.surely_exceeds("word and " * 400, 1000, allow_special=True)
    assert not smollm2.surely_exceeds("<|im_end|>" * 1000, 1000, allow_special=True)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "in 2024 don't", ["in", " 2024", " don", "'t"]),
        ("smollm", "in 2024 DON'T", ["in", " ", "2", "0", "2", "4", " DON", "'", "T"]),
        ("llama-bpe", "in 20245 DON'T", ["in", " ", "202", "45", " DON", "'T"]),
        ("qwen2", "in 2024 don't", ["in", " ", "2", "0", "2", "4", " don", "'t"]),
    ],
)
def test_a_gguf_pre_tokenizer_cuts_words_as_its_name_says(pre: str, text: str, words: list[str]) -> None:
    backend = build_gguf_tokenizer(_byte_level_metadata(pre)).backend
    assert backend.pre_tokenizer is not None
    cut = [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == words


def test_every_pre_tokenizer_name_makes_a_tokenizer_that_loses_nothing() -> None:
    for pre in PRE_TOKENIZERS:
        tokenizer = wrap(build_gguf_tokenizer(_byte_level_metadata(pre)).backend, bos=None)
        text = "Grüße,\r\n  世界 12345 I'LL <x> "
        assert tokenizer.decode(tokenizer.encode(text, allow_special=True, add_bos=False)) == text


def _byte_level_metadata(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    tokens = [
        token for token, _ in sorted(byte_level_backend().get_vocab().items(), key=lambda pair: pair[1])
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 3,
        "tokenizer.ggml.merges": [],
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "unheard-of"}, r"tokenizer\.ggml\.pre is 'unheard-of'"),
        ({"tokenizer.ggml.model": "bert"}, r"tokenizer\.ggml\.model is 'bert'"),
        ({"tokenizer.ggml.model": None}, r"tokenizer\.ggml\.model"),
        ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "token_type has 259"),
        ({"tokenizer.ggml.tokens": ["a"] * 259}, "same token twice"),
        ({"tokenizer.ggml.merges": ["no such"]}, "does not make a tokenizer"),
        ({"tokenizer.ggml.merges": [1]}, r"tokenizer\.ggml\.merges"),
    ],
)
def test_a_gguf_vocabulary_that_cannot_be_used_is_refused_by_its_key(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        build_gguf_tokenizer(_byte_level_metadata(**changes))


def test_a_hugging_face_folder_gives_tokenizer_and_special_tokens(hf_folder: Path) -> None:
    tokenizer = load_tokenizer(resolve_model(str(hf_folder)))
    assert tokenizer.encode("he<|end|>", allow_special=True, add_bos=True) == [257, 256, 259]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.adds_bos) == (257, (259,), True)
    assert tokenizer.special_ids == {257, 258, 259}


def test_a_trainings_truncation_and_padding_are_not_ours(hf_folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(hf_folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=100)
    backend.save(str(hf_folder / "tokenizer.json"))
    tokenizer = load_tokenizer(resolve_model(str(hf_folder)))
    assert len(tokenizer.encode("abcdefghij", allow_special=True, add_bos=False)) == 10


def test_equal_tokenizers_have_equal_digests_and_others_do_not(hf_folder: Path) -> None:
    files = resolve_model(str(hf_folder))
    first, again = load_tokenizer(files), load_tokenizer(files)
    assert first.digest == again.digest
    byte_level_backend([("h", "i")]).save(str(hf_folder / "tokenizer.json"))
    assert load_tokenizer(files).digest != first.digest


@pytest.mark.parametrize("content", [None, "", "{}", '{"model": 1}', "\xff"])
def test_a_missing_or_malformed_tokenizer_is_a_clear_error(hf_folder: Path, content: str | None) -> None:
    path = hf_folder / "tokenizer.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        load_tokenizer(resolve_model(str(hf_folder)))


def test_a_decoder_that_is_not_understood_is_refused() -> None:
    backend = byte_level_backend()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelFileError, match="WordPiece"):
        wrap(backend)


def test_sentencepiece_text_gets_a_space_in_front_and_loses_it_when_decoded() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode("hello hello", allow_special=False, add_bos=True)
    hello = tokenizer._backend.token_to_id("▁hello")
    assert ids == [1, hello, hello]
    assert tokenizer.decode(ids) == "hello hello"
    assert tokenizer.decode(ids[1:2]) == "hello"


def test_sentencepiece_merges_the_best_scored_pair_first() -> None:
    """With "ll" best, "hell" is h-e-ll; with "he" best and "hel" next, it is hel-l."""
    pieces = {"ll": ("ll", "he", "hel"), "he": ("he", "hel", "ll")}
    found = {}
    for best, order in pieces.items():
        tokenizer = sentencepiece_tokenizer(pieces=(*order, "h", "e", "l", "▁"))
        ids = tokenizer.encode_plain("hell", continuing=True)
        found[best] = [tokenizer.piece(token_id).decode() for token_id in ids]
    assert found == {"ll": ["he", "ll"], "he": ["hel", "l"]}


def test_sentencepiece_falls_back_to_bytes() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode("世", allow_special=False, add_bos=False)
    assert [tokenizer.piece(token_id) for token_id in ids] == [b" ", b"\xe4", b"\xb8", b"\x96"]
    assert tokenizer.decode(ids) == "世"


def test_plain_text_never_merges_into_a_sentencepiece_control_token() -> None:
    pieces = ("<", "s", ">", "<s", "/", "</", "</s", "▁")
    tokenizer = sentencepiece_tokenizer(pieces=pieces)
    for text in ("<s>", "</s>", "a</s>b"):
        ids = tokenizer.encode(text, allow_special=False, add_bos=False)
        assert tokenizer.special_ids.isdisjoint(ids)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<s>", allow_special=True, add_bos=False) == [1]


def test_sentencepiece_without_a_space_prefix_adds_and_strips_none() -> None:
    tokenizer = sentencepiece_tokenizer(**{"tokenizer.ggml.add_space_prefix": False})
    ids = tokenizer.encode(" hello", allow_special=False, add_bos=False)
    assert tokenizer.decode(ids) == " hello"


def test_scores_must_fit_the_vocabulary() -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.scores"):
        build_gguf_tokenizer(sentencepiece_metadata() | {"tokenizer.ggml.scores": [0.0]})


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_continued_text_gets_nothing_in_front(scheme: str) -> None:
    tokenizer = wrap(metaspace_backend(scheme), bos="<s>")
    alone = tokenizer.encode_plain("hello")
    continued = tokenizer.encode_plain("hello", continuing=True)
    assert b"".join(map(tokenizer.piece, alone)) == (b"hello" if scheme == "never" else b" hello")
    assert b"".join(map(tokenizer.piece, continued)) == b"hello"
    assert tokenizer.prefix_only_first == (scheme == "first")


@pytest.mark.deep
def test_the_default_models_tokens_are_those_of_transformers(
    smollm2: Tokenizer, smollm2_files: ModelFiles
) -> None:
    """transformers reads the merges from the same file; it does not read ``pre``, so its missing step is put in."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(
        str(smollm2_files.path.parent), gguf_file=smollm2_files.path.name
    ).backend_tokenizer
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), theirs.pre_tokenizer]
    )
    for text in [*random_texts(3000, seed=7), "<|im_start|>user\nHi<|im_end|>\n"]:
        wanted = theirs.encode(text, add_special_tokens=False).ids
        assert smollm2.encode(text, allow_special=True, add_bos=False) == wanted
        assert smollm2.decode(wanted) == theirs.decode(wanted, skip_special_tokens=True)
