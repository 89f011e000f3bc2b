"""Folding a call's responses into its answer."""

import pytest

from prefixmesh.client.answer import Answer, PrefillSavings, TextDelta, TokenLogprobs
from prefixmesh.client.answer_builder import AnswerBuilder
from prefixmesh.errors import InternalError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.tokens import pack
from tests.support.fake_inference import delta, finished, started


def fold(*responses: pb.GenerateResponse, branches: int = 1) -> Answer:
    builder = AnswerBuilder(sent_at_s=0.0, begun=[0] * branches)
    for response in responses:
        builder.add(response, now_s=0.0)
    return builder.end()


def test_answer_holds_everything_that_was_streamed() -> None:
    """Text and ids are those of the deltas in order, the rest is what Started and Finished said."""
    answer = fold(
        started(prompt_tokens=9, cached_tokens=pb.CachedTokens(device=5, host=2)),
        delta(0, "", 11, 12),
        delta(2, "é!", 13),
        finished(3, prompt_tokens=9, cached_tokens=pb.CachedTokens(device=5, host=2, disk=1, peer=4)),
    )
    assert answer.text == "é!"
    assert answer.token_ids == (11, 12, 13)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (9, 12, 3)
    assert (answer.cached.device, answer.cached.host, answer.cached.disk, answer.cached.peer) == (5, 2, 1, 4)
    assert answer.retokenized_tokens == 3
    assert (answer.worker_id, answer.model, answer.request_id) == ("worker-1", "fake", "req-1")
    assert answer.started.cached.total == 7
    assert answer.started.seed == 7
    assert answer.started.routing is not None
    assert answer.started.routing.predicted_cached_tokens == 1088
    assert (answer.timings.prefill_ms, answer.timings.load_back_ms) == (20.0, 5.0)


def test_servers_older_than_host_tiers_tell_of_the_device_alone() -> None:
    """What they do not say is 0."""
    end = finished(1, prompt_tokens=9, cached_tokens=pb.CachedTokens(device=6))
    end.finished.timings.ClearField("load_back_ms")
    answer = fold(started(prompt_tokens=9, cached_tokens=pb.CachedTokens(device=6)), delta(0, "a", 1), end)
    assert (answer.cached_tokens, answer.cached.host, answer.cached.disk) == (6, 0, 0)
    assert answer.timings.load_back_ms == 0.0


def test_first_token_time_is_the_clients_own_from_send_to_first_delta() -> None:
    """Started does not count as the first token, and later deltas do not move it."""
    builder = AnswerBuilder(sent_at_s=10.0)
    for now_s, response in enumerate([started(), delta(0, "a"), delta(1, "b"), finished(2)], start=11):
        builder.add(response, float(now_s))
    answer = builder.end()
    assert answer.first_token_s == 2.0
    assert answer.total_s == 4.0


def test_answer_without_a_token_has_no_first_token_time() -> None:
    """max_tokens 0 computes the prompt only."""
    assert fold(started(), finished(0)).first_token_s is None


def test_deltas_come_back_typed_and_other_events_as_none() -> None:
    """``add`` returns the delta it was given, with ids unpacked."""
    builder = AnswerBuilder(sent_at_s=0.0)
    assert builder.add(started(), 0.0) is None
    assert builder.add(delta(0, "hi", 5, 6), 0.0) == TextDelta("hi", (5, 6), 0)
    assert builder.add(finished(2), 0.0) is None


def test_direct_call_has_no_routing() -> None:
    """A worker called without a router sends none."""
    first = started()
    first.started.ClearField("routing")
    assert fold(first, finished(0)).started.routing is None


@pytest.mark.parametrize(
    ("wire", "reason"),
    [(pb.FINISH_REASON_STOP, "stop"), (pb.FINISH_REASON_LENGTH, "length"), (99, "other")],
)
def test_finish_reasons(wire: pb.FinishReason, reason: str) -> None:
    """A reason that a newer server may send is not an error."""
    assert fold(started(), finished(0, reason=wire)).finish_reason == reason


def test_event_newer_than_this_client_is_passed_over() -> None:
    """An event of an unknown kind arrives as an empty response and changes nothing."""
    assert fold(started(), pb.GenerateResponse(), delta(0, "a"), finished(1)).text == "a"


@pytest.mark.parametrize(
    "responses",
    [
        [delta(0, "a")],
        [finished(0)],
        [started(), started()],
        [started(), delta(1, "b")],
        [started(), delta(0, "a"), delta(0, "a")],
        [started(), finished(0), delta(0, "a")],
        [started(), pb.GenerateResponse(delta=pb.Delta(token_ids=b"123"))],
    ],
    ids=["delta first", "end first", "started twice", "gap", "repeat", "after the end", "half an id"],
)
def test_broken_order_is_an_error_and_never_a_wrong_answer(responses: list[pb.GenerateResponse]) -> None:
    """Lost, repeated or misplaced pieces raise when they arrive."""
    builder = AnswerBuilder(sent_at_s=0.0)
    for response in responses[:-1]:
        builder.add(response, now_s=0.0)
    with pytest.raises(InternalError):
        builder.add(responses[-1], now_s=0.0)


def branch_ended(branch: int, reason: pb.FinishReason = pb.FINISH_REASON_STOP) -> pb.GenerateResponse:
    return pb.GenerateResponse(branch_ended=pb.BranchEnded(branch=branch, reason=reason, completion_tokens=1))


def test_branches_are_folded_apart() -> None:
    """Each has its own positions, text and end; the first one's are the answer's own; the sum of tokens is the call's."""
    answer = fold(
        started(),
        delta(0, "a", 1, branch=1),
        delta(0, "x", 2, branch=0),
        delta(1, "b", 3, branch=1),
        branch_ended(1, pb.FINISH_REASON_LENGTH),
        branch_ended(2),
        delta(1, "y", 4, branch=0),
        branch_ended(0),
        finished(4),
        branches=3,
    )
    assert [branch.text for branch in answer.branches] == ["xy", "ab", ""]
    assert [branch.token_ids for branch in answer.branches] == [(2, 4), (1, 3), ()]
    assert [branch.finish_reason for branch in answer.branches] == ["stop", "length", "stop"]
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("xy", (2, 4), "stop")
    assert answer.completion_tokens == 4


def test_a_branchs_delta_says_whose_it_is() -> None:
    builder = AnswerBuilder(0.0, begun=(0, 0))
    builder.add(started(), 0.0)
    assert builder.add(delta(0, "hi", 5, branch=1), 0.0) == TextDelta("hi", (5,), 0, (), 1)


@pytest.mark.parametrize(
    "responses",
    [
        [delta(0, "a", branch=2)],
        [delta(0, "a", branch=-1)],
        [branch_ended(0), branch_ended(0)],
        [branch_ended(0), delta(0, "a", branch=0)],
        [branch_ended(0), finished(0)],
        [delta(0, "a"), finished(1)],
    ],
    ids=[
        "unknown",
        "negative",
        "ended twice",
        "on after its end",
        "one without an end",
        "a server without branches",
    ],
)
def test_branches_that_do_not_add_up_are_an_error(responses: list[pb.GenerateResponse]) -> None:
    """Also where a server of an earlier version answers once: that is not what was asked for."""
    with pytest.raises(InternalError, match="branch"):
        fold(started(), *responses, branches=2)


def test_savings_are_told_where_the_server_tells_them() -> None:
    """An older one does not, and nothing is made up."""
    saved = pb.PrefillSavings(linear=0.5, attention=0.25, total=0.375)
    told = fold(started(), finished(0, saved=saved)).prefill_saved
    assert told == PrefillSavings(linear=0.5, attention=0.25, total=0.375)
    assert fold(started(), finished(0)).prefill_saved is None


@pytest.mark.parametrize("responses", [[], [started()], [started(), delta(0, "a")]])
def test_stream_that_ends_early_is_an_error(responses: list[pb.GenerateResponse]) -> None:
    """Without Finished there is no answer."""
    with pytest.raises(InternalError, match="ended before"):
        fold(*responses)


def test_a_resumed_answer_begins_where_it_was_cut() -> None:
    """Positions count the whole answer, ids and text are what is new."""
    builder = AnswerBuilder(0.0, begun=(2,))
    for response in (started(), delta(2, "c", 13), delta(3, "d", 14), finished(2)):
        builder.add(response, 0.0)
    assert (builder.end().token_ids, builder.end().text) == ((13, 14), "cd")
    builder = AnswerBuilder(0.0, begun=(2,))
    builder.add(started(), 0.0)
    with pytest.raises(InternalError, match="gap"):
        builder.add(delta(0, "a", 11), 0.0)


def test_logprobs_are_folded_like_their_tokens() -> None:
    """Pairs of id and logarithm, one tuple for each token."""
    first, second = delta(0, "a", 11), delta(1, "b", 12)
    first.delta.logprobs.add(logprob=-0.5, top_ids=pack([11, 7]), top_logprobs=[-0.5, -1.5])
    second.delta.logprobs.add(logprob=-2.0)
    answer = fold(started(), first, second, finished(2))
    assert answer.logprobs == (TokenLogprobs(-0.5, ((11, -0.5), (7, -1.5))), TokenLogprobs(-2.0, ()))
