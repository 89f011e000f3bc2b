"""What signals do to a fleet that starts or stops, and what one that was killed left. Fleets here are stand-ins; the real ones are in ``tests/cluster``."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from prefixmesh import fleet_state
from prefixmesh.errors import ConfigError
from prefixmesh.fleet import keeper
from prefixmesh.fleet.fleet import Endpoints
from prefixmesh.fleet.hold import find_fleet
from prefixmesh.fleet.keeper import StopSignals, start_unless_asked_to_stop, stop_unless_forced
from prefixmesh.fleet.plan import FleetRequest
from prefixmesh.fleet_state import FleetState

ENDPOINTS = Endpoints(router="127.0.0.1:1", workers={})
REQUEST = FleetRequest()
LEFT = FleetState(
    router="127.0.0.1:1",
    workers={},
    model="m",
    ray_address="h:1",
    ray_namespace="n",
    actor_names=(),
    started_ray=True,
    pid=1,
)


class StandIn:
    """A fleet whose start and stop take until they are let."""

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.was_cut_short = False

    async def start(self) -> Endpoints:
        await self._take()
        return ENDPOINTS

    async def stop(self, grace_s: float) -> None:
        await self._take()

    async def _take(self) -> None:
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.was_cut_short = True
            raise


async def test_a_fleet_that_comes_up_tells_where() -> None:
    """Without a signal."""
    fleet: Any = StandIn()
    fleet.let.set()
    assert await start_unless_asked_to_stop(fleet, StopSignals()) == ENDPOINTS


async def test_a_signal_while_starting_ends_the_start() -> None:
    """As an interrupt, which also ends the command."""
    fleet: Any = StandIn()
    signals = StopSignals()
    asyncio.get_running_loop().call_soon(signals.take)
    with pytest.raises(KeyboardInterrupt):
        await start_unless_asked_to_stop(fleet, signals)
    assert fleet.was_cut_short


async def test_the_first_signal_leaves_the_stop_its_time_and_the_second_does_not() -> None:
    """So that a second Ctrl-C never waits."""
    fleet: Any = StandIn()
    signals = StopSignals()
    signals.asked.set()
    stopping = asyncio.create_task(stop_unless_forced(fleet, signals, grace_s=30.0))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not stopping.done()
    signals.forced.set()
    await stopping
    assert fleet.was_cut_short


async def test_the_second_signal_is_the_one_that_forces() -> None:
    """One is a wish, two are an order."""
    signals = StopSignals()
    signals.take()
    assert (signals.asked.is_set(), signals.forced.is_set()) == (True, False)
    signals.take()
    assert signals.forced.is_set()


def test_what_a_killed_keeper_left_does_not_pass_for_the_fleet_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts are gone, and who asks to revive them would send a signal that kills a process which does not listen for it yet."""
    monkeypatch.setenv("PREFIXMESH_HOME", str(tmp_path))
    fleet_state.save(LEFT)
    seen: list[object] = []

    def look(*_: object) -> FleetRequest:
        seen.append(find_fleet())
        raise ConfigError("far enough")

    monkeypatch.setattr(keeper, "check_request", look)
    with pytest.raises(ConfigError, match="far enough"):
        keeper.keep_fleet(REQUEST, lambda _: None, 0.0)
    assert seen == [None]
    fleet_state.save(dataclasses.replace(LEFT, supervisor="supervisor"))
    with pytest.raises(ConfigError, match="already up"):
        keeper.keep_fleet(REQUEST, lambda _: None, 0.0)
    assert fleet_state.load().supervisor == "supervisor"
