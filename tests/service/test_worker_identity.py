"""Whom a worker believes: tickets before all, metadata on loopback only, a request's body never."""

import secrets

import grpc
import grpc.aio
import pytest

from prefixmesh import fleet_secret
from prefixmesh.errors import AuthenticationError, InvalidRequestError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2 as control_pb
from prefixmesh.rpc.status import from_rpc_error
from prefixmesh.text.prompts import text_digest
from prefixmesh.ticket import TICKET_METADATA
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import (
    Metadata,
    Worker,
    byte_text,
    eventually,
    failure_of,
    rest_of,
    scripted_worker,
)

PROMPT = "a prompt that several tenants send, word for word"
REQUEST = pb.GenerateRequest(text=PROMPT)
MATCHABLE = len(PROMPT) - 1


def as_tenant(name: str) -> Metadata:
    return (("x-prefixmesh-tenant", name),)


async def cached(worker: Worker, request: pb.GenerateRequest, metadata: Metadata) -> int:
    return (await worker.generate(request, metadata)).started.cached_tokens.device


async def test_a_tenant_hits_its_own_prefix_and_no_others() -> None:
    """Warm within the tenant, cold for another: both, or caching off would pass (F48)."""
    async with scripted_worker(ScriptedEngine()) as worker:
        assert await cached(worker, REQUEST, as_tenant("acme")) == 0
        assert await cached(worker, REQUEST, as_tenant("acme")) == MATCHABLE
        assert await cached(worker, REQUEST, as_tenant("bolt")) == 0
        assert await cached(worker, REQUEST, ()) == 0


async def test_extra_key_narrows_within_the_tenant() -> None:
    """A caller's key separates its own requests, and reaches no other tenant's (F46, F49)."""
    async with scripted_worker(ScriptedEngine()) as worker:
        keyed = pb.GenerateRequest(text=PROMPT, extra_key="acme")
        assert await cached(worker, REQUEST, as_tenant("acme")) == 0
        assert await cached(worker, keyed, as_tenant("acme")) == 0
        assert await cached(worker, keyed, as_tenant("acme")) == MATCHABLE
        for request in (keyed, REQUEST):
            assert await cached(worker, request, as_tenant("bolt")) == 0
        # ("ab", "c") and ("a", "bc") are different pairs.
        assert await cached(worker, pb.GenerateRequest(text=PROMPT, extra_key="c"), as_tenant("ab")) == 0
        assert await cached(worker, pb.GenerateRequest(text=PROMPT, extra_key="bc"), as_tenant("a")) == 0


async def test_shared_isolation_is_one_trust_domain() -> None:
    """What one tenant computed another finds, when the operator said so."""
    async with scripted_worker(ScriptedEngine(), isolation="shared") as worker:
        assert await cached(worker, REQUEST, as_tenant("acme")) == 0
        assert await cached(worker, REQUEST, as_tenant("bolt")) == MATCHABLE


async def test_unknown_fields_of_a_body_name_nobody() -> None:
    """A tenant or namespace that a client puts in its message is ignored (F49)."""
    forged = (
        REQUEST.SerializeToString() + b"\xa2\x06\x04acme"
    )  # field 100, as some other version might define it
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        assert await cached(worker, REQUEST, as_tenant("acme")) == 0
        assert await cached(worker, pb.GenerateRequest.FromString(forged), as_tenant("bolt")) == 0
    assert [command.owner for command in engine.submitted] == ["acme", "bolt"]


async def test_a_ticket_says_it_all() -> None:
    """Tenant, namespace and id come from the ticket; metadata and extra_key beside it count for nothing."""
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        metadata = (*worker.ticket(request_id="r-1", namespace=b"N" * 16), *as_tenant("bolt"))
        answer = await worker.generate(pb.GenerateRequest(text="a", extra_key="mine"), metadata)
    assert answer.started.request_id == "r-1"
    assert answer.started.namespace_digest == (b"N" * 4).hex()
    assert (engine.submitted[0].request_id, engine.submitted[0].namespace) == ("r-1", b"N" * 16)
    assert engine.submitted[0].owner == "acme", "who pays for the KV"


async def test_a_ticket_that_is_not_ours_is_refused() -> None:
    """Forged, altered, for another life, doubled or empty: UNAUTHENTICATED, also on loopback, and never a fall-back (F49)."""
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        good = worker.ticket()[0][1]
        assert isinstance(good, bytes)
        notes = {
            "another fleet's": worker.ticket(secret=fleet_secret.generate()),
            "another life's": worker.ticket(incarnation=secrets.randbits(64)),
            "altered": ((TICKET_METADATA, good[:1] + bytes([good[1] ^ 1]) + good[2:]),),
            "empty": ((TICKET_METADATA, b""),),
            "two": (*worker.ticket(), *worker.ticket(request_id="ticket-2")),
            "cut": ((TICKET_METADATA, good[:-1]),),
        }
        for name, metadata in notes.items():
            error = await failure_of(worker, REQUEST, (*metadata, *as_tenant("acme")))
            assert isinstance(error, AuthenticationError), name
        assert not engine.submitted
        await worker.generate(REQUEST, worker.ticket())


async def test_a_ticket_in_use_is_not_taken_twice() -> None:
    """While its request runs, the same ticket is refused, and the request is not disturbed."""
    engine = ScriptedEngine()
    engine.hold_after_tokens = 1
    async with scripted_worker(engine) as worker:
        call = worker.inference.Generate(REQUEST, metadata=worker.ticket())
        await call.read()
        assert isinstance(await failure_of(worker, REQUEST, worker.ticket()), AuthenticationError)
        engine.release()
        assert (await rest_of(call))[-1].HasField("finished")


async def test_beyond_loopback_only_tickets_count() -> None:
    """Every method of a worker that others can reach refuses a call without a ticket."""
    async with scripted_worker(ScriptedEngine(), host="0.0.0.0") as worker:
        stub = worker.inference
        assert isinstance(await failure_of(worker, REQUEST, as_tenant("acme")), AuthenticationError)
        for call in (
            stub.Tokenize(pb.TokenizeRequest(text="a"), metadata=as_tenant("acme")),
            stub.ListModels(pb.ListModelsRequest()),
            stub.Abort(pb.AbortRequest(request_id="x")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await worker.generate(REQUEST, worker.ticket())


async def test_a_routers_abort_acts_for_the_ticket_s_tenant() -> None:
    """Abort through a ticket reaches that tenant's requests and no others (F49)."""
    engine = ScriptedEngine()
    engine.hold_after_tokens = 1
    async with scripted_worker(engine) as worker:
        call = worker.inference.Generate(REQUEST, metadata=worker.ticket(tenant="acme", request_id="r-1"))
        await call.read()
        target = pb.AbortRequest(request_id="r-1")
        await worker.inference.Abort(target, metadata=worker.ticket(tenant="bolt", request_id="a-1"))
        assert engine.running == {"r-1"}
        await worker.inference.Abort(target, metadata=worker.ticket(tenant="acme", request_id="a-2"))
        await engine.until(lambda: not engine.running)


async def test_a_bad_tenant_name_is_the_callers_error() -> None:
    """A name beyond its limits is refused with the metadata's name."""
    async with scripted_worker(ScriptedEngine()) as worker:
        error = await failure_of(worker, REQUEST, as_tenant("x" * 200))
    assert isinstance(error, InvalidRequestError)
    assert error.field == "x-prefixmesh-tenant"


@pytest.mark.parametrize("token", [None, "", "Bearer", "Bearer wrong", "Basic wrong"])
async def test_control_calls_need_the_fleets_token(token: str | None) -> None:
    """No token, a malformed and a wrong one are refused; a ticket is no substitute (F74)."""
    async with scripted_worker(ScriptedEngine()) as worker:
        credentials: Metadata = () if token is None else (("authorization", token),)
        metadata = (*credentials, *worker.ticket())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.control.Describe(control_pb.DescribeRequest(), metadata=metadata)
    assert isinstance(from_rpc_error(caught.value), AuthenticationError)


async def test_describe_tells_what_a_router_needs() -> None:
    """Identity, limits, versions, rates and the pool, from the engine's own figures."""
    async with scripted_worker(ScriptedEngine(), worker_id="w-3") as worker:
        told = await worker.control.Describe(control_pb.DescribeRequest(), metadata=worker.control_metadata())
        assert (told.worker_id, told.incarnation) == ("w-3", worker.bound.incarnation)
    assert (told.model, told.model_revision, told.context_length) == ("scripted", "rev-1", 1000)
    assert (told.page_size, told.prefix_cache, told.max_total_tokens) == (1, "radix", 4000)
    assert (told.protocol_version, told.fingerprint_version) == (1, 1)
    assert (told.rates.prefill_tokens_per_s, told.rates.decode_step_ms) == (1000.0, 2.0)
    assert (told.pool.total_pages, told.pool.free_pages) == (4000, 3993)
    assert (told.pool.evictable_pages, told.pool.protected_pages) == (4, 3)
    assert (told.cache.requests, told.cache.prompt_tokens) == (2, 40)
    assert (told.cache.hit_tokens.device, told.cache.hit_tokens.host) == (10, 5)
    misses = told.cache.miss_tokens
    assert (misses.never_seen, misses.evicted, misses.other_namespace, misses.tail) == (11, 7, 4, 3)
    assert (told.max_running_requests, told.running_requests, told.queued_requests) == (8, 0, 0)
    assert told.tokenizer_digest == text_digest(byte_text().tokenizer, byte_text().template)


async def test_describe_answers_with_the_last_figures_while_a_step_runs() -> None:
    """Busy is not dead: an engine that is inside a long step keeps nobody waiting for who it is."""
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        metadata = worker.control_metadata()
        before = await worker.control.Describe(control_pb.DescribeRequest(), metadata=metadata)
        engine.hold_stats = True
        during = await worker.control.Describe(control_pb.DescribeRequest(), metadata=metadata, timeout=5)
        before.unix_ms = during.unix_ms = 0  # the clock goes on
        assert during == before
        engine.steps = 1000  # what the engine has to tell when its step is over
        engine.release()

        async def is_fresh() -> bool:
            engine.hold_stats = False
            told = await worker.control.Describe(control_pb.DescribeRequest(), metadata=metadata, timeout=5)
            return bool(told.pool.free_pages == before.pool.free_pages - 1000)

        await eventually(is_fresh)


async def test_figures_that_come_late_count_all_the_same() -> None:
    """A worker whose every step is long still tells new figures: each late answer is told by the next Describe."""
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        metadata = worker.control_metadata()
        await worker.control.Describe(control_pb.DescribeRequest(), metadata=metadata)
        told = []
        for round_ in range(1, 4):
            engine.hold_stats = True
            await worker.control.Describe(control_pb.DescribeRequest(), metadata=metadata, timeout=5)
            engine.steps = round_
            answered = engine.stats_told
            engine.release()
            await engine.until(lambda answered=answered: engine.stats_told > answered)  # type: ignore[misc]
            engine.hold_stats = True
            later = await worker.control.Describe(control_pb.DescribeRequest(), metadata=metadata, timeout=5)
            told.append(engine.info.total_pages - 7 - later.pool.free_pages)
        assert told == [1, 2, 3]
        engine.release()


async def test_only_tickets_count_where_the_fleet_has_api_keys() -> None:
    """On loopback, too: naming a tenant past the router, who would have asked for a key, gets nobody in (F49)."""
    async with scripted_worker(ScriptedEngine(), tickets_only=True) as worker:
        error = await failure_of(worker, REQUEST, as_tenant("acme"))
        assert isinstance(error, AuthenticationError)
        assert (await worker.generate(REQUEST, worker.ticket())).finished.usage.completion_tokens > 0
