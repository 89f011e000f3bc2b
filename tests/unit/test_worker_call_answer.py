"""What a call says of its answers: once what it begins with, once how it ended, and between them each branch by its number."""

from dataclasses import replace

import pytest

from prefixmesh.errors import InternalError
from prefixmesh.ids import Namespace, RequestId
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.text.detokenizer import IncrementalDetokenizer
from prefixmesh.worker.answer_stream import AnswerStream
from prefixmesh.worker.call_answer import AnswerHead, CallAnswer
from prefixmesh.worker.messages import Admitted, Ended, EndReason, TokensOut
from prefixmesh.worker.prefill_savings import PrefillShape
from tests.support.scripted_engine import byte_tokenizer

HEAD = AnswerHead(
    request_id=RequestId("r"),
    worker_id="w",
    model="m",
    namespace=Namespace(bytes(16)),
    adapter_digest="ad",
    prompt_tokens=10,
    retokenized_tokens=2,
    resumed_tokens=0,
    seed=5,
    prefill_shape=PrefillShape(linear_flops_per_token=10, attention_flops_per_pair=4),
    prepared_ms=10.0,
)


def call(branches: int = 1, *stop: str) -> CallAnswer:
    return CallAnswer(
        HEAD,
        [
            AnswerStream(IncrementalDetokenizer(byte_tokenizer(), stop), branch=branch)
            for branch in range(branches)
        ],
    )


def admitted(cached_tokens: int = 4) -> Admitted:
    return Admitted(request_id="r", cached_tokens=cached_tokens, queued_ms=1.0)


def tokens(position: int, text: bytes) -> TokensOut:
    return TokensOut(request_id="r", position=position, token_ids=tuple(text))


def ended(reason: EndReason, first_token_ms: float = 3.0, decode_ms: float = 4.0) -> Ended:
    return Ended(
        request_id="r",
        reason=reason,
        completion_tokens=0,
        prefill_ms=2.0,
        first_token_ms=first_token_ms,
        decode_ms=decode_ms,
    )


def kinds(messages: list[pb.GenerateResponse]) -> list[str | None]:
    return [message.WhichOneof("event") for message in messages]


def test_timings_count_from_the_calls_arrival() -> None:
    """What the front did before the engine knew of the request belongs to waiting and to the first token."""
    answer = call()
    answer.on_event(0, admitted())
    (message,) = answer.on_event(0, ended("length"))
    timings = message.finished.timings
    assert (timings.queued_ms, timings.prefill_ms) == (11.0, 2.0)
    assert (timings.first_token_ms, timings.decode_ms) == (13.0, 4.0)


def test_what_came_from_lower_tiers_is_told_apart_and_counts_as_cached() -> None:
    """Each token on the nearest tier that had it; a hit saves what it saves wherever it was, and the wait for it is told."""
    answer = call()
    met = Admitted(
        request_id="r", cached_tokens=8, queued_ms=1.0, host_tokens=4, disk_tokens=3, load_back_ms=1.5
    )
    (begun,) = answer.on_event(0, met)
    (over,) = answer.on_event(0, ended("length"))
    cached = pb.CachedTokens(device=1, host=4, disk=3)
    assert begun.started.cached_tokens == over.finished.usage.cached_tokens == cached
    assert over.finished.usage.prefill_saved.linear == 0.8
    assert over.finished.timings.load_back_ms == 1.5


def test_branches_tell_of_what_the_first_admitted_found_and_waited_for() -> None:
    """The others find on the device what it has brought there."""
    answer = call(2)
    met = Admitted(request_id="r", cached_tokens=8, queued_ms=1.0, host_tokens=8, load_back_ms=1.5)
    answer.on_event(1, met)
    answer.on_event(0, admitted(8))
    answer.on_event(1, ended("length", 3.0))
    *_, over = answer.on_event(0, ended("length", 4.0))
    assert over.finished.usage.cached_tokens == pb.CachedTokens(host=8)
    assert over.finished.timings.load_back_ms == 1.5


def test_timings_of_several_branches_are_from_the_first_token_of_any_to_the_last_of_all() -> None:
    """Whichever branch that was; one without a token has no first one."""
    answer = call(3)
    for branch, queued_ms in enumerate((5.0, 1.0, 2.0)):
        answer.on_event(branch, Admitted(request_id="r", cached_tokens=4, queued_ms=queued_ms))
    answer.on_event(0, ended("length", 9.0, 20.0))
    answer.on_event(1, ended("length", 3.0, 30.0))
    *_, last = answer.on_event(2, ended("stop", 0.0, 0.0))
    timings = last.finished.timings
    assert (timings.queued_ms, timings.first_token_ms, timings.decode_ms) == (11.0, 13.0, 30.0)
    answer = call(2)
    for branch in (0, 1):
        answer.on_event(branch, admitted())
    answer.on_event(0, ended("length", 3.0, 4.0))
    *_, last = answer.on_event(1, ended("length", 5.0, 4.0))
    assert (last.finished.timings.first_token_ms, last.finished.timings.decode_ms) == (13.0, 6.0)


def test_usage_tells_what_the_cache_saved() -> None:
    """4 of 10 tokens: 40 % of the linear part, 16 % of attention, and the total by the model's shape."""
    answer = call()
    answer.on_event(0, admitted(cached_tokens=4))
    (message,) = answer.on_event(0, ended("length"))
    usage = message.finished.usage
    assert usage.cached_tokens.device == 4
    saved = usage.prefill_saved
    assert (saved.linear, saved.attention) == pytest.approx((0.4, 0.16))
    assert saved.total == pytest.approx((4 * 10 + 8 * 4) / (10 * 10 + 50 * 4))


def test_one_answer_has_no_branches_on_the_wire() -> None:
    """Whoever asks for one answer gets what there was before there were branches."""
    answer = call()
    assert kinds(answer.on_event(0, admitted())) == ["started"]
    (delta,) = answer.on_event(0, tokens(0, b"a"))
    assert delta.delta.branch == 0
    assert kinds(answer.on_event(0, ended("stop"))) == ["finished"]
    assert answer.finished == "stop"


def test_branches_begin_once_end_each_and_finish_once() -> None:
    """Started with the first admission and what it found; every delta and end with its branch; Finished with sums and the first's reason."""
    answer = call(3)
    (started,) = answer.on_event(0, admitted(cached_tokens=4))
    assert started.started.cached_tokens.device == 4
    for branch in (1, 2):
        assert answer.on_event(branch, admitted(cached_tokens=9)) == []
    for branch, text in enumerate((b"a", b"bc", b"def")):
        (message,) = answer.on_event(branch, tokens(0, text))
        assert (message.delta.branch, message.delta.position, message.delta.text) == (
            branch,
            0,
            text.decode(),
        )
    for branch, reason in ((1, "stop"), (0, "length")):
        (end,) = answer.on_event(branch, ended(reason))  # type: ignore[arg-type]
        assert (end.branch_ended.branch, end.branch_ended.completion_tokens) == (branch, branch + 1)
        assert answer.finished is None
    end, last = answer.on_event(2, ended("stop"))
    assert (end.branch_ended.branch, end.branch_ended.reason) == (2, pb.FINISH_REASON_STOP)
    assert last.finished.reason == pb.FINISH_REASON_LENGTH
    assert last.finished.usage.completion_tokens == 6
    assert (last.finished.usage.prompt_tokens, last.finished.usage.cached_tokens.device) == (10, 4)
    assert answer.finished == "length"


def test_a_stop_string_ends_its_own_branch_only() -> None:
    """The other goes on past the same text of its own."""
    answer = call(2, "b")
    for branch in (0, 1):
        answer.on_event(branch, admitted())
    answer.on_event(0, tokens(0, b"ab"))
    answer.on_event(1, tokens(0, b"ac"))
    assert [branch.stop_found for branch in answer.branches] == [True, False]
    assert kinds(answer.on_event(0, ended("aborted"))) == ["branch_ended"]
    answer.on_event(1, tokens(2, b"d"))
    assert answer.branches[1].text == "acd"


def test_an_error_of_one_branch_is_the_calls() -> None:
    """There is no half of a call."""
    answer = call(2)
    for branch in (0, 1):
        answer.on_event(branch, admitted())
    with pytest.raises(InternalError):
        answer.on_event(1, ended("failed"))


@pytest.mark.parametrize(
    ("cached", "host", "copied", "told"),
    [
        (9, 0, (0, 9), (0, 0, 9)),
        (9, 2, (0, 7), (0, 2, 7)),
        (9, 0, (4, 9), (4, 0, 5)),
        (6, 0, (4, 9), (4, 0, 2)),
        (3, 0, (4, 9), (3, 0, 0)),
        (9, 0, (4, 4), (9, 0, 0)),
    ],
)
def test_what_another_worker_gave_for_a_call_is_told_apart_from_what_was_here(
    cached: int, host: int, copied: tuple[int, int], told: tuple[int, int, int]
) -> None:
    """To the engine it lies on the device. What was evicted again before the call was admitted is not told; the sum is what was found."""
    head = replace(HEAD, peer_begin=copied[0], peer_end=copied[1])
    answer = CallAnswer(head, [AnswerStream(IncrementalDetokenizer(byte_tokenizer(), ()))])
    met = Admitted(request_id="r", cached_tokens=cached, queued_ms=1.0, host_tokens=host)
    (started,) = answer.on_event(0, met)
    tiers = started.started.cached_tokens
    assert (tiers.device, tiers.host, tiers.peer) == told
