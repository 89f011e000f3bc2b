"""Turns on the loop: one at a time, in their order, and as long a pause after each as it took."""

import asyncio

import pytest

from prefixmesh.router.pins.paced_turns import PacedTurns


class Pace:
    """Turns by a clock that only work and pauses move on."""

    def __init__(self) -> None:
        self.now = 100.0
        self.told: list[tuple[str, float]] = []
        self.turns = PacedTurns(lambda: self.now, self._sleep)

    async def work(self, name: str, took_s: float) -> None:
        async with self.turns.turn():
            self.told.append((name, round(self.now - 100.0, 6)))
            await asyncio.sleep(0)
            self.now += took_s

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.now += seconds


async def test_turns_follow_each_other_with_a_pause_as_long_as_the_last_one() -> None:
    pace = Pace()
    await asyncio.gather(pace.work("a", 0.02), pace.work("b", 0.03), pace.work("c", 0.0))
    assert pace.told == [("a", 0.0), ("b", 0.04), ("c", 0.1)]


async def test_who_comes_later_than_the_pause_waits_for_nothing_and_a_long_turn_has_a_short_pause() -> None:
    pace = Pace()
    await pace.work("a", 0.02)
    pace.now += 1.0
    await pace.work("long", 5.0)
    await pace.work("after", 0.0)
    assert pace.told == [("a", 0.0), ("long", 1.02), ("after", 6.12)]


async def test_turn_that_fails_or_is_given_up_is_over() -> None:
    pace = Pace()
    with pytest.raises(ValueError, match="no"):
        async with pace.turns.turn():
            raise ValueError("no")
    entered = asyncio.Event()

    async def hold() -> None:
        async with pace.turns.turn():
            entered.set()
            await asyncio.Event().wait()

    holding = asyncio.create_task(hold())
    await entered.wait()
    waiting = asyncio.create_task(pace.work("given up", 1.0))
    last = asyncio.create_task(pace.work("last", 0.0))
    await asyncio.sleep(0)
    waiting.cancel()
    holding.cancel()
    await last
    assert [name for name, _ in pace.told] == ["last"]
