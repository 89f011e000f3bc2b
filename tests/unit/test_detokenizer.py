"""Streaming text: whole characters only, nothing twice, and never a part of a stop string."""

import random

import pytest

from prefixmesh.model_files.source import ModelFiles
from prefixmesh.text.detokenizer import IncrementalDetokenizer, TextDelta
from prefixmesh.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.texts import random_texts
from tests.support.tokenizer_kit import byte_level_backend, sentencepiece_tokenizer, wrap


@pytest.fixture(scope="module")
def smollm2(smollm2_files: ModelFiles) -> Tokenizer:
    return load_tokenizer(smollm2_files)


@pytest.fixture(scope="module")
def by_bytes() -> Tokenizer:
    """Every byte is a token, so every cut happens."""
    return wrap(byte_level_backend())


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, allow_special=False, add_bos=False)


def _stream(detokenizer: IncrementalDetokenizer, ids: list[int], at_once: int = 1) -> list[str]:
    parts = [detokenizer.push(ids[at : at + at_once]).text for at in range(0, len(ids), at_once)]
    return [*parts, detokenizer.finish()]


@pytest.mark.parametrize("kind", ["smollm2", "by_bytes", "sentencepiece"])
def test_a_thousand_strings_stream_as_they_decode(kind: str, request: pytest.FixtureRequest) -> None:
    """F61: the joined stream equals the decoded whole, and U+FFFD comes only where the text itself has it."""
    tokenizer = sentencepiece_tokenizer() if kind == "sentencepiece" else request.getfixturevalue(kind)
    rng = random.Random(3)
    for text in random_texts(1000, seed=1):
        ids = _ids(tokenizer, text)
        parts = _stream(IncrementalDetokenizer(tokenizer), ids, at_once=rng.randint(1, 4))
        assert "".join(parts) == tokenizer.decode(ids) == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in part for part in parts)


def test_half_a_character_waits_for_its_other_half(by_bytes: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(by_bytes)
    assert [detokenizer.push([token_id]).text for token_id in _ids(by_bytes, "é世👍")] == [
        *("", "é"),
        *("", "", "世"),
        *("", "", "", "👍"),
    ]
    assert detokenizer.finish() == ""


def test_a_character_that_never_comes_ends_as_the_decoder_would_write_it(by_bytes: Tokenizer) -> None:
    ids = _ids(by_bytes, "a世")[:-1]
    detokenizer = IncrementalDetokenizer(by_bytes)
    assert _stream(detokenizer, ids) == ["a", "", "", "\ufffd"]
    assert by_bytes.decode(ids) == "a\ufffd"


def test_special_tokens_have_no_text_and_cut_no_character(by_bytes: Tokenizer) -> None:
    first, second = _ids(by_bytes, "é")
    special = min(by_bytes.special_ids)
    assert "".join(_stream(IncrementalDetokenizer(by_bytes), [first, special, second])) == "é"


def test_ids_beyond_the_vocabulary_are_no_error(by_bytes: Tokenizer) -> None:
    assert IncrementalDetokenizer(by_bytes).push([10**6]) == TextDelta("", stopped=False, tokens_used=1)


def test_text_is_held_back_only_while_it_may_be_part_of_a_stop_string(by_bytes: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(by_bytes, ["END"])
    assert _stream(detokenizer, _ids(by_bytes, "aENxEEN")) == ["a", "", "", "ENx", "", "E", "", "EN"]


def test_a_stop_string_ends_the_answer_before_it(by_bytes: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(by_bytes, ["END"])
    delta = detokenizer.push(_ids(by_bytes, "abENDcd"))
    assert delta == TextDelta("ab", stopped=True, tokens_used=5)
    assert detokenizer.stopped
    assert detokenizer.push(_ids(by_bytes, "more")) == TextDelta("", stopped=True, tokens_used=0)
    assert detokenizer.finish() == ""


def test_a_stop_string_inside_a_longer_token_cuts_it() -> None:
    tokenizer = wrap(byte_level_backend([("a", "b"), ("c", "d"), ("ab", "cd")]))
    (whole,) = _ids(tokenizer, "abcd")
    delta = IncrementalDetokenizer(tokenizer, ["bc"]).push([whole, whole])
    assert delta == TextDelta("a", stopped=True, tokens_used=1)


def test_the_stop_string_that_is_complete_first_counts(by_bytes: Tokenizer) -> None:
    """However many tokens come at a time: "bc" is complete before "abcd"."""
    for at_once in (1, 2, 3, 100):
        detokenizer = IncrementalDetokenizer(by_bytes, ["abcd", "bc"])
        assert "".join(_stream(detokenizer, _ids(by_bytes, "xabcd"), at_once)) == "xa"


def test_of_two_that_end_together_the_longer_counts(by_bytes: Tokenizer) -> None:
    assert IncrementalDetokenizer(by_bytes, ["d", "bcd"]).push(_ids(by_bytes, "abcd")).text == "a"


def test_a_stop_string_may_be_part_of_a_character_sequence(by_bytes: Tokenizer) -> None:
    delta = IncrementalDetokenizer(by_bytes, ["世"]).push(_ids(by_bytes, "a世b"))
    assert delta == TextDelta("a", stopped=True, tokens_used=4)


def test_a_stop_string_that_only_the_flush_completes_still_stops(by_bytes: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(by_bytes, ["b\ufffd"])
    text = detokenizer.push(_ids(by_bytes, "ab世")[:-1]).text
    assert text + detokenizer.finish() == "a"
    assert detokenizer.stopped


def test_a_first_space_that_decoding_strips_is_not_streamed() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = _ids(tokenizer, "hello hello")
    assert _stream(IncrementalDetokenizer(tokenizer), ids) == ["hello", " hello", ""]


def test_a_token_costs_the_same_at_the_end_of_a_long_answer(by_bytes: Tokenizer) -> None:
    """Nothing grows with the answer: what is kept is at most the longest stop string."""
    detokenizer = IncrementalDetokenizer(by_bytes, ["aab" * 80])
    for token_id in _ids(by_bytes, "aab" * 70 + "a" * 5000):
        detokenizer.push([token_id])
    assert len(detokenizer._search._held) <= 240
