"""The incremental detokenizer against the plain way: decode everything, then look for the stop strings."""

import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixmesh.text.detokenizer import IncrementalDetokenizer
from prefixmesh.text.tokenizer import Tokenizer
from tests.support.tokenizer_kit import byte_level_backend, sentencepiece_tokenizer, wrap

ALPHABET = "ab é世"
"""Few characters, of one, two and three bytes, so that stop strings and their beginnings are common."""

MERGES = [("a", "b"), ("ab", "ab"), ("b", "a"), ("Ġ", "a"), ("ä", "¸"), ("ĸ", "a"), ("Ã", "©")]
"""Tokens of several characters, and tokens that hold pieces of one (世 is e4 b8 96, written "ä¸ĸ")."""


@functools.cache
def _tokenizer(kind: str) -> Tokenizer:
    if kind == "sentencepiece":
        return sentencepiece_tokenizer(pieces=("▁a", "ab", "ba", "▁", "a", "b", "é"))
    return wrap(byte_level_backend(MERGES))


def _first_stop(text: str, stop: list[str]) -> int | None:
    """Where the answer ends: before the stop string that ends first, the longest of those."""
    found = [(text.find(word) + len(word), -len(word), word) for word in stop if word in text]
    if not found:
        return None
    end, _, word = min(found)
    return end - len(word)


def test_every_short_text_with_every_pair_of_short_stop_strings() -> None:
    """Exhaustive over two letters, where stop strings overlap themselves and each other in every way."""
    tokenizer = wrap(byte_level_backend())
    words = ["".join(letters) for size in (1, 2, 3) for letters in itertools.product("ab", repeat=size)]
    for letters in itertools.product("ab", repeat=6):
        text = "".join(letters)
        ids = tokenizer.encode_plain(text)
        for stop in map(list, itertools.product(words, repeat=2)):
            detokenizer = IncrementalDetokenizer(tokenizer, stop)
            streamed = "".join(detokenizer.push([token_id]).text for token_id in ids) + detokenizer.finish()
            assert streamed == text[: _first_stop(text, stop)]


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@given(data=st.data())
def test_any_tokens_in_any_portions_stream_as_the_whole_decodes(kind: str, data: st.DataObject) -> None:
    """F61, with stop strings; ids are arbitrary, so also bytes that are no character at all."""
    tokenizer = _tokenizer(kind)
    useful = sorted(
        {token_id for text in (*ALPHABET, "abab", "ba a") for token_id in tokenizer.encode_plain(text)}
    )
    token = st.sampled_from(useful) | st.integers(0, tokenizer.vocab_size)
    ids = data.draw(st.lists(token, max_size=30))
    stop = data.draw(st.lists(st.text(ALPHABET + "\ufffd", min_size=1, max_size=4), max_size=3))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))

    whole = tokenizer.decode(ids)
    end = _first_stop(whole, stop)
    detokenizer = IncrementalDetokenizer(tokenizer, stop)
    streamed, used = "", 0
    for start, stop_at in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        delta = detokenizer.push(ids[start:stop_at])
        streamed += delta.text
        used += delta.tokens_used
        assert whole.startswith(streamed)
        assert delta.stopped == detokenizer.stopped
    streamed += detokenizer.finish()

    assert streamed == (whole if end is None else whole[:end])
    assert detokenizer.stopped == (end is not None)
    assert _complete_after(tokenizer, ids, used, stop)


def _complete_after(tokenizer: Tokenizer, ids: list[int], used: int, stop: list[str]) -> bool:
    """``used`` tokens hold the whole stop string, or are all there are; one fewer does not hold it."""
    if used == len(ids):
        return True
    has_stop = _first_stop(tokenizer.decode(ids[:used]), stop) is not None
    before = tokenizer.decode(ids[: used - 1]).rstrip("\ufffd")
    return has_stop and _first_stop(before, stop) is None
