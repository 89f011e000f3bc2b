"""What a warming asks its engine, time and again, while a pin comes to the host: of its own pin alone, however many there are."""

from collections.abc import Callable

import pytest

from prefixmesh.cache.tier import Tier
from prefixmesh.worker.prefix_messages import (
    KvWritten,
    ListPins,
    PinInfo,
    PinPrefix,
    PrefixAnswer,
    PrefixCommand,
)
from prefixmesh.worker.running_calls import RunningCalls
from prefixmesh.worker.warm_order import PinOrder, WarmOrder
from prefixmesh.worker.warming import Warming
from tests.support.kv_copying import name_of

pytestmark = pytest.mark.asyncio(loop_scope="function")

TOKENS = list(range(20))


class ManyPins:
    """Of ``EngineClient`` what a warming uses whose KV is on both tiers already."""

    def __init__(self) -> None:
        self.looks: list[str] = []

    async def ask_prefix(self, make: Callable[[int], PrefixCommand]) -> PrefixAnswer:
        match make(1):
            case PinPrefix():
                return PrefixAnswer(question=1, made=True)
            case ListPins(pin_id=pin_id):
                self.looks.append(pin_id)
                held = len(TOKENS)
                pin = PinInfo(pin_id="p", owner="acme", tier=1, pages=1, held_tokens=held, missing_tokens=0)
                return PrefixAnswer(question=1, pins=(pin,))
            case _:
                return PrefixAnswer(question=1, written=KvWritten(held_tokens=len(TOKENS)))


async def test_a_warming_looks_at_its_own_pin_alone() -> None:
    engine = ManyPins()
    warming = Warming(
        engine=engine,  # type: ignore[arg-type]
        adapters=object(),  # type: ignore[arg-type]
        calls=RunningCalls(4, queue_limit=4),
    )
    pin = PinOrder(pin_id="p", owner="acme", tier=Tier.HOST, ttl_s=0.0)
    order = WarmOrder(prefix=name_of(TOKENS), adapter_digest="", pin=pin, sources=(), copy_only=True)
    assert (await warming.warm(order, None)).held_tokens == len(TOKENS)
    assert set(engine.looks) == {"p"}
