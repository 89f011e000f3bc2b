"""What a starting, running or stopping fleet tells its user, as plain records that also cross a pipe."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

EventKind = Literal[
    "fetching",
    "ray_starting",
    "ray_ready",
    "starting",
    "loading",
    "ready",
    "fleet_ready",
    "lost",
    "given_up",
    "stopping",
    "stopped",
    "failed",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetEvent:
    """One step in a fleet's life."""

    kind: EventKind
    subject: str = ""
    """Which part: a worker's id, ``router``, or empty for the whole."""

    detail: str = ""
    """An address for what is ready, the reason for what is lost or failed."""

    memory_sums: str = ""
    """For a worker that is ready: how its memory was divided."""

    seconds: float = 0.0
    """How long the step took; for what is lost, when it is started again."""


Report = Callable[[FleetEvent], None]
"""Takes each event as it happens; must not block."""
