"""Pieces between special tokens, remembered: the same tokens as tokenising the whole, within one namespace, within a bound."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from prefixmesh.ids import Namespace
from prefixmesh.model_files.source import ModelFiles
from prefixmesh.requests import ChatMessage, ChatPrompt, TextPrompt
from prefixmesh.text import piece_encoder
from prefixmesh.text.chat_template import ChatTemplate, load_chat_template
from prefixmesh.text.ids_memory import ENTRY_OVERHEAD_BYTES
from prefixmesh.text.piece_encoder import MIN_REMEMBERED_CHARS, PieceEncoder
from prefixmesh.text.prompts import PromptBuilder
from prefixmesh.text.tokenizer import Tokenizer, load_tokenizer
from prefixmesh.tokens import unpack
from tests.support.tokenizer_kit import (
    byte_level_backend,
    metaspace_backend,
    sentencepiece_tokenizer,
    wrap,
)

NAMESPACE = Namespace(b"n" * 16)
OTHER_NAMESPACE = Namespace(b"o" * 16)
CONTEXT = 4096
LONG = "The quick brown fox jumps over the lazy dog. " * 20

_SWALLOWING = [
    AddedToken("<|turn|>", special=True, normalized=False, rstrip=True),
    AddedToken("<|end|>", special=True, normalized=False, lstrip=True, rstrip=True),
]
TOKENIZERS = {
    "merging": wrap(byte_level_backend([("h", "e"), ("he", "h"), ("Ċ", "Ċ"), ("Ċ", "h")])),
    "swallowing": wrap(byte_level_backend([("h", "e")], _SWALLOWING), bos=None),
    "sentencepiece": sentencepiece_tokenizer(),
    "first": wrap(metaspace_backend("first"), bos="<s>"),
    "always": wrap(metaspace_backend("always"), bos="<s>"),
}


@pytest.fixture(scope="module", autouse=True)
def _remember_every_piece() -> object:
    """However short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(piece_encoder, "MIN_REMEMBERED_CHARS", 1)
        yield


@pytest.fixture(scope="module")
def smollm2(smollm2_files: ModelFiles) -> tuple[Tokenizer, ChatTemplate | None]:
    return load_tokenizer(smollm2_files), load_chat_template(smollm2_files)


def spelled(tokenizer: Tokenizer) -> st.SearchStrategy[str]:
    """Texts with this tokenizer's special tokens in them, whole and broken off."""
    special = [token.content for token in tokenizer.special_tokens.values()][:6]
    parts = [*special, *(token[:-1] for token in special), "he", "h", "e", " ", "\n", "世", "a b"]
    return st.lists(st.sampled_from(parts), max_size=12).map("".join)


@pytest.mark.parametrize("kind", list(TOKENIZERS))
@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_a_text_that_spells_special_tokens_has_the_tokens_of_the_whole(
    kind: str, data: st.DataObject
) -> None:
    """Of every text, and again of those whose pieces are remembered by now."""
    tokenizer = TOKENIZERS[kind]
    builder = PromptBuilder(tokenizer, None, None, context_length=CONTEXT)
    texts = data.draw(st.lists(spelled(tokenizer), min_size=1, max_size=3))
    for text in [*texts, *texts, "".join(texts)]:
        whole = tokenizer.encode(text, allow_special=True, add_bos=True)
        if whole:
            assert unpack(builder.build(TextPrompt(text), NAMESPACE).tokens).tolist() == whole


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_a_real_models_chats_have_the_tokens_of_their_whole_text_however_much_is_remembered(
    smollm2: tuple[Tokenizer, ChatTemplate], data: st.DataObject
) -> None:
    tokenizer, template = smollm2
    builder = PromptBuilder(tokenizer, template, None, context_length=CONTEXT)
    contents = data.draw(st.lists(st.text("he \n世'1.", max_size=12), min_size=1, max_size=6))
    messages = [
        ChatMessage("user" if at % 2 == 0 else "assistant", content) for at, content in enumerate(contents)
    ]
    for end in range(1, len(messages) + 1):
        chat = ChatPrompt(tuple(messages[:end]))
        whole = tokenizer.encode(template.render(chat.messages), allow_special=True, add_bos=False)
        assert unpack(builder.build(chat, NAMESPACE).tokens).tolist() == whole


def test_special_tokens_that_a_text_does_not_mean_wherever_it_spells_them_are_not_cut_at() -> None:
    """Found between words only, or in what a normaliser makes of the text: then the library decides."""
    between = [AddedToken("<|turn|>", special=True, normalized=False, single_word=True)]
    backend = byte_level_backend([("h", "e")], between)
    assert not wrap(backend, bos=None).cuts_at_specials
    normalized = byte_level_backend([("h", "e")], [AddedToken("<|turn|>", special=True, normalized=True)])
    assert wrap(normalized, bos=None).cuts_at_specials
    normalized.normalizer = normalizers.NFC()
    assert not wrap(normalized, bos=None).cuts_at_specials
    builder = PromptBuilder(wrap(backend, bos=None), None, None, context_length=CONTEXT)
    for text in ("he<|turn|>he", "he <|turn|> he"):
        ids = wrap(backend, bos=None).encode(text, allow_special=True, add_bos=False)
        assert unpack(builder.build(TextPrompt(text), NAMESPACE).tokens).tolist() == ids


def test_a_piece_is_recalled_in_its_own_namespace_only() -> None:
    encoder = PieceEncoder(TOKENIZERS["merging"])
    first = encoder.encode(NAMESPACE, LONG)
    assert encoder.encode(OTHER_NAMESPACE, LONG) == first
    assert encoder.recalled_tokens == 0
    assert encoder.encode(NAMESPACE, LONG) == first
    assert encoder.recalled_tokens == len(first) // 4


def test_a_piece_that_goes_on_is_another_than_the_same_text_at_a_beginning() -> None:
    tokenizer = TOKENIZERS["always"]
    encoder = PieceEncoder(tokenizer)
    for _ in range(2):
        for continuing in (False, True):
            ids = unpack(encoder.encode(NAMESPACE, "he" * 100, continuing=continuing)).tolist()
            assert ids == tokenizer.encode_plain("he" * 100, continuing=continuing)


def test_what_is_remembered_is_bounded_by_bytes_and_the_least_recent_leaves() -> None:
    tokenizer = TOKENIZERS["merging"]
    texts = [f"{number:03}" * 100 for number in range(5)]
    room = 3 * (len(PieceEncoder(tokenizer, 0).encode(NAMESPACE, texts[0])) + ENTRY_OVERHEAD_BYTES)
    encoder = PieceEncoder(tokenizer, room)
    for text in (*texts[:3], texts[0], *texts[3:]):
        encoder.encode(NAMESPACE, text)
    before = encoder.recalled_tokens
    for text in (texts[0], texts[3], texts[4]):
        encoder.encode(NAMESPACE, text)
    assert encoder.recalled_tokens - before == 3 * 300
    encoder.encode(NAMESPACE, texts[1])
    assert encoder.recalled_tokens - before == 3 * 300


def test_short_pieces_are_not_worth_remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_encoder, "MIN_REMEMBERED_CHARS", MIN_REMEMBERED_CHARS)
    encoder = PieceEncoder(TOKENIZERS["merging"])
    for text in ("x" * (MIN_REMEMBERED_CHARS - 1), "x" * MIN_REMEMBERED_CHARS) * 2:
        encoder.encode(NAMESPACE, text)
    assert encoder.recalled_tokens == MIN_REMEMBERED_CHARS
