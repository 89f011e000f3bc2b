"""What a worker refuses of tickets, each with a reason that a client can act on; and that a refusal costs nobody else anything."""

import asyncio
from typing import Any

import pytest

from prefixmesh import fleet_secret, wall_clock
from prefixmesh.errors import (
    AuthenticationError,
    ExpiredTicketError,
    ForgedTicketError,
    OtherLifeError,
    PrefixmeshError,
    TicketLimitError,
    UsedTicketError,
)
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.ticket import TICKET_METADATA
from prefixmesh.tokens import pack
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import Metadata, Worker, eventually, failure_of, scripted_worker

pytestmark = pytest.mark.asyncio(loop_scope="function")

HOUR_MS = 3_600_000


def request(tokens: int = 3, max_tokens: int = 5, branches: int = 1) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokens=pb.TokenPrompt(ids=pack(range(tokens))),
        sampling=pb.Sampling(max_tokens=max_tokens),
        branches=branches,
    )


def later() -> int:
    return wall_clock.unix_ms() + HOUR_MS


async def refusals(worker: Worker) -> "dict[str, tuple[Metadata, type[PrefixmeshError]]]":
    """Every kind of bad ticket, and the error that it must end in."""
    good = worker.ticket(request_id="good")
    note = good[0][1]
    assert isinstance(note, bytes)
    used = worker.ticket(request_id="used", expires_unix_ms=later())
    await worker.generate(request(), used)
    return {
        "changed": (((TICKET_METADATA, note[:-1] + bytes([note[-1] ^ 1])),), ForgedTicketError),
        "cut": (((TICKET_METADATA, note[:20]),), ForgedTicketError),
        "another fleet's": (worker.ticket(secret=fleet_secret.generate()), ForgedTicketError),
        "without a namespace": (worker.ticket(namespace=b""), ForgedTicketError),
        "another life's": (worker.ticket(incarnation=worker.bound.incarnation ^ 1), OtherLifeError),
        "expired": (worker.ticket(expires_unix_ms=wall_clock.unix_ms() - 1000), ExpiredTicketError),
        "used": (used, UsedTicketError),
        "two of them": ((*good, *worker.ticket(request_id="other")), AuthenticationError),
        "for a shorter prompt": (worker.ticket(prompt_tokens=2), TicketLimitError),
        "for a shorter answer": (worker.ticket(max_tokens=4), TicketLimitError),
    }


async def test_each_bad_ticket_is_refused_with_its_own_reason_and_the_next_call_is_served() -> None:
    async with scripted_worker(ScriptedEngine(), tickets_only=True) as worker:
        for name, (metadata, kind) in (await refusals(worker)).items():
            error = await failure_of(worker, request(), metadata)
            assert type(error) is kind, name
            await worker.generate(
                request(), worker.ticket(request_id=f"after {name}", expires_unix_ms=later())
            )
        assert len(worker.server._calls) == 0


async def test_ticket_within_its_limits_is_served_to_the_last_token() -> None:
    async with scripted_worker(ScriptedEngine()) as worker:
        limits: dict[str, Any] = {
            "prompt_tokens": 3,
            "max_tokens": 5,
            "branches": 2,
            "expires_unix_ms": later(),
        }
        answer = await worker.generate(request(3, 5), worker.ticket(**limits))
        assert len(answer.token_ids) == 5
        error = await failure_of(worker, request(branches=3), worker.ticket(request_id="more", **limits))
        assert isinstance(error, TicketLimitError)
        assert "branches: the ticket admits 2" in str(error)


async def test_answer_without_a_limit_of_its_own_is_held_to_the_tickets() -> None:
    """It would go on to the context's end."""
    async with scripted_worker(ScriptedEngine()) as worker:
        open_ended = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=pack([1])))
        error = await failure_of(worker, open_ended, worker.ticket(max_tokens=100))
        assert isinstance(error, TicketLimitError)


async def test_ticket_is_refused_while_its_call_runs_and_after_it() -> None:
    engine = ScriptedEngine()
    engine.hold_after_tokens = 1
    async with scripted_worker(engine) as worker:
        ticket = worker.ticket(request_id="once", expires_unix_ms=later())
        first = asyncio.create_task(worker.generate(request(), ticket))
        await eventually(lambda: engine.running)
        assert isinstance(await failure_of(worker, request(), ticket), UsedTicketError)
        engine.release()
        await first
        assert isinstance(await failure_of(worker, request(), ticket), UsedTicketError)


async def test_router_may_send_a_ticket_without_expiry_again_once_its_call_has_ended() -> None:
    """A proxy's own tickets are held by nobody else."""
    async with scripted_worker(ScriptedEngine()) as worker:
        for _ in range(2):
            await worker.generate(request(), worker.ticket(request_id="proxied"))


async def test_running_request_can_be_stopped_with_its_ticket_after_that_has_expired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An expiry ends what a ticket admits, not what it says of its holder."""
    engine = ScriptedEngine()
    engine.hold_after_tokens = 1
    async with scripted_worker(engine) as worker:
        ticket = worker.ticket(request_id="long", expires_unix_ms=wall_clock.unix_ms() + 100)
        running = asyncio.create_task(worker.generate(request(), ticket))
        await eventually(lambda: engine.running)
        monkeypatch.setattr("prefixmesh.wall_clock.time.time_ns", lambda: 2**62)
        await worker.inference.Abort(pb.AbortRequest(request_id="long"), metadata=ticket)
        with pytest.raises(PrefixmeshError):
            await running


async def test_tenant_and_namespace_of_the_callers_own_change_nothing_beside_a_ticket() -> None:
    """F49: what the ticket says counts."""
    engine = ScriptedEngine()
    async with scripted_worker(engine) as worker:
        metadata = (
            ("x-prefixmesh-tenant", "someone-else"),
            ("x-prefixmesh-namespace", "0" * 32),
            *worker.ticket(tenant="acme", namespace=b"a" * 16),
        )
        message = request()
        message.extra_key = "another"
        await worker.generate(message, metadata)
        (submitted,) = engine.submitted
        assert (submitted.owner, submitted.namespace) == ("acme", b"a" * 16)
