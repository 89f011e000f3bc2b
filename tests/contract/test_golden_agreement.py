"""Router and worker, each by the code it serves with, make of the golden file's vectors what the file says (F43)."""

import dataclasses
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from prefixmesh.cache.base import RadixKey
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.public import PublicPrefix, choose_key, key_fingerprints
from prefixmesh.cache.radix_cache import RadixCache, RadixOptions
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.ids import Fingerprint, Incarnation, Namespace, RequestId, TenantId
from prefixmesh.proto import codec
from prefixmesh.router.prepare import RequestPreparer
from prefixmesh.ticket import TICKET_METADATA, Ticket, sign
from prefixmesh.tokens import pack
from prefixmesh.worker.caller import CallerCheck
from tests.support.cache_kit import take
from tests.support.public_kit import Heard
from tests.support.router_kit import CONTEXT_LENGTH, tiny_model, token_request

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "fingerprints.json").read_text())
SECRET = FleetSecret(bytes.fromhex(GOLDEN["fleet_secret"]))
LIFE = Incarnation(1)
FLEET = GOLDEN["fleet_namespaces"]


def router_of(vector: dict[str, Any], block_size: int = 64) -> "closing[RequestPreparer]":
    """A router's preparer, for the fleet, model and isolation of a vector."""
    return closing(
        RequestPreparer(
            dataclasses.replace(tiny_model(), revision=vector["model_revision"]),
            namespace_key=SECRET.namespace_key(),
            isolation=vector["isolation"],
            block_size=block_size,
        )
    )


def worker_namespace(vector: dict[str, Any], ticket: Ticket | None = None) -> Namespace:
    """A worker's, for a direct caller who names its tenant, or for one with a router's ticket."""
    check = CallerCheck(
        secret=SECRET,
        incarnation=LIFE,
        model_revision=vector["model_revision"],
        isolation=vector["isolation"],
        tickets_only=False,
    )
    metadata: list[tuple[str, str | bytes]] = [("x-prefixmesh-tenant", vector["tenant"])]
    if ticket is not None:
        metadata = [(TICKET_METADATA, sign(ticket, SECRET))]
    return check.namespace(check.identify(metadata), vector["caller_key"])


def told_by_a_worker(key: RadixKey, page_size: int, block_size: int) -> list[str]:
    """The names in the events of a worker's cache, once it has computed all of ``key``."""
    heard = Heard()
    pool = PageAllocator(1000)
    cache = RadixCache(pool, page_size, RadixOptions(block_size=block_size, events=heard))
    cache.insert(key, take(pool, len(key.tokens) // 4 // page_size), 0.0, owner="acme")
    cache.check_invariants()
    return [f"{value:016x}" for _, _, _, names in heard.events for value in names]


@pytest.mark.parametrize("vector", FLEET, ids=lambda vector: f"{vector['tenant']}-{vector['isolation']}")
def test_both_put_a_tenant_into_the_same_namespace(vector: dict[str, Any]) -> None:
    """Routed, direct, or with a ticket: one request, one namespace."""
    with router_of(vector) as preparer:
        routed = preparer.namespace(TenantId(vector["tenant"]), vector["caller_key"])
    ticket = Ticket(
        request_id=RequestId("1"), tenant=TenantId(vector["tenant"]), namespace=routed, incarnation=LIFE
    )
    assert routed.hex() == vector["namespace"]
    assert worker_namespace(vector) == worker_namespace(vector, ticket) == routed


@pytest.mark.parametrize("vector", GOLDEN["fingerprints"], ids=lambda vector: vector["namespace"][:8])
def test_a_worker_tells_of_the_golden_blocks(vector: dict[str, Any]) -> None:
    """Whatever its page size."""
    for page_size in (1, 4):
        whole = len(vector["tokens"]) // page_size * page_size
        key = RadixKey(Namespace(bytes.fromhex(vector["namespace"])), pack(vector["tokens"][:whole]))
        names = vector["fingerprints"][: whole // vector["block_size"]]
        assert told_by_a_worker(key, page_size, vector["block_size"]) == names


@pytest.mark.parametrize("block_size", [4, 64])
async def test_a_router_names_a_prompt_as_the_worker_does_that_computes_it(block_size: int) -> None:
    """From the caller's message to the event: the same names, for every tenant."""
    for vector in FLEET:
        message = token_request(range(150), extra_key=vector["caller_key"])
        request = codec.decode_generate(message)
        with router_of(vector, block_size) as router:
            prepared = await router.prepare(
                request,
                message,
                TenantId(vector["tenant"]),
                adapter_digest="",
                context_length=CONTEXT_LENGTH,
            )
        key = RadixKey(worker_namespace(vector), pack(range(150)))
        routed = [f"{value:016x}" for value in prepared.route.fingerprints]
        assert routed == told_by_a_worker(key, 1, block_size)
        assert len(routed) == 150 // block_size


@pytest.mark.parametrize(
    "vector", GOLDEN["public_prefixes"], ids=lambda v: f"{v['page_size']}-{v['block_size']}"
)
def test_behind_a_public_prefix_both_have_the_golden_names(vector: dict[str, Any]) -> None:
    """What a ticket carries of a public pin leads the worker to the golden tail; what it then tells of, the router expects."""
    page_size, block_size = vector["page_size"], vector["block_size"]
    candidate = PublicPrefix(
        Namespace(bytes.fromhex(vector["public_namespace"])),
        vector["boundary_tokens"],
        Fingerprint(int(vector["boundary"], 16)),
    )
    tenant, tokens = Namespace(bytes.fromhex(vector["namespace"])), pack(vector["tokens"])
    key = choose_key(lambda _: 0, tenant, tokens, [candidate], page_size=page_size, block_size=block_size)
    assert (key.boundary_tokens, key.tail.hex()) == (vector["boundary_tokens"], vector["tail"])
    expected = [f"{value:016x}" for value in key_fingerprints(candidate.key(tenant, tokens), block_size)]
    assert expected == vector["fingerprints"]
    whole = len(vector["tokens"]) // page_size * page_size
    told = told_by_a_worker(key, page_size, block_size)
    assert told == vector["fingerprints"][: whole // block_size]
