"""A fleet that an actor looks after, as its holder sees it: the same few calls as ``Fleet``'s, made of a ``SupervisorActor``.

The holder starts the supervisor, listens to it, writes down what it tells, and has it end the fleet. It decides nothing, so that nothing is
lost with it; and while Ray restarts the supervisor, it waits.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from prefixmesh.errors import NotFoundError, UnavailableError
from prefixmesh.fleet.events import FleetEvent, Report
from prefixmesh.fleet.fleet import Endpoints, new_namespace
from prefixmesh.fleet.launcher import STOP_SLACK_S, first_line, get, start_error
from prefixmesh.fleet.plan import FleetPlan
from prefixmesh.fleet.ray_session import RaySession
from prefixmesh.fleet.record import shift
from prefixmesh.fleet.supervision import Part
from prefixmesh.fleet_secret import FleetSecret

SUPERVISOR: Final = "supervisor"
"""The actor's name within its fleet's namespace."""

RESTART_WAIT_S: Final = 60.0
"""How long a supervisor may be away before its fleet counts as lost to the holder: its node dies, is found dead, and another takes over."""

END_WAIT_S: Final = 5.0
"""Ray ends an actor within a moment; one on a node that is just dying is listed for some seconds longer."""

_END_POLL_S: Final = 0.05
_RETRY_S: Final = 0.2


class DetachedFleet:
    """One fleet under a supervisor of its own: ``start`` it once, ``supervise`` it, ``stop`` it once."""

    supervisor = SUPERVISOR

    def __init__(
        self,
        plan: FleetPlan,
        session: RaySession,
        secret: FleetSecret,
        report: Report,
        on_change: Callable[[], None],
    ) -> None:
        self.namespace = new_namespace()
        self._plan, self._session, self._secret = plan, session, secret
        self._ray: Any = session.ray
        self._report, self._on_change = report, on_change
        self._actor: Any = None
        self._parts: tuple[Part, ...] = ()
        self._heard = ("", 0)
        self._has_parts = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """As the supervisor told last."""
        return self._parts

    async def start(self) -> Endpoints:
        """Have a supervisor bring the fleet up; raises what it fails with."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from prefixmesh.fleet.supervisor_actor import SupervisorActor, SupervisorOrder

        home = self._ray.get_runtime_context().get_node_id()
        order = SupervisorOrder(
            plan=self._plan,
            secret=self._secret.raw,
            namespace=self.namespace,
            home_node=home,
            address=self._session.address,
        )
        options = {
            "name": SUPERVISOR,
            "namespace": self.namespace,
            "lifetime": "detached",
            "num_cpus": 0,
            # Beside the router, whose death it must notice soonest; elsewhere when that node is gone.
            "scheduling_strategy": NodeAffinitySchedulingStrategy(home, soft=True),
        }
        self._actor = self._ray.remote(SupervisorActor).options(max_restarts=-1, **options).remote(order)
        self._listening = asyncio.create_task(self._listen())
        try:
            outcome = await get(self._actor.start.remote())
        except self._ray.exceptions.RayError as error:
            raise UnavailableError(f"the supervisor could not start: {first_line(error)}") from error
        problem: str | None = getattr(outcome, "problem", None)
        if problem is not None:
            raise start_error(outcome.reason, problem)
        await self._has_parts.wait()
        endpoints: Endpoints = outcome
        return endpoints

    async def supervise(self) -> None:
        """Listen; returns when everything has been given up. Raises UnavailableError when the supervisor does not come back."""
        assert self._listening is not None, "start() first"
        await asyncio.wait({self._listening})  # which goes on when this is cancelled
        self._listening.result()

    def revive(self) -> None:
        """Have the supervisor try again what was given up."""
        self._actor.revive.remote()

    async def stop(self, grace_s: float) -> None:
        """Have the supervisor end the fleet, and end it too."""
        self._stop_listening()
        await stop_supervised(self._ray, self.namespace, grace_s)
        self._actor = None

    def kill(self) -> None:
        """End every actor of the fleet now, the supervisor first."""
        self._stop_listening()
        if self._actor is not None:
            self._ray.kill(self._actor, no_restart=True)
            self._actor = None
            end_namespace(self._ray, self.namespace)

    def _stop_listening(self) -> None:
        if self._listening is not None:
            self._listening.cancel()

    async def _listen(self) -> None:
        silent_since: float | None = None
        while True:
            try:
                news = await get(self._actor.news.remote(*self._heard))
            except self._ray.exceptions.RayActorError as error:
                now = time.monotonic()
                if silent_since is None:
                    silent_since = now
                    self._report(FleetEvent(kind="lost", subject=SUPERVISOR, detail=first_line(error)))
                if now - silent_since > RESTART_WAIT_S:
                    raise UnavailableError(f"the supervisor is lost: {first_line(error)}") from error
                await asyncio.sleep(_RETRY_S)
                continue
            if silent_since is not None:
                self._report(
                    FleetEvent(kind="ready", subject=SUPERVISOR, seconds=time.monotonic() - silent_since)
                )
                silent_since = None
            self._take(news)
            if news.is_over:
                return

    def _take(self, news: Any) -> None:
        self._heard = (news.teller, news.number)
        self._parts = shift(news.parts, time.monotonic() - time.time())
        if self._parts:
            self._has_parts.set()
            self._on_change()
        for event in news.events:
            self._report(event)


async def stop_supervised(ray: Any, namespace: str, grace_s: float) -> None:
    """Have a fleet's supervisor end it in an orderly way, then end what is left of it; also when no supervisor answers."""
    with suppress(ray.exceptions.RayError, TimeoutError, ValueError):
        async with asyncio.timeout(2 * (grace_s + STOP_SLACK_S)):
            await get(ray.get_actor(SUPERVISOR, namespace=namespace).stop.remote(grace_s))
    end_namespace(ray, namespace)


async def see_supervised(ray: Any, namespace: str) -> tuple[Part, ...]:
    """What a fleet's supervisor sees, by the wall clock. Raises NotFoundError when it is gone, UnavailableError when it does not answer."""
    news = await _ask_supervisor(ray, namespace, lambda actor: actor.news.remote("", 0))
    parts: tuple[Part, ...] = news.parts
    return parts


async def revive_supervised(ray: Any, namespace: str) -> None:
    """Have a fleet's supervisor try again what it gave up. Raises as ``see_supervised``."""
    await _ask_supervisor(ray, namespace, lambda actor: actor.revive.remote())


async def _ask_supervisor(ray: Any, namespace: str, ask: Callable[[Any], Any]) -> Any:
    try:
        async with asyncio.timeout(RESTART_WAIT_S):
            return await get(ask(ray.get_actor(SUPERVISOR, namespace=namespace)))
    except ValueError as error:
        raise NotFoundError(
            "the fleet is gone from its Ray cluster; forget it with: prefixmesh down"
        ) from error
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise UnavailableError(f"the supervisor does not answer: {first_line(error)}") from error


def end_namespace(ray: Any, namespace: str) -> None:
    """End whatever actors still bear names there, the supervisor first, which would start the others again.

    A supervisor may make one more while it is being ended, so this looks again until nothing is left, or for ``END_WAIT_S``.
    """
    deadline = time.monotonic() + END_WAIT_S
    while names := [
        one["name"]
        for one in ray.util.list_named_actors(all_namespaces=True)
        if one["namespace"] == namespace
    ]:
        for name in sorted(names, key=lambda name: name != SUPERVISOR):
            with suppress(ValueError):  # it ended meanwhile
                ray.kill(ray.get_actor(name, namespace=namespace), no_restart=True)
        if time.monotonic() >= deadline:
            return
        time.sleep(_END_POLL_S)
