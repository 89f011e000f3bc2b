"""LoRA adapters at a worker's own services: names, namespaces, tickets, and the control calls that change them."""

import asyncio
from typing import Any

import grpc.aio
import pytest

from prefixmesh.cache.namespace import derive_namespace, short_digest
from prefixmesh.errors import AdapterChangedError, InvalidRequestError, NotFoundError, PrefixmeshError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2 as control
from prefixmesh.rpc.status import from_rpc_error
from prefixmesh.worker.messages import Refused
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import Worker, eventually, failure_of, scripted_worker

TEXT = "What are your opening hours?"


async def call(worker: Worker, method: str, request: Any, timeout_s: float = 10.0) -> Any:
    """One control call; the error of our tree when it fails."""
    try:
        return await getattr(worker.control, method)(
            request, metadata=worker.control_metadata(), timeout=timeout_s
        )
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def load(worker: Worker, name: str, path: str) -> str:
    """The digest of what was loaded."""
    answer = await call(worker, "LoadAdapter", control.LoadAdapterRequest(name=name, path=path))
    return str(answer.adapter.digest)


async def test_a_direct_call_by_name_is_computed_with_its_content_in_its_namespace() -> None:
    """F46, F47: the engine gets the digest, and the namespace is the one that follows from it."""
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        digest = await load(worker, "clerk", "some/folder")
        answer = await worker.generate(
            pb.GenerateRequest(text=TEXT, adapter="clerk", extra_key="k"), (("x-prefixmesh-tenant", "acme"),)
        )
        [submit] = engine.submitted
        expected = derive_namespace(
            worker.secret.namespace_key(),
            tenant="acme",
            adapter_digest=digest,
            model_revision=engine.info.model_revision,
            caller_key="k",
        )
        assert (submit.adapter, submit.namespace) == (digest, expected)
        assert answer.started.adapter_digest == digest
        assert answer.started.namespace_digest == short_digest(expected)
        base = await worker.generate(pb.GenerateRequest(text=TEXT, extra_key="k"))
        assert (base.started.adapter_digest, engine.submitted[-1].adapter) == ("", "")


async def test_equal_prompts_of_adapters_and_base_and_of_a_key_that_looks_like_one_stay_apart() -> None:
    """F46, F48: warm within each, 0 cached across all; an adapter's name or digest as extra_key is not that adapter."""
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        one, other = await load(worker, "a", "one"), await load(worker, "b", "other")
        ways: list[dict[str, str]] = [{}, {"adapter": "a"}, {"adapter": "b"}]
        ways += [{"extra_key": key} for key in ("a", "b", one, other, "adapter", f"adapter{one}")]
        for expected in (0, len(TEXT) - 1):
            for way in ways:
                answer = await worker.generate(pb.GenerateRequest(text=TEXT, **way))  # type: ignore[arg-type]
                assert answer.started.cached_tokens.device == expected, way
        assert len({submit.namespace for submit in engine.submitted}) == len(ways)


async def test_a_reload_with_other_weights_is_another_namespace_and_the_same_weights_are_not() -> None:
    """F47: the digest decides, not the name: 0 cached after a change, warm again under another name of the same content."""
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        await load(worker, "clerk", "old")
        for path, name, expected in (
            ("old", "clerk", 0),
            ("new", "clerk", 0),
            ("old", "again", len(TEXT) - 1),
        ):
            await load(worker, name, path)
            answer = await worker.generate(pb.GenerateRequest(text=TEXT, adapter=name))
            assert answer.started.cached_tokens.device == expected


async def test_an_unknown_adapter_is_refused_by_field_and_names_no_other() -> None:
    """The next request is served."""
    async with scripted_worker(ScriptedEngine()) as worker:
        await load(worker, "clerk", "p")
        error = await failure_of(worker, pb.GenerateRequest(text=TEXT, adapter="other"))
        assert isinstance(error, InvalidRequestError)
        assert (error.field, error.problem) == ("adapter", "no adapter 'other' is loaded here")
        assert (await worker.generate(pb.GenerateRequest(text=TEXT, adapter="clerk"))).text


async def test_a_ticket_made_with_other_content_is_refused_before_anything_is_computed() -> None:
    """Never other weights under a namespace: whichever of name and content does not fit, the router is told to look again."""
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        digest = await load(worker, "clerk", "p")
        cases = (("clerk", "0" * 64), ("clerk", ""), ("", digest), ("other", digest), ("other", ""))
        for index, (name, told) in enumerate(cases):
            ticket = worker.ticket(request_id=f"t-{index}", adapter_digest=told)
            error = await failure_of(worker, pb.GenerateRequest(text=TEXT, adapter=name), ticket)
            assert isinstance(error, AdapterChangedError), (name, told)
        assert engine.submitted == []
        ticket = worker.ticket(adapter_digest=digest, namespace=b"N" * 16)
        await worker.generate(pb.GenerateRequest(text=TEXT, adapter="clerk"), ticket)
        assert [(one.namespace, one.adapter) for one in engine.submitted] == [(b"N" * 16, digest)]


async def test_an_adapter_that_leaves_between_preparation_and_admission_is_looked_up_once_more() -> None:
    """The engine refuses the content that it does not have any more. A direct caller's name is looked up again, a router's ticket is not."""

    class Reloading(ScriptedEngine):
        """Refuses the first request as if its adapter had been loaded anew meanwhile."""

        async def submit(self, command: Any) -> Any:
            if not self.submitted:
                self.submitted.append(command)
                yield Refused(
                    request_id=command.request_id,
                    field="adapter",
                    problem="it is not loaded",
                    adapter_left=True,
                )
                return
            async for event in super().submit(command):
                yield event

    for is_direct in (True, False):
        engine = Reloading()
        async with scripted_worker(engine) as worker:
            digest = await load(worker, "clerk", "p")
            request = pb.GenerateRequest(text=TEXT, adapter="clerk")
            if is_direct:
                assert (await worker.generate(request)).text == engine.answer
                assert len(engine.submitted) == 2
            else:
                error = await failure_of(worker, request, worker.ticket(adapter_digest=digest))
                assert isinstance(error, AdapterChangedError)


async def test_what_is_loaded_is_described_and_listed() -> None:
    """To routers by Describe, to operators by ListAdapters, to callers by name."""
    async with scripted_worker(ScriptedEngine()) as worker:
        await load(worker, "poet", "q")
        digest = await load(worker, "clerk", "p")
        described = await call(worker, "Describe", control.DescribeRequest())
        listed = await call(worker, "ListAdapters", control.ListAdaptersRequest())
        assert list(described.adapters) == list(listed.adapters)
        assert [(one.name, one.rank, one.size_bytes) for one in listed.adapters] == [
            ("clerk", 8, 1000),
            ("poet", 8, 1000),
        ]
        assert listed.adapters[0].digest == digest
        models = await worker.inference.ListModels(pb.ListModelsRequest())
        assert list(models.models[0].adapters) == ["clerk", "poet"]


async def test_an_unloaded_adapter_is_refused_and_a_second_unload_finds_nothing() -> None:
    """And its name is nowhere any more."""
    async with scripted_worker(ScriptedEngine()) as worker:
        await load(worker, "clerk", "p")
        await call(worker, "UnloadAdapter", control.UnloadAdapterRequest(name="clerk"))
        assert isinstance(
            await failure_of(worker, pb.GenerateRequest(text=TEXT, adapter="clerk")), InvalidRequestError
        )
        with pytest.raises(NotFoundError, match="'clerk'"):
            await call(worker, "UnloadAdapter", control.UnloadAdapterRequest(name="clerk"))
        assert not (await call(worker, "Describe", control.DescribeRequest())).adapters


async def test_an_unload_that_outlasts_its_deadline_goes_on() -> None:
    """The caller's deadline is honoured; the name is refused from the first moment."""
    let = asyncio.Event()

    class Slow(ScriptedEngine):
        async def unload_adapter(self, name: str) -> None:
            await let.wait()
            await super().unload_adapter(name)

    engine = Slow()
    async with scripted_worker(engine) as worker:
        await load(worker, "clerk", "p")
        unload = control.UnloadAdapterRequest(name="clerk")
        with pytest.raises(PrefixmeshError) as late:
            await call(worker, "UnloadAdapter", unload, timeout_s=0.1)
        assert late.value.reason == "DEADLINE_EXCEEDED"
        assert isinstance(
            await failure_of(worker, pb.GenerateRequest(text=TEXT, adapter="clerk")), InvalidRequestError
        )
        let.set()
        await eventually(lambda: not engine.adapters)


async def test_a_flush_empties_the_cache() -> None:
    """What was warm is cold."""
    async with scripted_worker(ScriptedEngine()) as worker:
        for expected in (0, len(TEXT) - 1):
            answer = await worker.generate(pb.GenerateRequest(text=TEXT))
            assert answer.started.cached_tokens.device == expected
        await call(worker, "Flush", control.FlushRequest())
        assert (await worker.generate(pb.GenerateRequest(text=TEXT))).started.cached_tokens.device == 0


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("LoadAdapter", control.LoadAdapterRequest(name="clerk", path="p")),
        ("UnloadAdapter", control.UnloadAdapterRequest(name="clerk")),
        ("ListAdapters", control.ListAdaptersRequest()),
        ("Flush", control.FlushRequest()),
    ],
)
async def test_control_calls_need_the_fleets_token(method: str, request_: Any) -> None:
    """Neither nothing, nor a wrong one, nor a ticket, nor a tenant's name will do; nothing happens."""
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        wrong = (("authorization", "Bearer wrong"),)
        for metadata in ((), wrong, worker.ticket(), (("x-prefixmesh-tenant", "acme"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await getattr(worker.control, method)(request_, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert engine.adapters == {}
