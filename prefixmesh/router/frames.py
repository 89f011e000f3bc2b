"""The frames of an answer as bytes: what they are without parsing them, and several as one. Pure.

A frame is a serialised ``GenerateResponse``, which has one event: a tag, a length, and the event's own bytes to the end. So the first
bytes tell its kind. Most frames are deltas, and nobody here needs to know more of most of them.
"""

import enum
from collections.abc import Sequence
from typing import Final

from prefixmesh.proto.v1 import inference_pb2 as pb


class FrameKind(enum.IntEnum):
    """The event of a frame, by the number of its field."""

    OTHER = 0
    """Of a later protocol, or not as this version would write it."""

    STARTED = pb.GenerateResponse.STARTED_FIELD_NUMBER
    DELTA = pb.GenerateResponse.DELTA_FIELD_NUMBER
    FINISHED = pb.GenerateResponse.FINISHED_FIELD_NUMBER
    BRANCH_ENDED = pb.GenerateResponse.BRANCH_ENDED_FIELD_NUMBER


_KINDS: Final[dict[int, FrameKind]] = {kind << 3 | 2: kind for kind in FrameKind if kind}
"""By the byte that a frame begins with: field number and "length-delimited" (protobuf encoding guide)."""


def kind_of(frame: bytes) -> FrameKind:
    """A frame's kind, from its first bytes. O(1)."""
    if len(frame) < 2:
        return FrameKind.OTHER
    kind = _KINDS.get(frame[0])
    if kind is None:
        return FrameKind.OTHER
    size, at = frame[1] & 0x7F, 2
    while frame[at - 1] & 0x80:
        if at == len(frame):
            return FrameKind.OTHER
        size |= (frame[at] & 0x7F) << 7 * (at - 1)
        at += 1
    # Something behind the event would be a second one, which counts instead of it.
    return kind if at + size == len(frame) else FrameKind.OTHER


def join_frames(frames: Sequence[bytes]) -> list[bytes]:
    """The same stream in as few frames: deltas of a branch that follow each other become one, but for a last one without a token. O(their
    bytes).

    Whatever is no delta stays where it is, as it came, and deltas stay before or behind it.
    """
    joined: list[bytes] = []
    run: list[bytes] = []
    for frame in frames:
        if kind_of(frame) is FrameKind.DELTA:
            run.append(frame)
            continue
        joined += _join_deltas(run)
        joined.append(frame)
        run = []
    return joined + _join_deltas(run)


def _join_deltas(run: list[bytes]) -> list[bytes]:
    if len(run) < 2:
        return run
    by_branch: dict[int, list[pb.Delta]] = {}
    for frame in run:
        delta = pb.GenerateResponse.FromString(frame).delta
        by_branch.setdefault(delta.branch, []).append(delta)
    joined: list[bytes] = []
    for deltas in by_branch.values():
        # Text without a token comes once, at an answer's end. Whoever goes on with the answer must know whether it was told.
        whole = len(deltas) - (not deltas[-1].token_ids)
        joined += [_as_one(part) for part in (deltas[:whole], deltas[whole:]) if part]
    return joined


def _as_one(deltas: list[pb.Delta]) -> bytes:
    first = deltas[0]
    for delta in deltas[1:]:
        first.logprobs.extend(delta.logprobs)
    first.token_ids = b"".join(delta.token_ids for delta in deltas)
    first.text = "".join(delta.text for delta in deltas)
    return pb.GenerateResponse(delta=first).SerializeToString()
