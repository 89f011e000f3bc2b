"""Carries out a plan on Ray: starts the actors together, watches them, and stops them together.

A thin shell: what to start was decided in ``prefixmesh.fleet.plan``. The actors belong to this process, so Ray ends them when
it dies, however it dies.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from prefixmesh.errors import ConfigError, ModelFileError, PrefixmeshError, UnavailableError
from prefixmesh.fleet.events import FleetEvent, Report
from prefixmesh.fleet.plan import FleetPlan, WorkerPlan
from prefixmesh.fleet.ray_session import RaySession
from prefixmesh.fleet_secret import FleetSecret

ROUTER: Final = "router"
_STOP_SLACK_S: Final = 5.0
"""How much longer than its grace an actor may take to stop before it is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoints:
    """Where a fleet that is up listens."""

    router: str
    workers: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """A part of the fleet that ended by itself."""

    subject: str
    problem: str


class Fleet:
    """One fleet: start it once, stop it once."""

    def __init__(self, plan: FleetPlan, session: RaySession, secret: FleetSecret, report: Report) -> None:
        self._plan = plan
        self._session = session
        self._ray: Any = session.ray
        self._secret = secret
        self._report = report
        self._actors: dict[str, Any] = {}
        self._watchers: dict[asyncio.Task[None], str] = {}
        self.namespace: Final = f"prefixmesh-{secrets.token_hex(4)}"
        """Ray namespace of the actors: fleets that share a cluster never meet."""

    def __repr__(self) -> str:
        return f"Fleet({self.namespace}: {', '.join(self._actors) or 'nothing started'})"

    @property
    def actor_names(self) -> tuple[str, ...]:
        """Names of the actors in ``namespace``."""
        return tuple(self._actors)

    def actor(self, name: str) -> Any:
        """The handle of one actor."""
        return self._actors[name]

    async def start(self) -> Endpoints:
        """Start all workers at once, then the router; raises the first failure, after which ``stop`` is due.

        It names the part and its problem in one line: ConfigError or ModelFileError for what the user must change, else UnavailableError.
        """
        starting = [asyncio.create_task(self._start_worker(worker)) for worker in self._plan.workers]
        try:
            addresses = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            raise
        router = await self._start_router(addresses)
        names = (worker.config.worker_id for worker in self._plan.workers)
        return Endpoints(router=router, workers=dict(zip(names, addresses, strict=True)))

    async def wait_lost(self) -> Lost:
        """Wait until a part that was up ends, and say which; each part is told of once."""
        done, _ = await asyncio.wait(self._watchers, return_when=asyncio.FIRST_COMPLETED)
        task = done.pop()
        subject = self._watchers.pop(task)
        error = task.exception()
        return Lost(subject=subject, problem=_first_line(error) if error else "its server ended")

    async def stop(self, grace_s: float) -> None:
        """Finish what runs within ``grace_s`` seconds and end every actor: the router first, so that nothing new arrives."""
        watchers = self._unwatch()
        await self._stop_actors([name for name in self._actors if name == ROUTER], grace_s)
        await self._stop_actors(list(self._actors), grace_s)
        if watchers:
            await asyncio.wait(watchers, timeout=_STOP_SLACK_S)

    def kill(self) -> None:
        """End every actor now."""
        self._unwatch()
        for name in list(self._actors):
            self._kill(name)

    async def _start_worker(self, worker: WorkerPlan) -> str:
        from prefixmesh.fleet.actors import WorkerActor

        options: dict[str, object] = {"num_cpus": worker.num_cpus, "num_gpus": worker.num_gpus}
        if worker.bind == "node":
            options["scheduling_strategy"] = "SPREAD"
        needs = f"{worker.num_gpus:g} GPU" if worker.num_gpus else f"{worker.num_cpus:g} CPU"
        arguments = (worker.config, self._secret.raw, worker.bind)
        return await self._start(worker.config.worker_id, WorkerActor, arguments, options, needs)

    async def _start_router(self, addresses: Sequence[str]) -> str:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from prefixmesh.fleet.actors import RouterActor

        # On the node of the one who called, so that a router on loopback is of use to him.
        here = NodeAffinitySchedulingStrategy(self._ray.get_runtime_context().get_node_id(), soft=False)
        arguments = (self._plan.router_config(addresses), self._secret.raw)
        return await self._start(
            ROUTER, RouterActor, arguments, {"num_cpus": 0, "scheduling_strategy": here}, "no resources"
        )

    async def _start(
        self, name: str, kind: type, arguments: tuple[object, ...], options: Mapping[str, object], needs: str
    ) -> str:
        """Start one actor and its server; its address. The failures of Ray and of the server become one line."""
        began, timeout_s = time.monotonic(), self._plan.request.start_timeout_s
        self._report(FleetEvent(kind="starting", subject=name))
        actor = (
            self._ray.remote(kind).options(name=name, namespace=self.namespace, **options).remote(*arguments)
        )
        self._actors[name] = actor
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await _get(actor.ping.remote())
                self._report(FleetEvent(kind="loading", subject=name))
                outcome = await _get(actor.start.remote())
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise UnavailableError(
                f"{name} was not ready after {timeout_s:g} s: it needs {needs}, and the cluster has {self._resources()}"
            ) from error
        except self._ray.exceptions.RayError as error:
            raise UnavailableError(f"{name} could not start: {_first_line(error)}") from error
        problem: str | None = getattr(outcome, "problem", None)
        if problem is not None:
            raise start_error(outcome.reason, f"{name} could not start: {problem}")
        self._watchers[asyncio.create_task(_get(actor.wait_closed.remote()))] = name
        address = str(outcome.address)
        ready = FleetEvent(
            kind="ready",
            subject=name,
            detail=address,
            memory_sums=outcome.memory_sums,
            seconds=time.monotonic() - began,
        )
        self._report(ready)
        return address

    async def _stop_actors(self, names: Sequence[str], grace_s: float) -> None:
        async def stop(name: str) -> None:
            with suppress(self._ray.exceptions.RayError, PrefixmeshError, TimeoutError):
                async with asyncio.timeout(grace_s + _STOP_SLACK_S):
                    await _get(self._actors[name].stop.remote(grace_s))
            self._kill(name)

        await asyncio.gather(*(stop(name) for name in names))

    def _kill(self, name: str) -> None:
        self._ray.kill(self._actors.pop(name), no_restart=True)

    def _unwatch(self) -> list[asyncio.Task[None]]:
        """Take the end of any part for what was wanted. The tasks end with their actors: Ray's client logs a trace when cancelled."""
        watchers = list(self._watchers)
        self._watchers.clear()
        for task in watchers:
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return watchers

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


async def _get(reference: Awaitable[Any]) -> Any:
    return await reference


def _first_line(error: BaseException) -> str:
    """The telling line of one of Ray's errors, whose texts are reports of many lines."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, PrefixmeshError):
        return str(cause)
    if isinstance(cause, Exception):
        return f"{type(cause).__name__}: {cause}".splitlines()[0]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    dead = [line for line in lines if line.startswith("The actor")]
    return (dead or lines or [type(error).__name__])[-1]
