"""Pins through a router: who may wish for what, what workers are had to do, and what becomes of it when they, or the router, leave."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from prefixmesh import fleet_secret
from prefixmesh.errors import (
    AccessDeniedError,
    BudgetError,
    InvalidRequestError,
    NotFoundError,
    PrefixmeshError,
)
from prefixmesh.proto.v1 import inference_pb2, router_pb2_grpc
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.router.pins import pin_rules
from prefixmesh.router.pins.pin_prompts import PinPrompts
from prefixmesh.rpc.identity import hash_key
from prefixmesh.rpc.status import from_rpc_error
from prefixmesh.tokens import pack
from tests.support.pinning_worker import OWNER_BUDGET_TOKENS, PinningWorker, holders
from tests.support.router_kit import Router, chat_request, headers, running_router, token_request
from tests.support.servers import eventually

PROMPT = list(range(200))
WAIT_S = 60.0


def pin(name: str = "a", ids: Sequence[int] = PROMPT, **fields: Any) -> pb.PinSpec:
    return pb.PinSpec(name=name, tokens=inference_pb2.TokenPrompt(ids=pack(ids)), **fields)


async def call(router: Router, method: str, request: Any, *, tenant: str = "", key: str = "") -> Any:
    """The answer of one call about pins; the error of our tree when it fails."""
    stub: Any = router_pb2_grpc.RouterStub(router.channel)  # type: ignore[no-untyped-call]
    try:
        return await getattr(stub, method)(request, metadata=headers(tenant, key), timeout=30)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def put(router: Router, spec: pb.PinSpec, **who: str) -> Any:
    return await call(router, "PutPin", pb.PutPinRequest(spec=spec), **who)


async def get(router: Router, name: str = "a", owner: str = "", **who: str) -> Any:
    return (await call(router, "GetPin", pb.GetPinRequest(name=name, owner=owner), **who)).pin


async def listed(router: Router, owner: str = "", **who: str) -> Any:
    return await call(router, "ListPins", pb.ListPinsRequest(owner=owner), **who)


async def remove(router: Router, name: str = "a", owner: str = "", **who: str) -> bool:
    answer = await call(router, "RemovePin", pb.RemovePinRequest(name=name, owner=owner), **who)
    return bool(answer.removed)


async def until_held(router: Router, count: int, name: str = "a", key: str = "") -> Any:
    """The pin, once so many workers hold it and none lacks."""
    seen: list[Any] = []

    async def holds() -> bool:
        seen[:] = [await get(router, name, key=key)]
        return bool(seen[0].held == count and seen[0].missing == 0)

    await eventually(holds, WAIT_S)
    return seen[0]


@asynccontextmanager
async def pinning_router(count: int = 2, **settings: Any) -> AsyncIterator[Router]:
    async with running_router(count, make_worker=PinningWorker, **settings) as router:
        yield router


def workers(router: Router) -> list[PinningWorker]:
    return [worker for worker in router.workers if isinstance(worker, PinningWorker)]


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    async with pinning_router() as running:
        yield running


async def test_a_pin_comes_to_as_many_workers_as_are_wished(router: Router) -> None:
    """And a request with that prompt finds it, of the pin's tenant alone."""
    answer = await put(router, pin(replicas=1))
    assert (answer.changed, answer.pin.tokens, answer.pin.generation) == (True, 200, 1)
    held = await until_held(router, 1)
    assert [(one.state, one.held_tokens, one.generation) for one in held.replicas] == [("held", 200, 1)]
    assert len(holders(router.workers, "pin/default/a")) == 1
    hit = await router.generate(token_request([*PROMPT, 7]))
    assert hit.started.cached_tokens.device == 200
    assert hit.started.worker_id == held.replicas[0].worker_id
    other = await router.generate(token_request([*PROMPT, 7]), tenant="other")
    assert other.started.cached_tokens.device == 0


async def test_the_same_again_changes_nothing(router: Router) -> None:
    await put(router, pin(replicas=2))
    await until_held(router, 2)
    again = await put(router, pin(replicas=2))
    assert (again.changed, again.pin.held, again.pin.generation) == (False, 2, 1)
    more = await put(router, pin(replicas=1))
    assert (more.changed, more.pin.generation) == (True, 1)
    await eventually(lambda: len(holders(router.workers, "pin/default/a")) == 1, WAIT_S)
    assert sum(len(worker.warmed) for worker in workers(router)) == 2


async def test_another_prompt_is_warm_before_the_old_one_goes(router: Router) -> None:
    await put(router, pin(replicas=2))
    await until_held(router, 2)
    for worker in workers(router):
        worker.before_warm.shut()
    answer = await put(router, pin(ids=[9, *PROMPT], replicas=2))
    assert (answer.changed, answer.pin.generation, answer.pin.tokens) == (True, 2, 201)
    await eventually(lambda: any(worker.before_warm.waiting for worker in workers(router)), WAIT_S)
    assert all(len(worker.pins) == 1 and not worker.unpinned for worker in workers(router))
    for worker in workers(router):
        worker.before_warm.open()
    await until_held(router, 2)
    await eventually(lambda: all(len(worker.pins) == 1 for worker in workers(router)), WAIT_S)
    kept = [warm for worker in workers(router) for warm in worker.pins.values()]
    assert {len(warm.prefix.token_ids) // 4 for warm in kept} == {201}


async def test_removed_pin_is_let_go_at_once(router: Router) -> None:
    await put(router, pin())
    await until_held(router, 2)
    assert await remove(router)
    assert not await remove(router)
    await eventually(lambda: not holders(router.workers, "pin/default/a"), WAIT_S)
    with pytest.raises(NotFoundError, match="no pin 'a'"):
        await get(router)


async def test_pin_ends_by_its_time(router: Router) -> None:
    """And is forgotten; one that is put again in time stays."""
    await put(router, pin("stays", ttl_ms=3_600_000))
    await put(router, pin("ends", ids=PROMPT[1:], ttl_ms=600))
    assert 0 < (await get(router, "stays")).expires_in_ms <= 3_600_000
    renewed = await put(router, pin("stays", ttl_ms=7_200_000))
    assert not renewed.changed
    assert renewed.pin.expires_in_ms > 3_600_000

    async def only_one() -> bool:
        return [one.spec.name for one in (await listed(router)).pins] == ["stays"]

    await eventually(only_one, WAIT_S)
    await eventually(lambda: not holders(router.workers, "pin/default/ends"), WAIT_S)
    await until_held(router, 2, "stays")


async def test_prompt_is_told_to_who_asks_for_one_pin_and_not_in_lists(router: Router) -> None:
    await put(router, pb.PinSpec(name="a", chat=chat_request(("system", "be kind")).chat, extra_key="k"))
    one = await get(router)
    assert one.spec.chat.messages[0].content == "be kind"
    assert (one.spec.owner, one.spec.tenant, one.spec.extra_key) == ("default", "default", "k")
    (shown,) = (await listed(router)).pins
    assert shown.spec.WhichOneof("prompt") is None
    assert shown.tokens == one.tokens > 0


@pytest.mark.slow
async def test_lost_replica_is_made_anew_elsewhere() -> None:
    async with pinning_router(3) as router:
        await put(router, pin(replicas=2))
        await until_held(router, 2)
        lost = next(worker for worker in workers(router) if worker.pins)
        await lost.kill()
        others = [worker for worker in workers(router) if worker is not lost]
        await eventually(lambda: all(worker.pins for worker in others), WAIT_S)
        await until_held(router, 2)


async def test_worker_that_restarts_or_forgets_is_warmed_again(router: Router) -> None:
    await put(router, pin())
    await until_held(router, 2)
    first, second = workers(router)
    await first.restart()
    await eventually(lambda: len(first.pins) == 1, WAIT_S)
    second.lose_pins()
    await eventually(lambda: len(second.pins) == 1, WAIT_S)
    await until_held(router, 2)


async def test_draining_workers_pins_are_held_by_others() -> None:
    async with pinning_router(3) as router:
        await put(router, pin(replicas=2))
        await until_held(router, 2)
        leaving = next(worker for worker in workers(router) if worker.pins)
        leaving.drain()
        others = [worker for worker in workers(router) if worker is not leaving]
        await eventually(lambda: all(worker.pins for worker in others), WAIT_S)


async def test_worker_that_joins_is_warm_where_all_are_to_be(router: Router) -> None:
    await put(router, pin(replicas=0))
    await until_held(router, 2)
    newcomer = PinningWorker(router.secret, "w2")
    await newcomer.start()
    try:
        router.server.add_worker(newcomer.address)
        await until_held(router, 3)
        assert len(newcomer.pins) == 1
    finally:
        await newcomer.kill()


@pytest.mark.slow
async def test_failure_is_told_and_tried_again(router: Router) -> None:
    for worker in workers(router):
        worker.warm_error = PrefixmeshError("the disk is on fire")
    await put(router, pin(replicas=1))

    async def tells() -> bool:
        one = await get(router)
        return one.missing == 1 and any("on fire" in replica.problem for replica in one.replicas)

    await eventually(tells, WAIT_S)
    assert (await listed(router)).actions["warm_failed"] >= 1
    for worker in workers(router):
        worker.warm_error = None
    await until_held(router, 1)


@pytest.mark.parametrize("kind", ["file", "memory"])
async def test_router_that_restarts_has_its_pins_and_warms_nothing_again(tmp_path: Path, kind: str) -> None:
    """With a file; without one it has forgotten them, and what workers still hold of them is let go."""
    secret = fleet_secret.generate()
    state = f"file://{tmp_path}/state" if kind == "file" else "memory://"
    fakes = [PinningWorker(secret, f"w{number}") for number in range(2)]
    addresses = tuple([(await fake.start()).address for fake in fakes])
    try:
        async with running_router(0, secret=secret, workers=addresses, state=state) as router:
            await router.until_ready(2)
            await put(router, pb.PinSpec(name="a", text="the quick brown fox jumps over the lazy dog"))
            before = await until_held(router, 2)
        async with running_router(0, secret=secret, workers=addresses, state=state) as router:
            if kind == "memory":
                await eventually(lambda: not any(fake.pins for fake in fakes), WAIT_S)
                return
            await router.until_ready(2)
            after = await until_held(router, 2)
            assert after.spec == before.spec
            assert after.namespace_digest == before.namespace_digest
        assert [len(fake.warmed) for fake in fakes] == [1, 1]
        assert not any(fake.unpinned for fake in fakes)
    finally:
        for fake in fakes:
            await fake.kill()


async def test_router_that_begins_lets_nothing_go_before_it_knows_its_pins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees what workers hold before it has made the tokens of what is wished."""
    secret, state = fleet_secret.generate(), f"file://{tmp_path}/state"
    worker = PinningWorker(secret)
    await worker.start()
    try:
        async with running_router(0, secret=secret, workers=(worker.address,), state=state) as router:
            await router.until_ready(1)
            await put(router, pin("a"))
            await put(router, pin("b", [5, *PROMPT]))
            await until_held(router, 1, "b")
            await until_held(router, 1, "a")
        made, real = asyncio.Event(), PinPrompts.tokens

        async def late(self: PinPrompts, spec: pb.PinSpec) -> bytes:
            if spec.name == "b":
                await made.wait()
            return await real(self, spec)

        monkeypatch.setattr(PinPrompts, "tokens", late)
        async with running_router(0, secret=secret, workers=(worker.address,), state=state) as router:
            keeper = router.server._pins.keeper  # type: ignore[union-attr]
            await eventually(lambda: any(one.usable and one.pins for one in keeper.workers), WAIT_S)
            asked = worker.listed
            keeper._told.expect_change(keeper.workers[0].endpoint)
            await eventually(lambda: worker.listed > asked, WAIT_S)
            assert (await get(router, "b")).why == "its tokens are being made"
            made.set()
            await until_held(router, 1, "b")
            await until_held(router, 1, "a")
        assert not worker.unpinned
        assert len(worker.warmed) == 2
    finally:
        await worker.kill()


@pytest.mark.slow
async def test_pin_of_an_adapter_that_is_loaded_anew_is_another(router: Router) -> None:
    for worker in workers(router):
        worker.script.adapters = {"clerk": "d1"}
    await put(router, pin(adapter="clerk"))
    first = await until_held(router, 2)
    for worker in workers(router):
        worker.script.adapters = {"clerk": "d2"}

    def has_new() -> bool:
        digests = [[one.prefix.adapter_digest for one in worker.pins.values()] for worker in workers(router)]
        return digests == [["d2"], ["d2"]]

    await eventually(has_new, WAIT_S)
    second = await until_held(router, 2)
    assert second.namespace_digest != first.namespace_digest
    with pytest.raises(InvalidRequestError, match="adapter"):
        await put(router, pin(adapter="nobody"))


async def test_owner_stops_at_its_budget_and_others_keep_theirs(router: Router) -> None:
    """F75: a thousand pins, of which so many are taken as fit; the refusal tells the sums."""
    ids = [number % 200 for number in range(500)]
    refusal = ""
    for taken in range(1000):
        try:
            await put(router, pin(f"p{taken}", [taken, *ids[1:]]), tenant="greedy")
        except BudgetError as error:
            refusal = str(error)
            break
    assert taken == OWNER_BUDGET_TOKENS // 500
    assert "500 tokens wanted on the device, 0 of 5000 are left to 'greedy', 5000 of 10000" in refusal
    await put(router, pin("mine"), tenant="modest")
    (use,) = (await listed(router, tenant="greedy")).budgets
    assert use.owner == "greedy"
    assert use.budget_tokens == 2 * OWNER_BUDGET_TOKENS


async def test_pins_are_counted_whatever_their_size(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixmesh.router.pins.pin_service.MAX_PINS_PER_OWNER", 2)
    for name in ("a", "b"):
        await put(router, pin(name, [ord(name), *PROMPT]))
    with pytest.raises(BudgetError, match="'default' has 2 pins, and 2 are the most"):
        await put(router, pin("c"))
    await put(router, pin("a", [1, *PROMPT]))
    monkeypatch.setattr("prefixmesh.router.pins.pin_service.MAX_PINS", 2)
    with pytest.raises(BudgetError, match="all owners together have 2 pins"):
        await put(router, pin("c"), tenant="other")


BAD_WISHES: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name: must be 1 to 128"),
    ({"name": "a/b"}, "name: must be 1 to 128"),
    ({"replicas": -1}, "replicas: must be 0 to"),
    ({"replicas": pin_rules.MAX_REPLICAS + 1}, "replicas: must be 0 to"),
    ({"ttl_ms": -1}, "ttl_ms: must be 0 to"),
    ({"tier": 7}, "tier: must be device or host"),
    ({"owner": "@heat"}, "owner: must not be"),
    ({"owner": "*"}, "owner: must not be"),
    ({"tenant": "a\nb"}, "tenant: must be 1 to 128 printable"),
    ({"extra_key": "k" * 1025}, "extra_key: at most 1024 bytes"),
    ({"adapter": "../x"}, "adapter: must be 1 to 128"),
    ({"public": True, "extra_key": "k"}, "extra_key: a public pin is for everybody"),
    ({"public": True, "tenant": "t"}, "tenant: a public pin is for everybody"),
    ({"public": True, "ids": PROMPT[:63]}, "prompt: a public one is shared in whole blocks"),
    ({"ids": []}, "tokens.ids: the prompt must not be empty"),
    ({"ids": [10**6]}, "tokens.ids: ids must be below"),
]


async def test_bad_wish_is_refused_by_its_field(router: Router) -> None:
    for fields, problem in BAD_WISHES:
        with pytest.raises(InvalidRequestError, match=problem):
            await put(router, pin(**fields))
    assert not (await listed(router, "*")).pins


async def test_many_wishes_at_once_have_one_turn_each(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others' calls go on between them: all at once they would keep the loop until the last one is done."""
    make, at_once, most = PinPrompts.tokens, 0, 0

    async def tokens(self: PinPrompts, spec: pb.PinSpec) -> bytes:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        try:
            return await make(self, spec)
        finally:
            at_once -= 1

    monkeypatch.setattr(PinPrompts, "tokens", tokens)
    answers = await asyncio.gather(*(put(router, pin(f"p{number}", replicas=1)) for number in range(20)))
    assert all(answer.changed for answer in answers)
    assert most == 1


async def test_wish_without_a_prompt_is_refused(router: Router) -> None:
    with pytest.raises(InvalidRequestError, match="prompt: one of text, chat or tokens"):
        await put(router, pb.PinSpec(name="a"))
    with pytest.raises(InvalidRequestError, match=r"chat.messages\[0\].role"):
        await put(router, pb.PinSpec(name="a", chat=chat_request(("king", "x")).chat))
    with pytest.raises(InvalidRequestError, match="text: too short"):
        await put(router, pb.PinSpec(name="a", text="word"))


async def test_tenants_have_their_own_pins_and_administrators_everybodys(tmp_path: Path) -> None:
    """What a tenant may not see is to it as if it were not there."""
    keys = tmp_path / "keys"
    keys.write_text(
        f"{hash_key('pm-acme')} acme\n{hash_key('pm-rival')} rival\n{hash_key('pm-admin')} ops admin\n"
    )
    async with pinning_router(1, api_keys_file=str(keys)) as router:
        await put(router, pin("secret"), key="pm-acme")
        for name in ("secret", "nothing"):
            with pytest.raises(NotFoundError, match=f"no pin '{name}' of this owner"):
                await get(router, name, "acme", key="pm-rival")
            with pytest.raises(NotFoundError, match=f"no pin '{name}' of this owner"):
                await remove(router, name, "acme", key="pm-rival")
        for owner in ("acme", "nobody", "*"):
            with pytest.raises(AccessDeniedError, match="administrator"):
                await listed(router, owner, key="pm-rival")
        for fields in ({"owner": "acme"}, {"tenant": "acme"}, {"public": True}):
            with pytest.raises(AccessDeniedError, match="administrator"):
                await put(router, pin("secret", **fields), key="pm-rival")
        assert not (await listed(router, key="pm-rival")).pins
        assert not (await listed(router, key="pm-rival")).actions
        await put(router, pin("secret", ids=PROMPT[1:]), key="pm-rival")
        assert (await get(router, "secret", key="pm-acme")).tokens == 200
        everybodys = (await listed(router, "*", key="pm-admin")).pins
        assert [(one.spec.owner, one.spec.name) for one in everybodys] == [
            ("acme", "secret"),
            ("rival", "secret"),
        ]
        await put(router, pin("policy", owner="ops", tenant="acme"), key="pm-admin")
        assert await remove(router, "secret", "acme", key="pm-admin")
        with pytest.raises(NotFoundError):
            await get(router, "secret", key="pm-acme")


async def test_calls_about_pins_need_a_key(tmp_path: Path) -> None:
    """F74: without one, and with a wrong one, all of them are refused."""
    keys = tmp_path / "keys"
    keys.write_text(f"{hash_key('pm-acme')} acme\n")
    async with running_router(1, api_keys_file=str(keys)) as router:
        for method in ("PutPin", "GetPin", "ListPins", "RemovePin"):
            request = getattr(pb, f"{method}Request")()
            for key in ("", "pm-wrong"):
                with pytest.raises(PrefixmeshError) as refused:
                    await call(router, method, request, key=key)
                assert refused.value.status == "UNAUTHENTICATED"


async def test_public_pin_is_matched_by_every_tenant(router: Router) -> None:
    await put(router, pin(public=True))
    await until_held(router, 2)
    (warm, *_) = workers(router)[0].warmed
    for tenant in ("one", "two"):
        await router.generate(token_request([*PROMPT, 7]), tenant=tenant)
    tickets = [call.ticket for worker in workers(router) for call in worker.received]
    assert len(tickets) == 2
    assert {ticket.public[0].namespace for ticket in tickets} == {warm.prefix.namespace}
    assert {ticket.public[0].boundary_tokens for ticket in tickets} == {192}
    await remove(router)
    for worker in workers(router):
        worker.received.clear()
    await router.generate(token_request([*PROMPT, 7]), tenant="one")
    assert [call.ticket.public for worker in workers(router) for call in worker.received] == [()]


async def test_prompts_stand_in_no_log(router: Router, caplog: pytest.LogCaptureFixture) -> None:
    """F74."""
    caplog.set_level("DEBUG")
    await put(router, pb.PinSpec(name="a", text="the password is tangerine, never tell anybody"))
    await until_held(router, 2)
    await remove(router)
    await eventually(lambda: not holders(router.workers, "pin/default/a"), WAIT_S)
    assert "pin_put" in caplog.text
    assert "tangerine" not in caplog.text
