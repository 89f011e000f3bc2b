"""Streaming from workers directly, for both clients: what is tried when a worker cannot serve, and when the proxy is the way."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from prefixmesh.client import direct_aio, direct_blocking
from prefixmesh.client.direct import LEAST_RETRIES
from prefixmesh.errors import (
    LIFE_IS_OVER,
    AdapterChangedError,
    AuthenticationError,
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    PrefixmeshError,
    UnavailableError,
)
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.rpc.channel import CLIENT_OPTIONS
from prefixmesh.ticket import TICKET_METADATA
from prefixmesh.tokens import pack
from tests.support.any_client import AnyClient, AwaitedClient, BlockingClient
from tests.support.fake_inference import FakeInference, delta, finished, refusing_address, started
from tests.support.servers import eventually

ANSWER = "The quick brown fox"


@pytest.fixture
async def servers() -> AsyncIterator[list[FakeInference]]:
    """A router, which computes by itself when asked by Generate, and two workers that it routes to, the first before the second."""
    async with AsyncExitStack() as stack:
        router, *workers = [await stack.enter_async_context(FakeInference()) for _ in range(3)]
        router.routes = tuple(worker.address for worker in workers)
        router.words = ("by", " proxy")
        yield [router, *workers]


@pytest.fixture(params=[BlockingClient, AwaitedClient], ids=["Client", "AsyncClient"])
async def client(request: pytest.FixtureRequest, servers: list[FakeInference]) -> AsyncIterator[AnyClient]:
    made: AnyClient = request.param(servers[0].address, direct=True)
    yield made
    await made.close()


async def within(awaitable: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaitable, 10)


async def test_tokens_do_not_cross_the_router(client: AnyClient, servers: list[FakeInference]) -> None:
    """The worker gets the prompt as tokens and the ticket, and nothing that the ticket settles; Started tells what the router predicted."""
    router, worker, _ = servers
    answer = await client.generate("hello", model="named", extra_key="mine", max_tokens=7)
    assert answer.text == ANSWER
    (question,), (sent,) = router.questions, worker.ticketed
    assert (question.request.text, question.request.extra_key) == ("hello", "mine")
    assert (sent.tokens.ids, sent.model, sent.extra_key) == (pack([1, 2, 3]), "", "")
    assert sent.sampling.max_tokens == 7
    assert worker.metadata[0][TICKET_METADATA] == b"ticket 1"
    assert answer.started.routing is not None
    assert answer.started.routing.predicted_cached_tokens == 1088
    assert (answer.started.model, answer.retokenized_tokens) == ("routed-model", 5)


async def test_a_prompt_of_tokens_goes_as_it_came(client: AnyClient, servers: list[FakeInference]) -> None:
    """The router does not send back what the caller has."""
    await client.generate([7, 8, 9])
    assert servers[1].ticketed[0].tokens.ids == pack([7, 8, 9])


async def test_worker_out_of_reach_costs_another_question(
    client: AnyClient, servers: list[FakeInference]
) -> None:
    """The next question excludes it and gives back what was reserved there; the next request avoids it from the start."""
    router, _, second = servers
    with refusing_address() as nobody:
        router.routes = (nobody, second.address)
        assert (await within(client.generate("hello"))).text == ANSWER
        assert (await within(client.generate("again"))).text == ANSWER
    first, retry, later = router.questions
    assert (list(first.exclude), first.unused_request_id) == ([], "")
    assert (list(retry.exclude), retry.unused_request_id) == ([nobody], "request-1")
    assert (list(later.exclude), later.unused_request_id) == ([nobody], "")
    assert len(second.ticketed) == 2


async def test_proxy_answers_where_no_worker_is_in_reach(
    client: AnyClient, servers: list[FakeInference]
) -> None:
    """Whether the router knows others (two are tried) or not."""
    router = servers[0]
    with refusing_address() as one, refusing_address() as two:
        router.routes = (one,)
        assert (await within(client.generate("a"))).text == "by proxy"
        router.routes = (one, two)
        assert (await within(client.generate("b"))).text == "by proxy"
        asked = len(router.questions)
        router.routes = (one, two, servers[1].address)
        assert (await within(client.generate("c"))).text == ANSWER
    assert len(router.questions) == asked + 1  # neither is tried again so soon


async def test_what_was_reserved_at_the_last_worker_in_vain_is_given_back(
    client: AnyClient, servers: list[FakeInference]
) -> None:
    """The request goes to the proxy without another question, so the router is told beside it."""
    router = servers[0]
    with refusing_address() as one, refusing_address() as two:
        router.routes = (one, two)
        assert (await within(client.generate("hello"))).text == "by proxy"
        await eventually(lambda: router.given_back == ["request-2"])
    assert len(router.questions) == 2


async def test_worker_that_never_answers_a_connection_is_out_of_reach(
    servers: list[FakeInference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall that drops what it gets: the attempt to connect ends in its own time, long before the caller's deadline."""
    options = (*CLIENT_OPTIONS, ("grpc.min_reconnect_backoff_ms", 50))
    monkeypatch.setattr(direct_aio, "WORKER_OPTIONS", options)
    monkeypatch.setattr(direct_blocking, "WORKER_OPTIONS", options)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        servers[0].routes = (f"127.0.0.1:{silent.getsockname()[1]}",)
        kinds: tuple[type, ...] = (BlockingClient, AwaitedClient)
        for kind in kinds:
            client: AnyClient = kind(servers[0].address, direct=True)
            assert (await within(client.generate("hello", timeout_s=9))).text == "by proxy"
            await client.close()


@pytest.mark.parametrize("error", [UnavailableError("stopping"), AuthenticationError("another life")])
async def test_worker_that_refuses_is_left_for_another(
    client: AnyClient, servers: list[FakeInference], error: PrefixmeshError
) -> None:
    """A drained one, or one that has restarted under the ticket."""
    router, first, second = servers
    first.error_for = lambda _: error
    assert (await within(client.generate("hello"))).text == ANSWER
    assert len(second.ticketed) == 1
    assert list(router.questions[1].exclude) == [first.address]


@pytest.mark.parametrize("kind", LIFE_IS_OVER)
async def test_a_worker_that_says_it_died_has_not_refused(
    client: AnyClient, servers: list[FakeInference], kind: Callable[[str], PrefixmeshError]
) -> None:
    """However often: what may be tried again after refusals is not used up by deaths."""
    _, first, second = servers
    first.error_for = lambda _: kind("gone")
    asked = 2 * LEAST_RETRIES
    for _ in range(asked):
        assert (await within(client.generate("hello"))).text == ANSWER
    assert len(second.ticketed) == asked


async def test_request_that_kills_its_workers_is_not_handed_round(
    client: AnyClient, servers: list[FakeInference]
) -> None:
    """Two workers fail it, and it ends; neither a third nor the proxy is tried (F23)."""
    router, *workers = servers
    for worker in workers:
        worker.error_for = lambda _: UnavailableError("died")
    with pytest.raises(UnavailableError, match="failed this request: died"):
        await within(client.generate("hello"))
    assert len(router.questions) == len(router.requests) == 2


async def test_lone_worker_that_fails_says_why(client: AnyClient, servers: list[FakeInference]) -> None:
    """Where no other is left, its own trouble says more than that no worker is ready."""
    router, first, _ = servers
    router.routes = (first.address,)
    first.error_for = lambda _: UnavailableError("died")
    with pytest.raises(UnavailableError, match="died"):
        await within(client.generate("hello"))


async def test_death_between_start_and_first_token_begins_anew(
    client: AnyClient, servers: list[FakeInference]
) -> None:
    """Nothing had been answered; the answer tells of the worker that gave it."""
    _, first, second = servers
    first.events, first.cached_tokens = (started(request_id="lost"),), 0
    second.events = (started(request_id="found"), delta(0, "hi"), finished(1))
    answer = await within(client.generate("hello"))
    assert (answer.text, answer.started.request_id) == ("hi", "found")


@pytest.mark.parametrize("kind", [BlockingClient, AwaitedClient], ids=["Client", "AsyncClient"])
async def test_nothing_is_tried_again_after_the_first_token_by_who_does_not_want_it(
    kind: type, servers: list[FakeInference]
) -> None:
    """With ``resume=False`` what was answered stays answered: the error is the stream's (F24)."""
    router, first, second = servers
    client: AnyClient = kind(router.address, direct=True, resume=False)
    first.words, first.error = ("half",), UnavailableError("died")
    stream = await client.stream("hello")
    assert (await within(stream.next())).text == "half"
    with pytest.raises(UnavailableError, match="died"):
        await within(stream.next())
    assert len(router.questions) == 1
    assert not second.ticketed
    first.events = (started(), delta(0, "half"))
    with pytest.raises(UnavailableError, match="ended the stream before"):
        await within(client.generate("hello"))
    await client.close()


@pytest.mark.parametrize(
    "error", [OverloadedError("queue full"), InvalidRequestError("branches", "too many")]
)
async def test_workers_verdict_is_the_callers(
    client: AnyClient, servers: list[FakeInference], error: PrefixmeshError
) -> None:
    """Busy is not dead, and a caller's error is not the worker's: neither is sent elsewhere."""
    router, first, second = servers
    first.error_for = lambda _: error
    with pytest.raises(type(error)):
        await within(client.generate("hello"))
    assert len(router.questions) == 1
    assert not second.ticketed
    await eventually(lambda: router.given_back == ["request-1"])  # nothing stays booked for it


async def test_changed_adapter_is_looked_up_anew(client: AnyClient, servers: list[FakeInference]) -> None:
    """The router is told, so that it asks the workers before it decides; three times, as at the proxy."""
    router, first, _ = servers
    changes = iter([AdapterChangedError("changed"), AdapterChangedError("changed"), None])
    first.error_for = lambda _: next(changes)
    assert (await within(client.generate("hello", adapter="poet"))).text == ANSWER
    assert [question.adapter_changed for question in router.questions] == [False, True, True]
    assert not any(question.exclude for question in router.questions)
    first.error_for = lambda _: AdapterChangedError("changed again")
    with pytest.raises(AdapterChangedError):
        await within(client.generate("hello", adapter="poet"))
    assert len(router.questions) == 6


async def test_routers_refusal_is_the_callers(client: AnyClient, servers: list[FakeInference]) -> None:
    """No worker is asked, and not the proxy, which would say the same."""
    router, first, _ = servers
    for error in (AuthenticationError("unknown key"), UnavailableError("no worker is ready")):
        router.route_error = error
        with pytest.raises(type(error), match=str(error)):
            await within(client.generate("hello"))
    assert not first.ticketed
    assert len(router.questions) == len(router.requests) == 2


@pytest.mark.parametrize("kind", [BlockingClient, AwaitedClient], ids=["Client", "AsyncClient"])
async def test_server_that_knows_no_route_is_its_own_proxy(kind: type) -> None:
    """A router of an earlier version, or a worker; both of two calls are answered, and only the first asks."""
    async with FakeInference(serves_route=False) as server:
        client: AnyClient = kind(server.address, direct=True)
        assert [(await within(client.generate(text))).text for text in ("a", "b")] == [ANSWER, ANSWER]
        await client.close()
    assert [request.text for request in server.requests] == ["a", "b"]


async def test_cancel_reaches_the_router_while_it_decides(
    client: AnyClient, servers: list[FakeInference]
) -> None:
    """The question is the call that runs then; the reader is told."""
    router = servers[0]
    router.hold_route = True
    opening = asyncio.create_task(within(client.generate("hello", timeout_s=5)))
    await within(router.routing.wait())
    await client.close()
    with pytest.raises(CancelledError):
        await opening
    await within(router.cancelled.wait())


async def test_one_deadline_bounds_all_attempts(client: AnyClient, servers: list[FakeInference]) -> None:
    """A second attempt has what the first has left, and a question that is not answered costs no more than that."""
    router, first, second = servers
    first.error_for = lambda _: UnavailableError("died")
    await client.generate("hello")  # connected to all: the time is for the calls alone
    second.hold_after = 0
    with pytest.raises(DeadlineError):
        await within(client.generate("hello", timeout_s=0.3))
    await within(second.cancelled.wait())
    router.hold_route = True
    with pytest.raises(DeadlineError):
        await within(client.generate("hello", timeout_s=0.1))


async def test_leaving_a_stream_at_once_leaves_nothing_running(
    client: AnyClient, servers: list[FakeInference]
) -> None:
    """Never read, and left: whatever had begun is cancelled, and the client serves on."""
    for server in servers:
        server.hold_after = 0
    stream = await client.stream("hello")
    await stream.leave()
    with pytest.raises(CancelledError):
        await within(stream.next())
    for server in servers:
        server.hold_after = None
    assert (await within(client.generate("hello"))).text == ANSWER


async def test_events_of_a_later_protocol_pass(client: AnyClient, servers: list[FakeInference]) -> None:
    """An empty message among the others is no error."""
    servers[1].events = (started(), pb.GenerateResponse(), delta(0, "hi"), finished(1))
    assert (await within(client.generate("hello"))).text == "hi"
