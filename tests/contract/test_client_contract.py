"""One behaviour for both clients and both data paths: every test runs with ``Client`` and with ``AsyncClient``, through the proxy and
directly, against a fake server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from prefixmesh import errors
from prefixmesh.client import AsyncClient, Client, ServedModel, TextDelta
from prefixmesh.errors import (
    CancelledError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from prefixmesh.ticket import TICKET_METADATA
from tests.support.any_client import AnyClient, AwaitedClient, BlockingClient
from tests.support.fake_inference import (
    CONTEXT_LENGTH,
    MODEL,
    FakeInference,
    delta,
    refusing_address,
    started,
)

CHAT = [{"role": "user", "content": "hi"}]


MakeClient = Callable[..., AnyClient]


@pytest.fixture
async def fake() -> AsyncIterator[FakeInference]:
    async with FakeInference() as server:
        yield server


@pytest.fixture(params=[False, True], ids=["proxy", "direct"])
def is_direct(request: pytest.FixtureRequest) -> bool:
    direct: bool = request.param
    return direct


@pytest.fixture(params=[BlockingClient, AwaitedClient], ids=["Client", "AsyncClient"])
async def make_client(request: pytest.FixtureRequest, is_direct: bool) -> AsyncIterator[MakeClient]:
    made: list[AnyClient] = []

    def make(*args: Any, **settings: Any) -> AnyClient:
        made.append(request.param(*args, direct=is_direct, **settings))
        return made[-1]

    yield make
    for client in made:
        await client.close()


@pytest.fixture
async def client(make_client: MakeClient, fake: FakeInference) -> AnyClient:
    return make_client(fake.address)


async def within(awaitable: Awaitable[Any]) -> Any:
    """Fail, and do not hang, when what is awaited never comes."""
    return await asyncio.wait_for(awaitable, 10)


async def test_generate_returns_the_whole_answer(client: AnyClient) -> None:
    """Text, ids, cache figures, worker and the client's own first-token time."""
    answer = await client.generate("hello")
    assert answer.text == "The quick brown fox"
    assert answer.token_ids == (100, 101, 102, 103)
    assert (answer.cached_tokens, answer.prompt_tokens) == (1152, 1204)
    assert (answer.worker_id, answer.finish_reason) == ("worker-1", "stop")
    assert answer.first_token_s is not None
    assert 0 < answer.first_token_s <= answer.total_s < 10


async def test_options_and_prompt_reach_the_server(client: AnyClient, fake: FakeInference) -> None:
    """A chat with sampling and an extra key arrives as such."""
    await client.generate(CHAT, max_tokens=5, extra_key="session 9", adapter="poet")
    (request,) = fake.requests
    assert request.chat.messages[0].content == "hi"
    assert (request.sampling.max_tokens, request.extra_key, request.adapter) == (5, "session 9", "poet")


async def test_stream_gives_deltas_then_the_answer(client: AnyClient) -> None:
    """Deltas in order; Started is known from the first delta on; the answer at the end is their sum."""
    stream = await client.stream("hello")
    first = await stream.next()
    assert first == TextDelta("The", (100,), 0)
    assert stream.started is not None
    assert stream.started.request_id == "req-1"
    texts = [first.text]
    texts += [(await stream.next()).text for _ in range(3)]
    with pytest.raises(StopAsyncIteration):
        await stream.next()
    assert texts == ["The", " quick", " brown", " fox"]
    assert stream.answer.text == "".join(texts)
    await stream.leave()


async def test_answer_is_not_to_be_had_before_the_end(client: AnyClient) -> None:
    """Half an answer never passes for a whole one."""
    stream = await client.stream("hello")
    await stream.next()
    with pytest.raises(InvalidRequestError, match=r"stream: .* read to its end"):
        _ = stream.answer
    await stream.leave()
    with pytest.raises(InvalidRequestError, match=r"stream: .* read to its end"):
        _ = stream.answer


async def test_delta_arrives_while_the_answer_goes_on(client: AnyClient, fake: FakeInference) -> None:
    """Streaming is real: the first delta is here while the server still holds the second."""
    fake.hold_after = 1
    stream = await client.stream("hello")
    assert (await within(stream.next())).text == "The"
    await within(fake.holding.wait())
    await stream.leave()


async def test_leaving_a_stream_early_cancels_at_the_server(client: AnyClient, fake: FakeInference) -> None:
    """The server's handler is cancelled while it stands still (F17)."""
    fake.hold_after = 2
    stream = await client.stream("hello")
    await within(stream.next())
    await within(fake.holding.wait())
    assert not fake.cancelled.is_set()
    await stream.leave()
    await within(fake.cancelled.wait())


async def test_reading_on_after_cancel_is_a_typed_error(client: AnyClient, fake: FakeInference) -> None:
    """prefixmesh's CancelledError, and in asyncio not the one that means that the task itself was cancelled (F22)."""
    fake.hold_after = 1
    stream = await client.stream("hello")
    await within(stream.next())
    stream.cancel()
    with pytest.raises(CancelledError):
        await within(stream.next())
    await within(fake.cancelled.wait())


async def test_cancel_from_beside_wakes_the_reader(client: AnyClient, fake: FakeInference) -> None:
    """A reader that waits for the next delta gets CancelledError when another part of the program cancels."""
    fake.hold_after = 0
    stream = await client.stream("hello")
    reader = asyncio.create_task(stream.collect())
    await within(fake.holding.wait())
    stream.cancel()
    with pytest.raises(CancelledError):
        await within(reader)


async def test_closing_the_client_ends_its_streams(client: AnyClient, fake: FakeInference) -> None:
    """No reader is left waiting."""
    fake.hold_after = 1
    stream = await client.stream("hello")
    await within(stream.next())
    await client.close()
    with pytest.raises(CancelledError):
        await within(stream.collect())
    await within(fake.cancelled.wait())


async def test_closed_client_says_so(client: AnyClient) -> None:
    """Closing twice is fine; calling afterwards is the caller's error."""
    await client.close()
    await client.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        await client.generate("hello")
    with pytest.raises(InvalidRequestError, match="closed"):
        await client.list_models()


async def test_timeout_is_a_deadline_error_and_stops_the_server(
    client: AnyClient, fake: FakeInference
) -> None:
    """The deadline travels with the call (F22)."""
    await client.generate("hello")  # connected: the time is for the call alone
    fake.hold_after = 1
    with pytest.raises(DeadlineError):
        await within(client.generate("hello", timeout_s=0.3))
    await within(fake.cancelled.wait())


async def test_clients_own_timeout_counts_where_a_call_has_none(
    make_client: MakeClient, fake: FakeInference
) -> None:
    """And a call's own goes before it."""
    client = make_client(fake.address, timeout_s=0.1)
    assert (await within(client.generate("hello", timeout_s=30))).text
    fake.hold_after = 1
    with pytest.raises(DeadlineError):
        await within(client.generate("hello"))


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequestError("sampling.top_p", "must be above 0"),
        errors.AuthenticationError("unknown API key"),
        errors.AccessDeniedError("not yours"),
        errors.NotFoundError("no such model"),
        errors.OverloadedError("queue full"),
        errors.UnavailableError("no worker is ready"),
        errors.DeadlineError("too late"),
        errors.CancelledError("aborted"),
        errors.InternalError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_servers_errors_come_back_as_themselves(
    client: AnyClient, fake: FakeInference, error: errors.PrefixmeshError, *, is_direct: bool
) -> None:
    """Same class, same message, from streams and from unary calls; but a worker that refuses a ticket says nothing of its caller's key."""
    fake.error = error
    if is_direct and isinstance(error, errors.AuthenticationError):
        with pytest.raises(UnavailableError, match=f"did not take the ticket: {error}"):
            await client.generate("hello")
    else:
        with pytest.raises(type(error)) as caught:
            await client.generate("hello")
        assert str(caught.value) == str(error)
    with pytest.raises(type(error)) as caught:
        await client.tokenize("hello")
    assert str(caught.value) == str(error)
    if isinstance(caught.value, InvalidRequestError):
        assert caught.value.field == "sampling.top_p"


async def test_deltas_before_an_error_are_delivered(client: AnyClient, fake: FakeInference) -> None:
    """What was streamed stays usable; the error comes where the stream broke."""
    fake.words, fake.error = ("a",), OverloadedError("full")
    stream = await client.stream("hello")
    assert (await stream.next()).text == "a"
    with pytest.raises(OverloadedError):
        await stream.next()


async def test_stream_that_just_stops_is_an_error(client: AnyClient, fake: FakeInference) -> None:
    """A server that closes the stream without Finished has not answered: iterating does not just end either. There is no other to go on."""
    fake.events = (started(), delta(0, "half"))
    with pytest.raises((InternalError, UnavailableError), match=r"ended (the stream )?before"):
        await client.generate("hello")
    stream = await client.stream("hello")
    assert (await stream.next()).text == "half"
    with pytest.raises((InternalError, UnavailableError), match=r"ended (the stream )?before"):
        await stream.next()


async def test_a_message_that_cannot_be_read_is_an_error_of_ours(
    client: AnyClient, fake: FakeInference
) -> None:
    """gRPC gives ``None`` for it in asyncio, and an error of its own elsewhere."""
    unreadable: Any = b"\xff\xff\xff"
    fake.events = (started(), delta(0, "half"), unreadable)
    with pytest.raises(InternalError):
        await within(client.generate("hello"))


async def test_nobody_at_the_address(make_client: MakeClient) -> None:
    """The error names the address and says how to start a fleet."""
    with refusing_address() as address:
        client = make_client(address)
        for call in (client.generate("hello"), client.list_models()):
            with pytest.raises(UnavailableError, match=f"nobody answers at {address} .*prefixmesh up"):
                await within(call)


async def test_server_that_vanishes_is_a_lost_connection(
    make_client: MakeClient, fake: FakeInference
) -> None:
    """A stream that was running ends in UnavailableError when its server goes, for a client that does not wait for it."""
    client = make_client(fake.address, resume=False)
    fake.hold_after = 1
    stream = await client.stream("hello")
    await within(stream.next())
    await within(fake.holding.wait())
    await fake.stop_now()
    with pytest.raises(UnavailableError):
        await within(stream.collect())


async def test_bad_arguments_never_reach_the_server(client: AnyClient, fake: FakeInference) -> None:
    """They are refused before anything is sent (F58)."""
    for prompt, options in (("", {}), ("x", {"max_tokens": -1}), ("x", {"seed": 2**70})):
        with pytest.raises(InvalidRequestError):
            await client.generate(prompt, **options)
    with pytest.raises(InvalidRequestError):
        await client.tokenize([1])
    assert fake.metadata == []


async def test_credentials_travel_as_metadata(make_client: MakeClient, fake: FakeInference) -> None:
    """On streams and on unary calls alike."""
    client = make_client(fake.address, api_key="pm-key", tenant="acme")
    await client.generate("hello")
    await client.list_models()
    # A worker is shown the ticket, and nothing that would be of use elsewhere.
    by_ticket = [metadata for metadata in fake.metadata if TICKET_METADATA in metadata]
    assert not any({"authorization", "x-prefixmesh-tenant"} & set(metadata) for metadata in by_ticket)
    others = [metadata for metadata in fake.metadata if metadata not in by_ticket]
    assert len(others) == 2
    for metadata in others:
        assert metadata["authorization"] == "Bearer pm-key"
        assert metadata["x-prefixmesh-tenant"] == "acme"


async def test_client_without_credentials_sends_none(client: AnyClient, fake: FakeInference) -> None:
    """No empty header that a server would have to understand."""
    await client.list_models()
    assert not {"authorization", "x-prefixmesh-tenant"} & set(fake.metadata[0])


async def test_abort_tokenize_and_models(client: AnyClient, fake: FakeInference) -> None:
    """The unary calls, typed."""
    await client.abort("req-1")
    assert fake.aborted == ["req-1"]
    assert await client.tokenize("hi") == (104, 105)
    assert await client.tokenize(CHAT) == (104, 105)
    assert await client.list_models() == (
        ServedModel(name=MODEL, revision="r1", context_length=CONTEXT_LENGTH, adapters=("poet",)),
    )


async def test_two_streams_of_one_client_run_side_by_side(client: AnyClient) -> None:
    """Interleaved reading gives each its own answer (F60: with the same id of the caller)."""
    one = await client.stream("a", request_id="same")
    two = await client.stream("b", request_id="same")
    assert (await one.next()).text == (await two.next()).text == "The"
    assert (await two.collect()).text == (await one.collect()).text == "The quick brown fox"


async def test_cancelled_task_stays_a_cancelled_task(fake: FakeInference) -> None:
    """asyncio's own cancellation passes through, and the server's work stops."""
    fake.hold_after = 1
    async with AsyncClient(fake.address) as client:
        task = asyncio.create_task(client.generate("hello"))
        await within(fake.holding.wait())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await within(task)
        await within(fake.cancelled.wait())


async def test_asyncio_timeout_around_a_call_works(fake: FakeInference) -> None:
    """``asyncio.timeout`` sees its own cancellation come back."""
    fake.hold_after = 1
    async with AsyncClient(fake.address) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.generate("hello")
        await within(fake.cancelled.wait())


async def test_context_managers_close(fake: FakeInference) -> None:
    """``with`` and ``async with``, for clients and streams, as users write them."""

    def blocking() -> str:
        with Client(fake.address) as client, client.stream("hello") as stream:
            return "".join(delta.text for delta in stream)

    assert await asyncio.to_thread(blocking) == "The quick brown fox"
    async with AsyncClient(fake.address) as client, client.stream("hello") as stream:
        assert "".join([delta.text async for delta in stream]) == "The quick brown fox"
    with pytest.raises(InvalidRequestError, match="closed"):
        client.stream("hello")


def test_async_client_may_be_made_where_no_event_loop_runs() -> None:
    """It opens its channel at the first call; its repr is its state."""
    assert repr(AsyncClient("127.0.0.1:1")) == "AsyncClient(127.0.0.1:1)"
