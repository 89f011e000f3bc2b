"""What was told of an answer, what is asked of the next worker, and what of its answer is told on."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.answer_record import AnswerRecord, LivedTimes
from prefixmesh.errors import UnavailableError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.tokens import pack, unpack

STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH


def started(worker: str = "one", cached: int = 48) -> pb.GenerateResponse:
    told = pb.Started(
        request_id="r-1",
        worker_id=worker,
        prompt_tokens=64,
        cached_tokens=pb.CachedTokens(device=cached),
        seed=7,
    )
    return pb.GenerateResponse(started=told)


def delta(position: int, *ids: int, text: str = "", branch: int = 0) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        delta=pb.Delta(position=position, token_ids=pack(ids), text=text, branch=branch)
    )


def ended(branch: int, tokens: int, reason: pb.FinishReason = STOP) -> pb.GenerateResponse:
    told = pb.BranchEnded(branch=branch, reason=reason, completion_tokens=tokens)
    return pb.GenerateResponse(branch_ended=told)


def finished(tokens: int, *, cached: int = 0, reason: pb.FinishReason = STOP) -> pb.GenerateResponse:
    usage = pb.Usage(
        prompt_tokens=64,
        cached_tokens=pb.CachedTokens(device=cached),
        completion_tokens=tokens,
        resumed_tokens=99,
        prefill_saved=pb.PrefillSavings(linear=0.5),
    )
    timings = pb.Timings(queued_ms=1.0, prefill_ms=2.0, first_token_ms=3.0, decode_ms=4.0)
    return pb.GenerateResponse(finished=pb.Finished(reason=reason, usage=usage, timings=timings))


def told(*messages: pb.GenerateResponse, as_bytes: bool = True, **asked: object) -> AnswerRecord:
    record = AnswerRecord(**asked)  # type: ignore[arg-type]
    for message in messages:
        if as_bytes:
            record.told(message.SerializeToString())
        else:
            record.told_message(message)
    return record


def resumed(record: AnswerRecord, **asked: object) -> pb.GenerateRequest:
    record.interrupted()
    request = pb.GenerateRequest(text="hi", **asked)  # type: ignore[arg-type]
    record.resume(request)
    return request


@pytest.mark.parametrize("as_bytes", [True, False])
def test_the_next_worker_goes_on_from_the_tokens_and_the_seed_that_were_told(as_bytes: bool) -> None:
    """As the proxy notes it and as a client does; what the caller asked beside that stays."""
    record = told(started(), delta(0, 11, 12, text="a"), delta(2, 13), as_bytes=as_bytes)
    request = resumed(record, sampling=pb.Sampling(max_tokens=9))
    assert unpack(request.resumed_output).tolist() == [11, 12, 13]
    assert (request.sampling.seed, request.sampling.max_tokens, request.text) == (7, 9, "hi")
    assert not request.resumed_branches


def test_the_caller_is_told_one_start_each_token_once_and_one_end() -> None:
    """The end counts the tokens of both attempts, what the first one found in the cache, and the interruption."""
    record = told(started(cached=48), delta(0, 11, text="a"))
    resumed(record)
    assert record.continued(started("two", cached=64)) is None
    assert record.continued(delta(1, 12, text="b")) == delta(1, 12, text="b")
    end = record.continued(finished(1, cached=64, reason=LENGTH))
    assert end is not None
    usage = end.finished.usage
    assert (usage.completion_tokens, usage.interruptions, usage.resumed_tokens) == (2, 1, 0)
    assert (usage.prompt_tokens, usage.cached_tokens.device) == (64, 48)
    assert not usage.HasField("prefill_saved")  # of the last worker's finds, which the caller is not told of
    assert end.finished.reason == LENGTH
    assert end.finished.timings.decode_ms == 4.0  # the last attempt's: nobody has noted the times


def test_an_answer_may_be_interrupted_again_and_again() -> None:
    """Each attempt goes on from all that was told before it."""
    record = told(started())
    for position in range(3):
        request = resumed(record)
        assert unpack(request.resumed_output).tolist() == list(range(position))
        assert record.continued(started()) is None
        assert record.continued(delta(position, position)) is not None
    end = record.continued(finished(1))
    assert end is not None
    # The first of the three came before any token: there was nothing yet to interrupt.
    assert (end.finished.usage.completion_tokens, end.finished.usage.interruptions) == (3, 2)


def test_attempts_that_fail_without_a_token_are_one_interruption() -> None:
    """The caller has waited once, however many workers were tried meanwhile."""
    record = told(started(), delta(0, 11))
    for _ in range(3):
        resumed(record)
        record.continued(started())
    assert record.continued(delta(1, 12)) is not None
    assert record.interruptions == 1
    resumed(record)
    assert record.interruptions == 2


def test_before_the_first_token_only_the_seed_is_kept() -> None:
    """The caller knows of a start with a seed: the answer is drawn with that one, and begins at its beginning."""
    record = told(started())
    assert not record.has_token
    request = resumed(record, branches=1)
    assert (request.resumed_output, request.sampling.seed) == (b"", 7)
    assert record.interruptions == 0
    assert record.continued(started("two")) is None
    assert record.continued(delta(0, 11)) is not None


def test_what_was_admitted_once_is_not_given_up_for_waiting() -> None:
    """``queue_timeout_ms`` is for the first admission: the next worker's queue must not end an answer that has begun."""
    assert resumed(told(started(), delta(0, 11)), queue_timeout_ms=50).queue_timeout_ms == 0
    assert resumed(told(), queue_timeout_ms=50).queue_timeout_ms == 50


def test_with_nothing_told_the_request_is_as_it_was() -> None:
    """The next attempt's start is the caller's first, and its seed the server's to draw."""
    record = AnswerRecord()
    request = resumed(record)
    assert request == pb.GenerateRequest(text="hi")
    assert record.continued(started("two")) == started("two")


def test_what_the_caller_resumed_itself_stands_before_it() -> None:
    """Its tokens begin the answer in every attempt, are told as resumed, and count as nobody's."""
    record = told(started(), delta(2, 13), resumed=[pack([11, 12])])
    assert unpack(resumed(record, resumed_output=pack([11, 12])).resumed_output).tolist() == [11, 12, 13]
    assert record.continued(delta(3, 14)) is not None
    end = record.continued(finished(1))
    assert end is not None
    assert (end.finished.usage.completion_tokens, end.finished.usage.resumed_tokens) == (2, 2)


def test_each_branch_goes_on_from_its_own_tokens() -> None:
    """In the order of branches, empty where one had not begun."""
    record = told(started(), delta(0, 5, branch=2), delta(0, 11), delta(1, 12), branches=3)
    request = resumed(record, branches=3)
    assert [unpack(one).tolist() for one in request.resumed_branches] == [[11, 12], [], [5]]
    assert request.resumed_output == b""
    assert record.continued(delta(0, 8, branch=1)) is not None
    assert record.continued(delta(1, 6, branch=2)) is not None
    assert [unpack(one.packed).tolist() for one in record.branches] == [[11, 12], [8], [5, 6]]
    again = resumed(record, branches=3, resumed_branches=[b"", b"", b""])
    assert [unpack(one).tolist() for one in again.resumed_branches] == [[11, 12], [8], [5, 6]]


def test_several_branches_of_which_none_has_begun_are_asked_for_anew() -> None:
    """None, or as many as branches: nothing is to be resumed."""
    assert not resumed(told(started(), branches=3), branches=3).resumed_branches


def test_a_branch_that_has_ended_stays_as_it_was_told() -> None:
    """The next worker computes its end once more; the caller is told nothing of it, even where it would go on."""
    record = told(started(), delta(0, 11), ended(0, 1, LENGTH), delta(0, 21, branch=1), branches=2)
    resumed(record, branches=2)
    assert record.continued(delta(1, 12)) is None
    assert record.continued(ended(0, 1, STOP)) is None
    assert record.continued(ended(0, 1, STOP)) is None
    end = record.continued(ended(1, 0))
    assert end is not None
    assert end.branch_ended.completion_tokens == 1  # of both attempts
    last = record.continued(finished(1, reason=STOP))
    assert last is not None
    assert (last.finished.reason, last.finished.usage.completion_tokens) == (LENGTH, 2)


def test_several_branches_that_have_all_ended_need_no_other_attempt() -> None:
    """All that is missing is what follows from what was told."""
    lived = LivedTimes(asked_s=1.0, started_s=1.5, first_token_s=2.0)
    messages = [started(cached=48), delta(0, 11), ended(0, 1, LENGTH), ended(1, 0)]
    assert not told(*messages[:-1], branches=2).is_whole
    record = told(*messages, branches=2, lived=lived)
    assert record.is_whole
    record.interrupted()
    finish = record.whole_end(5.0).finished
    assert (finish.reason, finish.usage.completion_tokens, finish.usage.interruptions) == (LENGTH, 1, 1)
    assert (finish.usage.prompt_tokens, finish.usage.cached_tokens.device) == (64, 48)
    assert finish.timings.decode_ms == 3000.0


def test_one_answer_is_never_whole_without_its_end() -> None:
    """Only Finished tells whether it stopped or was cut off."""
    assert not told(started(), delta(0, 11), delta(1, text="rest")).is_whole


def test_text_that_was_held_back_to_the_end_is_told_once() -> None:
    """It came without a token before the interruption; the next worker holds the same back and sends it again."""
    record = told(started(), delta(0, 11, text="a"), delta(1, text="b"))
    resumed(record)
    assert record.continued(delta(1, text="b")) is None
    assert record.continued(delta(1, 12, text="bc")) is None  # nothing can follow it
    end = record.continued(finished(0))
    assert end is not None
    assert end.finished.usage.completion_tokens == 1
    assert record.branches[0].text == "ab"


def test_text_that_was_still_held_back_is_told_by_the_next_worker() -> None:
    """It was certain only at the end, which had not come."""
    record = told(started(), delta(0, 11, text="a"), delta(1, 12))
    resumed(record)
    assert record.continued(delta(2, text="b")) == delta(2, text="b")
    assert record.branches[0].text == "ab"


@pytest.mark.parametrize("position", [0, 1, 3, 9])
def test_a_worker_that_begins_elsewhere_is_a_clear_error(position: int) -> None:
    """One that is older than ``resumed_branches`` begins at 0; no token is told twice, and none is left out."""
    record = told(started(), delta(0, 11, 12), branches=2)
    resumed(record, branches=2)
    with pytest.raises(
        UnavailableError, match=f"token 2 of branch 0 is next, and the worker sent {position}"
    ):
        record.continued(delta(position, 99))


def test_a_branch_that_nobody_asked_for_is_a_clear_error() -> None:
    """From a later attempt; its end is passed over."""
    record = told(started(), delta(0, 11))
    resumed(record)
    assert record.continued(ended(4, 1)) is None
    with pytest.raises(UnavailableError, match="branch 4 was never asked for"):
        record.continued(delta(0, 11, branch=4))


def test_an_answer_does_not_go_on_with_other_weights() -> None:
    """The adapter's name means another content by now; before the first token nothing was drawn with either."""
    other = started()
    other.started.adapter_digest = "other"
    record = told(started())
    resumed(record)
    assert record.continued(other) is None
    assert record.continued(delta(0, 11)) is not None
    record.interrupted()
    with pytest.raises(UnavailableError, match="its adapter was loaded anew"):
        record.continued(other)


@pytest.mark.parametrize(("said", "counted"), [(2**31 - 1, 1_000_001), (-5, 1)])
def test_a_worker_cannot_say_more_interruptions_than_can_be_told_on(said: int, counted: int) -> None:
    record = told(started(), delta(0, 11))
    record.interrupted()
    end = finished(1)
    end.finished.usage.interruptions = said
    last = record.continued(end)
    assert last is not None
    assert last.finished.usage.interruptions == counted


def test_interruptions_of_both_hops_add_up() -> None:
    """A proxy has counted those behind it."""
    record = told(started(), delta(0, 11))
    resumed(record)
    end = finished(1)
    end.finished.usage.interruptions = 2
    last = record.continued(end)
    assert last is not None
    assert last.finished.usage.interruptions == 3


@pytest.mark.parametrize("broken", [delta(2, 12), delta(0, 12), delta(0, 12, branch=1)])
def test_an_answer_with_a_gap_is_not_gone_on_with(broken: pb.GenerateResponse) -> None:
    """Nobody could say what it is that would be continued."""
    record = told(started(), delta(0, 11), broken)
    with pytest.raises(UnavailableError, match="cannot be gone on with: token"):
        resumed(record)


def test_the_times_are_those_that_the_caller_has_lived() -> None:
    """From the first attempt's beginning to the last one's end."""
    lived = LivedTimes(asked_s=10.0, started_s=10.5, first_token_s=11.0)
    record = told(started(), delta(0, 11), lived=lived)
    resumed(record)
    end = record.continued(finished(1), now_s=14.0)
    assert end is not None
    timings = end.finished.timings
    assert (timings.queued_ms, timings.prefill_ms, timings.first_token_ms) == (500.0, 500.0, 1000.0)
    assert timings.decode_ms == 3000.0


def test_an_event_of_a_later_version_is_passed_on() -> None:
    """It is not ours to drop."""
    record = told(started(), delta(0, 11))
    resumed(record)
    assert record.continued(pb.GenerateResponse()) == pb.GenerateResponse()


@settings(derandomize=True, max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=14),
    st.lists(st.integers(0, 16), max_size=4),
    st.booleans(),
)
def test_wherever_it_is_interrupted_the_caller_gets_the_same(
    order: list[int], cuts: list[int], as_bytes: bool
) -> None:
    """Three branches in any order, cut anywhere any number of times: every token once, in its order, and an end each."""
    whole = {branch: [branch * 100 + at for at in range(order.count(branch))] for branch in range(3)}
    record, caller = AnswerRecord(branches=3), []
    for attempt, cut in enumerate([*cuts, 999]):
        request = pb.GenerateRequest(branches=3)
        record.resume(request)
        begun = [len(one) // 4 for one in request.resumed_branches] or [0, 0, 0]
        for message in _attempt(order, whole, begun)[:cut]:
            ours = message if attempt == 0 else record.continued(message)
            if attempt == 0 and as_bytes:
                record.told(message.SerializeToString())
            elif attempt == 0:
                record.told_message(message)
            if ours is not None:
                caller.append(ours)
        if caller and caller[-1].HasField("finished"):
            break
        record.interrupted()
    kinds = [message.WhichOneof("event") for message in caller]
    assert (kinds[0], kinds[-1]) == ("started", "finished")
    assert (kinds.count("started"), kinds.count("finished"), kinds.count("branch_ended")) == (1, 1, 3)
    got: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for message in caller:
        if message.HasField("delta"):
            assert message.delta.position == len(got[message.delta.branch])
            got[message.delta.branch] += unpack(message.delta.token_ids).tolist()
    assert got == whole
    assert caller[-1].finished.usage.completion_tokens == len(order)
    ends = {
        m.branch_ended.branch: m.branch_ended.completion_tokens for m in caller if m.HasField("branch_ended")
    }
    assert ends == {branch: len(ids) for branch, ids in whole.items()}


def _attempt(order: list[int], whole: dict[int, list[int]], begun: list[int]) -> list[pb.GenerateResponse]:
    """What a worker says that goes on from so many tokens of each branch."""
    messages, at = [started()], dict.fromkeys(range(3), 0)
    for branch in order:
        if at[branch] >= begun[branch]:
            messages.append(delta(at[branch], whole[branch][at[branch]], branch=branch))
        at[branch] += 1
    messages += [ended(branch, len(whole[branch]) - begun[branch]) for branch in range(3)]
    return [*messages, finished(len(order) - sum(begun))]


def test_what_was_passed_on_unread_and_is_no_message_cannot_be_gone_on_from() -> None:
    record = told(started(), delta(0, 5))
    record.told(b"\x12\x03\xff\xff\xff")
    assert [list(unpack(branch.packed)) for branch in record.branches] == [[5]]
    with pytest.raises(UnavailableError, match="something was told that cannot be read"):
        resumed(record)


def test_half_an_id_is_none() -> None:
    message = delta(0, 5, 6)
    message.delta.token_ids += b"\x01\x02"
    record = told(message, delta(2, 7))
    assert [list(unpack(branch.packed)) for branch in record.branches] == [[5, 6, 7]]
