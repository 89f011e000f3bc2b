"""Tickets by tenant: bounded for each, and nobody's but their own."""

import pytest

from prefixmesh.errors import OverloadedError
from prefixmesh.ids import RequestId, TenantId
from prefixmesh.router.open_tickets import OpenTickets

ANNA, BEN = TenantId("anna"), TenantId("ben")


def full(tickets: OpenTickets) -> OpenTickets:
    for number in range(3):
        tickets.check(ANNA, float(number))
        tickets.given(RequestId(f"a{number}"), ANNA, number + 10.0)
    return tickets


def test_one_tenant_has_its_share_and_the_others_theirs() -> None:
    """And is told when the first of its tickets ends; by then it may have another."""
    tickets = full(OpenTickets(3))
    with pytest.raises(OverloadedError, match="3 tickets of this tenant") as caught:
        tickets.check(ANNA, 4.0)
    assert caught.value.retry_after_s == 6.0
    tickets.check(BEN, 4.0)
    tickets.check(ANNA, 10.0)
    assert len(tickets) == 2


def test_a_ticket_is_its_tenants_until_it_ends() -> None:
    tickets = full(OpenTickets(3))
    assert tickets.is_of("a0", ANNA)
    assert not tickets.is_of("a0", BEN)
    assert not tickets.is_of("never given", ANNA)
    tickets.check(BEN, 100.0)
    assert not tickets.is_of("a0", ANNA)
    assert len(tickets) == 0
