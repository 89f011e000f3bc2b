"""Deadlines and queue timeouts, at a worker and through a router: who no longer waits is no longer computed for (F22).

Nothing here is timed: the engine is held in a step that would take for ever, so what is seen is that the abort was there before the
step's end, and that the next step is without the request.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest

from prefixmesh.config import EngineConfig
from prefixmesh.errors import InternalError, QueueTimeoutError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.requests import Prompt
from prefixmesh.rpc.status import ERROR_DOMAIN, from_rpc_error
from prefixmesh.text.prompt_threads import MAX_INLINE_CHARS
from prefixmesh.text.prompts import BuiltPrompt, PromptBuilder
from prefixmesh.worker.answer_grammar import AnswerGrammar
from prefixmesh.worker.grammar_queue import GrammarQueue
from prefixmesh.worker.messages import Submit
from tests.support.fake_engine import fake_worker
from tests.support.routed_worker import router_before, scripted_model
from tests.support.router_kit import token_request
from tests.support.scripted_engine import INFO, ScriptedEngine
from tests.support.servers import Worker, eventually, rest_of, scripted_worker

SETUP_S = 0.6
"""A deadline that is far enough to bring requests where they shall be, and near enough to wait for."""

SMALL = EngineConfig(
    max_total_tokens=2000, max_running_requests=2, max_queued_requests=4, chunked_prefill_size=2
)

ways = pytest.mark.parametrize("routed", [False, True], ids=["direct", "routed"])


@asynccontextmanager
async def stub_of(worker: Worker, *, routed: bool) -> AsyncIterator[Any]:
    """The worker's Inference, or that of a router before it, whose load is 0 at the end. It takes also what cannot end in time."""
    async with AsyncExitStack() as stack:
        if not routed:
            yield worker.inference
            return
        router = await stack.enter_async_context(router_before(worker, scripted_model(), max_wait_s=0.0))
        yield router.inference
        await eventually(lambda: router.loads() == [0])


def endless(token: int, prompt_tokens: int = 2, max_tokens: int = 90) -> pb.GenerateRequest:
    """More tokens than anybody waits for here, unless told otherwise."""
    sampling = pb.Sampling(max_tokens=max_tokens, ignore_eos=True)
    return token_request([token] * prompt_tokens, sampling=sampling)


async def past_its_deadline(call: Any) -> None:
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@ways
async def test_a_deadline_ends_a_request_in_the_step_it_meets(routed: bool) -> None:
    """One decodes, one is in the middle of its prompt, one waits; all deadlines pass in one long step; none is in the next."""
    async with fake_worker(SMALL) as stage, stub_of(stage.worker, routed=routed) as inference:
        decoding = inference.Generate(endless(5, max_tokens=900), timeout=SETUP_S)
        assert (await decoding.read()).HasField("started")
        assert (await decoding.read()).HasField("delta")
        prefilling = inference.Generate(endless(6, 900), timeout=SETUP_S)
        assert (await prefilling.read()).HasField("started")
        waiting = inference.Generate(endless(7), timeout=SETUP_S)
        await eventually(lambda: stage.scheduler.queued == 1)
        stage.model.hold()
        await eventually(lambda: stage.model.is_held)
        steps = stage.model.steps
        for call in (decoding, prefilling, waiting):
            await past_its_deadline(call)
        await eventually(lambda: not stage.engine._streams._queues, timeout_s=1.0)
        assert stage.model.steps == steps, "all of it happened while the engine computed one step"
        stage.model.release()
        stats = await stage.engine.stats()
        assert (stats.running, stats.queued, stats.protected_pages) == (0, 0, 0)
        assert stage.model.steps == steps + 1
        assert stage.scheduler.aborted_in == {"decoding": 1, "prefilling": 1, "waiting": 1}
        assert stage.is_quiet()


@ways
async def test_a_deadline_while_the_prompt_is_built_sends_nothing_to_the_engine(
    routed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer's thread cannot be stopped; what it brings is not waited for and not computed."""
    go_on, begun, build = threading.Event(), threading.Event(), PromptBuilder.build

    def slow_build(self: PromptBuilder, prompt: Prompt, namespace: Any) -> BuiltPrompt:
        begun.set()
        go_on.wait()
        return build(self, prompt, namespace)

    engine = ScriptedEngine(info=msgspec.structs.replace(INFO, context_length=10_000))
    async with scripted_worker(engine) as worker, stub_of(worker, routed=routed) as inference:
        monkeypatch.setattr(PromptBuilder, "build", slow_build)
        call = inference.Generate(pb.GenerateRequest(text="x" * (MAX_INLINE_CHARS + 1)), timeout=0.2)
        try:
            await past_its_deadline(call)
            assert begun.is_set()
            await eventually(lambda: not len(worker.server._calls))
        finally:
            go_on.set()
        assert (await rest_of(inference.Generate(pb.GenerateRequest(text="y"))))[-1].HasField("finished")
        assert [command.tokens[0] for command in engine.submitted] == [ord("y")]


async def test_a_prompt_that_held_up_the_server_past_its_deadline_is_not_submitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A small prompt is built on the event loop, where the cancellation is heard only afterwards."""
    past, build = threading.Event(), PromptBuilder.build

    def slow_build(self: PromptBuilder, prompt: Prompt, namespace: Any) -> BuiltPrompt:
        past.wait(0.2)  # nobody sets it
        return build(self, prompt, namespace)

    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        await rest_of(worker.inference.Generate(pb.GenerateRequest(text="warm up")))
        monkeypatch.setattr(PromptBuilder, "build", slow_build)
        await past_its_deadline(worker.inference.Generate(pb.GenerateRequest(text="x"), timeout=0.1))
        await eventually(lambda: not len(worker.server._calls))
        assert len(engine.submitted) == 1


@ways
async def test_a_deadline_while_a_grammar_is_compiled_ends_the_request(routed: bool) -> None:
    """The compiler runs on unheard; the engine knows nothing of the request any more."""
    go_on, begun = threading.Event(), threading.Event()

    def slow_compile(command: Submit) -> AnswerGrammar:
        begun.set()
        go_on.wait()
        raise RuntimeError("nobody reads this")

    async with fake_worker(SMALL) as stage, stub_of(stage.worker, routed=routed) as inference:
        stage.core._entrance._grammars = GrammarQueue(slow_compile)
        request = token_request([5], sampling=pb.Sampling(regex="a+"))
        try:
            await past_its_deadline(inference.Generate(request, timeout=0.2))
            assert begun.is_set()
            await eventually(stage.is_quiet)
            assert (await stage.engine.stats()).queued == 0
        finally:
            go_on.set()
        assert (await rest_of(inference.Generate(endless(5, max_tokens=2))))[-1].HasField("finished")


@ways
@pytest.mark.parametrize("after_tokens", [False, True])
async def test_a_cancellation_that_nobody_asked_for_is_told_before_the_deadline(
    routed: bool, after_tokens: bool
) -> None:
    """A CancelledError that a handler raises by itself would leave its caller waiting; it is a bug of ours, and told as one."""

    class LeakyEngine(ScriptedEngine):
        async def submit(self, command: Submit) -> AsyncIterator[Any]:  # type: ignore[override]
            async with aclosing(super().submit(command)) as events:
                async for event in events:
                    if after_tokens:
                        yield event
                    raise asyncio.CancelledError

    async with scripted_worker(LeakyEngine()) as worker, stub_of(worker, routed=routed) as inference:
        with pytest.raises(InternalError):
            await rest_of(inference.Generate(pb.GenerateRequest(text="x"), timeout=30))


@ways
async def test_who_waits_longer_than_the_queue_timeout_is_told_so(routed: bool) -> None:
    """RESOURCE_EXHAUSTED with a reason of its own, not the deadline's; who is computed goes on, and so does who sets no limit."""
    settings = EngineConfig(max_total_tokens=2000, max_running_requests=1)
    async with fake_worker(settings) as stage, stub_of(stage.worker, routed=routed) as inference:
        running = inference.Generate(endless(5, max_tokens=900))
        await running.read()
        stage.model.hold()
        await eventually(lambda: stage.model.is_held)
        request = endless(6)
        request.queue_timeout_ms = 10
        patient = inference.Generate(endless(7, max_tokens=2))
        call = inference.Generate(request, timeout=30)
        await eventually(lambda: len(stage.engine._streams._queues) == 3)
        stage.model.release()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = from_rpc_error(caught.value)
        assert isinstance(error, QueueTimeoutError)
        assert (error.reason, ERROR_DOMAIN) == ("QUEUE_TIMEOUT", "prefixmesh")
        running.cancel()
        assert (await rest_of(patient))[-1].HasField("finished")
        assert stage.scheduler.queued == 0
