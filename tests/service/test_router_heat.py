"""Heat at a router that serves: what is noted of requests, and what ``ListHeat`` tells."""

from typing import Any

import pytest

from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.proto.v1 import router_pb2_grpc
from prefixmesh.router.heat import watch
from prefixmesh.rpc.identity import DEFAULT_TENANT
from prefixmesh.tokens import pack
from tests.support.router_kit import Router, running_router, token_request
from tests.support.servers import eventually

SHARED = [7] * 192


def stub_of(router: Router) -> Any:
    return router_pb2_grpc.RouterStub(router.channel)  # type: ignore[no-untyped-call]


async def heat_of(router: Router) -> pb.ListHeatResponse:
    answer: pb.ListHeatResponse = await stub_of(router).ListHeat(pb.ListHeatRequest())
    return answer


async def ask(router: Router, count: int) -> None:
    """Requests that share three blocks, every other one by a ticket."""
    for number in range(count):
        request = token_request([*SHARED, *[100 + number] * 70])
        if number % 2:
            await stub_of(router).Route(pb.RouteRequest(request=request))
        else:
            await router.generate(request)


async def test_shared_prefix_is_listed_by_its_last_blocks_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests that pass through the router and of those that only ask it for the way; with who holds it, and the bounds."""
    monkeypatch.setattr(watch, "REVIEW_S", 0.05)
    async with running_router(2, heat_max_replicas=3, heat_max_prefixes=4, heat_max_tokens=5_000) as router:
        await ask(router, 8)

        async def is_listed() -> bool:
            return any(item.tokens == 192 for item in (await heat_of(router)).items)

        await eventually(is_listed)
        told = await heat_of(router)
        assert (told.enabled, told.acting) == (True, True)
        assert (told.max_replicas, told.max_prefixes, told.max_tokens) == (3, 4, 5_000)
        (item,) = (one for one in told.items if one.tokens == 192)
        preparer = router.server._preparer
        assert preparer is not None
        namespace = preparer.namespace(DEFAULT_TENANT, "")
        assert item.id == f"{block_fingerprints(namespace, pack(SHARED))[-1]:016x}"
        assert item.namespace_digest == namespace[:4].hex()
        assert item.requests_per_s > 0.0
        assert item.holders == sum(int(item.id, 16) in worker.told.held for worker in router.workers) > 0
        assert item.target in (1, 2), "by how fast the eight came"
        assert not item.is_adapter


async def test_nothing_is_noted_where_heat_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "REVIEW_S", 0.05)
    async with running_router(1, heat="off") as router:
        await ask(router, 8)
        told = await heat_of(router)
        assert not told.enabled
        assert not told.items
