"""An answer that is interrupted anywhere and goes on, beside the one that nobody disturbed."""

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import pytest

from prefixmesh.answer_record import AnswerRecord
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.tokens import unpack
from tests.support.servers import rest_of


class Said(NamedTuple):
    """What a caller was told of one branch."""

    ids: tuple[int, ...]
    text: str
    reason: int
    tokens: int
    logprobs: tuple[float, ...]
    """Of the tokens and of the likeliest at their places."""


def assert_same(told: Sequence[pb.GenerateResponse], whole: Sequence[pb.GenerateResponse]) -> None:
    """Both say the same, but for what another batch does to a probability in float32."""
    ours, theirs = said(told), said(whole)
    for branch in theirs:
        assert ours[branch]._replace(logprobs=()) == theirs[branch]._replace(logprobs=())
        assert ours[branch].logprobs == pytest.approx(theirs[branch].logprobs, abs=1e-3)
    assert ours.keys() == theirs.keys()


def said(messages: Sequence[pb.GenerateResponse]) -> dict[int, Said]:
    """By branch; asserts that there is one Started and one Finished, where they belong, and no gap in any branch."""
    kinds = [message.WhichOneof("event") for message in messages]
    assert (kinds[0], kinds[-1]) == ("started", "finished")
    assert (kinds.count("started"), kinds.count("finished")) == (1, 1)
    ids: dict[int, list[int]] = defaultdict(list)
    texts: dict[int, str] = defaultdict(str)
    logprobs: dict[int, list[float]] = defaultdict(list)
    finished = messages[-1].finished
    ends = {m.branch_ended.branch: m.branch_ended for m in messages if m.HasField("branch_ended")}
    first = next((m.delta.position for m in messages if m.HasField("delta")), 0)
    for message in messages:
        if message.HasField("delta"):
            delta = message.delta
            assert delta.position == len(ids[delta.branch]) + first
            ids[delta.branch] += unpack(delta.token_ids).tolist()
            texts[delta.branch] += delta.text
            for one in delta.logprobs:
                logprobs[delta.branch] += [one.logprob, *one.top_logprobs]
    assert finished.usage.completion_tokens == sum(map(len, ids.values()))
    assert not ends or finished.reason == ends[0].reason
    return {
        branch: Said(
            ids=tuple(ids[branch]),
            text=texts[branch],
            logprobs=tuple(logprobs[branch]),
            reason=ends[branch].reason if ends else finished.reason,
            tokens=ends[branch].completion_tokens if ends else finished.usage.completion_tokens,
        )
        for branch in sorted(ends or {0})
    }


async def interrupted_everywhere(
    inference: Any, request: pb.GenerateRequest, step: int = 1, metadata: Any = ()
) -> AsyncIterator[tuple[int, Sequence[pb.GenerateResponse], Sequence[pb.GenerateResponse]]]:
    """For every ``step``-th number of messages after which an answer may break off, and the last: that number, what the caller is told when it goes on from
    there, and what it would have been told otherwise."""
    whole = await rest_of(inference.Generate(request, metadata=metadata))
    for cut in sorted({*range(1, len(whole), step), len(whole) - 1}):
        record = AnswerRecord(max(1, request.branches))
        for message in whole[:cut]:
            record.told(message.SerializeToString())
        record.interrupted()
        again = pb.GenerateRequest()
        again.CopyFrom(request)
        record.resume(again)
        rest = await rest_of(inference.Generate(again, metadata=metadata))
        told = [ours for message in rest if (ours := record.continued(message)) is not None]
        yield cut, [*whole[:cut], *told], whole
