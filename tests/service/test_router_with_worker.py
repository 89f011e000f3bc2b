"""A router in front of the real worker: the two speak one protocol, and one client talks to either."""

import dataclasses
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from prefixmesh.config import EngineConfig
from prefixmesh.errors import CancelledError, InvalidRequestError, PrefixmeshError, UnavailableError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.tokens import pack
from tests.support.routed_worker import TEXT, router_before, scripted_model
from tests.support.router_kit import chat_request, headers
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import eventually, real_worker, scripted_worker
from tests.support.tiny_model import make_tiny_model


async def read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_router_changes_nothing_but_the_address() -> None:
    """The same request gives the same tokens and text directly and through a router; the second finds the first's prefix."""
    engine = ScriptedEngine("An answer, in pieces.")
    async with scripted_worker(engine) as worker, router_before(worker, scripted_model()) as router:
        direct = await worker.generate(pb.GenerateRequest(text=TEXT))
        routed = await router.generate(pb.GenerateRequest(text=TEXT))
        again = await router.generate(pb.GenerateRequest(text=TEXT))
        assert (routed.text, routed.token_ids) == (direct.text, direct.token_ids)
        assert routed.started.namespace_digest == direct.started.namespace_digest
        assert again.started.cached_tokens.device == len(TEXT) - 1
        assert again.started.routing.predicted_cached_tokens == 64


async def test_router_and_worker_may_know_the_same_files_by_other_names() -> None:
    """The revision says what is served, a name is local: the router's name is the one that its callers see and may send."""
    async with scripted_worker(ScriptedEngine()) as worker:
        model = dataclasses.replace(scripted_model(), name="the-routers-name")
        async with router_before(worker, model) as router:
            answer = await router.generate(pb.GenerateRequest(text=TEXT, model="the-routers-name"))
            assert answer.started.model == "the-routers-name"


@pytest.mark.parametrize(
    "request_",
    [
        pb.GenerateRequest(text="x", model="other"),
        pb.GenerateRequest(text="x", adapter="other"),
        pb.GenerateRequest(text="x" * 2000),
        pb.GenerateRequest(text="x" * 990, sampling=pb.Sampling(max_tokens=11)),
        pb.GenerateRequest(text="x", sampling=pb.Sampling(min_p=2)),
        pb.GenerateRequest(),
    ],
    ids=["model", "adapter", "context", "max_tokens", "sampling", "no-prompt"],
)
async def test_refusals_name_the_same_field_directly_and_through_a_router(
    request_: pb.GenerateRequest,
) -> None:
    """F58, F59: one client handles both."""
    async with scripted_worker(ScriptedEngine()) as worker, router_before(worker, scripted_model()) as router:
        refusals: list[PrefixmeshError] = []
        for server in (worker, router):
            with pytest.raises(InvalidRequestError) as caught:
                await server.generate(request_)
            refusals.append(caught.value)
        direct, routed = refusals
        assert isinstance(direct, InvalidRequestError)
        assert isinstance(routed, InvalidRequestError)
        assert direct.field == routed.field


@pytest.mark.parametrize("where", ["queued", "decoding"])
async def test_leaving_stops_the_engine_through_the_router(where: str) -> None:
    """F17 (first form): a client of the router that disconnects while queued or decoding → the engine's request is aborted."""
    engine = ScriptedEngine()
    engine.hold_admission = where == "queued"
    engine.hold_after_tokens = 1
    async with scripted_worker(engine) as worker, router_before(worker, scripted_model()) as router:
        call = router.inference.Generate(pb.GenerateRequest(text=TEXT))
        await engine.until(lambda: len(engine.running) == 1)
        if where == "decoding":
            await call.read()
            await call.read()
        call.cancel()
        await engine.until(lambda: len(engine.aborted) == 1 and not engine.running)
        await eventually(lambda: router.loads() == [0])


async def test_abort_through_the_router_stops_the_engine() -> None:
    """The id that Started told is the one that works, and the caller's stream says it was aborted."""
    engine = ScriptedEngine()
    engine.hold_after_tokens = 1
    async with scripted_worker(engine) as worker, router_before(worker, scripted_model()) as router:
        call = router.inference.Generate(pb.GenerateRequest(text=TEXT), metadata=headers("acme"))
        request_id = (await call.read()).started.request_id
        assert request_id in engine.running
        await router.inference.Abort(pb.AbortRequest(request_id=request_id), metadata=headers("acme"))
        with pytest.raises(grpc.aio.AioRpcError, match="aborted"):
            await read_all(call)
        await engine.until(lambda: not engine.running)


async def test_request_ended_by_the_worker_alone_says_so() -> None:
    """The engine aborts a request by itself: CANCELLED reaches the caller, and the load is settled."""
    engine = ScriptedEngine()
    engine.hold_after_tokens = 1
    async with scripted_worker(engine) as worker, router_before(worker, scripted_model()) as router:
        call = router.inference.Generate(pb.GenerateRequest(text=TEXT))
        engine.abort((await call.read()).started.request_id)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert router.loads() == [0]


async def test_dead_engine_is_an_error_in_the_middle_and_unavailable_afterwards() -> None:
    """F65: the engine dies while it answers: a typed error, and the worker is not ready any more."""
    engine = ScriptedEngine()
    engine.hold_after_tokens = 1
    async with scripted_worker(engine) as worker, router_before(worker, scripted_model()) as router:
        call = router.inference.Generate(pb.GenerateRequest(text=TEXT))
        await call.read()
        engine.die()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(UnavailableError, match="worker-0"):
            await router.generate(pb.GenerateRequest(text=TEXT))
        with pytest.raises(PrefixmeshError) as direct:
            await worker.generate(pb.GenerateRequest(text=TEXT))
        assert not isinstance(direct.value, CancelledError)


@pytest.mark.slow
async def test_chat_through_a_router_finds_the_turn_before(tmp_path: Path) -> None:
    """Multi-turn with a real model: every turn finds prompt and answer of the one before, less the last token and one page."""
    model = str(make_tiny_model(tmp_path / "tiny"))
    engine = EngineConfig(model=model, dtype="float32", max_total_tokens=4096, threads=1)
    async with real_worker(engine) as worker, router_before(worker, model) as router:
        turns = [("user", "What is the capital of France? " * 8)]
        before = 0
        for turn in range(5):
            request = chat_request(*turns, sampling=pb.Sampling(temperature=1.0, seed=turn, max_tokens=12))
            answer = await router.generate(request)
            assert answer.finished.usage.retokenized_tokens == 0
            assert answer.started.cached_tokens.device >= before - 2
            before = answer.started.prompt_tokens + len(answer.token_ids)
            turns += [("assistant", answer.text), ("user", f"And what is {turn}?")]
        predicted = answer.started.routing.predicted_cached_tokens
        assert answer.started.cached_tokens.device - predicted in range(-1, 65)


async def test_an_answer_is_resumed_through_a_router_as_at_the_worker(tmp_path: Path) -> None:
    """What was generated already goes along, and what the next turn will find is named with it."""
    model = str(make_tiny_model(tmp_path / "tiny"))
    engine = EngineConfig(model=model, dtype="float32", max_total_tokens=4096, threads=1)
    sampling = pb.Sampling(temperature=1.0, seed=4, max_tokens=80, ignore_eos=True, logprobs=2)
    async with real_worker(engine) as worker, router_before(worker, model) as router:
        whole = await router.generate(pb.GenerateRequest(text="Once", sampling=sampling))
        for cut in (1, 40, 80):
            rest = await router.generate(
                pb.GenerateRequest(text="Once", sampling=sampling, resumed_output=pack(whole.token_ids[:cut]))
            )
            assert rest.token_ids == whole.token_ids[cut:]
            assert len([one for delta in rest.deltas for one in delta.logprobs]) == 80 - cut
        prompt = (await router.inference.Tokenize(pb.TokenizeRequest(text="Once"))).ids
        asked = prompt + pack(whole.token_ids)
        again = await router.generate(
            pb.GenerateRequest(tokens=pb.TokenPrompt(ids=asked), sampling=pb.Sampling(max_tokens=0))
        )
        assert again.started.routing.predicted_cached_tokens == 64
