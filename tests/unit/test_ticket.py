"""A worker believes a ticket that this fleet signed for this life of it, and nothing else."""

import dataclasses

import pytest

from prefixmesh import fleet_secret
from prefixmesh.errors import AuthenticationError
from prefixmesh.ids import Incarnation, Namespace, RequestId, TenantId
from prefixmesh.ticket import Ticket, sign, verify

SECRET = fleet_secret.FleetSecret(bytes(range(32)))
TICKET = Ticket(
    request_id=RequestId("r-1"),
    tenant=TenantId("acme"),
    namespace=Namespace(bytes(16)),
    incarnation=Incarnation(2**64 - 1),
    adapter_digest="ad" * 16,
    router_id="0f" * 8,
    expires_unix_ms=2**41,
    prompt_tokens=2**40,
    max_tokens=4096,
    branches=4,
)


def test_a_signed_ticket_comes_back_whole() -> None:
    """Signing and verifying is the identity."""
    assert verify(sign(TICKET, SECRET), SECRET, TICKET.incarnation) == TICKET


def test_every_single_changed_byte_is_noticed() -> None:
    """Nothing in the note can be altered (F49)."""
    note = sign(TICKET, SECRET)
    for index in range(len(note)):
        forged = bytearray(note)
        forged[index] ^= 1
        with pytest.raises(AuthenticationError):
            verify(bytes(forged), SECRET, TICKET.incarnation)


def test_a_ticket_of_an_earlier_router_is_for_the_base_model() -> None:
    """Version N works with N+1: a note without the field says what such a router meant."""
    earlier = dataclasses.replace(TICKET, adapter_digest="")
    assert verify(sign(earlier, SECRET), SECRET, TICKET.incarnation).adapter_digest == ""


@pytest.mark.parametrize("note", [b"", b"x", bytes(32), bytes(64 * 1024 + 1)])
def test_what_is_no_ticket_is_refused(note: bytes) -> None:
    """Short, empty and huge notes are no special case."""
    with pytest.raises(AuthenticationError, match="not signed"):
        verify(note, SECRET, TICKET.incarnation)


def test_a_ticket_of_another_fleet_or_life_is_refused() -> None:
    """The key must be this fleet's, the incarnation this worker's."""
    note = sign(TICKET, SECRET)
    with pytest.raises(AuthenticationError, match="not signed"):
        verify(note, fleet_secret.generate(), TICKET.incarnation)
    with pytest.raises(AuthenticationError, match="incarnation"):
        verify(note, SECRET, Incarnation(1))


@pytest.mark.parametrize(
    "ticket",
    [
        dataclasses.replace(TICKET, namespace=Namespace(b"")),
        dataclasses.replace(TICKET, request_id=RequestId("")),
    ],
)
def test_a_ticket_without_namespace_or_id_is_refused(ticket: Ticket) -> None:
    """An empty namespace would be one that everybody shares."""
    with pytest.raises(AuthenticationError, match="incomplete"):
        verify(sign(ticket, SECRET), SECRET, TICKET.incarnation)
