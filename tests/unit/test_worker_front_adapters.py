"""What a worker's front believes of its adapters: names, contents, and changes in the order in which they came."""

import asyncio
from typing import cast

import pytest

from prefixmesh.errors import AdapterChangedError, InvalidRequestError, NotFoundError, OverloadedError
from prefixmesh.worker.engine_client import EngineClient
from prefixmesh.worker.front_adapters import FrontAdapters
from prefixmesh.worker.messages import AdapterInfo
from tests.support.servers import eventually


def adapter(name: str, digest: str, *, resident: bool = False) -> AdapterInfo:
    return AdapterInfo(
        name=name,
        digest=digest,
        rank=4,
        size_bytes=100,
        resident=resident,
        pinned=False,
        running_requests=0,
    )


class Engine:
    """Does what it is told when it is let: each command waits for its gate."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.listed: list[AdapterInfo] = []
        self.hold_list = False

    def gate(self, what: str) -> asyncio.Event:
        return self.gates.setdefault(what, asyncio.Event())

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> AdapterInfo:
        self.log.append(f"load {name} {path}")
        if path in self.gates:
            await self.gates[path].wait()
        if path == "broken":
            raise InvalidRequestError("path", "broken")
        return adapter(name, f"digest of {path}")

    async def unload_adapter(self, name: str) -> None:
        self.log.append(f"unload {name}")
        if "unload" in self.gates:
            await self.gates["unload"].wait()

    async def list_adapters(self) -> tuple[AdapterInfo, ...]:
        self.log.append("list")
        if self.hold_list:
            await asyncio.Event().wait()
        return tuple(self.listed)


def front(engine: Engine, *adapters: AdapterInfo) -> FrontAdapters:
    return FrontAdapters(cast(EngineClient, engine), adapters)


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_name_means_its_content_and_no_other_name_means_any() -> None:
    """Names that are known at start count; the base model has the empty one."""
    adapters = front(Engine(), adapter("clerk", "d1"))
    assert adapters.digest_of("clerk") == "d1"
    assert adapters.digest_of("") == ""
    with pytest.raises(InvalidRequestError, match=r"^adapter: no adapter 'x+' is loaded here$") as caught:
        adapters.digest_of("x" * 5000)
    assert len(str(caught.value)) < 150
    assert "clerk" not in str(caught.value)


async def test_a_tickets_content_must_be_the_one_that_is_here() -> None:
    """Every other pair is refused: an adapter's namespace without the adapter, and a name with the base model's."""
    adapters = front(Engine(), adapter("clerk", "d1"))
    adapters.check("clerk", "d1")
    adapters.check("", "")
    for name, digest in (("clerk", "d2"), ("clerk", ""), ("", "d1"), ("other", "d1"), ("other", "")):
        with pytest.raises(AdapterChangedError):
            adapters.check(name, digest)


async def test_loading_under_a_known_name_changes_what_it_means() -> None:
    """Once it has succeeded, and not before; a load that fails leaves the old one."""
    engine = Engine()
    adapters = front(engine, adapter("clerk", "d1"))
    engine.gate("new")
    loading = asyncio.create_task(adapters.load("clerk", "new", pinned=False))
    await settle()
    assert adapters.digest_of("clerk") == "d1"
    engine.gates["new"].set()
    assert (await loading).digest == adapters.digest_of("clerk") == "digest of new"
    with pytest.raises(InvalidRequestError):
        await adapters.load("clerk", "broken", pinned=False)
    assert adapters.digest_of("clerk") == "digest of new"


async def test_unloading_refuses_at_once_and_waits_for_the_end() -> None:
    """Whoever asks again meanwhile waits for the same end, and it is told to the engine once."""
    engine = Engine()
    adapters = front(engine, adapter("clerk", "d1"))
    engine.gate("unload")
    first = asyncio.create_task(adapters.unload("clerk"))
    await settle()
    with pytest.raises(InvalidRequestError):
        adapters.digest_of("clerk")
    second = asyncio.create_task(adapters.unload("clerk"))
    await settle()
    assert not first.done()
    assert not second.done()
    engine.gates["unload"].set()
    await asyncio.gather(first, second)
    assert engine.log == ["unload clerk"]
    with pytest.raises(NotFoundError):
        await adapters.unload("clerk")


async def test_a_name_can_be_given_anew_while_requests_of_the_old_one_run() -> None:
    """The load does not wait for the unload's end, and the unload's end does not take the new one away."""
    engine = Engine()
    adapters = front(engine, adapter("clerk", "d1"))
    engine.gate("unload")
    unloading = asyncio.create_task(adapters.unload("clerk"))
    await settle()
    await adapters.load("clerk", "new", pinned=False)
    engine.gates["unload"].set()
    await unloading
    assert adapters.digest_of("clerk") == "digest of new"


async def test_changes_of_one_name_keep_their_order_and_others_do_not_wait() -> None:
    """A load that takes long, an unload after it: the name is gone in the end. Another name is loaded meanwhile."""
    engine = Engine()
    adapters = front(engine)
    engine.gate("slow")
    loading = asyncio.create_task(adapters.load("clerk", "slow", pinned=False))
    await settle()
    unloading = asyncio.create_task(adapters.unload("clerk"))
    await adapters.load("poet", "quick", pinned=False)
    engine.gates["slow"].set()
    await asyncio.gather(loading, unloading)
    assert engine.log == ["load clerk slow", "load poet quick", "unload clerk"]
    assert adapters.names() == ["poet"]


async def test_a_change_goes_on_when_its_caller_leaves() -> None:
    """A deadline that passes must not leave the front believing something else than the engine."""
    engine = Engine()
    adapters = front(engine, adapter("poet", "d2"))
    engine.gate("slow")
    engine.gate("unload")
    calls = [
        asyncio.create_task(adapters.load("clerk", "slow", pinned=False)),
        asyncio.create_task(adapters.unload("poet")),
    ]
    await settle()
    for call in calls:
        call.cancel()
    await settle()
    engine.gates["slow"].set()
    engine.gates["unload"].set()
    await eventually(lambda: adapters.names() == ["clerk"])
    with pytest.raises(NotFoundError):
        await adapters.unload("poet")


async def test_more_changes_than_may_wait_are_refused_and_the_room_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever asked may have left long ago, so callers do not bound them. A refused change is not begun later."""
    monkeypatch.setattr("prefixmesh.worker.front_adapters.MAX_CHANGES", 3)
    engine = Engine()
    adapters = front(engine, adapter("poet", "d2"))
    engine.gate("slow")
    loads = [asyncio.create_task(adapters.load(f"clerk-{i}", "slow", pinned=False)) for i in range(3)]
    await settle()
    with pytest.raises(OverloadedError, match=r"^3 adapters are being loaded or unloaded already"):
        await adapters.load("late", "quick", pinned=False)
    with pytest.raises(OverloadedError):
        await adapters.unload("poet")
    engine.gates["slow"].set()
    await asyncio.gather(*loads)
    assert adapters.names() == ["clerk-0", "clerk-1", "clerk-2", "poet"]
    await adapters.load("late", "quick", pinned=False)
    assert engine.log.count("load late quick") == 1


async def test_describing_does_not_wait_for_a_busy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and contents are known here; of the weights' state the last word counts."""
    monkeypatch.setattr("prefixmesh.worker.front_adapters.STATE_WAIT_S", 0.01)
    engine = Engine()
    adapters = front(engine, adapter("clerk", "d1"), adapter("poet", "d2"))
    engine.listed = [adapter("clerk", "d1", resident=True), adapter("poet", "other", resident=True)]
    clerk, poet = await adapters.recent()
    assert clerk.resident
    assert (poet.digest, poet.resident) == ("d2", False), "told of a content that is not here any more"
    engine.hold_list = True
    engine.listed = []
    assert [one.name for one in await adapters.recent()] == ["clerk", "poet"]
    assert [one.name for one in await adapters.recent()] == ["clerk", "poet"]
    assert engine.log == ["list", "list"], "one question at a time"


async def test_without_adapters_the_engine_is_not_asked() -> None:
    """Describe costs what it cost."""
    engine = Engine()
    assert await front(engine).recent() == []
    assert engine.log == []
