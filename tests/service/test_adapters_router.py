"""LoRA adapters through a router: who gets a request, what its ticket says, and what happens when an adapter changes under it."""

import asyncio

import grpc
import grpc.aio
import pytest

from prefixmesh.client import AsyncClient
from prefixmesh.errors import AdapterChangedError, InvalidRequestError, UnavailableError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.router.endpoint import Endpoint
from tests.support.router_kit import Router, running_router, token_request
from tests.support.servers import eventually

PROMPT = list(range(200))


def told(router: Router, index: int) -> dict[str, str]:
    """What the router knows of a worker's adapters."""
    entry = router.server.core.registry.get(Endpoint(router.workers[index].address))
    assert entry is not None
    return {name: one.digest for name, one in entry.adapters.items()}


def serve(router: Router, index: int, **adapters: str) -> None:
    """Give a worker other adapters, which the router does not know yet."""
    router.workers[index].script.adapters = adapters


async def test_only_the_worker_that_has_the_adapter_gets_its_requests() -> None:
    """Two workers, one of which has it, loaded after the router came to know both: found at the first request, no waiting."""
    async with running_router(2) as router:
        serve(router, 1, clerk="d1")
        answers = await asyncio.gather(
            *(router.generate(token_request([i, *PROMPT], adapter="clerk")) for i in range(8))
        )
        assert {answer.started.worker_id for answer in answers} == {"w1"}
        received = router.workers[1].received
        assert {call.ticket.adapter_digest for call in received} == {"d1"}
        assert {call.message.adapter for call in received} == {"clerk"}
        assert router.loads() == [0, 0]


async def test_an_adapter_has_a_namespace_of_its_own() -> None:
    """F47, F48: warm within the adapter, cold between base, adapter and other content under the name; beliefs likewise."""
    async with running_router(1) as router:
        serve(router, 0, clerk="d1")
        namespaces = []
        for expected_cached, adapter in ((0, ""), (0, "clerk"), (200, "clerk"), (200, "")):
            answer = await router.generate(token_request(PROMPT, adapter=adapter))
            assert answer.started.cached_tokens.device == pytest.approx(expected_cached, abs=1)
            assert answer.started.routing.predicted_cached_tokens == pytest.approx(expected_cached, abs=8)
            namespaces.append(answer.started.namespace_digest)
        assert len(set(namespaces)) == 2
        serve(router, 0, clerk="d2")
        reloaded = await router.generate(token_request(PROMPT, adapter="clerk"))
        assert reloaded.started.cached_tokens.device == 0
        assert reloaded.started.namespace_digest not in namespaces
        assert router.workers[0].received[-1].ticket.adapter_digest == "d2"


async def test_a_reload_that_the_router_has_not_heard_of_is_mended_within_the_request() -> None:
    """The worker refuses the ticket made with the old content; the request is prepared anew and answered, and nothing leaks."""
    async with running_router(2) as router:
        for index in (0, 1):
            serve(router, index, clerk="old")
        await router.generate(token_request(PROMPT, adapter="clerk"))
        await eventually(lambda: told(router, 0) == told(router, 1) == {"clerk": "old"})
        for index in (0, 1):
            serve(router, index, clerk="new")
        answer = await router.generate(token_request(PROMPT, adapter="clerk"))
        assert answer.started.cached_tokens.device == 0
        refused, taken = [call for worker in router.workers for call in worker.received][-2:]
        assert {refused.ticket.adapter_digest, taken.ticket.adapter_digest} <= {"old", "new"}
        assert router.loads() == [0, 0]
        router.server.core.check_invariants()


async def test_while_one_of_two_is_loaded_anew_requests_get_one_content() -> None:
    """The newer one, from the worker that has it."""
    async with running_router(2) as router:
        for index in (0, 1):
            serve(router, index, clerk="old")
        await eventually(lambda: told(router, 0) == told(router, 1) == {"clerk": "old"})
        serve(router, 1, clerk="new")
        await eventually(lambda: told(router, 1) == {"clerk": "new"})
        for i in range(4):
            answer = await router.generate(token_request([i, *PROMPT], adapter="clerk"))
            assert answer.started.worker_id == "w1"


async def test_an_unloaded_adapter_is_refused_as_one_that_never_was() -> None:
    """The worker that still was believed to have it says no, the router asks once more, and the caller learns the field."""
    async with running_router(1) as router:
        serve(router, 0, clerk="d1")
        await router.generate(token_request(PROMPT, adapter="clerk"))
        serve(router, 0)
        with pytest.raises(InvalidRequestError, match="no adapter 'clerk' is loaded here") as caught:
            await router.generate(token_request(PROMPT, adapter="clerk"))
        assert caught.value.field == "adapter"
        assert (await router.generate(token_request(PROMPT))).started.worker_id == "w0"
        assert router.loads() == [0]


async def test_an_adapter_that_changes_at_every_try_ends_in_a_clear_error() -> None:
    """A worker that tells one content and refuses tickets of it: after a few preparations the caller may try again."""
    async with running_router(1) as router:
        serve(router, 0, clerk="d1")
        router.workers[0].script.error = AdapterChangedError("it has other content here")
        with pytest.raises(AdapterChangedError):
            await router.generate(token_request(PROMPT, adapter="clerk"))
        assert len(router.workers[0].received) == 3
        assert router.loads() == [0]


async def test_an_adapter_whose_worker_died_is_unavailable() -> None:
    """Not unknown: the caller's request is right."""
    async with running_router(2) as router:
        serve(router, 0, clerk="d1")
        await router.generate(token_request(PROMPT, adapter="clerk"))
        await router.workers[0].kill()
        with pytest.raises(UnavailableError):
            await router.generate(token_request(PROMPT, adapter="clerk"))
        await eventually(lambda: len(router.server.core.registry.ready) == 1)
        with pytest.raises(UnavailableError, match="w0 cannot be reached"):
            await router.generate(token_request(PROMPT, adapter="clerk"))


async def test_adapters_are_listed_for_callers_and_operators() -> None:
    """ListModels names those of all ready workers, ListWorkers each worker's own."""
    async with running_router(2) as router:
        serve(router, 0, clerk="d1", poet="d2")
        serve(router, 1, clerk="d1")
        await eventually(lambda: told(router, 0) and told(router, 1))
        async with AsyncClient(router.address) as client:
            (model,) = await client.list_models()
            assert model.adapters == ("clerk", "poet")
        views = {view.worker_id: list(view.adapters) for view in await router.list_workers()}
        assert views == {"w0": ["clerk", "poet"], "w1": ["clerk"]}


async def test_a_flood_of_made_up_names_asks_the_workers_a_few_times_only() -> None:
    """Each caller gets its refusal, and workers are not asked once a caller."""
    async with running_router(1) as router:
        described = router.workers[0].described
        requests = [pb.GenerateRequest(text="x", adapter=f"made-up-{i}") for i in range(100)]
        outcomes = await asyncio.gather(*(router.generate(one) for one in requests), return_exceptions=True)
        assert all(isinstance(outcome, InvalidRequestError) for outcome in outcomes)
        assert router.workers[0].described - described <= 10


async def test_an_answer_that_has_begun_never_begins_anew() -> None:
    """A worker that loses the adapter in the middle of an answer: the caller is told, and gets no token twice."""
    async with running_router(1) as router:
        serve(router, 0, clerk="d1")
        router.workers[0].script.breaks_with = AdapterChangedError("it was loaded anew")
        call = router.inference.Generate(token_request(PROMPT, adapter="clerk"))
        events: list[str | None] = []

        async def read_all() -> None:
            async for message in call:
                events.append(message.WhichOneof("event"))  # noqa: PERF401  what came before the error counts

        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await read_all()
        assert events == ["started", "delta"]
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert len(router.workers[0].received) == 1
        assert router.loads() == [0]
