"""A call with several branches, at a worker and through a router: one prompt, one beginning, one end, and an answer for each branch."""

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from prefixmesh.branch_seed import branch_seed
from prefixmesh.config import EngineConfig
from prefixmesh.errors import (
    CancelledError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.rpc.status import from_rpc_error
from prefixmesh.tokens import unpack
from prefixmesh.worker.branch_events import branch_events
from prefixmesh.worker.messages import Refused, Submit
from tests.support.routed_worker import TEXT, router_before, scripted_model
from tests.support.router_kit import Router, headers
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import Worker, eventually, failure_of, records_of, rest_of, scripted_worker

TENANT = headers("acme")


def request(branches: int, text: str = TEXT, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, branches=branches, sampling=pb.Sampling(**sampling))


def branch_of(command: Submit) -> int:
    return int(command.request_id.partition("/")[2] or 0)


def engine_of_answers(*answers: str) -> ScriptedEngine:
    """An engine whose answer depends on the branch."""
    engine = ScriptedEngine()
    engine.answer_of = lambda command: answers[branch_of(command)]
    return engine


@asynccontextmanager
async def both(scripted: ScriptedEngine, **settings: Any) -> AsyncIterator[tuple[Worker, Router]]:
    """A worker, and a router before it."""
    async with (
        scripted_worker(scripted, **settings) as worker,
        router_before(worker, scripted_model()) as router,
    ):
        yield worker, router


async def stream_of(server: Worker | Router, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return await rest_of(server.inference.Generate(message, metadata=TENANT, timeout=10))


def texts_of(messages: list[pb.GenerateResponse]) -> dict[int, str]:
    """Each branch's text; asserts that its ids and text come without a gap."""
    texts: dict[int, str] = defaultdict(str)
    ids: dict[int, list[int]] = defaultdict(list)
    for message in messages:
        if message.HasField("delta"):
            delta = message.delta
            assert delta.position == len(ids[delta.branch])
            texts[delta.branch] += delta.text
            ids[delta.branch] += unpack(delta.token_ids).tolist()
    assert {branch: bytes(packed).decode() for branch, packed in ids.items()} == texts
    return dict(texts)


async def test_each_branch_has_its_answer_between_one_start_and_one_end() -> None:
    """Directly and through a router: Started, deltas of all, an end for each, Finished with the sums and branch 0's reason."""
    answers = ["a", "two words", "", "four"]
    async with both(engine_of_answers(*answers)) as servers:
        for server in servers:
            messages = await stream_of(server, request(4, max_tokens=5))
            kinds = [message.WhichOneof("event") for message in messages]
            assert (kinds.count("started"), kinds[0]) == (1, "started")
            assert (kinds.count("finished"), kinds[-1]) == (1, "finished")
            assert texts_of(messages) == {0: "a", 1: "two w", 3: "four"}
            ends = {m.branch_ended.branch: m.branch_ended for m in messages if m.HasField("branch_ended")}
            assert [ends[branch].completion_tokens for branch in range(4)] == [1, 5, 0, 4]
            assert [ends[branch].reason for branch in range(4)] == [1, 2, 1, 1]
            finished = messages[-1].finished
            assert (finished.usage.completion_tokens, finished.usage.prompt_tokens) == (10, len(TEXT))
            assert finished.reason == pb.FINISH_REASON_STOP


async def test_branches_are_requests_that_differ_in_name_and_seed_alone() -> None:
    """The same prompt, namespace and rules; branch 0 draws with the seed that Started tells, the others with what follows from it."""
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        message = request(3, seed=7, top_k=5, logprobs=2, regex="[a-z, .]+", min_tokens=1)
        message.priority, message.queue_timeout_ms = 9, 1500
        started = (await stream_of(worker, message))[0].started
    assert started.seed == 7
    assert [command.request_id for command in engine.submitted] == [
        f"{started.request_id}/{i}" for i in range(3)
    ]
    assert [command.sampling.seed for command in engine.submitted] == [branch_seed(7, i) for i in range(3)]
    first, *rest = engine.submitted
    for command in rest:
        assert (command.tokens, command.namespace, command.owner) == (first.tokens, first.namespace, "acme")
        assert (command.priority, command.sampling.regex, command.sampling.logprobs) == (9, "[a-z, .]+", 2)
    # What the call may wait for is its beginning: a branch that waits for the prompt to be computed has begun.
    assert [command.queue_timeout_s for command in engine.submitted] == [1.5, math.inf, math.inf]


async def test_one_branch_is_the_call_itself() -> None:
    """Asking for one answer is what it always was, on the wire and in the engine."""
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        messages = await stream_of(worker, request(1))
    assert not [message for message in messages if message.HasField("branch_ended")]
    assert [command.request_id for command in engine.submitted] == [messages[0].started.request_id]


async def test_a_stop_string_ends_its_own_branch() -> None:
    """The engine is told to stop that one; the others go on to their ends."""
    engine = engine_of_answers("one. two", "one, two, three")
    engine.hold_after_tokens = 6
    async with scripted_worker(engine) as worker:
        call = worker.inference.Generate(request(2, stop=["."]), metadata=TENANT)
        await engine.until(lambda: len(engine.running) == 1)
        assert engine.running == {engine.submitted[1].request_id}
        engine.release()
        messages = await rest_of(call)
    assert {m.delta.branch: m.delta.text for m in messages if m.HasField("delta")}.keys() == {0, 1}
    ends = {m.branch_ended.branch: m.branch_ended for m in messages if m.HasField("branch_ended")}
    assert (ends[0].reason, ends[0].completion_tokens) == (pb.FINISH_REASON_STOP, 4)
    assert "".join(m.delta.text for m in messages if m.delta.branch == 0) == "one"
    assert "".join(m.delta.text for m in messages if m.delta.branch == 1) == "one, two, three"


@pytest.mark.parametrize("where", ["queued", "decoding"])
@pytest.mark.parametrize("way", ["cancel", "abort", "deadline"])
@pytest.mark.parametrize("routed", [False, True])
async def test_whatever_ends_the_call_ends_every_branch(where: str, way: str, routed: bool) -> None:
    """F17, F18, F22: nothing of it runs on in the engine, no place stays taken, and the next call is served."""
    engine = ScriptedEngine()
    engine.hold_admission = where == "queued"
    engine.hold_after_tokens = 2
    places = EngineConfig(max_running_requests=1, max_queued_requests=3)
    async with both(engine, engine=places) as servers:
        server = servers[routed]
        timeout_s = 0.2 if way == "deadline" else None
        call = server.inference.Generate(request(3), metadata=TENANT, timeout=timeout_s)
        await engine.until(lambda: len(engine.running) == 3)
        if way == "cancel":
            call.cancel()
        elif way == "abort":
            request_id = engine.submitted[0].request_id.partition("/")[0]
            await server.inference.Abort(pb.AbortRequest(request_id=request_id), metadata=headers("other"))
            assert len(engine.running) == 3
            await server.inference.Abort(pb.AbortRequest(request_id=request_id), metadata=TENANT)
            with pytest.raises(CancelledError):
                await rest_of(call)
        await engine.until(lambda: not engine.running, timeout_s=1.0)
        if way == "deadline":
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        engine.release()
        await eventually(lambda: not routed or servers[1].loads() == [0])
        assert texts_of(await stream_of(server, request(3, "again"))) == dict.fromkeys(
            range(3), engine.answer
        )


@pytest.mark.parametrize("what", ["refused", "failed", "aborted", "cancelled by itself", "dead"])
async def test_one_branchs_end_in_an_error_is_the_calls(what: str) -> None:
    """The caller gets that error, and the other branches are ended in the engine."""
    engine = ScriptedEngine()
    engine.hold_after_tokens = 2
    errors = {
        "refused": OverloadedError,
        "failed": InternalError,
        "aborted": CancelledError,
        "cancelled by itself": InternalError,
        "dead": UnavailableError,
    }
    broken = BrokenBranch(engine, what)
    async with scripted_worker(broken) as worker:
        call = worker.inference.Generate(request(3), metadata=TENANT, timeout=10)
        if what in ("aborted", "dead"):
            await engine.until(lambda: len(engine.running) == 3)
            engine.die() if what == "dead" else engine.abort(engine.submitted[1].request_id)
        with pytest.raises(errors[what]):
            await rest_of(call)
        assert not engine.running
        if what != "dead":
            broken.what = ""
            engine.release()
            assert len(texts_of(await stream_of(worker, request(3)))) == 3


class BrokenBranch(ScriptedEngine):
    """An engine that breaks branch 1 of a call, and leaves the rest to another."""

    def __init__(self, engine: ScriptedEngine, what: str) -> None:
        super().__init__()
        self.what = what
        self._engine = engine
        self.abort, self.until, self.closed = engine.abort, engine.until, engine.closed  # type: ignore[method-assign]

    async def submit(self, command: Submit) -> AsyncGenerator[Any, None]:
        if branch_of(command) == 1 and self.what == "refused":
            yield Refused(request_id=command.request_id, field="", problem="full")
            return
        async with aclosing(self._engine.submit(command)) as events:
            async for event in events:
                if branch_of(command) == 1 and self.what == "failed":
                    raise InternalError("numbers went bad")
                if branch_of(command) == 1 and self.what == "cancelled by itself":
                    raise asyncio.CancelledError
                yield event


async def test_a_branch_that_is_cancelled_by_itself_does_not_pass_for_the_callers_leaving() -> None:
    """It is told as the bug it is, to whoever reads the joined stream, and the others are ended."""
    async with scripted_worker(ScriptedEngine()) as worker:
        await stream_of(worker, request(3))
        submits = worker.server._engine.submitted  # type: ignore[attr-defined]
    engine = ScriptedEngine()
    engine.hold_after_tokens = 2
    with pytest.raises(InternalError, match="cancelled by itself"):
        async for _ in branch_events(BrokenBranch(engine, "cancelled by itself"), submits):
            pass
    assert not engine.running


async def test_a_call_that_does_not_fit_as_a_whole_begins_with_nothing() -> None:
    """All branches or none: two places are free, a call of three is refused at once, a call of two is served."""
    engine = ScriptedEngine()
    engine.hold_admission = True
    settings = EngineConfig(max_running_requests=1, max_queued_requests=4)
    async with scripted_worker(engine, engine=settings) as worker:
        held = worker.inference.Generate(request(2), metadata=TENANT)
        await engine.until(lambda: len(engine.running) == 2)
        assert isinstance(await failure_of(worker, request(3)), OverloadedError)
        assert len(engine.submitted) == 2
        error = await failure_of(worker, request(5))
        assert isinstance(error, InvalidRequestError)
        assert (error.field, error.problem) == ("branches", "at most 4 fit the queue here, got 5")
        engine.release()
        assert len(texts_of(await rest_of(held))) == 2
        assert len(texts_of(await stream_of(worker, request(4)))) == 4


@pytest.mark.parametrize("branches", [-1, 65, 1000, 2**31 - 1])
async def test_a_number_of_branches_beyond_the_limit_is_refused_by_name(branches: int) -> None:
    """F64: at the worker and at the router, and nothing reaches the engine."""
    engine = ScriptedEngine()
    async with both(engine) as servers:
        for server in servers:
            with pytest.raises(InvalidRequestError, match="branches: must be at least 1 and at most 64"):
                await stream_of(server, request(branches))
        assert not engine.submitted


async def test_a_resumed_call_has_one_branch() -> None:
    """What was generated already is the beginning of one answer."""
    async with both(ScriptedEngine()) as servers:
        for server in servers:
            message = request(2)
            message.resumed_output = b"1234"
            with pytest.raises(InvalidRequestError, match="branches: must be 1 with resumed_output"):
                await stream_of(server, message)


@pytest.mark.parametrize("routed", [False, True])
async def test_a_conversation_goes_on_from_any_branch(routed: bool) -> None:
    """Each branch's ids are remembered for itself: whichever answer the next turn carries, nothing is tokenised again."""
    answers = ["fine", "well", "so so"]
    user = pb.ChatMessage(role="user", content="how are you?" * 8)
    async with both(engine_of_answers(*answers)) as servers:
        server = servers[routed]
        await stream_of(server, pb.GenerateRequest(chat=pb.ChatPrompt(messages=[user]), branches=3))
        for answer in answers:
            turn = [user, pb.ChatMessage(role="assistant", content=answer), user]
            again = await stream_of(server, pb.GenerateRequest(chat=pb.ChatPrompt(messages=turn)))
            assert again[-1].finished.usage.retokenized_tokens == 0, answer
        turn = [user, pb.ChatMessage(role="assistant", content="bad"), user]
        again = await stream_of(server, pb.GenerateRequest(chat=pb.ChatPrompt(messages=turn)))
        assert again[-1].finished.usage.retokenized_tokens == 3


async def test_a_router_knows_where_every_branchs_answer_lies() -> None:
    """A prompt that continues one branch or another is predicted to be found up to its last whole block."""
    answers = ["x" * 200, "y" * 200]
    async with both(engine_of_answers(*answers)) as (_, router):
        first = await stream_of(router, request(2))
        assert first[0].started.routing.policy == "cost"
        for answer in answers:
            again = await stream_of(router, request(1, TEXT + answer, max_tokens=0))
            predicted = again[0].started.routing.predicted_cached_tokens
            assert predicted == (len(TEXT) + 199) // 64 * 64
        assert router.loads() == [0]


async def test_the_end_of_a_call_is_one_line_whatever_branches_it_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With their number and the sum of their tokens."""
    with caplog.at_level("INFO", logger="prefixmesh"):
        async with scripted_worker(engine_of_answers("ab", "cde")) as worker:
            await stream_of(worker, request(2))
    (record,) = records_of(caplog, "request_ended")
    assert "outcome=stop" in record.getMessage()
    assert "completion_tokens=5 branches=2" in record.getMessage()


async def test_errors_through_a_router_name_the_same() -> None:
    """A worker without room for all branches refuses through the router in its own words."""
    engine = ScriptedEngine()
    async with both(engine, engine=EngineConfig(max_queued_requests=2)) as (_, router):
        call = router.inference.Generate(request(3), metadata=TENANT)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert str(from_rpc_error(caught.value)) == "branches: at most 2 fit the queue here, got 3"
