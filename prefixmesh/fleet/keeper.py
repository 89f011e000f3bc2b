"""The process that holds a fleet: it has everything started, tells what happens to it, and takes it all down again.

In the foreground that process is ``prefixmesh up`` itself. With ``--detach`` it is the same code in the background
(``prefixmesh.fleet.detached``). It owns the local Ray if there is one, and looks after the actors itself (``Fleet``): what ends it ends both. On a
cluster that was joined with ``--detach`` the fleet is looked after by an actor (``DetachedFleet``) and outlives this process too.
"""

import asyncio
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, Protocol

from prefixmesh import fleet_state, paths
from prefixmesh.errors import ConfigError
from prefixmesh.fleet.events import FleetEvent, Report
from prefixmesh.fleet.fleet import Endpoints, Fleet, given_up_error
from prefixmesh.fleet.hold import ALREADY_UP, REVIVE_SIGNAL, find_fleet, hold_fleet
from prefixmesh.fleet.plan import FleetPlan, FleetRequest, plan_fleet
from prefixmesh.fleet.precheck import check_adapters, check_request
from prefixmesh.fleet.ray_session import RaySession, open_session
from prefixmesh.fleet.record import living_actors, part_states, shift
from prefixmesh.fleet.supervision import Part
from prefixmesh.fleet.tier_memory import check_host_tiers
from prefixmesh.fleet_secret import FleetSecret, load_or_create
from prefixmesh.fleet_state import FleetState
from prefixmesh.model_files.pull import KNOWN_MODELS
from prefixmesh.model_files.source import resolve_model

_log = logging.getLogger(__name__)

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class AnyFleet(Protocol):
    """A fleet that this process looks after, or that an actor does."""

    namespace: str
    supervisor: str
    """Name of that actor; empty when there is none."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """What is known of each part; times are of ``time.monotonic``."""
        ...

    async def start(self) -> Endpoints:
        """Have everything started; raises what goes wrong."""
        ...

    async def supervise(self) -> None:
        """Return when everything has been given up."""
        ...

    def revive(self) -> None:
        """Try again what was given up."""
        ...

    async def stop(self, grace_s: float) -> None:
        """End it in an orderly way."""
        ...

    def kill(self) -> None:
        """End what is left of it now."""
        ...


class StopSignals:
    """SIGINT and SIGTERM as something to wait for: the first asks for an orderly end, the second for an end now."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.forced = asyncio.Event()

    def install(self) -> None:
        """Take the signals over; call it in the running event loop."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self.take)

    def take(self) -> None:
        """Count one signal."""
        (self.forced if self.asked.is_set() else self.asked).set()


def keep_fleet(request: FleetRequest, report: Report, grace_s: float, *, outlives_us: bool = False) -> None:
    """Bring a fleet up, remember it, hold it until a signal, and take it down. Blocks for the fleet's life.

    With ``outlives_us`` a fleet on a joined cluster goes on when this process is killed. Raises ConfigError when one is already up or the
    settings cannot work, UnavailableError when a part cannot start or everything has been given up, KeyboardInterrupt when it was told to end
    before it was up. Nothing is left behind in any case.
    """
    with hold_fleet(), interruptible():
        left = find_fleet()
        if left is not None and left.supervisor:
            raise ConfigError(ALREADY_UP)  # its keeper was killed, and it lives on
        fleet_state.forget()  # what a killed keeper left of one that ended with it must not pass for this one while it starts
        request = prepare_model(check_request(request), report)
        check_adapters(request)
        with fleet_session(request, report) as session:
            asyncio.run(_keep(request, session, report, grace_s, outlives_us=outlives_us))
    report(FleetEvent(kind="stopped"))


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does, while no event loop takes the signals."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def prepare_model(request: FleetRequest, report: Report) -> FleetRequest:
    """Have the model's files here before workers need them, and name them so that the working folder does not matter.

    On a joined cluster the files are looked up on each worker's own node.
    """
    model = request.engine.model
    if request.address is None:
        files = resolve_model(model, lambda text: report(FleetEvent(kind="fetching", detail=text)))
        model = model if model in KNOWN_MODELS else str(files.path)
    elif model not in KNOWN_MODELS and Path(model).expanduser().exists():
        model = str(Path(model).expanduser().absolute())
    return dataclasses.replace(request, engine=dataclasses.replace(request.engine, model=model))


@contextmanager
def fleet_session(request: FleetRequest, report: Report) -> Iterator[RaySession]:
    """Ray for a fleet, with its two events."""
    began = time.monotonic()
    report(FleetEvent(kind="ray_starting", detail=request.address or ""))
    with open_session(request.address) as session:
        report(FleetEvent(kind="ray_ready", detail=session.address, seconds=time.monotonic() - began))
        yield session


async def _keep(
    request: FleetRequest, session: RaySession, report: Report, grace_s: float, *, outlives_us: bool
) -> None:
    signals = StopSignals()
    signals.install()
    began = time.monotonic()
    secret = load_or_create(paths.fleet_secret_file())
    plan = plan_fleet(request, session.view())
    check_host_tiers(plan)
    router = ""

    def remember() -> None:
        if not router:
            return
        try:
            fleet_state.save(_state(request, session, fleet, router))
        except OSError as error:  # a full disk must not end a fleet that serves
            _log.warning("fleet_state_not_saved problem=%s", error)

    fleet = _make_fleet(plan, session, secret, report, remember, is_detached=outlives_us)
    try:
        endpoints = await start_unless_asked_to_stop(fleet, signals)
        asyncio.get_running_loop().add_signal_handler(REVIVE_SIGNAL, fleet.revive)
        router = endpoints.router
        fleet_state.save(_state(request, session, fleet, router))  # from now on somebody may send that signal
        report(FleetEvent(kind="fleet_ready", detail=router, seconds=time.monotonic() - began))
        await supervise_until_asked_to_stop(fleet, signals)
        report(FleetEvent(kind="stopping"))
        await stop_unless_forced(fleet, signals, grace_s)
    finally:
        router = ""
        fleet_state.forget()
        fleet.kill()


def _make_fleet(
    plan: FleetPlan,
    session: RaySession,
    secret: FleetSecret,
    report: Report,
    on_change: Callable[[], None],
    *,
    is_detached: bool,
) -> AnyFleet:
    """A local Ray ends with this process, and so does whatever supervisor lives in it: there the process itself is the supervisor."""
    if is_detached and not session.is_local:
        from prefixmesh.fleet.detached_fleet import DetachedFleet

        return DetachedFleet(plan, session, secret, report, on_change)
    return Fleet(plan, session, secret, report, on_change=on_change)


async def start_unless_asked_to_stop(fleet: AnyFleet, signals: StopSignals) -> Endpoints:
    """``fleet.start()``; raises KeyboardInterrupt when a signal comes first."""
    starting = asyncio.create_task(fleet.start())
    asked = asyncio.create_task(signals.asked.wait())
    await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
        raise KeyboardInterrupt
    return starting.result()


async def stop_unless_forced(fleet: AnyFleet, signals: StopSignals, grace_s: float) -> None:
    """``fleet.stop(grace_s)``, cut short by a second signal."""
    stopping = asyncio.create_task(fleet.stop(grace_s))
    forced = asyncio.create_task(signals.forced.wait())
    await asyncio.wait({stopping, forced}, return_when=asyncio.FIRST_COMPLETED)
    forced.cancel()
    if not stopping.done():
        stopping.cancel()
        await asyncio.wait({stopping})
        return
    stopping.result()


async def supervise_until_asked_to_stop(fleet: AnyFleet, signals: StopSignals) -> None:
    """Return at a signal. Raises UnavailableError when everything has been given up: then there is nothing to hold."""
    supervising = asyncio.create_task(fleet.supervise())
    asked = asyncio.create_task(signals.asked.wait())
    await asyncio.wait({supervising, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if not supervising.done():
        supervising.cancel()
        await asyncio.wait({supervising})
        return
    supervising.result()
    raise given_up_error(fleet.parts)


def _state(request: FleetRequest, session: RaySession, fleet: AnyFleet, router: str) -> FleetState:
    parts = shift(fleet.parts, time.time() - time.monotonic())
    workers = {part.name: part.address for part in parts if part.kind == "worker" and part.address}
    supervisors = (fleet.supervisor,) if fleet.supervisor else ()
    return FleetState(
        router=router,
        workers=workers,
        model=request.engine.model,
        ray_address=session.address,
        ray_namespace=fleet.namespace,
        actor_names=(*living_actors(parts), *supervisors),
        started_ray=session.is_local,
        pid=os.getpid(),
        parts=part_states(parts),
        supervisor=fleet.supervisor,
    )
