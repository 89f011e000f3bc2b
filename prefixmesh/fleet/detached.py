"""Starting a fleet's keeper in the background, so that it outlives the command.

The keeper gets its settings as JSON on stdin and tells its events as JSON lines on stdout, until the fleet is up; its
log goes to a file.
"""

import contextlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from prefixmesh import paths
from prefixmesh.errors import PrefixmeshError, UnavailableError
from prefixmesh.fleet.events import FleetEvent, Report
from prefixmesh.fleet.hold import check_no_fleet
from prefixmesh.fleet.keeper import keep_fleet
from prefixmesh.fleet.launcher import start_error
from prefixmesh.fleet.plan import FleetRequest


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
