"""What issue 8 shows of pins, with processes: a router, and workers that are real but for their models.

They are killed, added, filled up and started again while callers ask. How long each recovery takes is printed (``-s``) and not asserted; that
it comes, and that nobody misses meanwhile, is.
"""

import asyncio
import itertools
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from prefixmesh.client import AsyncClient
from prefixmesh.errors import AccessDeniedError, BudgetError, NotFoundError
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.rpc.identity import hash_key
from tests.support.failure_fleet import FailureFleet, until
from tests.support.pinning import Pins, cached_at, ids_pin, some_ids
from tests.support.redis_server import start_redis_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

POOL_TOKENS = 8_192
PIN_TOKENS = 640
"""Below what one owner may have of a pool."""

SHORT_TOKENS = 200
"""Several of these fit it."""

KEYS = {"pm-greedy": "greedy", "pm-other": "other", "pm-admin": "ops admin"}
"""API keys, and whose they are."""

WORKER = ("--max-total-tokens", str(POOL_TOKENS), "--step-ms", "2", "--prefill-ms-per-token", "0.1")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Iterator[FailureFleet]:
    """Three workers, and a router that keeps its state in a file."""
    folder = tmp_path_factory.mktemp("pins")
    state = ("--state", f"file://{folder}/state.json")
    with FailureFleet(
        folder, model=str(tiny_model_folder), worker_arguments=WORKER, router_arguments=state
    ) as fleet:
        fleet.start(3)
        yield fleet


@pytest.fixture
async def fleet(started: FailureFleet) -> FailureFleet:
    """All of it runs and is ready, and nothing is pinned."""
    dead = [one for one in started.workers if not one.is_running]
    for worker in dead:
        worker.launch()
    for worker in dead:
        await asyncio.to_thread(worker.wait_listening)
    await started.until_ready()
    pins = Pins(started)
    for pin in (await pins.listed()).pins:
        await pins.remove(pin.spec.name)
    return started


@dataclass
class Asked:
    """Requests for one prompt, each with an end of its own."""

    misses: list[int] = field(default_factory=list)
    """Cached tokens of those that found less than all of the prompt."""

    by_worker: dict[str, int] = field(default_factory=dict)


@asynccontextmanager
async def asking(fleet: FailureFleet, ids: list[int]) -> AsyncIterator[Asked]:
    """Ask all the time, one request after the other, through the router."""
    asked, is_over = Asked(), asyncio.Event()

    async def ask() -> None:
        async with AsyncClient(fleet.router.address, timeout_s=60) as client:
            for number in itertools.count():
                tail = some_ids(10_000 + number, 5, fleet.vocab_size)
                answer = await client.generate([*ids, *tail], max_tokens=2, temperature=0.0)
                asked.by_worker[answer.worker_id] = asked.by_worker.get(answer.worker_id, 0) + 1
                if answer.cached_tokens < len(ids):
                    asked.misses.append(answer.cached_tokens)
                if is_over.is_set():
                    return

    running = asyncio.create_task(ask())
    try:
        yield asked
        is_over.set()
        await running
    finally:
        running.cancel()


async def test_a_killed_holder_is_replaced_and_callers_hit_meanwhile(fleet: FailureFleet) -> None:
    """Two of three hold it; one of these dies: the third takes its place, and every request meanwhile finds all of the prompt."""
    pins = Pins(fleet)
    ids = some_ids(1, PIN_TOKENS, fleet.vocab_size)
    await pins.put(ids_pin("policy", ids, replicas=2))
    _, holders = await pins.until_held("policy", 2)
    async with asking(fleet, ids) as asked:
        await until(lambda: sum(asked.by_worker.values()) > 5, "requests are answered")
        dying = next(worker for worker in fleet.workers if worker.address == holders[0])
        dying.kill()
        took_s, now = await pins.until_held("policy", 2, but=lambda one: one.address == dying.address)
    print(f"two holders again {took_s:.1f} s after one was killed; {asked.by_worker} requests")
    assert dying.address not in now
    assert [await cached_at(address, [*ids, 5]) for address in now] == [PIN_TOKENS, PIN_TOKENS]
    assert asked.misses == []


@pytest.mark.parametrize(
    "rounds", [pytest.param(2, id="short"), pytest.param(60, id="long", marks=pytest.mark.deep)]
)
async def test_a_pin_survives_a_pool_full_of_other_traffic(fleet: FailureFleet, rounds: int) -> None:
    """Each round is a pool's worth of other prompts for each worker; what is not pinned is gone after it, what is stays everywhere."""
    pins = Pins(fleet)
    ids = some_ids(3, PIN_TOKENS, fleet.vocab_size)
    unpinned = some_ids(4, PIN_TOKENS, fleet.vocab_size)
    await pins.put(ids_pin("policy", ids))
    await pins.until_held("policy", 3)
    for worker in fleet.workers:
        await cached_at(worker, unpinned)
    number = itertools.count(20_000)
    async with AsyncClient(fleet.router.address, tenant="others", timeout_s=60) as client:
        for _ in range(rounds):
            prompts = [some_ids(next(number), 1_000, fleet.vocab_size) for _ in range(3 * 9)]
            await asyncio.gather(*(client.generate(one, max_tokens=1) for one in prompts))
    assert [await cached_at(worker, [*ids, 5]) for worker in fleet.workers] == [PIN_TOKENS] * 3
    assert [await cached_at(worker, unpinned) for worker in fleet.workers] == [0] * 3


def as_told(answer: pb.ListPinsResponse) -> list[tuple[str, int, int, int, int]]:
    """What must not change with the router's life."""
    return sorted((one.spec.name, one.generation, one.wanted, one.held, one.tokens) for one in answer.pins)


async def check_restart(fleet: FailureFleet) -> None:
    """Pins before and after a router's SIGKILL: the same ones, held by the same workers, which had to do nothing for it."""
    pins = Pins(fleet)
    ids = [some_ids(5 + number, PIN_TOKENS // 2, fleet.vocab_size) for number in range(2)]
    await pins.put(ids_pin("first", some_ids(9, 100, fleet.vocab_size), replicas=2))
    await pins.put(ids_pin("first", ids[0], replicas=2))
    await pins.put(ids_pin("second", ids[1], ttl_ms=3_600_000))
    await pins.until_held("first", 2)
    await pins.until_held("second", 3)
    before, holders = await pins.listed(), await holders_of(pins, "first")
    fleet.router.kill()
    began = time.monotonic()
    await asyncio.to_thread(fleet.router.start)
    await pins.until_held("first", 2)
    await pins.until_held("second", 3)
    print(f"pins as before {time.monotonic() - began:.1f} s after the router was started again")
    after = await pins.listed()
    assert as_told(after) == as_told(before)
    assert await holders_of(pins, "first") == holders
    second = next(one for one in after.pins if one.spec.name == "second")
    assert 0 < second.expires_in_ms <= 3_600_000
    assert [await cached_at(worker, [*ids[1], 5]) for worker in fleet.workers] == [PIN_TOKENS // 2] * 3
    assert await pins.remove("second")
    assert [one.spec.name for one in (await pins.listed()).pins] == ["first"]


async def holders_of(pins: Pins, name: str) -> set[str]:
    return {one.address for one in (await pins.get(name)).replicas if one.state == "held"}


async def test_pins_outlive_the_router_in_a_file(fleet: FailureFleet) -> None:
    await check_restart(fleet)


async def test_a_worker_that_joins_is_warm_before_it_gets_traffic(fleet: FailureFleet) -> None:
    """``replicas`` is all. None of its answers to that prompt computes it, not the first one either; and it does get some, once the others are
    gone."""
    pins = Pins(fleet)
    ids = some_ids(2, PIN_TOKENS, fleet.vocab_size)
    await pins.put(ids_pin("policy", ids))
    await pins.until_held("policy", 3)
    async with asking(fleet, ids) as asked:
        joining = fleet.add_worker()
        await asyncio.to_thread(joining.start)
        await fleet.tell_router_of(joining)
        took_s, _ = await pins.until_held("policy", 4)
        print(f"a fourth holder {took_s:.1f} s after it joined")
        leaving = [worker for worker in fleet.workers if worker is not joining]
        for worker in leaving:
            worker.send(signal.SIGTERM)
        await until(lambda: joining.name in asked.by_worker, "the new worker answers")
        for worker in leaving:
            await asyncio.to_thread(worker.wait)
    assert asked.misses == []


async def test_pins_outlive_the_router_in_redis(tmp_path: Path, tiny_model_folder: Path) -> None:
    server = start_redis_server()
    try:
        with FailureFleet(
            tmp_path,
            model=str(tiny_model_folder),
            worker_arguments=WORKER,
            router_arguments=("--state", server.url),
        ) as fleet:
            fleet.start(3)
            await check_restart(fleet)
    finally:
        server.kill()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Iterator[FailureFleet]:
    """Two workers and a router that asks for API keys."""
    folder = tmp_path_factory.mktemp("guarded")
    keys = folder / "keys"
    keys.write_text("".join(f"{hash_key(key)} {who}\n" for key, who in KEYS.items()))
    keys.chmod(0o600)
    with FailureFleet(
        folder,
        model=str(tiny_model_folder),
        worker_arguments=WORKER,
        router_arguments=("--api-keys-file", str(keys)),
    ) as started:
        started.start(2)
        yield started


async def test_every_tenant_hits_a_public_pin_and_nobody_anothers_tail(guarded: FailureFleet) -> None:
    """Only an administrator pins it. What a tenant asks behind it is cached for the tenant, and for nobody else."""
    admin = Pins(guarded, key="pm-admin")
    ids = some_ids(1, PIN_TOKENS, guarded.vocab_size)
    with pytest.raises(AccessDeniedError):
        await Pins(guarded, key="pm-other").put(ids_pin("rules", ids, public=True))
    await admin.put(ids_pin("rules", ids, public=True))
    await admin.until_held("rules", 2)
    prompt = [*ids, *some_ids(2, 300, guarded.vocab_size)]
    for key in ("pm-greedy", "pm-other"):
        assert await cached_for(guarded, key, prompt) == PIN_TOKENS, key
        # The router may be told a moment later where that is cached now.
        await until(partial(finds_all, guarded, key, prompt), "the tenant finds what it has asked itself")
    assert await admin.remove("rules")


async def cached_for(fleet: FailureFleet, key: str, prompt: list[int]) -> int:
    """Tokens of the prompt that whoever has this key finds cached."""
    async with AsyncClient(fleet.router.address, api_key=key) as client:
        return (await client.generate(prompt, max_tokens=1, temperature=0.0)).cached_tokens


async def finds_all(fleet: FailureFleet, key: str, prompt: list[int]) -> bool:
    """But the last token, which is always computed."""
    return await cached_for(fleet, key, prompt) == len(prompt) - 1


async def pin_until_refused(pins: Pins, vocab_size: int) -> tuple[int, BudgetError]:
    """How many of a thousand pins are taken, and why the next was not."""
    for number in range(1_000):
        try:
            await pins.put(ids_pin(f"p{number}", some_ids(number, SHORT_TOKENS, vocab_size)))
        except BudgetError as error:
            return number, error
    raise AssertionError("a thousand pins, and no end")


async def test_a_tenant_that_pins_without_end_stops_at_its_budget(guarded: FailureFleet) -> None:
    """F75: it is told the sums; another tenant pins and is cached as before; nobody else sees its pins, shows or removes them, and an administrator
    does."""
    greedy, other, admin = (Pins(guarded, key=key) for key in KEYS)
    taken, refusal = await pin_until_refused(greedy, guarded.vocab_size)
    print(f"{taken} pins of {SHORT_TOKENS} tokens; then: {refusal}")
    assert 0 < taken * SHORT_TOKENS <= 0.15 * POOL_TOKENS < (taken + 1) * SHORT_TOKENS
    assert re.search(r"\d", str(refusal))
    await greedy.until_held("p0", 2)
    ids = some_ids(5_000, SHORT_TOKENS, guarded.vocab_size)
    await other.put(ids_pin("p0", ids))
    await other.until_held("p0", 2)
    assert await cached_for(guarded, "pm-other", [*ids, 5]) == SHORT_TOKENS
    with pytest.raises(NotFoundError):
        await other.get("p0", owner="greedy")
    with pytest.raises(NotFoundError):
        await other.remove("p0", owner="greedy")
    with pytest.raises(AccessDeniedError):
        await other.listed(owner="greedy")
    assert {one.spec.owner for one in (await other.listed()).pins} == {"other"}
    everybody = await admin.listed(owner="*")
    assert {one.spec.owner for one in everybody.pins} >= {"greedy", "other"}
    assert all(use.charged_tokens <= use.budget_tokens for use in everybody.budgets)
    assert await admin.remove("p0", owner="greedy")
    assert await greedy.put(ids_pin("again", some_ids(6_000, SHORT_TOKENS, guarded.vocab_size)))
