"""A worker believes a ticket that this fleet signed for this life of it, and nothing else."""

import hmac

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh import fleet_secret
from prefixmesh.cache.public import PublicPrefix
from prefixmesh.errors import AuthenticationError, ForgedTicketError, OtherLifeError
from prefixmesh.ids import Fingerprint, Incarnation, Namespace, RequestId, TenantId
from prefixmesh.kv_source import KvSource
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
    public=(
        PublicPrefix(Namespace(b"p" * 16), 2**20, Fingerprint(2**64 - 1)),
        PublicPrefix(Namespace(b"p" * 16), 64, Fingerprint(1)),
    ),
    sources=(KvSource(address="10.0.0.1:50", incarnation=Incarnation(7), tokens=640, boundary_tokens=64),),
)


def test_a_signed_ticket_comes_back_whole() -> None:
    """Signing and verifying is the identity."""
    assert verify(sign(TICKET, SECRET), SECRET, TICKET.incarnation) == TICKET


def test_a_note_ends_in_the_hmac_of_all_before_it() -> None:
    """Routers and workers of other versions make and check the same."""
    note = sign(TICKET, SECRET)
    assert note[-32:] == hmac.digest(SECRET.ticket_key(), note[:-32], "sha256")


def test_every_single_changed_byte_is_noticed() -> None:
    """Nothing in the note can be altered (F49)."""
    note = sign(TICKET, SECRET)
    for index in range(len(note)):
        forged = bytearray(note)
        forged[index] ^= 1
        with pytest.raises(AuthenticationError):
            verify(bytes(forged), SECRET, TICKET.incarnation)


names = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=20)
counts = st.integers(0, 2**31 - 1)
tickets = st.builds(
    Ticket,
    request_id=names,
    tenant=names,
    namespace=st.binary(min_size=16, max_size=16),
    incarnation=st.integers(0, 2**64 - 1),
    adapter_digest=names | st.just(""),
    router_id=names | st.just(""),
    expires_unix_ms=st.integers(0, 2**62),
    prompt_tokens=counts,
    max_tokens=counts,
    branches=counts,
)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(ticket=tickets, data=st.data())
def test_any_ticket_comes_back_whole_and_none_that_was_changed_at_all(
    ticket: Ticket, data: st.DataObject
) -> None:
    """F49: whatever byte is changed, left out, put in or added, the note is nobody's."""
    note = sign(ticket, SECRET)
    assert verify(note, SECRET, ticket.incarnation) == ticket
    start = data.draw(st.integers(0, len(note)))
    end = data.draw(st.integers(start, min(start + 3, len(note))))
    changed = note[:start] + data.draw(st.binary(max_size=3)) + note[end:]
    if changed != note:
        with pytest.raises(ForgedTicketError):
            verify(changed, SECRET, ticket.incarnation)


@settings(derandomize=True, max_examples=50, deadline=None)
@given(one=tickets, other=tickets)
def test_signature_of_one_ticket_is_none_for_another(one: Ticket, other: Ticket) -> None:
    if one != other:
        with pytest.raises(ForgedTicketError):
            verify(sign(one, SECRET)[:-32] + sign(other, SECRET)[-32:], SECRET, one.incarnation)


def test_a_ticket_of_an_earlier_router_is_for_the_base_model() -> None:
    """Version N works with N+1: a note without the field says what such a router meant."""
    earlier = msgspec.structs.replace(TICKET, adapter_digest="")
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
    with pytest.raises(OtherLifeError, match="incarnation"):
        verify(note, SECRET, Incarnation(1))


@pytest.mark.parametrize(
    "ticket",
    [
        msgspec.structs.replace(TICKET, namespace=Namespace(b"")),
        msgspec.structs.replace(TICKET, request_id=RequestId("")),
    ],
)
def test_a_ticket_without_namespace_or_id_is_refused(ticket: Ticket) -> None:
    """An empty namespace would be one that everybody shares."""
    with pytest.raises(AuthenticationError, match="incomplete"):
        verify(sign(ticket, SECRET), SECRET, TICKET.incarnation)
