"""A fleet's loop between what dies and what is started: Ray is a stand-in here, the real one is in ``tests/cluster``."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from prefixmesh.errors import UnavailableError
from prefixmesh.fleet import fleet as fleet_module
from prefixmesh.fleet.events import FleetEvent
from prefixmesh.fleet.fleet import Fleet
from prefixmesh.fleet.launcher import ROUTER, LifeKey, first_line
from prefixmesh.fleet.plan import ClusterView, FleetRequest, NodeView, WorkerPlan, plan_fleet
from prefixmesh.fleet.record import decode_parts, encode_parts, living_actors, part_states, shift
from prefixmesh.fleet.supervision import NEVER, Part
from prefixmesh.fleet_secret import generate

SOON_S = 10.0


class FakeLauncher:
    """Lives that serve at once, or fail to, and end when a test says so."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.ends: dict[LifeKey, asyncio.Future[str]] = {}
        self.made: list[LifeKey] = []
        self.problems: list[str] = []
        self.started_routers: list[tuple[int, tuple[str, ...], int | None]] = []
        self.standbys: list[int] = []
        self.routed: list[tuple[int, tuple[str, ...]]] = []
        self.left: set[LifeKey] = set()

    @property
    def lives(self) -> tuple[LifeKey, ...]:
        return tuple(self.ends)

    def find(self, part: str, life: int) -> bool:
        if (part, life) not in self.left:
            return False
        self.ends[part, life] = asyncio.get_running_loop().create_future()
        return True

    async def start_worker(self, worker: WorkerPlan, life: int) -> Any:
        if self.problems:
            raise UnavailableError(self.problems.pop())
        self._begin(worker.config.worker_id, life)
        return SimpleNamespace(address=f"{worker.config.worker_id}:{life}")

    async def prepare_router(self, life: int) -> None:
        self.standbys.append(life)
        self._begin(ROUTER, life)

    async def start_router(
        self, life: int, addresses: Sequence[str], port: int | None, meet_workers_s: float
    ) -> Any:
        self.started_routers.append((life, tuple(addresses), port))
        self._begin(ROUTER, life)
        return SimpleNamespace(address=f"router:{port or 7}")

    async def wait_ended(self, part: str, life: int) -> str:
        return await self.ends[part, life]

    async def route_to(self, life: int, addresses: Sequence[str]) -> None:
        self.routed.append((life, tuple(addresses)))

    async def stop(self, lives: Sequence[LifeKey], grace_s: float) -> None:
        for key in lives:
            self.end(*key)

    def end(self, part: str, life: int) -> None:
        ended = self.ends.pop((part, life), None)
        if ended is not None and not ended.done():
            ended.set_result("ended by its fleet")

    def kill(self, part: str, life: int) -> None:
        self.ends[part, life].set_result("killed")

    def _begin(self, part: str, life: int) -> None:
        if (part, life) not in self.ends:  # a standby that is found, or serves
            assert all(made < life for name, made in self.made if name == part), "a number used twice"
            self.made.append((part, life))
            self.ends[part, life] = asyncio.get_running_loop().create_future()


class Kept:
    """A fleet of two workers, and what it told."""

    def __init__(self, **settings: Any) -> None:
        self.events: list[FleetEvent] = []
        self.notes: list[bytes] = []
        request = FleetRequest(workers=2, **settings)
        plan = plan_fleet(request, ClusterView(nodes=(NodeView(cpus=2, gpus=0),)))
        session: Any = SimpleNamespace(ray=None)
        self.fleet = Fleet(
            plan, session, generate(), self.events.append, home_node="here", on_change=self.note
        )
        launcher: Any = self.fleet._launcher
        self.ray: FakeLauncher = launcher

    def note(self) -> None:
        self.notes.append(encode_parts(self.fleet.parts))

    def part(self, name: str) -> Part:
        return next(part for part in self.fleet.parts if part.name == name)

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON_S):
            while not is_so():  # noqa: ASYNC110  what a fleet has come to is plain state, without news
                await asyncio.sleep(0)

    async def until_serving(self, name: str, life: int) -> None:
        await self.until(lambda: (self.part(name).life, self.part(name).phase) == (life, "serving"))


@pytest.fixture
async def kept(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kept]:
    """A fleet that is up and looked after."""
    monkeypatch.setattr(fleet_module, "Launcher", FakeLauncher)
    kept = Kept(max_restarts=1)
    await kept.fleet.start()
    supervising = asyncio.create_task(kept.fleet.supervise())
    yield kept
    supervising.cancel()
    await asyncio.wait({supervising})
    await kept.fleet.stop(0.0)
    assert kept.ray.lives == ()


async def test_the_router_is_told_of_a_workers_death_and_of_its_next_life(kept: Kept) -> None:
    """The whole list each time; the life that is over is ended too, whatever is left of it."""
    kept.ray.kill("worker-0", 1)
    await kept.until_serving("worker-0", 2)
    await kept.until(lambda: len(kept.ray.routed) == 3)
    assert kept.ray.routed[1:] == [(1, ("worker-1:1",)), (1, ("worker-0:2", "worker-1:1"))]
    assert ("worker-0", 1) not in kept.ray.lives
    (lost,) = (event for event in kept.events if event.kind == "lost")
    assert (lost.subject, lost.detail, lost.seconds) == ("worker-0", "killed", 0.0)


async def test_the_next_router_is_the_standby_on_the_same_port_with_the_workers_of_now(kept: Kept) -> None:
    """Another stands by for it."""
    await kept.until(lambda: kept.ray.standbys == [2])
    kept.ray.kill("worker-0", 1)
    await kept.until_serving("worker-0", 2)
    kept.ray.kill(ROUTER, 1)
    await kept.until_serving(ROUTER, 2)
    assert kept.ray.started_routers[-1] == (2, ("worker-0:2", "worker-1:1"), 7)
    await kept.until(lambda: kept.ray.standbys == [2, 3])
    assert kept.ray.routed[-1] == (2, ("worker-0:2", "worker-1:1"))


async def test_a_standby_that_dies_is_replaced_and_its_router_serves_on(kept: Kept) -> None:
    """Nobody is told of it: nothing is lost."""
    await kept.until(lambda: (ROUTER, 2) in kept.ray.lives)
    kept.ray.kill(ROUTER, 2)
    await kept.until(lambda: (ROUTER, 2) not in kept.ray.lives)
    assert (kept.part(ROUTER).life, kept.part(ROUTER).phase) == (1, "serving")
    assert [event.kind for event in kept.events] == []


async def test_what_is_given_up_is_told_and_tried_again_when_somebody_asks(kept: Kept) -> None:
    """The other worker serves on meanwhile."""
    kept.ray.problems = ["no room", "no room"]
    kept.ray.kill("worker-0", 1)
    await kept.until(lambda: kept.part("worker-0").phase == "given_up")
    kept.ray.problems = []
    (told,) = (event for event in kept.events if event.kind == "given_up")
    assert told.detail == "given up after 1 restarts in a row: no room"
    assert kept.part("worker-1").phase == "serving"
    kept.fleet.revive()
    await kept.until_serving("worker-0", 3)


async def test_a_fleet_of_which_everything_is_given_up_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not before."""
    monkeypatch.setattr(fleet_module, "Launcher", FakeLauncher)
    kept = Kept(max_restarts=0, standby_router=False)
    await kept.fleet.start()
    supervising = asyncio.create_task(kept.fleet.supervise())
    for name in ("worker-0", "worker-1"):
        kept.ray.kill(name, 1)
    await kept.until(lambda: all(kept.part(name).phase == "given_up" for name in ("worker-0", "worker-1")))
    assert not supervising.done()
    kept.ray.kill(ROUTER, 1)
    async with asyncio.timeout(SOON_S):
        await supervising


async def test_an_interrupted_supervisor_goes_on_from_its_note(kept: Kept) -> None:
    """What lives is watched on, what died unseen or was starting is begun anew, each as a life that no earlier one was."""
    kept.ray.kill("worker-0", 1)
    await kept.until_serving("worker-0", 2)
    noted = list(decode_parts(kept.notes[-1]))
    starting = next(part for part in noted if part.name == "worker-1")
    starting.phase, starting.address = "starting", ""

    again = Kept(max_restarts=2)
    again.ray.left = {(ROUTER, 1), (ROUTER, 2), ("worker-0", 2), ("worker-1", 1)}
    again.fleet.resume(noted)
    supervising = asyncio.create_task(again.fleet.supervise())
    await again.until_serving("worker-1", 2)
    assert [(part.name, part.life) for part in again.fleet.parts] == [
        (ROUTER, 1),
        ("worker-0", 2),
        ("worker-1", 2),
    ]
    assert ("worker-1", 1) not in again.ray.lives, "a life that was starting is ended"
    assert (again.ray.standbys, again.ray.made[:1]) == ([2], [("worker-1", 2)]), "the standby was found"
    assert again.ray.routed[0] == (1, ("worker-0:2",)), "what it may not have told any more is told again"
    again.ray.kill("worker-0", 2)
    await again.until_serving("worker-0", 3)
    assert again.part("worker-0").in_a_row == 2, "what an earlier supervisor counted is not forgotten"
    supervising.cancel()
    await asyncio.wait({supervising})
    await again.fleet.stop(0.0)


def test_a_record_keeps_times_across_clocks_and_names_the_living_actors() -> None:
    """A standby has an actor too; what waits or is given up has none."""
    parts = [
        Part("worker-0", "worker", phase="waiting", life=3, since=5.0, due=7.0, reason="killed", restarts=2),
        Part(ROUTER, "router", life=4, address="r:1", standby=5, newest=5),
    ]
    moved = decode_parts(encode_parts(shift(parts, 100.0)))
    assert (moved[0].since, moved[0].due, moved[0].standby_due) == (105.0, 107.0, NEVER)
    assert shift(moved, -100.0) == tuple(parts)
    assert living_actors(parts) == ("router.4", "router.5")
    router, worker = part_states(parts)
    assert (router.name, router.actor, worker.actor) == (ROUTER, "router.4", "")
    assert (worker.phase, worker.life, worker.restarts, worker.reason) == ("waiting", 3, 2, "killed")


def test_what_ray_reports_of_a_death_is_told_in_a_few_words() -> None:
    """Its own texts go on for a dozen sentences; an error of ours is told as it is."""
    head = "The actor died unexpectedly before finishing this task.\n\tclass_name: WorkerActor\n"
    killed = f"{head}The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: ..."
    gone = f"{head}The actor died because its node has died. Node Id: 12ab\n\tthe actor's node was terminated"
    other = f"{head}The actor is dead because it was killed by `ray.kill`. Good bye."
    assert [first_line(RuntimeError(text)) for text in (killed, gone, other, "")] == [
        "its process died",
        "its node died",
        "The actor is dead because it was killed by `ray.kill`",
        "RuntimeError",
    ]
    ours = RuntimeError("a trace")
    ours.cause = UnavailableError("the engine ended")  # type: ignore[attr-defined]
    assert first_line(ours) == "the engine ended"
