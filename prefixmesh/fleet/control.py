"""Asking the fleet that is up: how it is, to try again what it gave up, to end.

Whoever holds it is asked by signals, and what it writes down is read. A fleet on a joined cluster has a supervisor there and goes on when its
holder is killed: then the supervisor is asked, for which this joins the cluster.
"""

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from typing import Final

from prefixmesh import fleet_state, paths
from prefixmesh.errors import ConfigError, NotFoundError, UnavailableError
from prefixmesh.fleet.detached_fleet import revive_supervised, see_supervised, stop_supervised
from prefixmesh.fleet.hold import REVIVE_SIGNAL, find_fleet, find_holder
from prefixmesh.fleet.ray_session import open_session
from prefixmesh.fleet.record import living_actors, part_states
from prefixmesh.fleet_state import FleetState
from prefixmesh.rpc.until_signal import DEFAULT_GRACE_S

_POLL_S: Final = 0.05
"""Linux has no portable way to wait for a process that is not one's child."""

FORCE_WAIT_S: Final = 10.0
"""How long a keeper may take to end after it was asked twice."""


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


def stop_fleet(timeout_s: float) -> bool:
    """Ask the keeper of this user's fleet to end and wait until it has; False when there is none.

    After ``timeout_s`` it is asked to hurry, then killed: Ray then ends the actors that are its own. Ends no process but the keeper. Without
    a keeper, a supervisor that may live on is asked.
    """
    state, pid = find_fleet(), find_holder()
    if pid is None:  # a keeper that was killed may have left its file, and a fleet
        if state is not None:
            _stop_supervised(state, timeout_s)
        fleet_state.forget()
        return state is not None
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
    try:
        with open_session(state.ray_address) as session:
            asyncio.run(stop_supervised(session.ray, state.ray_namespace, min(timeout_s, DEFAULT_GRACE_S)))
    except ConfigError as error:
        raise ConfigError(
            f"{error}; if that cluster is gone, so is the fleet: remove {paths.fleet_state_file()}"
        ) from error


def _wait_released(wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while find_holder() is not None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
