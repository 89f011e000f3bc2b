"""Keeping a fleet in the background: starting its keeper so that it outlives the command, and asking it to end or to try again.

The keeper gets its settings as JSON on stdin and tells its events as JSON lines on stdout, until the fleet is up; its
log goes to a file. A fleet on a joined cluster has a supervisor there and goes on when its keeper is killed: then the commands here ask the
supervisor, for which they join the cluster.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from prefixmesh import fleet_state, paths
from prefixmesh.errors import NotFoundError, PrefixmeshError, UnavailableError
from prefixmesh.fleet.detached_fleet import revive_supervised, see_supervised, stop_supervised
from prefixmesh.fleet.events import FleetEvent, Report
from prefixmesh.fleet.hold import check_no_fleet, find_fleet, find_holder
from prefixmesh.fleet.keeper import REVIVE_SIGNAL, keep_fleet
from prefixmesh.fleet.launcher import start_error
from prefixmesh.fleet.plan import FleetRequest
from prefixmesh.fleet.ray_session import open_session
from prefixmesh.fleet.record import living_actors, part_states
from prefixmesh.fleet_state import FleetState

_POLL_S: Final = 0.05
"""Linux has no portable way to wait for a process that is not one's child."""

FORCE_WAIT_S: Final = 10.0
"""How long a keeper may take to end after it was asked twice."""


class _Order(msgspec.Struct, frozen=True):
    """What a background keeper is told on stdin."""

    request: FleetRequest
    grace_s: float


def log_file() -> Path:
    """Where a background keeper logs."""
    return paths.fleet_state_file().with_suffix(".log")


def start_detached(request: FleetRequest, report: Report, grace_s: float) -> None:
    """Start a keeper in a session of its own and return when its fleet is up.

    Raises what made it fail; a KeyboardInterrupt while waiting takes the keeper down again.
    """
    check_no_fleet()
    log_file().parent.mkdir(parents=True, exist_ok=True)
    with log_file().open("w") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "prefixmesh.fleet.detached"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError), keeper.stdin as stdin:
            stdin.write(msgspec.json.encode(_Order(request, grace_s)))
        for line in keeper.stdout:
            event = msgspec.json.decode(line, type=FleetEvent)
            if event.kind == "failed":
                keeper.wait()
                raise start_error(event.subject, event.detail)
            report(event)
            if event.kind == "fleet_ready":
                return
        raise UnavailableError(f"the fleet's keeper ended without a word; see {log_file()}")
    except KeyboardInterrupt:
        keeper.terminate()
        keeper.wait()
        raise
    finally:
        keeper.stdout.close()


def stop_fleet(timeout_s: float) -> bool:
    """Ask the keeper of this user's fleet to end and wait until it has; False when there is none.

    After ``timeout_s`` it is asked to hurry, then killed: Ray then ends the actors that are its own. Ends no process but the keeper. Without
    a keeper, a supervisor that may live on is asked.
    """
    state, pid = find_fleet(), find_holder()
    if pid is None:
        fleet_state.forget()  # left by a keeper that was killed
        if state is None:
            return False
        _stop_supervised(state, timeout_s)
        return True
    for number, wait_s in (
        (signal.SIGTERM, timeout_s),
        (signal.SIGTERM, FORCE_WAIT_S),
        (signal.SIGKILL, FORCE_WAIT_S),
    ):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        if _wait_released(wait_s):
            break
    else:
        raise UnavailableError(f"process {pid}, which holds the fleet, does not end")
    if number == signal.SIGKILL and state is not None and state.supervisor:
        _stop_supervised(state, 0.0)  # it would have gone on
    fleet_state.forget()
    return True


def _stop_supervised(state: FleetState, timeout_s: float) -> None:
    with open_session(state.ray_address) as session:
        asyncio.run(stop_supervised(session.ray, state.ray_namespace, timeout_s))


def see_fleet() -> FleetState:
    """The fleet that is up, with what its supervisor sees now; raises NotFoundError when none is up.

    Reads a file; joins the Ray cluster (seconds) only when the file's writer has been killed and the fleet's supervisor lives on.
    """
    state = find_fleet()
    if state is None:
        raise NotFoundError("no fleet is up; start one with: prefixmesh up")
    if find_holder() is not None:
        return state
    with open_session(state.ray_address) as session:
        parts = asyncio.run(see_supervised(session.ray, state.ray_namespace))
    return dataclasses.replace(
        state,
        pid=None,
        workers={part.name: part.address for part in parts if part.kind == "worker" and part.address},
        actor_names=(*living_actors(parts), state.supervisor),
        parts=part_states(parts),
    )


def revive_fleet() -> None:
    """Have the fleet that is up try again what it has given up; raises NotFoundError when none is up."""
    state = find_fleet()
    if state is None:
        raise NotFoundError("no fleet is up; start one with: prefixmesh up")
    pid = find_holder()
    if pid is not None:
        os.kill(pid, REVIVE_SIGNAL)
        return
    with open_session(state.ray_address) as session:
        asyncio.run(revive_supervised(session.ray, state.ray_namespace))


def _wait_released(wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while find_holder() is not None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _serve_order() -> int:
    """The background keeper."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=_Order)
    tell = _Teller(os.dup(sys.stdout.fileno()))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else prints must not mix with the events
    try:
        keep_fleet(order.request, tell, order.grace_s, outlives_us=True)
    except KeyboardInterrupt:
        return 130
    except PrefixmeshError as error:
        logging.getLogger(__name__).error("fleet_failed error=%s", error)
        tell(FleetEvent(kind="failed", subject=error.reason, detail=str(error)))
        return 1
    return 0


class _Teller:
    """Writes events to a pipe for as long as somebody reads there."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_heard = True

    def __call__(self, event: FleetEvent) -> None:
        logging.getLogger(__name__).info(
            "fleet_event kind=%s subject=%s %s", event.kind, event.subject, event.detail
        )
        if not self._is_heard:
            return
        try:
            os.write(self._descriptor, msgspec.json.encode(event) + b"\n")
        except BrokenPipeError:
            self._is_heard = False


if __name__ == "__main__":
    sys.exit(_serve_order())
