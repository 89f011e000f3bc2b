"""Adapters of the whole fleet: put once at the router, and loaded by every worker, whenever it comes, until they are taken back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefixmesh import fleet_secret
from prefixmesh.errors import (
    AuthenticationError,
    BudgetError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from prefixmesh.proto.v1 import inference_pb2
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.router import server as router_server
from prefixmesh.router.adapters import adapter_keeper, adapter_service, records
from prefixmesh.router.adapters.config import AdapterControllerConfig
from prefixmesh.router.adapters.records import ADAPTERS, FORMAT
from prefixmesh.router.pins import acting_lease
from prefixmesh.router.state_memory import MemoryStore
from prefixmesh.router.state_store import Entry
from prefixmesh.rpc.identity import hash_key
from prefixmesh.tokens import pack
from tests.support.adapter_worker import (
    WAIT_S,
    AdapterWorker,
    adapter_workers,
    call,
    digest_of,
    listed,
    put,
    remove,
    share_folders,
    states,
    until_held,
    until_states,
)
from tests.support.router_kit import Router, running_router, token_request
from tests.support.servers import eventually

PROMPT = list(range(100))


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to settle, or to be tried again, need not take its time."""
    config = partial(AdapterControllerConfig, settle_s=0.05, first_pause_s=0.05)
    monkeypatch.setattr(adapter_keeper, "AdapterControllerConfig", config)
    monkeypatch.setattr(acting_lease, "RENEW_S", 0.05)


@asynccontextmanager
async def fleet(count: int = 2, **settings: Any) -> AsyncIterator[Router]:
    """A router before workers that read the same folders, ``a`` and ``b``."""
    async with running_router(count, make_worker=AdapterWorker, **settings) as router:
        share_folders(adapter_workers(router), {"a": "first weights", "b": "other weights"})
        yield router


class CommonStore(MemoryStore):
    """A store of several routers of this process, none of which closes it. Between a question and its answer others have their turn."""

    async def get(self, key: str) -> Entry | None:
        entry = await super().get(key)
        await asyncio.sleep(0.001)
        return entry

    @property
    def is_shared(self) -> bool:
        return True

    async def close(self) -> None:
        """Others use it on."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> CommonStore:
    """That of all routers of the test."""
    common = CommonStore()
    monkeypatch.setattr(router_server, "open_store", lambda _: common)
    return common


async def generate(router: Router, number: int = 0, name: str = "clerk") -> str:
    """The content that answered a request."""
    answer = await router.generate(token_request([number, *PROMPT], adapter=name))
    return answer.started.adapter_digest


async def test_adapter_that_is_put_is_loaded_by_every_worker_and_answers() -> None:
    async with fleet() as router:
        answered = await put(router, pinned=True)
        assert (answered.generation, answered.digest) == (1, "")
        told = await until_held(router, 2)
        assert told.digest == digest_of("first weights")
        assert {one.state for one in told.workers} == {"held"}
        assert [worker.pinned for worker in router.workers] == [{"clerk"}, {"clerk"}]  # type: ignore[attr-defined]
        assert [worker.loads for worker in adapter_workers(router)] == [[("clerk", "a")]] * 2
        assert await generate(router) == digest_of("first weights")


async def test_worker_that_restarts_or_joins_is_told_by_nobody_but_the_router() -> None:
    """It has it a moment after it is ready; until one has it, the name is not unknown, and the call may be made again."""
    async with fleet(1) as router:
        (first,) = adapter_workers(router)
        await put(router)
        await until_held(router, 1)
        first.before_load.shut()
        await first.restart()
        await eventually(lambda: first.before_load.waiting, WAIT_S)
        with pytest.raises(
            UnavailableError, match="no worker that is ready has loaded the adapter 'clerk' yet"
        ):
            await generate(router)
        first.before_load.open()
        await until_held(router, 1)
        assert await generate(router) == digest_of("first weights")
        second = await AdapterWorker(router.secret, "w1").start()
        try:
            second.folders = first.folders
            router.server.add_worker(second.address)
            await until_held(router, 2)
            assert second.loads == [("clerk", "a")]
        finally:
            await second.kill()


async def test_router_that_restarts_remembers_and_loads_nothing_twice(tmp_path: Path) -> None:
    """The state's file has the wish and which content it is; a worker that came while no router was there is given it."""
    secret, state = fleet_secret.generate(), f"file://{tmp_path}/state.json"
    workers = [await AdapterWorker(secret, f"w{i}").start() for i in range(2)]
    share_folders(workers, {"a": "first weights"})
    addresses = tuple(worker.address for worker in workers)
    try:
        async with running_router(0, secret=secret, workers=addresses, state=state) as first:
            await put(first)
            await until_held(first, 2)
        await workers[1].restart()
        async with running_router(0, secret=secret, workers=addresses, state=state) as second:
            told = await until_held(second, 2)
            assert (told.generation, told.digest) == (1, digest_of("first weights"))
        async with running_router(0, secret=secret, workers=addresses, state=state) as third:
            await until_held(third, 2)
        assert [len(worker.loads) for worker in workers] == [1, 2]
    finally:
        for worker in workers:
            await worker.kill()


@pytest.mark.slow
async def test_another_content_rolls_over_while_requests_run() -> None:
    """One worker after the other; every answer is of one of the two contents, and none is an error."""
    async with fleet(3) as router:
        contents = {digest_of("first weights"), digest_of("other weights")}
        await put(router)
        await until_held(router, 3)
        answers: list[str] = []
        is_over = asyncio.Event()

        async def ask(number: int) -> None:
            while not is_over.is_set():
                answers.append(await generate(router, number))
                await asyncio.sleep(0.01)

        async with asyncio.TaskGroup() as asking:
            for number in range(4):
                asking.create_task(ask(number))
            told = await put(router, path="b")
            assert told.generation == 2
            told = await until_held(router, 3)
            is_over.set()
        assert told.digest == digest_of("other weights")
        assert set(answers) == contents
        assert await generate(router) == digest_of("other weights")


@pytest.mark.usefixtures("_quick")
async def test_folder_that_changed_is_loaded_anew_when_it_is_put_again() -> None:
    """The same path and other weights: nobody but a worker can tell, so one looks, and the others follow."""
    async with fleet(2) as router:
        await put(router)
        await until_held(router, 2)
        adapter_workers(router)[0].folders["a"] = "trained on"
        await put(router)

        async def has_new() -> bool:
            told = (await listed(router))["clerk"]
            return told.held == 2 and told.digest == digest_of("trained on")

        await eventually(has_new, WAIT_S)
        loads = sum(len(worker.loads) for worker in adapter_workers(router))
        await put(router)
        await until_held(router, 2)
        assert sum(len(worker.loads) for worker in adapter_workers(router)) == loads + 1


async def test_worker_that_refuses_is_told_of_and_the_others_have_it() -> None:
    async with fleet(2) as router:
        odd = adapter_workers(router)[1]
        odd.folders = {}
        await put(router)
        await until_states(router, {"w0": "held", "w1": "refused"})
        told = (await listed(router))["clerk"]
        assert (told.held, told.wanted) == (1, 2)
        problem = {one.worker_id: one.problem for one in told.workers}["w1"]
        assert "there is no folder 'a' below the adapter root" in problem
        assert "tried again in" in problem
        assert await generate(router) == digest_of("first weights")
        odd.folders = {"a": "first weights"}
        await put(router)  # somebody has mended it: all are asked at once
        await until_held(router, 2)


@pytest.mark.usefixtures("_quick")
async def test_name_keeps_what_it_means_while_no_worker_can_load_what_was_put() -> None:
    """A folder that is not there costs nobody anything: requests go on, and a worker that restarts gets the version before."""
    async with fleet(2) as router:
        await put(router)
        await until_held(router, 2)
        await put(router, path="mistyped")
        await until_states(router, {"w0": "refused", "w1": "refused"})
        told = (await listed(router))["clerk"]
        assert (told.generation, told.digest, told.held) == (2, "", 0)
        assert (told.kept_generation, told.kept.path) == (1, "a")
        assert await generate(router) == digest_of("first weights")
        first = adapter_workers(router)[0]
        first.loads.clear()
        await first.restart()
        await eventually(lambda: "clerk" in first.script.adapters, WAIT_S)
        assert first.script.adapters == {"clerk": digest_of("first weights")}
        await put(router, path="b")
        told = await until_held(router, 2)
        assert (told.generation, told.kept_generation) == (3, 0)
        assert await generate(router) == digest_of("other weights")


async def test_worker_with_other_weights_in_the_folder_is_told_of() -> None:
    """The name means one content, that of whom was first; what another found is its problem."""
    async with fleet(2) as router:
        first, second = adapter_workers(router)
        second.folders = {"a": "something else"}
        await put(router)
        await eventually(lambda: first.loads and second.loads, WAIT_S)

        async def one_refused() -> bool:
            return sorted((await states(router)).values()) == ["held", "refused"]

        await eventually(one_refused, WAIT_S)
        told = (await listed(router))["clerk"]
        assert any("holds other weights" in one.problem for one in told.workers)
        assert await generate(router) == told.digest, "as it is told"
        pin = pb.PinSpec(name="p", tokens=inference_pb2.TokenPrompt(ids=pack(PROMPT)), adapter="clerk")
        await call(router, "PutPin", pb.PutPinRequest(spec=pin))
        (wish,) = router.server._pins.roster.wishes(0)  # type: ignore[union-attr]
        assert wish.version.adapter_digest == told.digest, "a pin is of what requests will have"


@pytest.mark.usefixtures("_quick")
async def test_load_that_fails_is_tried_again() -> None:
    """What may pass is tried again soon; meanwhile it is shown."""
    async with fleet(1) as router:
        (worker,) = adapter_workers(router)
        worker.load_error = OverloadedError("64 adapters are being loaded already")
        await put(router)
        await until_states(router, {"w0": "failed"})
        told = (await listed(router))["clerk"].workers[0]
        assert "64 adapters are being loaded already" in told.problem
        worker.load_error = None
        await until_held(router, 1)
        assert len(worker.loads) >= 2


async def test_removed_adapter_leaves_every_worker_also_one_that_was_away() -> None:
    """At once it is unknown to requests; what was started with another adapter keeps that."""
    async with fleet(2) as router:
        first, second = adapter_workers(router)
        for worker in (first, second):
            worker.script.adapters = {"poet": "own"}
        await put(router)
        await until_held(router, 2)
        kept = dict(second.script.adapters)
        await second.kill()
        await router.until_ready(1)
        assert await remove(router)
        with pytest.raises(InvalidRequestError, match="no adapter 'clerk' is loaded here"):
            await generate(router)
        await eventually(lambda: "clerk" not in first.script.adapters, WAIT_S)
        await come_back(second, kept)
        await eventually(lambda: "clerk" in second.unloads, WAIT_S)
        await eventually(lambda: second.script.adapters == {"poet": "own"}, WAIT_S)
        assert first.script.adapters == {"poet": "own"}
        assert not await remove(router)

        async def only_poet() -> bool:
            return set(await listed(router)) == {"poet"}

        await eventually(only_poet, WAIT_S)


async def come_back(worker: AdapterWorker, adapters: dict[str, str]) -> None:
    """The same life at the same address, with what it had: only its connection was lost."""
    await super(AdapterWorker, worker).start()
    worker.script.adapters = adapters


@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
async def test_removal_is_forgotten_after_its_time(
    store: CommonStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it is as if the name had never been the store's: whoever has it keeps it."""
    monkeypatch.setattr(records, "REMOVED_FOR_MS", 100)
    async with fleet(1) as router:
        (worker,) = adapter_workers(router)
        await put(router)
        await until_held(router, 1)
        assert await remove(router)
        await eventually(lambda: worker.unloads, WAIT_S)

        async def is_forgotten() -> bool:
            return not await store.entries(ADAPTERS)

        await eventually(is_forgotten, WAIT_S)
        worker.script.adapters = {"clerk": "own"}
        await until_states(router, {"w0": "none"})
        assert await generate(router) == "own"
        assert worker.unloads == ["clerk"]


async def test_adapters_that_the_store_never_knew_are_left_alone_and_listed() -> None:
    async with fleet(2) as router:
        adapter_workers(router)[0].script.adapters = {"own": "d1"}
        await put(router)
        await until_held(router, 2)

        async def is_told() -> bool:
            return (await states(router, "own")) == {"w0": "none"}

        await eventually(is_told, WAIT_S)
        own = (await listed(router))["own"]
        assert (own.generation, own.digest) == (0, "d1")
        assert not await remove(router, "own")
        assert adapter_workers(router)[0].unloads == []


async def test_each_worker_loads_one_adapter_at_a_time() -> None:
    async with fleet(2) as router:
        for worker in adapter_workers(router):
            worker.before_load.shut()
        for number in range(4):
            await put(router, f"n{number}")
        for _ in range(8):
            await eventually(
                lambda: any(worker.before_load.waiting for worker in adapter_workers(router)), WAIT_S
            )
            for worker in adapter_workers(router):
                if worker.before_load.waiting:
                    worker.before_load.let_one()
                    await eventually(lambda w=worker: not w.before_load.waiting or w.loading, WAIT_S)
        for worker in adapter_workers(router):
            worker.before_load.open()
        for number in range(4):
            await until_held(router, 2, f"n{number}")
        assert [worker.most_loading for worker in adapter_workers(router)] == [1, 1]


@pytest.mark.slow
@pytest.mark.usefixtures("_quick", "store")
async def test_two_routers_on_one_store_have_one_that_acts() -> None:
    """What is put at one is loaded once, known to both, and goes on being seen to when the one that acted has gone."""
    secret = fleet_secret.generate()
    workers = [await AdapterWorker(secret, f"w{i}").start() for i in range(2)]
    share_folders(workers, {"a": "first weights"})
    settings: dict[str, Any] = {"secret": secret, "workers": tuple(worker.address for worker in workers)}
    try:
        async with running_router(0, **settings) as second:
            async with running_router(0, **settings) as first:
                for router in (first, second):
                    await router.until_ready(2)
                await put(first)
                await until_held(first, 2)
                await until_held(second, 2)
                assert [len(worker.loads) for worker in workers] == [1, 1]
                assert [await acts(router) for router in (first, second)].count(True) == 1
            await workers[0].restart()
            await until_held(second, 2)
            assert await acts(second)
    finally:
        for worker in workers:
            await worker.kill()


async def acts(router: Router) -> bool:
    answer = await call(router, "ListAdapters", pb.ListFleetAdaptersRequest())
    return bool(answer.acting)


async def test_wish_of_a_later_version_is_neither_read_nor_written_over(store: CommonStore) -> None:
    """Its name may mean something: a request for it may be sent again. The others are looked after."""
    value = msgspec.json.encode({"format": FORMAT + 1, "who": "knows"})
    await store.put(f"{ADAPTERS}clerk", value)
    async with fleet(1) as router:
        adapter_workers(router)[0].script.adapters = {"clerk": "d1"}
        with pytest.raises(UnsupportedError, match="put by a later version"):
            await put(router)
        with pytest.raises(UnsupportedError):
            await remove(router)
        entry = await store.get(f"{ADAPTERS}clerk")
        assert entry is not None
        assert entry.value == value
        await put(router, "poet")
        await until_held(router, 1, "poet")
        assert adapter_workers(router)[0].unloads == []
        await store.put(f"{ADAPTERS}later", value)

        async def may_be_sent_again() -> bool:
            with pytest.raises((InvalidRequestError, UnavailableError)) as refused:
                await generate(router, name="later")
            return refused.type is UnavailableError

        await eventually(may_be_sent_again, WAIT_S)


async def test_records_that_cannot_be_cost_the_others_nothing(store: CommonStore) -> None:
    """Numbers beyond the wire's, and another's record in a name's place: all lists are answered, and who puts the name anew has it."""
    async with fleet(1) as router:
        await put(router)
        spec = pb.AdapterSpec(name="poet", path="a").SerializeToString()
        stored = {"format": FORMAT, "generation": 1 << 63, "digest": "", "removed_unix_ms": 0, "spec": spec}
        await store.put(f"{ADAPTERS}poet", msgspec.json.encode(stored))
        clerk = await store.get(f"{ADAPTERS}clerk")
        assert clerk is not None
        await store.put(f"{ADAPTERS}other", clerk.value)
        await until_held(router, 1)
        assert set(await listed(router)) == {"clerk"}
        for name in ("poet", "other"):
            assert not await remove(router, name)
            assert (await put(router, name)).generation == 1
            await until_held(router, 1, name)


@pytest.mark.usefixtures("store")
async def test_wishes_put_at_the_same_time_are_generations_of_their_own() -> None:
    """No two contents have one number, and none of the wishes is lost unsaid."""
    async with running_router(0, make_worker=AdapterWorker) as router:
        told = await asyncio.gather(*(put(router, path=f"p{number}") for number in range(5)))
        assert sorted(one.generation for one in told) == [1, 2, 3, 4, 5]
        last = max(told, key=lambda one: one.generation)
        assert (await listed(router))["clerk"].spec.path == last.spec.path
        assert sorted(await asyncio.gather(*(remove(router) for _ in range(3)))) == [False, False, True]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"name": ""}, "spec.name: must be 1 to 128 characters"),
        ({"name": "a/b"}, "spec.name: must be 1 to 128 characters"),
        ({"path": ""}, "spec.path: must be 1 to 1024 bytes, got 0"),
        ({"path": "a" * 1025}, "spec.path: must be 1 to 1024 bytes, got 1025"),
        ({"path": "/etc"}, "spec.path: must lead to a folder below"),
        ({"path": "a/../../b"}, "spec.path: must lead to a folder below"),
        ({"path": "a\0b"}, "spec.path: must lead to a folder below"),
    ],
)
async def test_wish_that_no_worker_would_take_is_refused_at_once(
    fields: dict[str, str], problem: str
) -> None:
    async with running_router(0, make_worker=AdapterWorker) as router:
        with pytest.raises(InvalidRequestError, match=problem):
            await put(router, fields.get("name", "clerk"), fields.get("path", "a"))
        with pytest.raises(InvalidRequestError, match="name: must be"):
            await remove(router, "a/b")
        assert await listed(router) == {}


async def test_wishes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that were taken back: what is put and removed in a loop ends."""
    monkeypatch.setattr(adapter_service, "MAX_ADAPTERS", 2)
    monkeypatch.setattr(adapter_service, "MAX_REMEMBERED", 3)
    async with running_router(0, make_worker=AdapterWorker) as router:
        for name in ("a", "b"):
            await put(router, name)
        with pytest.raises(BudgetError, match="2 adapters are wished for, and 2 are the most"):
            await put(router, "c")
        await put(router, "a")
        assert await remove(router, "a")
        await put(router, "c")
        assert await remove(router, "c")
        with pytest.raises(BudgetError, match="3 names were put within a day"):
            await put(router, "d")
        assert (await put(router, "a")).generation == 3


async def test_list_of_very_many_tells_of_those_that_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message has its bounds; one name alone is told in full."""
    monkeypatch.setattr(adapter_service, "MAX_ROWS", 3)
    async with fleet(2) as router:
        await put(router)
        await until_held(router, 2)
        adapter_workers(router)[1].folders = {}
        await put(router, "poet")

        async def refused() -> bool:
            return (await states(router, "poet")) == {"w1": "refused"}

        await eventually(refused, WAIT_S)
        told = await listed(router)
        assert [len(one.workers) for one in told.values()] == [0, 1]
        assert (told["clerk"].held, told["poet"].held, told["poet"].wanted) == (2, 1, 2)
        alone = await call(router, "ListAdapters", pb.ListFleetAdaptersRequest(name="clerk"))
        assert [len(one.workers) for one in alone.adapters] == [2]


async def test_calls_about_adapters_need_a_key(tmp_path: Path) -> None:
    """Without one, and with a wrong one, all of them are refused."""
    keys = tmp_path / "keys"
    keys.write_text(f"{hash_key('pm-acme')} acme\n")
    async with running_router(0, api_keys_file=str(keys)) as router:
        for method, request in (
            ("PutAdapter", pb.PutAdapterRequest()),
            ("ListAdapters", pb.ListFleetAdaptersRequest()),
            ("RemoveAdapter", pb.RemoveAdapterRequest()),
        ):
            for key in ("", "pm-wrong"):
                with pytest.raises(AuthenticationError):
                    await call(router, method, request, key=key)
