"""What a request has brought for it: under which key, up to where, and on whose account."""

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.namespace import tail_namespace
from prefixmesh.cache.owners import NOBODY
from prefixmesh.cache.public import PublicPrefix, public_boundary
from prefixmesh.ids import Incarnation, Namespace, RequestId, TenantId
from prefixmesh.kv_source import KvSource
from prefixmesh.ticket import Ticket
from prefixmesh.tokens import pack
from prefixmesh.worker.prefix_messages import PrefixName
from prefixmesh.worker.request_copies import Wanted, wanted_of

OWN, PUBLIC = Namespace(b"o" * 16), Namespace(b"p" * 16)
PROMPT = pack(list(range(200)))


def house_rules() -> PublicPrefix:
    """The prompt's first 128 tokens, for everybody."""
    prefix = public_boundary(PUBLIC, PROMPT[: 128 * 4], page_size=2)
    assert prefix is not None
    return prefix


def wanted(held: int, boundary: int = 0, public: tuple[PublicPrefix, ...] = ()) -> Wanted | None:
    source = KvSource(address="a:1", incarnation=Incarnation(7), tokens=held, boundary_tokens=boundary)
    ticket = Ticket(
        request_id=RequestId("r"),
        tenant=TenantId("acme"),
        namespace=OWN,
        incarnation=Incarnation(1),
        public=public,
        sources=(source,),
    )
    return wanted_of(ticket, PROMPT, 2)


def test_whole_pages_of_what_a_source_has_and_never_the_last_token() -> None:
    for held, size in ((71, 70), (200, 198), (1, 0)):
        told = wanted(held)
        assert (None if told is None else told.prefix) == (
            PrefixName(OWN, PROMPT[: size * 4]) if size else None
        )


def test_a_tenant_pays_for_its_own_and_for_what_it_has_behind_a_public_part() -> None:
    public = house_rules()
    plain, behind = wanted(150), wanted(150, 128, (public,))
    assert plain is not None
    assert behind is not None
    assert behind.prefix.key() == RadixKey(
        PUBLIC, PROMPT[: 150 * 4], 128, tail_namespace(OWN, public.fingerprint)
    )
    assert (plain.owner, behind.owner) == ("acme", "acme")


def test_a_public_part_alone_is_on_no_tenants_account() -> None:
    """Whichever tenant's request has it brought: it would be the first to go where that tenant has more than its share, and count to its floor."""
    for held in (100, 128):
        told = wanted(held, 128, (house_rules(),))
        assert told is not None
        assert told.prefix == PrefixName(PUBLIC, PROMPT[: held * 4])
        assert told.owner == NOBODY


def test_a_boundary_that_the_ticket_does_not_name_is_none() -> None:
    assert wanted(150, 64, (house_rules(),)) is None
