"""What becomes of an engine's events on their way out, event by event."""

import pytest

from prefixmesh.errors import CancelledError, InternalError, OverloadedError, QueueTimeoutError
from prefixmesh.text.detokenizer import IncrementalDetokenizer
from prefixmesh.tokens import pack
from prefixmesh.worker.answer_stream import AnswerStream
from prefixmesh.worker.messages import Admitted, Ended, EndReason, TokensOut
from tests.support.scripted_engine import byte_tokenizer


def stream(*stop: str) -> AnswerStream:
    answer = AnswerStream(IncrementalDetokenizer(byte_tokenizer(), stop))
    answer.on_event(Admitted(request_id="r", cached_tokens=4, queued_ms=1.0))
    return answer


def tokens(position: int, text: bytes) -> TokensOut:
    return TokensOut(request_id="r", position=position, token_ids=tuple(text))


def ended(reason: EndReason, completion_tokens: int = 0) -> Ended:
    return Ended(
        request_id="r",
        reason=reason,
        completion_tokens=completion_tokens,
        prefill_ms=2.0,
        first_token_ms=3.0,
        decode_ms=4.0,
    )


def test_ids_go_out_at_once_and_text_when_it_is_certain() -> None:
    """A delta may carry ids whose text is still held back."""
    answer = stream()
    first, second = (answer.on_event(tokens(n, b))[0] for n, b in enumerate((b"\xc3", b"\xa9")))
    assert (first.token_ids, first.text) == (pack([0xC3]), "")
    assert (second.position, second.token_ids, second.text) == (1, pack([0xA9]), "é")


def test_a_character_that_never_completes_is_told_at_the_end() -> None:
    """The last delta carries text without ids."""
    answer = stream()
    answer.on_event(tokens(0, b"a\xe2\x82"))
    (rest,) = answer.on_event(ended("length", 3))
    assert (rest.position, rest.token_ids, rest.text) == (3, b"", "\ufffd")
    assert answer.completion_tokens == 3
    assert answer.text == "a\ufffd"


def test_what_comes_after_a_stop_string_is_dropped() -> None:
    """Tokens that the engine made before it heard of the stop are no part of the answer."""
    answer = stream("b")
    (delta,) = answer.on_event(tokens(0, b"abcd"))
    assert answer.stop_found
    assert (delta.token_ids, delta.text) == (pack(list(b"ab")), "a")
    assert answer.on_event(tokens(4, b"efg")) == []
    assert answer.on_event(ended("aborted", 7)) == []
    assert (answer.finished, answer.completion_tokens) == ("stop", 2)


def test_a_gap_in_the_answer_is_a_bug_and_no_answer() -> None:
    """Tokens that are lost or come twice end the call with an error."""
    for position in (0, 2):
        answer = stream()
        answer.on_event(tokens(0, b"a"))
        with pytest.raises(InternalError, match="1 was next"):
            answer.on_event(tokens(position, b"b"))


def test_an_abort_without_a_stop_string_is_cancelled() -> None:
    """Somebody wanted it so; the text that was held back is not sent."""
    with pytest.raises(CancelledError):
        stream().on_event(ended("aborted"))


def test_a_request_that_found_no_room_ends_as_the_overload_it_is() -> None:
    """Nothing is broken, and later or elsewhere there may be room."""
    with pytest.raises(OverloadedError, match="no room"):
        stream().on_event(ended("no_room"))


def test_an_abort_before_the_beginning_is_no_answer_whatever_was_resumed() -> None:
    """A stop string in what was resumed ends the answer only once the engine has taken the request."""
    answer = AnswerStream(IncrementalDetokenizer(byte_tokenizer(), ("b",)), resumed=list(b"ab"))
    assert answer.stop_found
    with pytest.raises(CancelledError):
        answer.on_event(ended("aborted"))


def test_a_request_that_waited_too_long_says_so() -> None:
    """With a reason of its own, so that callers can tell it from a queue that is full."""
    with pytest.raises(QueueTimeoutError, match="queue timeout"):
        stream().on_event(ended("queue_timeout"))
