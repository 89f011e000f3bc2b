"""Both clients get over the death of a worker and the restart of a router: one answer, each token once, or a clear error in time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import pytest

from prefixmesh.client import Answer, AsyncClient, Client
from prefixmesh.errors import (
    AdapterChangedError,
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    PrefixmeshError,
    UnavailableError,
)
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.tokens import unpack
from tests.support.any_client import AnyClient, AwaitedClient, BlockingClient
from tests.support.fake_inference import FakeInference, delta, finished, started

WORDS: Final = tuple(f" word{number}" for number in range(64))
IDS: Final = tuple(range(100, 164))

MakeClient = Callable[..., AnyClient]


@pytest.fixture(params=[BlockingClient, AwaitedClient], ids=["Client", "AsyncClient"])
async def make_client(request: pytest.FixtureRequest) -> AsyncIterator[MakeClient]:
    made: list[AnyClient] = []

    def make(*args: Any, **settings: Any) -> AnyClient:
        made.append(request.param(*args, **settings))
        return made[-1]

    yield make
    for client in made:
        await client.close()


async def within(awaitable: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaitable, 30)


@asynccontextmanager
async def fleet(
    *dying: int | None, way: str = "dies_at"
) -> AsyncIterator[tuple[FakeInference, list[FakeInference]]]:
    """A router and workers, which it names in this order; each vanishes, or fails, at the token that is given."""

    def make(at: int | None) -> FakeInference:
        worker = FakeInference(words=WORDS)
        setattr(worker, way, at)
        return worker

    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(FakeInference())
        workers = [await stack.enter_async_context(make(at)) for at in dying]
        router.routes = tuple(worker.address for worker in workers)
        yield router, workers


def check_whole(answer: Answer, *, interruptions: int) -> None:
    """It is what nobody has disturbed, and tells how often it was."""
    for branch in answer.branches:
        assert (branch.text, branch.token_ids, branch.finish_reason) == ("".join(WORDS), IDS, "stop")
    assert answer.completion_tokens == 64 * len(answer.branches)
    assert answer.interruptions == interruptions
    assert (answer.prompt_tokens, answer.cached_tokens) == (1204, 1152)


def check_resumed(request: pb.GenerateRequest, at: int) -> int:
    """Most tokens of a branch that a request goes on from: the answer's own, and none that was not sent before the death at ``at``. What
    was sent and not read yet may be lost with a connection."""
    resumed = request.resumed_branches or [request.resumed_output]
    for packed in resumed:
        ids = tuple(unpack(packed).tolist())
        assert ids == IDS[: len(ids)]
        assert len(ids) <= at
    return max(len(packed) // 4 for packed in resumed)


async def check_death(make_client: MakeClient, at: int, **options: Any) -> FakeInference:
    """A direct answer whose worker dies at a token; the router, to look at."""
    async with fleet(at, None) as (router, (first, second)):
        client = make_client(router.address, direct=True)
        answer = await within(client.generate("hello", **options))
        again = router.questions[1]
        assert (list(again.exclude), again.unused_request_id) == ([first.address], "request-1")
        told = check_resumed(again.request, at)
        check_whole(answer, interruptions=told > 0)
        assert again.request.sampling.seed == (7 if told else 0)  # the one that Started told
        assert second.ticketed[0].sampling == again.request.sampling
        await client.close()
    return router


@pytest.mark.parametrize("at", [0, 1, 33, 64])
async def test_an_answer_goes_on_where_its_worker_died(make_client: MakeClient, at: int) -> None:
    """After none, some, or all of its tokens, and never a token twice: positions without a gap are the client's own check."""
    await check_death(make_client, at)


@pytest.mark.slow
async def test_an_answer_goes_on_wherever_its_worker_died(make_client: MakeClient) -> None:
    """A kill at every token from 0 to 64: 65 of 65 answers equal the undisturbed one."""
    for at in range(65):
        await check_death(make_client, at)


@pytest.mark.parametrize("at", [0, 17, 64])
async def test_several_answers_go_on_each_from_its_own_tokens(make_client: MakeClient, at: int) -> None:
    """Three branches of one call."""
    await check_death(make_client, at, branches=3)


@pytest.mark.parametrize("at", [1, 33])
async def test_an_answer_goes_on_where_its_worker_fell_silent(make_client: MakeClient, at: int) -> None:
    """Its connection stands, and nothing comes: it is given up there, and the tokens that were told are not asked for again."""
    async with fleet(None, None) as (router, (first, second)):
        first.hold_after = at
        client = make_client(router.address, direct=True, stream_idle_timeout_s=0.2)
        answer = await within(client.generate("hello"))
        check_whole(answer, interruptions=1)
        assert check_resumed(router.questions[1].request, at) == at
        assert list(router.questions[1].exclude) == [first.address]
        await within(first.cancelled.wait())
        assert len(second.ticketed) == 1
        await client.close()


async def test_a_worker_that_falls_silent_ends_an_answer_that_must_not_go_on(make_client: MakeClient) -> None:
    async with fleet(None, None) as (router, (first, second)):
        first.hold_after = 2
        client = make_client(router.address, direct=True, stream_idle_timeout_s=0.2, resume=False)
        with pytest.raises(UnavailableError, match=r"has said nothing for 0\.2 s"):
            await within(client.generate("hello"))
        assert not second.ticketed
        await client.close()


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "soon"])
def test_an_idle_timeout_is_seconds(seconds: Any) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidRequestError, match="stream_idle_timeout_s: must be"):
            kind("127.0.0.1:1", direct=True, stream_idle_timeout_s=seconds)


async def test_what_the_caller_brings_along_stands_before_what_goes_on(make_client: MakeClient) -> None:
    """Its own ``resumed_branches`` begin every attempt, and are neither told nor counted."""
    async with fleet(30, None, way="fails_at") as (router, (_, second)):
        client = make_client(router.address, direct=True)
        begun = [IDS[:20], IDS[:5]]
        answer = await within(client.generate("hello", branches=2, resumed_branches=begun))
        assert [branch.token_ids for branch in answer.branches] == [IDS[20:], IDS[5:]]
        assert (answer.completion_tokens, answer.interruptions) == (44 + 59, 1)
        assert [len(packed) // 4 for packed in second.ticketed[0].resumed_branches] == [30, 30]


async def test_the_caller_knows_the_first_start_and_lives_one_answer(make_client: MakeClient) -> None:
    """Deltas come as they would, Started stays, the first token's time is the first token's, and a prompt that was tokenised stays so."""
    async with fleet(2, None) as (router, (_, second)):
        stream = await make_client(router.address, direct=True).stream("hello")
        texts = [(await within(stream.next())).text for _ in range(2)]
        begun = stream.started
        while True:
            try:
                texts.append((await within(stream.next())).text)
            except StopAsyncIteration:
                break
        answer = stream.answer
        assert (tuple(texts), answer.started) == (WORDS, begun)
        assert answer.first_token_s is not None
        assert answer.timings.first_token_ms == pytest.approx(answer.first_token_s * 1e3, rel=0.5, abs=5)
        assert answer.retokenized_tokens == 5
        (again,) = second.ticketed
        assert unpack(again.tokens.ids).tolist() == [1, 2, 3]
        assert router.questions[1].request.tokens.ids == again.tokens.ids


async def test_progress_makes_up_for_deaths_and_attempts_are_bounded(make_client: MakeClient) -> None:
    """Each of the first workers gives some tokens before it dies: the answer is whole. The eighth that has it is the last."""
    async with fleet(1, 9, 20, 21, 64, None, way="fails_at") as (router, _):
        client = make_client(router.address, direct=True)
        check_whole(await within(client.generate("hello")), interruptions=5)
    async with fleet(*range(1, 10), way="fails_at") as (router, workers):
        client = make_client(router.address, direct=True)
        with pytest.raises(UnavailableError, match=f"worker {workers[7].address} failed this request"):
            await within(client.generate("hello"))
        assert len(router.questions) == 8


async def test_two_deaths_without_a_token_end_it(make_client: MakeClient) -> None:
    """A request that kills workers does not go round (F23)."""
    async with fleet(5, 5, 5, None, way="fails_at") as (router, workers):
        client = make_client(router.address, direct=True)
        stream = await client.stream("hello")
        for _ in range(2):
            with pytest.raises(UnavailableError, match="failed this request"):
                await within(stream.collect())
        assert not workers[3].ticketed


async def test_a_busy_worker_is_passed_over_once_the_answer_has_begun(make_client: MakeClient) -> None:
    """Before, the caller would be told at once; a caller's own error ends it in any case."""
    async with fleet(5, None, None, way="fails_at") as (router, (_, busy, _)):
        client = make_client(router.address, direct=True)
        busy.error_for = lambda _: OverloadedError("queue full")
        check_whole(await within(client.generate("hello")), interruptions=1)
        router.routes = router.routes[:2]
        with pytest.raises(OverloadedError, match="queue full"):
            await within(client.generate("hello"))


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("resumed_output", "the grammar does not allow it"),
        AdapterChangedError("loaded anew"),
    ],
)
async def test_what_another_worker_would_say_too_is_told_at_once(
    make_client: MakeClient, error: PrefixmeshError
) -> None:
    """Nothing is tried any more; what was answered stays answered. The caller never asked for what is not taken."""
    async with fleet(5, None, None, way="fails_at") as (router, (_, second, third)):
        second.error_for = lambda _: error
        client = make_client(router.address, direct=True)
        with pytest.raises(UnavailableError, match=f"cannot (be gone|go) on.*{error}"):
            await within(client.generate("hello"))
        assert not third.ticketed


async def test_a_worker_that_begins_anew_is_a_clear_error(make_client: MakeClient) -> None:
    """One of a version that knows nothing of ``resumed_branches``: no token is told twice."""
    async with fleet(5, None, way="fails_at") as (router, (_, old)):
        old.events = (started(), delta(0, " word0"), finished(1))
        stream = await make_client(router.address, direct=True).stream("hello", branches=2)
        for _ in range(2):  # reading on tries nothing any more
            with pytest.raises(UnavailableError, match="cannot be gone on with: token 5 of branch 0 is next"):
                await within(stream.collect())
        assert len(router.questions) == 2


@pytest.mark.parametrize("at", [0, 1, 40, 64])
async def test_a_stream_rides_over_the_restart_of_its_router(make_client: MakeClient, at: int) -> None:
    """The router vanishes in mid-stream and comes back at its address: sent again before the first token, gone on with after it."""
    async with FakeInference(words=WORDS, dies_at=at) as router:
        client = make_client(router.address)
        answering = asyncio.create_task(client.generate("hello"))
        await within(router.died.wait())
        async with FakeInference(words=WORDS, address=router.address) as again:
            answer = await within(answering)
        (request,) = again.requests
        told = check_resumed(request, at)
        check_whole(answer, interruptions=told > 0)
        assert request.sampling.HasField("seed") == (told > 0)


async def test_a_router_that_comes_back_before_its_workers_is_waited_for(make_client: MakeClient) -> None:
    """It refuses for want of workers, which is an answer at any other time."""
    async with FakeInference(words=WORDS, dies_at=3) as router:
        client = make_client(router.address)
        answering = asyncio.create_task(client.generate("hello"))
        await within(router.died.wait())
        refusals = iter([UnavailableError("no worker is ready")] * 2)
        async with FakeInference(words=WORDS, address=router.address) as again:
            again.error_for = lambda _: next(refusals, None)
            answer = await within(answering)
            check_whole(answer, interruptions=check_resumed(again.requests[-1], 3) > 0)
            assert len(again.requests) == 3
            again.error_for = lambda _: UnavailableError("no worker is ready")
            with pytest.raises(UnavailableError, match="no worker is ready"):
                await within(client.generate("hello"))
            assert len(again.requests) == 4


@pytest.mark.parametrize("direct", [False, True])
async def test_calls_that_are_sent_while_the_router_is_gone_are_answered(
    make_client: MakeClient, direct: bool
) -> None:
    """Unary ones and streams, of a client that knows the router; Route is asked again."""
    async with FakeInference(words=WORDS) as router:
        client = make_client(router.address, direct=direct)
        models = await client.list_models()
    calls: list[asyncio.Task[Any]] = [
        asyncio.create_task(asyncio.wait_for(call, 30))
        for call in (client.list_models(), client.tokenize("a"), client.generate("b"), client.abort("c"))
    ]
    await asyncio.sleep(0)
    async with FakeInference(words=WORDS, address=router.address) as again:
        listed, tokenized, answer, _ = await asyncio.gather(*calls)
        assert (listed, tokenized, again.aborted) == (models, (97,), ["c"])
        check_whole(answer, interruptions=0)


async def test_worker_and_router_may_die_together(make_client: MakeClient) -> None:
    """A direct stream whose worker dies while there is no router goes on once one is back."""
    async with fleet(7, None) as (router, workers):
        client = make_client(router.address, direct=True)
        stream = await client.stream("hello")
        assert (await within(stream.next())).text == WORDS[0]
        await router.stop_now()
        reading = asyncio.create_task(stream.collect())
        await within(workers[0].died.wait())
        again = FakeInference(address=router.address, routes=router.routes)
        async with again:
            check_whole(await within(reading), interruptions=1)
        assert list(again.questions[-1].exclude) == [workers[0].address]


@pytest.mark.parametrize("direct", [False, True])
async def test_waiting_for_a_router_ends_with_the_deadline(make_client: MakeClient, direct: bool) -> None:
    """The error says who is gone, and for how long it was waited for; on a machine that oversleeps, only that the time is over."""
    async with FakeInference(words=WORDS) as router:
        client = make_client(router.address, direct=direct)
        await client.list_models()
    told = rf"{router.address}.*\(waited .* s for it\)|the timeout passed"
    with pytest.raises((UnavailableError, DeadlineError), match=told):
        await within(client.generate("hello", timeout_s=0.4))
    with pytest.raises((UnavailableError, DeadlineError), match=told):
        await within(client.list_models(timeout_s=0.4))


async def test_who_does_not_want_to_wait_is_told_at_once(make_client: MakeClient) -> None:
    """``resume=False``: the stream's error, and the call's."""
    async with FakeInference(words=WORDS, dies_at=3) as router:
        client = make_client(router.address, resume=False)
        with pytest.raises(UnavailableError, match=r"the connection to .* broke"):
            await within(client.generate("hello"))
        with pytest.raises(UnavailableError, match="nobody answers"):
            await within(client.list_models())


@pytest.mark.parametrize("direct", [False, True])
async def test_a_caller_may_leave_while_the_router_is_gone(make_client: MakeClient, direct: bool) -> None:
    """Cancelling wakes the reader from its pause."""
    async with fleet(None) as (router, workers):
        router.words, router.hold_after, workers[0].hold_after = WORDS, 3, 3
        client = make_client(router.address, direct=direct)
        stream = await client.stream("hello")
        assert (await within(stream.next())).text == WORDS[0]
        reading = asyncio.create_task(stream.collect())
        await router.stop_now()
        await workers[0].stop_now()
        stream.cancel()
        with pytest.raises(CancelledError):
            await within(reading)


async def test_a_call_that_is_cancelled_while_it_takes_a_connection_gives_it_back() -> None:
    """By another thread, between the two attempts: the place in the pool is not lost."""

    def answer(at: str) -> str:
        with Client(at, direct=True) as client:
            workers, stream = client._workers, client.stream("hello")
            assert workers is not None
            take = workers.take

            def take_and_cancel(address: str) -> Any:
                channel = take(address)
                stream.cancel()
                return channel

            workers.take = take_and_cancel  # type: ignore[method-assign]
            with pytest.raises(CancelledError):
                stream.collect()
            return repr(workers)

    async with fleet(3, None, way="fails_at") as (router, _):
        left = await within(asyncio.to_thread(answer, router.address))
    assert left == "Workers(WorkerChannels(0 in use, 2 idle))"


@pytest.mark.parametrize("direct", [False, True])
async def test_a_client_that_is_closed_while_its_router_is_gone_ends_its_calls(
    make_client: MakeClient, direct: bool
) -> None:
    """Streams and unary calls: nobody is left waiting for half a minute."""
    async with fleet(None) as (router, workers):
        router.words, router.hold_after, workers[0].hold_after = WORDS, 3, 3
        client = make_client(router.address, direct=direct)
        stream = await client.stream("hello")
        assert (await within(stream.next())).text == WORDS[0]
    calls = [asyncio.create_task(stream.collect()), asyncio.create_task(client.list_models())]
    await asyncio.sleep(0)
    await client.close()
    for call in calls:
        with pytest.raises((CancelledError, InvalidRequestError)):
            await asyncio.wait_for(call, 10)


async def test_an_answer_that_is_there_is_not_asked_for_again(make_client: MakeClient) -> None:
    """The worker ends its stream in an error after the last message: the answer stands."""
    async with fleet(None, None) as (router, (first, second)):
        first.error_after_end = UnavailableError("stopping")
        client = make_client(router.address, direct=True)
        check_whole(await within(client.generate("hello")), interruptions=0)
        assert not second.ticketed


async def test_branches_that_have_all_ended_need_no_other_worker(make_client: MakeClient) -> None:
    """What is missing of the end follows from what was told."""
    async with fleet(None, None) as (router, (first, second)):
        first.events = (
            started(),
            delta(0, "a"),
            *(
                pb.GenerateResponse(branch_ended=pb.BranchEnded(branch=branch, reason="FINISH_REASON_LENGTH"))
                for branch in range(2)
            ),
        )
        answer = await within(make_client(router.address, direct=True).generate("hello", branches=2))
        assert [branch.text for branch in answer.branches] == ["a", ""]
        assert (answer.finish_reason, answer.completion_tokens, answer.interruptions) == ("length", 1, 1)
        assert not second.ticketed
