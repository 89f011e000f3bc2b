"""``Route`` before a real worker's front: what the ticket admits, what becomes of its load, and who may ask."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from prefixmesh import wall_clock
from prefixmesh.client import AsyncClient
from prefixmesh.errors import (
    AuthenticationError,
    CancelledError,
    ExpiredTicketError,
    ForgedTicketError,
    InvalidRequestError,
    OverloadedError,
    PrefixmeshError,
    TicketLimitError,
    UnavailableError,
    UsedTicketError,
)
from prefixmesh.ids import RequestId
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import router_pb2, router_pb2_grpc
from prefixmesh.router import direct, placements
from prefixmesh.router.reservation import ReservationState
from prefixmesh.rpc.identity import hash_key
from prefixmesh.rpc.status import from_rpc_error
from prefixmesh.ticket import TICKET_METADATA
from prefixmesh.tokens import pack
from prefixmesh.worker import control_service
from tests.support.fake_worker import Script
from tests.support.routed_worker import TEXT, router_before, scripted_model
from tests.support.router_kit import Router, headers, running_router
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import Worker, eventually, failure_of, scripted_worker


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A router and its one worker, whose engine is scripted."""

    router: Router
    worker: Worker
    engine: ScriptedEngine


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker, router_before(worker, scripted_model()) as router:
        yield Pair(router=router, worker=worker, engine=engine)
        engine.release()


async def route(
    router: Router, request: pb.GenerateRequest, *, tenant: str = "", key: str = "", **fields: Any
) -> router_pb2.RouteResponse:
    """The router's answer; the error of our tree when the call fails."""
    stub: Any = router_pb2_grpc.RouterStub(router.channel)  # type: ignore[no-untyped-call]
    question = router_pb2.RouteRequest(request=request, **fields)
    try:
        answer: router_pb2.RouteResponse = await stub.Route(
            question, metadata=headers(tenant, key), timeout=20
        )
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return answer


def with_ticket(answer: router_pb2.RouteResponse) -> tuple[tuple[str, bytes], ...]:
    return ((TICKET_METADATA, answer.ticket),)


def tokens(ids: bytes, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(tokens=pb.TokenPrompt(ids=ids), **fields)


async def test_answer_has_what_a_caller_needs(pair: Pair) -> None:
    """Address, ticket, the prompt as the router tokenised it, what was predicted; the worker serves it under the ticket's id."""
    answer = await route(pair.router, pb.GenerateRequest(text=TEXT), tenant="acme")
    assert answer.address == pair.worker.bound.address
    assert answer.prompt_ids == pack(list(TEXT.encode()))
    assert (answer.worker_id, answer.model) == ("worker-0", scripted_model().name)
    assert (answer.routing.policy, answer.valid_ms) == ("cost", direct.TICKET_VALID_S * 1000)
    served = await pair.worker.generate(tokens(answer.prompt_ids), with_ticket(answer))
    assert served.started.request_id == answer.request_id
    proxied = await pair.router.generate(pb.GenerateRequest(text=TEXT), tenant="acme")
    assert served.started.namespace_digest == proxied.started.namespace_digest


async def test_tokens_are_not_sent_back(pair: Pair) -> None:
    answer = await route(pair.router, tokens(pack([1, 2, 3])))
    assert answer.prompt_ids == b""
    await pair.worker.generate(tokens(pack([1, 2, 3])), with_ticket(answer))


async def test_ticket_admits_one_call(pair: Pair) -> None:
    """The second one is refused; the next ticket is served (F60 in reverse: one id, two calls)."""
    answer = await route(pair.router, tokens(pack([1, 2])))
    await pair.worker.generate(tokens(pack([1, 2])), with_ticket(answer))
    assert isinstance(
        await failure_of(pair.worker, tokens(pack([1, 2])), with_ticket(answer)), UsedTicketError
    )
    again = await route(pair.router, tokens(pack([1, 2])))
    await pair.worker.generate(tokens(pack([1, 2])), with_ticket(again))


async def test_ticket_admits_what_was_routed_and_no_more(pair: Pair) -> None:
    """A longer prompt, a longer answer, more branches; each takes a ticket of its own, since a refusal uses it up."""
    asked = tokens(pack([1, 2]), sampling=pb.Sampling(max_tokens=3))
    for larger in (
        tokens(pack([1, 2, 3]), sampling=pb.Sampling(max_tokens=3)),
        tokens(pack([1, 2]), sampling=pb.Sampling(max_tokens=4)),
        tokens(pack([1, 2])),
        tokens(pack([1, 2]), sampling=pb.Sampling(max_tokens=3), branches=2),
    ):
        answer = await route(pair.router, asked)
        assert isinstance(await failure_of(pair.worker, larger, with_ticket(answer)), TicketLimitError)
    await pair.worker.generate(asked, with_ticket(await route(pair.router, asked)))
    nothing = tokens(pack([1, 2]), sampling=pb.Sampling(max_tokens=0))
    await pair.worker.generate(nothing, with_ticket(await route(pair.router, nothing)))
    answer = await route(pair.router, nothing)
    longer = tokens(pack([1, 2]), sampling=pb.Sampling(max_tokens=2))
    assert isinstance(await failure_of(pair.worker, longer, with_ticket(answer)), TicketLimitError)


async def test_changed_ticket_is_forged(pair: Pair) -> None:
    """Any byte of it."""
    answer = await route(pair.router, tokens(pack([1])))
    note = bytearray(answer.ticket)
    note[5] ^= 1
    forged = ((TICKET_METADATA, bytes(note)),)
    assert isinstance(await failure_of(pair.worker, tokens(pack([1])), forged), ForgedTicketError)


async def test_late_ticket_is_expired(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the worker's clock; the next one, in time, is served."""
    with monkeypatch.context() as patch:
        patch.setattr(direct, "TICKET_VALID_S", -1.0)
        answer = await route(pair.router, tokens(pack([1])))
    assert isinstance(
        await failure_of(pair.worker, tokens(pack([1])), with_ticket(answer)), ExpiredTicketError
    )


@pytest.mark.parametrize("apart_ms", [600_000, -600_000])
async def test_worker_whose_clock_is_apart_takes_tickets_and_lets_them_expire_as_others_do(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, apart_ms: int
) -> None:
    """F30: tickets expire by the clock that the worker tells of."""
    monkeypatch.setattr(control_service, "unix_ms", lambda: wall_clock.unix_ms() + apart_ms)
    inference = pair.worker.server._inference
    assert inference is not None
    callers = inference._callers
    monkeypatch.setattr(callers, "_unix_ms", lambda: wall_clock.unix_ms() + apart_ms)
    pool = pair.router.server._pool
    assert pool is not None
    await pool.describe_ready()
    answer = await route(pair.router, tokens(pack([1])))
    assert (
        await pair.worker.generate(tokens(pack([1])), with_ticket(answer))
    ).finished.usage.completion_tokens
    late = await route(pair.router, tokens(pack([1])))
    later_ms = apart_ms + round(1e3 * direct.TICKET_VALID_S) + 1_000
    monkeypatch.setattr(callers, "_unix_ms", lambda: wall_clock.unix_ms() + later_ms)
    error = await failure_of(pair.worker, tokens(pack([1])), with_ticket(late))
    assert isinstance(error, ExpiredTicketError)


async def test_load_of_a_direct_stream_is_the_workers_to_tell(pair: Pair) -> None:
    """Booked at the decision, still there while the stream runs, gone a report after its end."""
    pair.engine.hold_after_tokens = 1
    async with AsyncClient(pair.router.address, direct=True) as client:
        stream = client.stream(TEXT)
        await anext(stream)
        assert pair.router.loads() == [1]
        pair.engine.release()
        await stream.collect()
        await eventually(lambda: pair.router.loads() == [0])


async def test_unused_ticket_leaves_no_load(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end takes it away, by itself; and it stays no longer than that (F13's kind)."""
    monkeypatch.setattr(direct, "TICKET_VALID_S", 0.1)
    monkeypatch.setattr(placements, "LATE_REPORT_S", 0.1)
    await asyncio.gather(*(route(pair.router, tokens(pack([n]))) for n in range(5)))
    assert pair.router.loads() == [5]
    await eventually(lambda: pair.router.loads() == [0])
    assert pair.router.server.core.open_tickets == 0


async def test_ticket_that_is_reported_unused_is_given_back_at_once(pair: Pair) -> None:
    """Once; and only while the worker has not taken the request in."""
    first = await route(pair.router, tokens(pack([1])))
    second = await route(pair.router, tokens(pack([1])), unused_request_id=first.request_id)
    assert pair.router.loads() == [1]
    third = await route(pair.router, tokens(pack([1])), unused_request_id=first.request_id)
    assert pair.router.loads() == [2]
    fourth = await route(pair.router, tokens(pack([1])))
    nothing = await route(pair.router, pb.GenerateRequest(), unused_request_id=fourth.request_id)
    assert (nothing, pair.router.loads()) == (router_pb2.RouteResponse(), [2])
    pair.engine.hold_after_tokens = 1
    call = pair.worker.inference.Generate(tokens(pack([1])), metadata=with_ticket(second))
    await call.read()

    def state_of(answer: router_pb2.RouteResponse) -> ReservationState | None:
        placement = pair.router.server.core.placed_by_ticket(RequestId(answer.request_id))
        return None if placement is None else placement.reservation.state

    await eventually(lambda: state_of(second) is ReservationState.PREFILLED)
    await route(pair.router, tokens(pack([1])), unused_request_id=second.request_id)
    assert state_of(second) is ReservationState.PREFILLED
    assert state_of(third) is ReservationState.RESERVED
    call.cancel()


@pytest.mark.parametrize("address", ["nowhere", "host:0", "", "a:b:c"])
async def test_excluded_worker_is_named_by_its_address(pair: Pair, address: str) -> None:
    """Anything else names the field; an address that is not known excludes nobody."""
    with pytest.raises(InvalidRequestError, match=r"exclude\[1\]: must be host:port"):
        await route(pair.router, tokens(pack([1])), exclude=["other:1", address])
    assert (await route(pair.router, tokens(pack([1])), exclude=["other:1"])).address
    with pytest.raises(InvalidRequestError, match="exclude: at most 256"):
        await route(pair.router, tokens(pack([1])), exclude=["other:1"] * 257)


async def test_request_is_refused_as_at_generate(pair: Pair) -> None:
    """The same errors, of the same fields; nothing is booked."""
    with pytest.raises(InvalidRequestError, match="prompt"):
        await route(pair.router, pb.GenerateRequest())
    with pytest.raises(InvalidRequestError, match="model"):
        await route(pair.router, pb.GenerateRequest(text="x", model="other"))
    with pytest.raises(InvalidRequestError, match="adapter"):
        await route(pair.router, pb.GenerateRequest(text="x", adapter="none"))
    with pytest.raises(UnavailableError, match="no worker is ready"):
        await route(pair.router, pb.GenerateRequest(text="x"), exclude=[pair.worker.bound.address])
    assert pair.router.loads() == [0]


async def test_open_tickets_are_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks and asks and uses none is refused; giving one back does not open the way before its time, running out does."""
    monkeypatch.setattr(direct, "MAX_OPEN_TICKETS", 2)
    monkeypatch.setattr(direct, "TICKET_VALID_S", 0.2)
    monkeypatch.setattr(placements, "LATE_REPORT_S", 0.1)
    for _ in range(2):
        await route(pair.router, tokens(pack([1])))
    with pytest.raises(OverloadedError, match="2 tickets"):
        await route(pair.router, tokens(pack([1])))
    await eventually(lambda: pair.router.server.core.open_tickets == 0)
    await route(pair.router, tokens(pack([1])))


async def test_nobody_gives_back_the_ticket_of_another_tenant(pair: Pair) -> None:
    """Its load stays booked for whoever was given it; its own tenant may give it back."""
    given = await route(pair.router, tokens(pack([1])), tenant="anna")
    await route(pair.router, pb.GenerateRequest(), tenant="ben", unused_request_id=given.request_id)
    assert pair.router.loads() == [1]
    await route(pair.router, pb.GenerateRequest(), tenant="anna", unused_request_id=given.request_id)
    assert pair.router.loads() == [0]


async def test_router_that_stops_routes_nothing(pair: Pair) -> None:
    """While streams that are direct go on: they do not need it."""
    pair.engine.hold_after_tokens = 1
    async with AsyncClient(pair.router.address, direct=True, resume=False) as client:
        stream = client.stream(TEXT)
        await anext(stream)
        await pair.router.server.stop(0.0)
        pair.engine.release()
        assert (await stream.collect()).text == "Hello, world."
        with pytest.raises(UnavailableError):
            await client.generate(TEXT)


async def test_abort_reaches_a_direct_stream(pair: Pair) -> None:
    """By the id that Started told, through the router, within the tenant; another tenant's call changes nothing, silently."""
    pair.engine.hold_after_tokens = 2
    async with (
        AsyncClient(pair.router.address, tenant="acme", direct=True) as client,
        AsyncClient(pair.router.address, tenant="other") as stranger,
    ):
        stream = client.stream(TEXT)
        await anext(stream)
        assert stream.started is not None
        await stranger.abort(stream.started.request_id)
        await anext(stream)
        await client.abort(stream.started.request_id)
        with pytest.raises(CancelledError):
            await asyncio.wait_for(stream.collect(), 10)
        await client.abort("unknown")


async def test_route_asks_for_credentials_where_generate_does(tmp_path: Path) -> None:
    """A caller's own key is enough, and its tenant is the key's (F49)."""
    keys = tmp_path / "keys"
    keys.write_text(f"{hash_key('pm-key')} acme\n")
    async with running_router(api_keys_file=str(keys)) as router:
        with pytest.raises(AuthenticationError):
            await route(router, tokens(pack([1])))
        with pytest.raises(AuthenticationError):
            await route(router, tokens(pack([1])), key="pm-wrong")
        with pytest.raises(PrefixmeshError):
            await route(router, tokens(pack([1])), key="pm-key", tenant="other")
        async with AsyncClient(router.address, api_key="pm-key", direct=True) as client:
            await client.generate([1, 2])
    assert router.workers[0].received[0].ticket.tenant == "acme"


async def test_adapter_that_changes_under_a_ticket_is_met_anew() -> None:
    """The worker has other content than the router knew of; asked again, the router looks first."""
    script = Script(adapters={"poet": "old"})
    async with running_router(1, script=script) as router, AsyncClient(router.address, direct=True) as client:
        assert (await client.generate([1, 2], adapter="poet")).started.adapter_digest == "old"
        script.adapters = {"poet": "new"}
        assert (await client.generate([1, 2], adapter="poet")).started.adapter_digest == "new"
