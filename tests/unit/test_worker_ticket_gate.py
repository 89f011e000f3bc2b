"""A ticket admits one call, in its time, within its limits."""

import msgspec
import pytest

from prefixmesh.errors import ExpiredTicketError, OverloadedError, TicketLimitError, UsedTicketError
from prefixmesh.ids import Incarnation, Namespace, RequestId, TenantId
from prefixmesh.ticket import Ticket
from prefixmesh.worker.ticket_gate import TicketGate, check_limits

TICKET = Ticket(
    request_id=RequestId("r-1"),
    tenant=TenantId("acme"),
    namespace=Namespace(bytes(16)),
    incarnation=Incarnation(7),
    expires_unix_ms=1000,
    prompt_tokens=100,
    max_tokens=10,
    branches=2,
)


def ticket(name: str, expires_unix_ms: int) -> Ticket:
    return msgspec.structs.replace(TICKET, request_id=RequestId(name), expires_unix_ms=expires_unix_ms)


def test_ticket_is_good_until_its_time_and_for_one_call() -> None:
    gate = TicketGate()
    with pytest.raises(ExpiredTicketError, match=r"2\.5 s ago"):
        gate.admit(TICKET, 3500)
    gate.admit(TICKET, 1000)
    with pytest.raises(UsedTicketError):
        gate.admit(TICKET, 1000)


def test_used_ticket_is_refused_up_to_its_expiry_and_forgotten_after_it() -> None:
    gate = TicketGate()
    for number in range(100):
        gate.admit(ticket(f"t{number}", 1000 + number), 1000)
    assert len(gate) == 100
    gate.admit(ticket("late", 5000), 1050)
    assert len(gate) == 51
    for number in range(100):
        with pytest.raises((UsedTicketError, ExpiredTicketError)):
            gate.admit(ticket(f"t{number}", 1000 + number), 1050)


def test_clock_that_is_set_back_lets_no_forgotten_ticket_in_again() -> None:
    gate = TicketGate()
    gate.admit(ticket("a", 1000), 900)
    gate.admit(ticket("b", 3000), 2000)
    with pytest.raises(ExpiredTicketError, match="set back"):
        gate.admit(ticket("a", 1000), 900)
    gate.admit(ticket("c", 1001), 900)


def test_more_tickets_than_can_be_remembered_are_refused_until_one_expires() -> None:
    """To forget one instead would let it in a second time."""
    gate = TicketGate(max_used=2)
    gate.admit(ticket("a", 1000), 0)
    gate.admit(ticket("b", 2000), 0)
    with pytest.raises(OverloadedError, match="2 tickets"):
        gate.admit(ticket("c", 3000), 0)
    with pytest.raises(UsedTicketError):
        gate.admit(ticket("a", 1000), 0)
    gate.admit(ticket("c", 3000), 1001)


def test_ticket_without_an_expiry_is_remembered_by_nobody() -> None:
    gate = TicketGate()
    for _ in range(2):
        gate.admit(ticket("router's own", 0), 10**15)
    assert len(gate) == 0


def test_request_within_its_tickets_limits_passes_and_one_beyond_any_is_refused() -> None:
    within = {"prompt_tokens": 100, "max_tokens": 10, "branches": 2}
    check_limits(TICKET, **within)
    for name, limit in within.items():
        with pytest.raises(TicketLimitError, match=f"{name}: the ticket admits {limit}"):
            check_limits(TICKET, **(within | {name: limit + 1}))


def test_ticket_that_sets_no_limits_admits_any() -> None:
    free = msgspec.structs.replace(TICKET, prompt_tokens=0, max_tokens=0, branches=0)
    check_limits(free, prompt_tokens=10**9, max_tokens=10**9, branches=10**9)
