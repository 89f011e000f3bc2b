"""Ray's side of the lives of a fleet's parts: actors with their names, nodes and resources, asked to serve, and ended.

It decides nothing: which life starts when is ``prefixmesh.fleet.supervision``'s matter, the node of each is Ray's within the resources of
``prefixmesh.fleet.plan``. What Ray and the servers fail with becomes one line here.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any, Final

from prefixmesh.errors import ConfigError, ModelFileError, PrefixmeshError, UnavailableError
from prefixmesh.fleet.events import FleetEvent, Report
from prefixmesh.fleet.plan import FleetPlan, WorkerPlan
from prefixmesh.fleet.ray_session import RaySession
from prefixmesh.fleet_secret import FleetSecret

ROUTER: Final = "router"

STOP_SLACK_S: Final = 5.0
"""How much longer than its grace an actor may take to stop before it is killed."""

MEET_WORKERS_S: Final = 20.0
"""The workers serve already when the first router starts; a busy machine may take seconds to connect to them."""

_DEATHS: Final = (
    ("its worker process has died", "its process died"),  # Ray's "worker" is any process of its own
    ("its node has died", "its node died"),
)
"""What matters of Ray's most frequent reports, which say the rest in a dozen sentences of guesses."""

LifeKey = tuple[str, int]
"""A part's name and the number of one of its lives."""


def actor_name(part: str, life: int) -> str:
    """Each life has a name of its own: Ray keeps a dead actor's for a while."""
    return f"{part}.{life}"


class Launcher:
    """The actors of one fleet, by part and life. Not a judge of their number: it starts what it is told to."""

    def __init__(
        self,
        plan: FleetPlan,
        session: RaySession,
        secret: FleetSecret,
        report: Report,
        *,
        namespace: str,
        home_node: str,
        is_detached: bool,
    ) -> None:
        """``home_node`` is Ray's id of the node that a router on loopback is of use to. Actors that are not detached end with the process
        that made them, however it ends."""
        self._plan, self._session, self._secret, self._report = plan, session, secret, report
        self._ray: Any = session.ray
        self._namespace, self._home_node, self._is_detached = namespace, home_node, is_detached
        self._actors: dict[LifeKey, Any] = {}

    @property
    def lives(self) -> tuple[LifeKey, ...]:
        """Those whose actors exist."""
        return tuple(self._actors)

    def find(self, part: str, life: int) -> bool:
        """Take over an actor that an earlier process made; False when there is none any more."""
        try:
            self._actors[part, life] = self._ray.get_actor(actor_name(part, life), namespace=self._namespace)
        except ValueError:
            return False
        return True

    async def start_worker(self, worker: WorkerPlan, life: int) -> Any:
        """Make the actor of one life, and have it serve: its ``Serving``. Raises PrefixmeshError, in one line that names the part."""
        name = worker.config.worker_id
        cpus = self._plan.cpus_now(worker, self._session.view())
        options: dict[str, object] = {"num_cpus": cpus, "num_gpus": worker.num_gpus}
        # A worker on loopback is of use only where the router is.
        options["scheduling_strategy"] = "SPREAD" if worker.bind == "node" else self._at_home()
        needs = f"{worker.num_gpus:g} GPU" if worker.num_gpus else f"{cpus:g} CPU"

        async def serve() -> Any:
            from prefixmesh.fleet.actors import WorkerActor

            self._report(FleetEvent(kind="starting", subject=name))
            arguments = (worker.config, self._secret.raw, worker.bind)
            actor = self._make(WorkerActor, (name, life), arguments, options)
            await get(actor.ping.remote())
            self._report(FleetEvent(kind="loading", subject=name))
            return await get(actor.start.remote())

        return await self._in_time(name, serve(), needs)

    async def prepare_router(self, life: int) -> None:
        """Have a router stand by, whose actor is made unless it was found. Raises as ``start_worker``."""

        async def prepare() -> Any:
            return await get(self._router(life).prepare.remote())

        await self._in_time(ROUTER, prepare(), "no resources", is_told=False)

    async def start_router(
        self, life: int, addresses: Sequence[str], port: int | None, meet_workers_s: float
    ) -> Any:
        """Have a router serve, whose actor is made unless it stands by: its ``Serving``. Raises as ``start_worker``."""
        config = self._plan.request.router_config(addresses, port)

        async def serve() -> Any:
            self._report(FleetEvent(kind="starting", subject=ROUTER))
            actor = self._router(life)
            await get(actor.ping.remote())
            self._report(FleetEvent(kind="loading", subject=ROUTER))
            return await get(actor.start.remote(config, meet_workers_s))

        return await self._in_time(ROUTER, serve(), "no resources")

    async def wait_ended(self, part: str, life: int) -> str:
        """Wait until a life ends, and say why."""
        actor = self._actors.get((part, life))
        if actor is None:
            return "it was ended"
        try:
            await get(actor.wait_closed.remote())
        except self._ray.exceptions.RayError as error:
            return first_line(error)
        return "its server ended"

    async def route_to(self, life: int, addresses: Sequence[str]) -> None:
        """Tell a router which workers there are. One that dies meanwhile is told when its next life serves."""
        actor = self._actors.get((ROUTER, life))
        if actor is not None:
            with suppress(self._ray.exceptions.RayError):
                await get(actor.route_to.remote(tuple(addresses)))

    async def stop(self, lives: Sequence[LifeKey], grace_s: float) -> None:
        """Have these finish what runs within ``grace_s`` seconds, all at once, and end them."""

        async def stop(key: LifeKey) -> None:
            with suppress(self._ray.exceptions.RayError, PrefixmeshError, TimeoutError):
                async with asyncio.timeout(grace_s + STOP_SLACK_S):
                    await get(self._actors[key].stop.remote(grace_s))
            self.end(*key)

        await asyncio.gather(*(stop(key) for key in lives))

    def end(self, part: str, life: int) -> None:
        """End a life now; nothing happens when it is over."""
        actor = self._actors.pop((part, life), None)
        if actor is not None:
            self._ray.kill(actor, no_restart=True)

    def _router(self, life: int) -> Any:
        """The one that stands by, else a new one."""
        if (ROUTER, life) in self._actors:
            return self._actors[ROUTER, life]
        from prefixmesh.fleet.actors import RouterActor

        addresses = [f"{ROUTER}:1"]  # told when it starts to serve
        arguments = (self._plan.request.router_config(addresses), self._secret.raw)
        options = {"num_cpus": 0, "scheduling_strategy": self._at_home()}
        return self._make(RouterActor, (ROUTER, life), arguments, options)

    def _make(
        self, kind: type, key: LifeKey, arguments: tuple[object, ...], options: dict[str, object]
    ) -> Any:
        if self._is_detached:
            options["lifetime"] = "detached"
        named = self._ray.remote(kind).options(
            name=actor_name(*key), namespace=self._namespace, max_restarts=0, **options
        )
        actor = self._actors[key] = named.remote(*arguments)
        return actor

    def _at_home(self) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(self._home_node, soft=False)

    async def _in_time(self, name: str, asking: Awaitable[Any], needs: str, *, is_told: bool = True) -> Any:
        """What a server answers to being started, within the time for that. The failures of Ray and of the server become one line."""
        began, timeout_s = time.monotonic(), self._plan.request.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s) as limit:
                outcome = await asking
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise UnavailableError(
                f"{name} was not ready after {timeout_s:g} s: it needs {needs}, and the cluster has {self._resources()}"
            ) from error
        except self._ray.exceptions.RayError as error:
            raise UnavailableError(f"{name} could not start: {first_line(error)}") from error
        problem: str | None = getattr(outcome, "problem", None)
        if problem is not None:
            raise start_error(outcome.reason, f"{name} could not start: {problem}")
        if is_told:
            self._report(
                FleetEvent(
                    kind="ready",
                    subject=name,
                    detail=outcome.address,
                    memory_sums=outcome.memory_sums,
                    seconds=time.monotonic() - began,
                )
            )
        return outcome

    def _resources(self) -> str:
        nodes = self._session.view().nodes
        cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
        return f"{len(nodes)} nodes with {cpus:g} CPUs and {gpus:g} GPUs"


def start_error(reason: str, message: str) -> PrefixmeshError:
    """A failure to start, told across processes by its ``reason``: what the user must change, or that it could not be done."""
    for kind in (ConfigError, ModelFileError):
        if kind.reason == reason:
            return kind(message)
    return UnavailableError(message)


async def get(reference: Awaitable[Any]) -> Any:
    """What a call of an actor answers; makes one of Ray's references a coroutine."""
    return await reference


def first_line(error: BaseException) -> str:
    """The telling sentence of one of Ray's errors, whose texts are reports of many lines."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, PrefixmeshError):
        return str(cause)
    if isinstance(cause, Exception):
        return f"{type(cause).__name__}: {cause}".splitlines()[0]
    text = str(error)
    for ray_says, in_short in _DEATHS:
        if ray_says in text:
            return in_short
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    dead = [line.partition(". ")[0] for line in lines if line.startswith("The actor")]
    return (dead or lines or [type(error).__name__])[-1]
