"""A fleet that ``prefixmesh up`` started on a Ray cluster which this process has joined: its parts, their processes and nodes."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil
import ray

from prefixmesh import fleet_state
from prefixmesh.fleet_state import FleetState, PartState

SOON_S: Final = 90.0
"""Far longer than anything takes on a machine of its own (``benchmarks/supervision.py`` has the figures)."""


class SupervisedFleet:
    """A fleet that is up, by what its holder writes down."""

    def __init__(self, home: Path) -> None:
        self.home = home

    @property
    def state(self) -> FleetState:
        return fleet_state.load(self.home / "fleet.json")

    def part(self, name: str) -> PartState:
        return next(part for part in self.state.parts if part.name == name)

    def actor(self, name: str) -> Any:
        """The actor of a part's present life, or the one that has this name."""
        actors = {part.name: part.actor for part in self.state.parts}
        return ray.get_actor(actors.get(name, name), namespace=self.state.ray_namespace)

    def process(self, name: str) -> psutil.Process:
        return psutil.Process(ray.get(self.actor(name).ping.remote()))

    def node(self, name: str) -> str:
        node: str = ray.get(
            self.actor(name).__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        )
        return node

    def wait_serving(self, name: str, life: int) -> PartState:
        """The part, once a life of at least this number serves."""
        wait_until(lambda: self.part(name).phase == "serving" and self.part(name).life >= life)
        return self.part(name)

    def wait_whole(self) -> None:
        wait_until(lambda: all(part.phase == "serving" for part in self.state.parts))


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
