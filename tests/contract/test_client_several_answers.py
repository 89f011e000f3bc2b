"""Branches and forks: one behaviour for both clients, against a fake server."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from prefixmesh.errors import CancelledError, DeadlineError, InvalidRequestError, OverloadedError
from prefixmesh.proto.v1 import inference_pb2 as pb
from tests.contract.test_client_contract import MakeClient, within
from tests.support.any_client import AnyClient, AwaitedClient, BlockingClient
from tests.support.fake_inference import FakeInference
from tests.support.servers import eventually

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def fake() -> AsyncIterator[FakeInference]:
    async with FakeInference() as server:
        yield server


@pytest.fixture(params=[False, True], ids=["proxy", "direct"])
def is_direct(request: pytest.FixtureRequest) -> bool:
    direct: bool = request.param
    return direct


@pytest.fixture(params=[BlockingClient, AwaitedClient], ids=["Client", "AsyncClient"])
async def client(
    request: pytest.FixtureRequest, fake: FakeInference, is_direct: bool
) -> AsyncIterator[AnyClient]:
    make: MakeClient = request.param
    made = make(fake.address, direct=is_direct)
    yield made
    await made.close()


async def test_branches_come_back_side_by_side(client: AnyClient, fake: FakeInference) -> None:
    """As many as were asked for, each whole; the first is the answer's own."""
    answer = await client.generate("hello", branches=3, priority=4, queue_timeout_ms=9)
    (request,) = fake.requests
    assert (request.branches, request.priority, request.queue_timeout_ms) == (3, 4, 9)
    assert [branch.text for branch in answer.branches] == ["The quick brown fox"] * 3
    assert answer.token_ids == answer.branches[0].token_ids == (100, 101, 102, 103)
    assert answer.completion_tokens == 12


async def test_a_stream_of_branches_says_whose_each_delta_is(client: AnyClient) -> None:
    stream = await client.stream("hello", branches=2)
    deltas = [await stream.next() for _ in range(4)]
    assert [(delta.branch, delta.text) for delta in deltas] == [
        (0, "The"),
        (1, "The"),
        (0, " quick"),
        (1, " quick"),
    ]
    assert len((await stream.collect()).branches) == 2


async def test_what_the_cache_saved_comes_with_the_answer(client: AnyClient, fake: FakeInference) -> None:
    fake.saved = pb.PrefillSavings(linear=0.5, attention=0.25, total=0.375)
    answer = await client.generate("hello")
    assert answer.prefill_saved is not None
    assert answer.prefill_saved.total == 0.375


async def test_forks_are_answers_to_the_context_and_each_continuation(
    client: AnyClient, fake: FakeInference
) -> None:
    """In the order of the continuations, each prompt what it would be alone, every option with each."""
    answers = await client.fork(CHAT, ["a", "b", "c"], max_tokens=7, extra_key="k", timeout_s=10)
    assert [answer.text for answer in answers] == ["The quick brown fox"] * 3
    said = [[message.content for message in request.chat.messages] for request in fake.requests]
    assert said[0] == ["hi", "a"]
    assert sorted(said[1:]) == [["hi", "b"], ["hi", "c"]]
    for request in fake.requests:
        assert (request.sampling.max_tokens, request.extra_key) == (7, "k")


async def test_the_other_forks_wait_for_the_firsts_first_token(
    client: AnyClient, fake: FakeInference
) -> None:
    """By then the context is computed, and a router knows where."""
    fake.hold_after = 0
    forking = asyncio.create_task(client.fork("a", ["b", "c"]))
    await within(fake.holding.wait())
    await client.close()
    with pytest.raises(CancelledError):
        await within(forking)
    assert [request.text for request in fake.requests] == ["ab"]


async def test_forks_run_at_the_same_time_and_closing_the_client_ends_them(
    client: AnyClient, fake: FakeInference
) -> None:
    """All stand still together after their first words: none waits for another's end."""
    fake.hold_after = 1
    forking = asyncio.create_task(client.fork("a", ["b", "c", "d"]))
    await eventually(lambda: len(fake.requests) == 3)
    await client.close()
    with pytest.raises(CancelledError):
        await within(forking)


async def test_a_timeout_bounds_all_forks_together(client: AnyClient, fake: FakeInference) -> None:
    await client.generate("hello")  # connected: the time is for the calls alone
    fake.hold_after = 1
    with pytest.raises(DeadlineError):
        await within(client.fork("a", ["b", "c"], timeout_s=0.3))
    await within(fake.cancelled.wait())


async def test_one_forks_error_is_the_calls_and_ends_the_others(
    client: AnyClient, fake: FakeInference
) -> None:
    """Nobody computes on for a caller who will not see it."""
    fake.error_for = lambda request: OverloadedError("full") if request.text == "ac" else None
    fake.hold_after = 1
    with pytest.raises(OverloadedError):
        await within(client.fork("a", ["b", "c", "d"]))
    await within(fake.cancelled.wait())


async def test_forks_that_cannot_be_are_refused_before_anything_is_sent(
    client: AnyClient, fake: FakeInference
) -> None:
    for context, continuations, options in (
        ("a", [], {}),
        ("a", ["b", 5], {}),
        ("a", ["b"], {"resumed_output": [1]}),
        ("", [""], {}),
        ("a", ["b"], {"temperature": -1}),
    ):
        with pytest.raises(InvalidRequestError):
            await client.fork(context, continuations, **options)
    assert fake.requests == []
