"""Frames as bytes: their kinds without parsing, what deltas say, and fewer frames that say the same."""

from collections.abc import Sequence

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.router.frames import FrameKind, join_frames, kind_of
from prefixmesh.tokens import pack, unpack


def delta(position: int, text: str, *ids: int, branch: int = 0, logprobs: Sequence[float] = ()) -> bytes:
    told = [pb.TokenLogprobs(logprob=one) for one in logprobs]
    message = pb.Delta(position=position, token_ids=pack(ids), text=text, branch=branch, logprobs=told)
    return pb.GenerateResponse(delta=message).SerializeToString()


def ended(branch: int) -> bytes:
    return pb.GenerateResponse(branch_ended=pb.BranchEnded(branch=branch)).SerializeToString()


def said(frames: list[bytes]) -> dict[int, tuple[str, list[int]]]:
    answers: dict[int, tuple[str, list[int]]] = {}
    for frame in frames:
        one = pb.GenerateResponse.FromString(frame).delta
        text, ids = answers.get(one.branch, ("", []))
        answers[one.branch] = (text + one.text, ids + [int(id_) for id_ in unpack(one.token_ids)])
    return answers


STARTED = pb.GenerateResponse(started=pb.Started(request_id="r", seed=7)).SerializeToString()
FINISHED = pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_STOP)).SerializeToString()


@pytest.mark.parametrize("size", [0, 1, 100, 125, 130, 20_000, 3_000_000])
def test_a_frame_is_known_by_its_first_bytes_whatever_its_size(size: int) -> None:
    assert kind_of(delta(1, "x" * size)) is FrameKind.DELTA
    started = pb.GenerateResponse(started=pb.Started(request_id="x" * size)).SerializeToString()
    assert kind_of(started) is FrameKind.STARTED
    assert kind_of(FINISHED) is FrameKind.FINISHED
    assert kind_of(ended(3)) is FrameKind.BRANCH_ENDED


def test_what_this_version_would_not_write_is_some_other_frame() -> None:
    """An event of a later protocol, two in one, one cut off, no message at all."""
    later = bytes([15 << 3 | 2, 1, 0])
    for frame in (
        b"",
        b"\x12",
        later,
        STARTED + FINISHED,
        delta(1, "abc")[:-1],
        b"\x12\xff\xff",
        b"\x12\x80",
    ):
        assert kind_of(frame) is FrameKind.OTHER, frame


@given(st.binary(max_size=12))
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_no_bytes_make_it_fail_and_what_it_names_is_what_parsing_finds(frame: bytes) -> None:
    kind = kind_of(frame)
    if kind is not FrameKind.OTHER:
        try:
            parsed = pb.GenerateResponse.FromString(frame)
        except DecodeError:
            return
        assert kind.name.lower() == parsed.WhichOneof("event")


def test_deltas_that_follow_each_other_become_one_and_all_else_stays_where_it_is() -> None:
    joined = join_frames([STARTED, delta(0, "a", 1), delta(1, "b", 2), delta(2, "", 3), FINISHED])
    assert joined == [STARTED, delta(0, "ab", 1, 2, 3), FINISHED]
    alone = [delta(0, "a", 1), delta(1, "rest"), ended(0), FINISHED]
    assert join_frames(alone) == alone
    assert join_frames([]) == []


def test_branches_are_joined_each_with_itself_and_not_over_an_end() -> None:
    frames = [
        delta(0, "a", 1),
        delta(0, "A", 11, branch=1),
        delta(1, "b", 2),
        ended(0),
        delta(1, "B", 12, branch=1),
        delta(2, "C", 13, branch=1),
    ]
    assert join_frames(frames) == [
        delta(0, "ab", 1, 2),
        delta(0, "A", 11, branch=1),
        ended(0),
        delta(1, "BC", 12, 13, branch=1),
    ]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.text(max_size=3), st.lists(st.integers(0, 99), max_size=3)),
        max_size=12,
    )
)
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
def test_joined_frames_say_what_the_frames_said(deltas: list[tuple[int, str, list[int]]]) -> None:
    """Text, ids, log-probabilities and positions, for every branch."""
    positions: dict[int, int] = {}
    frames = []
    for branch, text, ids in deltas:
        position = positions.get(branch, 0)
        positions[branch] = position + len(ids)
        frames.append(delta(position, text, *ids, branch=branch, logprobs=[float(one) for one in ids]))
    joined = join_frames(frames)
    assert len(joined) <= max(1, 2 * len(positions))
    assert said(frames) == said(joined)
    for frame in joined:
        one = pb.GenerateResponse.FromString(frame).delta
        assert not one.position or not one.token_ids
        assert [told.logprob for told in one.logprobs] == unpack(one.token_ids).tolist()
