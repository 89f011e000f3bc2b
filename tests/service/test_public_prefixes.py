"""Public prefixes end to end, router and worker over gRPC: every tenant hits what is public, nobody what another has added.

Always both directions: what a tenant must find, and what it must not, or caching off would pass (F46 to F49).
"""

import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from prefixmesh.cache.namespace import Isolation, public_namespace
from prefixmesh.cache.public import key_fingerprints, public_boundary
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.cache.tier import Tier
from prefixmesh.config import EngineConfig, PrefixCacheKind
from prefixmesh.errors import ForgedTicketError
from prefixmesh.fleet_secret import generate
from prefixmesh.ids import Incarnation, Namespace, RequestId, TenantId
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import router_pb2, router_pb2_grpc
from prefixmesh.router.pins.wishes import PinVersion
from prefixmesh.router.public_prefixes import PublicPrefixes
from prefixmesh.router.server import RouterServer
from prefixmesh.router_config import RouterConfig
from prefixmesh.rpc.channel import open_channel
from prefixmesh.ticket import TICKET_METADATA, Ticket, sign, verify
from prefixmesh.tokens import pack
from tests.support.fake_engine import FakeStage, fake_worker
from tests.support.fake_model import expected_output
from tests.support.routed_worker import scripted_model
from tests.support.router_kit import Router, headers
from tests.support.scripted_engine import VOCAB_SIZE
from tests.support.servers import Answer, eventually, failure_of

PAGE = 16
ENGINE = EngineConfig(max_total_tokens=16_384, page_size=PAGE, max_running_requests=8)
POLICY = [token % 200 for token in range(7, 7 + 192)]
"""What an operator pins: three blocks."""

LONGER = [*POLICY, *range(30, 30 + 128)]
QUESTION = [token % 190 for token in range(3, 3 + 80)]
PROMPT = [*POLICY, *QUESTION]
WHOLE = (len(PROMPT) - 1) // PAGE * PAGE
"""What there is to find of a prompt that was computed before."""

PUBLIC = len(POLICY)


class TestsOwn(PublicPrefixes):
    """Set by the test, and by no pins of the router: nothing is warmed, so that who computes what can be counted."""

    __test__ = False

    def set(self, versions: Iterable[PinVersion], page_size: int) -> bool:
        return False

    def pin(self, versions: Iterable[PinVersion]) -> None:
        super().set(versions, PAGE)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A router with one worker, and what is public."""

    router: Router
    stage: FakeStage
    public: TestsOwn

    def pin(self, *prompts: Sequence[int], adapter_digest: str = "") -> None:
        """These are public from now on."""
        namespace = public_namespace(
            self.router.secret.namespace_key(),
            adapter_digest=adapter_digest,
            model_revision=scripted_model().revision,
        )
        versions = [
            PinVersion(
                generation=1,
                namespace=namespace,
                tokens=pack(ids),
                fingerprints=(),
                adapter_digest=adapter_digest,
            )
            for ids in prompts
        ]
        self.public.pin(versions)

    async def ask(
        self, tenant: str, ids: Sequence[int] = PROMPT, *, max_tokens: int = 2, **fields: Any
    ) -> Answer:
        """An answer, checked, through the router."""
        answer = await self.router.generate(question(ids, max_tokens, **fields), tenant=tenant)
        assert answer.token_ids == expected_output(ids, max_tokens, VOCAB_SIZE)
        return answer

    async def cached(self, tenant: str, ids: Sequence[int] = PROMPT, **fields: Any) -> int:
        """Prompt tokens that were found."""
        return (await self.ask(tenant, ids, **fields)).finished.usage.cached_tokens.device

    async def route(self, tenant: str, ids: Sequence[int] = PROMPT) -> router_pb2.RouteResponse:
        """A ticket for the worker itself."""
        stub: Any = router_pb2_grpc.RouterStub(self.router.channel)  # type: ignore[no-untyped-call]
        answer: router_pb2.RouteResponse = await stub.Route(
            router_pb2.RouteRequest(request=question(ids)), metadata=headers(tenant), timeout=20
        )
        return answer

    async def rest(self) -> None:
        """Until the router knows all that the worker's cache holds, by its events, and expects nothing else."""
        cache, core = self.stage.scheduler.kv._cache, self.router.server.core
        assert isinstance(cache, RadixCache)
        ((_, followed),) = core.view

        def is_known() -> bool:
            held = core.view.index.held(followed.slot, Tier.DEVICE)
            return held == cache.blocks(Tier.DEVICE) and not len(core.view.predictions)

        await eventually(self.stage.is_quiet)
        await eventually(is_known)
        core.check_invariants()


def question(ids: Sequence[int], max_tokens: int = 2, **fields: Any) -> pb.GenerateRequest:
    sampling = pb.Sampling(max_tokens=max_tokens, temperature=0)
    return pb.GenerateRequest(tokens=pb.TokenPrompt(ids=pack(ids)), sampling=sampling, **fields)


@asynccontextmanager
async def fleet(isolation: Isolation = "tenant", cache: PrefixCacheKind = "radix") -> AsyncIterator[Fleet]:
    engine = EngineConfig(
        max_total_tokens=ENGINE.max_total_tokens,
        page_size=PAGE,
        max_running_requests=ENGINE.max_running_requests,
        prefix_cache=cache,
    )
    async with fake_worker(engine) as stage:
        worker, model = stage.worker, scripted_model(ENGINE.max_total_tokens or 0)
        config = RouterConfig(workers=(worker.bound.address,), model=model.name, isolation=isolation)
        server = RouterServer(config, worker.secret, model=model)
        public = server.public_prefixes = TestsOwn(config.block_size)
        bound = await server.start()
        try:
            async with open_channel(bound.address) as channel:
                router = Router(
                    server=server, address=bound.address, secret=worker.secret, workers=[], channel=channel
                )
                await router.until_ready(1)
                yield Fleet(router=router, stage=stage, public=public)
        finally:
            await server.stop(0.0)


@pytest.mark.parametrize("cache", ["radix", "hash"])
@pytest.mark.parametrize("first", ["acme", "globex"])
async def test_every_tenant_hits_the_public_prefix_and_none_what_another_has_added(
    first: str, cache: PrefixCacheKind
) -> None:
    """Whoever was first; and its own again, all of it."""
    async with fleet(cache=cache) as all_:
        all_.pin(POLICY)
        second = {"acme": "globex", "globex": "acme"}[first]
        assert await all_.cached(first) == 0
        assert await all_.cached(second) == PUBLIC
        assert await all_.cached("third") == PUBLIC
        assert await all_.cached(first) == await all_.cached(second) == WHOLE


async def test_where_tenants_are_one_trust_domain_the_public_prefix_joins_what_callers_keep_apart() -> None:
    """Tenants share everything then, and an ``extra_key`` still narrows: to what is public."""
    async with fleet("shared") as all_:
        all_.pin(POLICY)
        assert await all_.cached("acme") == 0
        assert await all_.cached("globex") == WHOLE
        assert await all_.cached("globex", extra_key="mine") == PUBLIC
        assert await all_.cached("acme", extra_key="mine") == WHOLE


@pytest.mark.parametrize("isolation", ["tenant", "shared"])
async def test_no_two_callers_meet_behind_a_public_prefix_unless_they_are_one(isolation: Isolation) -> None:
    """F46: pairs that only look alike, keys that look like an adapter or a reserved word. Each finds its own again."""
    callers = [
        ("ab", "c"),
        ("a", "bc"),
        ("a", "public"),
        ("a", "prefixmesh/pub"),
        ("public", ""),
        ("a", "tail"),
        ("a", ""),
    ]
    async with fleet(isolation) as all_:
        all_.pin(POLICY)
        found = [await all_.cached(tenant, extra_key=key) for tenant, key in callers]
        again = [await all_.cached(tenant, extra_key=key) for tenant, key in callers]
    keys = [key for _, key in callers]
    is_new = [isolation == "tenant" or keys.index(key) == place for place, key in enumerate(keys)]
    assert found == [0, *(PUBLIC if new else WHOLE for new in is_new[1:])]
    assert again == [WHOLE] * len(callers)


async def test_the_router_expects_what_the_worker_keeps_and_tells_of() -> None:
    """Predictions are proved by events: the names behind the boundary are the tenant's own, on both sides."""
    async with fleet() as all_:
        all_.pin(POLICY)
        await all_.ask("acme", max_tokens=150)
        answer = expected_output(PROMPT, 150, VOCAB_SIZE)
        follow_up = await all_.ask("acme", [*PROMPT, *answer, 5, 6, 7])
        routing = follow_up.started.routing
        assert follow_up.finished.usage.cached_tokens.device == (len(PROMPT) + 149) // PAGE * PAGE
        assert routing.predicted_cached_tokens == (len(PROMPT) + 149) // 64 * 64
        other = await all_.ask("globex")
        assert other.started.routing.predicted_cached_tokens == PUBLIC
        await all_.rest()


async def test_a_ticket_says_to_the_worker_what_is_public() -> None:
    """The direct path, as the relayed one."""
    async with fleet() as all_:
        all_.pin(POLICY)
        assert await all_.cached("acme") == 0
        for tenant, found in (("globex", PUBLIC), ("acme", WHOLE)):
            ticket = (await all_.route(tenant)).ticket
            note = verify(ticket, all_.router.secret, Incarnation(all_.stage.worker.bound.incarnation))
            assert [prefix.boundary_tokens for prefix in note.public] == [PUBLIC]
            answer = await all_.stage.worker.generate(question(PROMPT), ((TICKET_METADATA, ticket),))
            assert answer.finished.usage.cached_tokens.device == found


async def test_a_caller_is_told_its_own_namespace_with_and_without_a_pin() -> None:
    """What is public is not another identity."""
    async with fleet() as all_:
        before = (await all_.ask("acme")).started.namespace_digest
        all_.pin(POLICY)
        ids = [*POLICY, 1, 2, 3]
        after = [(await all_.ask(tenant, ids)).started.namespace_digest for tenant in ("acme", "globex")]
        assert after[0] == before != after[1]


async def test_pins_that_come_grow_and_go_cost_tenants_nothing_at_once() -> None:
    async with fleet() as all_:
        assert [await all_.cached(tenant) for tenant in ("acme", "globex")] == [0, 0]
        all_.pin(POLICY)
        assert [await all_.cached(tenant) for tenant in ("acme", "globex")] == [WHOLE, WHOLE]
        ids = [*LONGER, *QUESTION]
        whole = (len(ids) - 1) // PAGE * PAGE
        # Nothing but the policy is there for these, and it is the tenant's own in "acme" as it is in public for nobody yet.
        assert await all_.cached("acme", ids) == PUBLIC
        assert await all_.cached("third", ids) == 0
        assert await all_.cached("fourth", ids) == PUBLIC
        all_.pin(LONGER)
        assert [await all_.cached(tenant, ids) for tenant in ("acme", "third", "fourth")] == [whole] * 3
        all_.pin()
        assert await all_.cached("third", ids) == 0, "what hangs below a pin is not reached without it"
        assert await all_.cached("acme", ids) == whole, "it was in its own namespace"
        assert await all_.cached("third", ids) == whole
        await all_.rest()
        all_.pin(POLICY)
        assert await all_.cached("fifth", ids) == PUBLIC


async def test_two_adapters_have_each_their_own() -> None:
    """A pin of an adapter is none of the base model's (F47: nor of the same name's other weights, which have another digest)."""
    async with fleet() as all_:
        all_.pin(POLICY, adapter_digest="d1")
        assert await all_.cached("acme") == 0
        assert await all_.cached("globex") == 0
        all_.pin(POLICY)
        assert [await all_.cached("third"), await all_.cached("fourth")] == [0, PUBLIC]


@pytest.mark.parametrize("branches", [2, 4])
async def test_branches_of_one_call_compute_the_prompt_once_behind_the_boundary(branches: int) -> None:
    async with fleet() as all_:
        all_.pin(POLICY)
        await all_.cached("acme")
        computed = all_.stage.scheduler.ledger.totals()
        call = all_.router.inference.Generate(
            question(PROMPT, branches=branches), metadata=headers("globex"), timeout=20
        )
        messages = [message async for message in call]
        assert messages[-1].finished.usage.cached_tokens.device == PUBLIC
        await eventually(all_.stage.is_quiet)
        asked = all_.stage.scheduler.ledger.totals()
        # The first finds what is public; all others everything, but for what is always computed.
        assert asked.hit_tokens.device - computed.hit_tokens.device == PUBLIC + (branches - 1) * WHOLE
        assert await all_.cached("globex") == WHOLE


async def test_what_a_client_says_of_boundaries_is_ignored_or_refused() -> None:
    """F49: only a router's signature says what is public. A client can neither put its prompt into public nor reach there."""
    async with fleet() as all_:
        worker, key = all_.stage.worker, all_.router.secret.namespace_key()
        namespace = public_namespace(key, adapter_digest="", model_revision=scripted_model().revision)
        cut = public_boundary(namespace, pack(POLICY), page_size=PAGE)
        assert cut is not None
        note = Ticket(
            request_id=RequestId("mine"),
            tenant=TenantId("acme"),
            namespace=Namespace(b"n" * 16),
            incarnation=Incarnation(worker.bound.incarnation),
            public=(cut,),
        )
        forged = ((TICKET_METADATA, sign(note, generate())),)
        # To the router it is nothing; what was computed stays its own.
        for tenant, found in (("acme", 0), ("globex", 0), ("acme", WHOLE)):
            call = all_.router.inference.Generate(
                question(PROMPT), metadata=(*headers(tenant), *forged), timeout=20
            )
            messages = [message async for message in call]
            assert messages[-1].finished.usage.cached_tokens.device == found
        # A worker that is asked directly believes no such note, and without any knows nothing public.
        assert isinstance(await failure_of(worker, question(PROMPT), forged), ForgedTicketError)
        all_.pin(POLICY)
        assert [await all_.cached("third"), await all_.cached("fourth")] == [0, PUBLIC]
        direct = await worker.generate(question(PROMPT), headers("fifth"))
        assert direct.finished.usage.cached_tokens.device == 0


async def test_behind_one_boundary_no_two_tenants_blocks_have_one_name() -> None:
    """What events tell of a tail says whose it is to nobody, and is nobody else's."""
    async with fleet() as all_:
        all_.pin(POLICY)
        tenants = [f"t{number}" for number in range(5)]
        for tenant in tenants:
            await all_.ask(tenant)
        await all_.rest()
        cache = all_.stage.scheduler.kv._cache
        assert isinstance(cache, RadixCache)
        blocks = cache.blocks(Tier.DEVICE)
        assert len(blocks) == 3 + len(tenants) * ((len(PROMPT) - PUBLIC) // 64)
        (known,) = all_.public.fitting("", pack(PROMPT))
        preparer = all_.router.server._preparer
        assert preparer is not None
        tails = [
            set(
                key_fingerprints(
                    known.prefix.key(preparer.namespace(TenantId(tenant), ""), pack(PROMPT)), 64
                )[3:]
            )
            for tenant in tenants
        ]
        assert all(tail <= blocks for tail in tails)
        assert all(one.isdisjoint(other) for one, other in itertools.combinations(tails, 2))
