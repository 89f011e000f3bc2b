"""The process that a fleet lives and ends with: it starts everything, watches it, and takes it all down again.

In the foreground that process is ``prefixmesh up`` itself. With ``--detach`` it is the same code in the background
(``prefixmesh.fleet.detached``). Either way one process owns the actors, and the local
Ray if there is one, so that stopping the fleet is asking that process to end, and Ray ends both if it is killed.
"""

import asyncio
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from prefixmesh import fleet_state, paths
from prefixmesh.errors import UnavailableError
from prefixmesh.fleet.events import FleetEvent, Report
from prefixmesh.fleet.fleet import ROUTER, Endpoints, Fleet
from prefixmesh.fleet.hold import hold_fleet
from prefixmesh.fleet.plan import FleetRequest, plan_fleet
from prefixmesh.fleet.precheck import check_adapters, check_request
from prefixmesh.fleet.ray_session import RaySession, open_session
from prefixmesh.fleet_secret import load_or_create
from prefixmesh.fleet_state import FleetState
from prefixmesh.model_files.pull import KNOWN_MODELS
from prefixmesh.model_files.source import resolve_model

_log = logging.getLogger(__name__)

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


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


def keep_fleet(request: FleetRequest, report: Report, grace_s: float) -> None:
    """Bring a fleet up, remember it, hold it until a signal, and take it down. Blocks for the fleet's life.

    Raises ConfigError when one is already up or the settings cannot work, UnavailableError when a part cannot start or the whole is lost, KeyboardInterrupt
    when it was told to end before it was up. Nothing is left behind in any case.
    """
    with hold_fleet(), interruptible():
        request = prepare_model(check_request(request), report)
        check_adapters(request)
        with fleet_session(request, report) as session:
            asyncio.run(_keep(request, session, report, grace_s))
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


async def _keep(request: FleetRequest, session: RaySession, report: Report, grace_s: float) -> None:
    signals = StopSignals()
    signals.install()
    began = time.monotonic()
    secret = load_or_create(paths.fleet_secret_file())
    fleet = Fleet(plan_fleet(request, session.view()), session, secret, report)
    try:
        endpoints = await start_unless_asked_to_stop(fleet, signals)
        fleet_state.save(_state(request, session, fleet, endpoints))
        report(FleetEvent(kind="fleet_ready", detail=endpoints.router, seconds=time.monotonic() - began))
        await _watch(fleet, signals, report, workers=len(endpoints.workers))
        report(FleetEvent(kind="stopping"))
        await stop_unless_forced(fleet, signals, grace_s)
    finally:
        fleet_state.forget()
        fleet.kill()


async def start_unless_asked_to_stop(fleet: Fleet, signals: StopSignals) -> Endpoints:
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


async def stop_unless_forced(fleet: Fleet, signals: StopSignals, grace_s: float) -> None:
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


async def _watch(fleet: Fleet, signals: StopSignals, report: Report, workers: int) -> None:
    """Return at a signal. A lost worker is told of, and the rest serves on; without router or workers there is no fleet."""
    asked = asyncio.create_task(signals.asked.wait())
    while True:
        losing = asyncio.create_task(fleet.wait_lost())
        await asyncio.wait({asked, losing}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            losing.cancel()
            return
        lost = losing.result()
        _log.error("fleet_part_lost subject=%s problem=%s", lost.subject, lost.problem)
        report(FleetEvent(kind="lost", subject=lost.subject, detail=lost.problem))
        workers -= lost.subject != ROUTER
        if lost.subject == ROUTER or not workers:
            asked.cancel()
            raise UnavailableError(
                f"{'the router' if lost.subject == ROUTER else 'the last worker'} is lost: {lost.problem}"
            )


def _state(request: FleetRequest, session: RaySession, fleet: Fleet, endpoints: Endpoints) -> FleetState:
    return FleetState(
        router=endpoints.router,
        workers=endpoints.workers,
        model=request.engine.model,
        ray_address=session.address,
        ray_namespace=fleet.namespace,
        actor_names=fleet.actor_names,
        started_ray=session.is_local,
        pid=os.getpid(),
    )
