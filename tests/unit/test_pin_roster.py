"""Which pins a router knows, and what it takes workers to have to hold for each: by the store, and by what adapters' names mean."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import msgspec
import pytest

from prefixmesh.errors import UnavailableError
from prefixmesh.proto.v1 import inference_pb2
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.router.pins import pin_roster
from prefixmesh.router.pins.pin_prompts import PinPrompts
from prefixmesh.router.pins.pin_roster import PinRoster
from prefixmesh.router.pins.records import FORMAT, PinName, PinRecord, encode
from prefixmesh.router.state_memory import MemoryStore
from prefixmesh.router.state_store import Entry
from prefixmesh.tokens import pack
from tests.support.router_kit import tiny_model
from tests.support.servers import eventually

IDS = list(range(100))


def spec(name: str = "a", ids: list[int] = IDS, **fields: object) -> pb.PinSpec:
    prompt = {} if "text" in fields else {"tokens": inference_pb2.TokenPrompt(ids=pack(ids))}
    return pb.PinSpec(name=name, owner="acme", tenant="acme", **prompt, **fields)  # type: ignore[arg-type]


def is_known(roster: PinRoster, store_version: int) -> bool:
    pin = roster.get(PinName("acme", "a"))
    return pin is not None and pin.store_version == store_version


class Setting:
    """A roster, its store, and what the fleet's adapters mean."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.digests: dict[str, str] = {}
        self.prompts = PinPrompts(tiny_model(), namespace_key=b"k" * 32, isolation="tenant", block_size=64)
        self.changes = 0
        self.roster = self.another()

    def another(self) -> PinRoster:
        """As another router has it."""
        return PinRoster(self.store, self.prompts, self.digests.get, self._count)

    async def put(self, wish: pb.PinSpec, generation: int = 1) -> int:
        record = PinRecord(wish, generation, 0)
        return await self.store.put(record.name.key, encode(record)) or -1

    def versions(self) -> dict[str, int]:
        return {wish.key: wish.version.generation for wish in self.roster.wishes(0)}

    def _count(self) -> None:
        self.changes += 1


@pytest.fixture
async def setting() -> AsyncIterator[Setting]:
    made = Setting()
    yield made
    await made.roster.close()
    await made.store.close()


async def test_pins_of_the_store_are_wished_as_they_come_and_go(setting: Setting) -> None:
    """Those that are there before a router begins, and those that another one puts; both take one wish for the same."""
    await setting.put(spec("a"))
    assert not setting.another().is_settled
    setting.roster.start()
    await eventually(lambda: setting.roster.is_settled and len(setting.versions()) == 1)
    await setting.put(spec("b", text="the quick brown fox"))
    await eventually(lambda: set(setting.versions()) == {"pin/acme/a", "pin/acme/b"})
    other = setting.another()
    other.start()
    await eventually(lambda: other.is_settled and len(other.wishes(0)) == 2)
    assert sorted(one.pin_id for one in other.wishes(0)) == sorted(
        one.pin_id for one in setting.roster.wishes(0)
    )
    await other.close()
    changes = setting.changes
    await setting.store.delete(PinName("acme", "a").key)
    await eventually(lambda: set(setting.versions()) == {"pin/acme/b"})
    assert (setting.changes, setting.roster.count_of("acme")) == (changes + 1, 1)


async def test_other_prompt_tier_or_namespace_is_another_version(setting: Setting) -> None:
    """And the same again, however it came about, is the same."""
    setting.roster.start()
    seen = []
    for wish in (
        spec(),
        spec(replicas=3),
        spec(ids=[9, *IDS]),
        spec(tier=1),
        spec(extra_key="k"),
        spec(ids=[*IDS]),
    ):
        version = await setting.put(wish)
        await eventually(partial(is_known, setting.roster, version))
        await eventually(lambda: setting.roster.is_settled)
        seen.append(setting.versions()["pin/acme/a"])
    assert seen[0] == seen[1] == seen[5]
    assert len(set(seen)) == 4


async def test_wish_stays_while_its_next_tokens_are_made(setting: Setting) -> None:
    setting.roster.start()
    await setting.put(spec())
    await eventually(lambda: len(setting.versions()) == 1)
    before = setting.versions()
    made = asyncio.Event()
    real = setting.prompts.tokens

    async def slow(wish: pb.PinSpec) -> bytes:
        await made.wait()
        return await real(wish)

    setting.prompts.tokens = slow  # type: ignore[method-assign,assignment]
    await setting.put(spec(text="the quick brown fox"), 2)
    await eventually(lambda: not setting.roster.is_settled)
    assert setting.versions() == before
    made.set()
    await eventually(lambda: setting.roster.is_settled)
    assert setting.versions() != before


async def test_adapter_that_is_loaded_anew_gives_another_version(setting: Setting) -> None:
    """While nobody has it, what was wished stays; what never was known is not touched on workers."""
    setting.roster.start()
    await setting.put(spec(adapter="clerk"))
    await eventually(lambda: setting.roster.is_settled and len(setting.roster) == 1)
    assert setting.roster.unresolved() == {"pin/acme/a"}
    assert "clerk" in getattr(setting.roster.get(PinName("acme", "a")), "problem", "")
    setting.digests["clerk"] = "d1"
    setting.roster.review()
    first = setting.versions()
    assert len(first) == 1
    setting.digests.clear()
    setting.roster.review()
    assert setting.versions() == first
    setting.digests["clerk"] = "d2"
    setting.roster.review()
    assert len(setting.versions()) == 1
    assert setting.versions() != first


async def test_own_pin_whose_news_came_first_is_wished_at_once(setting: Setting) -> None:
    """Whoever put it has made its tokens: nobody makes them again."""
    wish = spec()
    tokens = await setting.prompts.tokens(wish)
    setting.roster.start()
    version = await setting.put(wish)
    async with setting.prompts._places, setting.prompts._places:  # no others are made meanwhile
        await eventually(lambda: is_known(setting.roster, version))
        known = setting.roster.get(PinName("acme", "a"))
        assert known is not None
        assert known.wish is None
        other = PinRecord(spec(ids=IDS[1:]), 1, 0)
        assert setting.roster.take(other, version, tokens).tokens is None
        assert setting.roster.take(PinRecord(wish, 1, 0), version, tokens) is known
        assert (known.tokens, known.problem) == (tokens, "")
        assert known.wish is not None


async def test_record_that_cannot_be_read_is_left_alone(setting: Setting) -> None:
    """By the other pins, too; once it can be, it is a pin like any."""
    key = PinName("acme", "new").key
    await setting.store.put(key, msgspec.json.encode({"format": FORMAT + 1}))
    await setting.store.put("pins/nonsense", b"?")
    await setting.store.put("pins/acme/b", encode(PinRecord(spec("c"), 1, 0)))
    await setting.put(spec("a"))
    setting.roster.start()
    await eventually(lambda: setting.roster.is_settled and len(setting.versions()) == 1)
    assert setting.roster.unresolved() == {"pin/acme/new", "pin/acme/b"}
    await setting.put(spec("new"))
    await eventually(lambda: "pin/acme/new" in setting.versions())
    assert setting.roster.unresolved() == {"pin/acme/b"}


async def test_pin_that_the_model_cannot_take_says_so(setting: Setting) -> None:
    """As after the fleet's model has changed."""
    await setting.put(spec(ids=[10**6]))
    setting.roster.start()
    await eventually(lambda: setting.roster.is_settled)
    assert "ids must be below" in getattr(setting.roster.get(PinName("acme", "a")), "problem", "")
    assert setting.roster.unresolved() == {"pin/acme/a"}


async def test_private_version_is_never_taken_for_public(setting: Setting) -> None:
    """Of a pin that becomes public, what is still wished is its tenant's until the public one is known."""
    setting.roster.start()
    await setting.put(spec(adapter="clerk"))
    setting.digests["clerk"] = "d1"
    await eventually(lambda: setting.roster.is_settled and len(setting.roster) == 1)
    setting.roster.review()
    private = setting.roster.wishes(0)[0].version
    made = asyncio.Event()

    async def slow(wish: pb.PinSpec) -> bytes:
        await made.wait()
        return pack(IDS)

    setting.prompts.tokens = slow  # type: ignore[method-assign,assignment]
    public = pb.PinSpec(name="a", owner="acme", adapter="clerk", public=True, text="the quick brown fox")
    await setting.put(public, 2)
    await eventually(lambda: not setting.roster.is_settled)
    assert setting.roster.wishes(0)[0].version is private
    assert not setting.roster.public_versions(0)
    made.set()
    await eventually(lambda: setting.roster.is_settled)
    (version,) = setting.roster.public_versions(0)
    assert version.namespace != private.namespace


async def test_store_that_is_gone_is_read_when_it_is_back(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pin_roster, "RETRY_S", 0.01)
    await setting.put(spec())
    asked = 0
    entries = setting.store.entries

    async def sometimes(prefix: str) -> list[Entry]:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise UnavailableError("it is gone")
        return await entries(prefix)

    setting.store.entries = sometimes  # type: ignore[method-assign]
    setting.roster.start()
    await eventually(lambda: setting.roster.is_settled and len(setting.versions()) == 1)
