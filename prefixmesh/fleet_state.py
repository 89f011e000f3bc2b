"""What ``prefixmesh up`` remembers of the fleet it started, so that the other commands find it without being told.

One small JSON file (``paths.fleet_state_file``), written anew whenever a part of the fleet dies or comes back. It says where the fleet
was then, not that it still runs: whoever reads it must be ready to find nobody at home.
"""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prefixmesh import paths
from prefixmesh.errors import ConfigError, NotFoundError


@dataclass(frozen=True, kw_only=True, slots=True)
class PartState:
    """What a fleet's supervisor saw of one worker, or of the router."""

    name: str
    kind: str
    """``worker`` or ``router``."""

    phase: str
    """``starting``, ``serving``, ``waiting`` (dead, and to be started again) or ``given_up``."""

    life: int
    """Which life serves, starts, or ended last; the first is 1."""

    since_unix_s: float
    """When the phase began."""

    restarts: int = 0
    """How often it was started again since the fleet came up."""

    reason: str = ""
    """Why the last life ended, or why the part was given up; empty when it has never died."""

    address: str = ""
    """Where it serves; empty while it does not."""

    actor: str = ""
    """Name of the life's Ray actor; empty while there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetState:
    """One started fleet: where its parts listen and what must be stopped to end it."""

    router: str
    """Address (``host:port``) of the router."""

    workers: Mapping[str, str]
    """Address of each worker that serves, by its id."""

    model: str
    """The model as ``up`` was asked for it: a known name or a path."""

    ray_address: str
    """Address of the Ray cluster that the actors live in."""

    ray_namespace: str
    """Ray namespace of the actors."""

    actor_names: tuple[str, ...]
    """Names of the living actors in that namespace: router and workers, a router that stands by, the supervisor if it is one."""

    started_ray: bool
    """Whether ``up`` started that Ray itself, so that ``down`` stops it too."""

    pid: int | None
    """Process id of the process that holds the fleet, in the foreground or detached; None when there is none."""

    parts: tuple[PartState, ...] = ()
    """What its supervisor sees, the router first."""

    supervisor: str = ""
    """Name of the actor that looks after the fleet also when no process holds it; empty when the holder does so itself."""

    def __post_init__(self) -> None:
        if not self.router:
            raise ConfigError("the fleet's state names no router")


def load(path: Path | None = None) -> FleetState:
    """The fleet remembered in ``path`` (default: this user's); costs one small file read.

    Raises NotFoundError when no fleet is remembered, and ConfigError when the file cannot be read as one.
    """
    path = path or paths.fleet_state_file()
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise NotFoundError(f"no fleet is remembered in {path}; start one with: prefixmesh up") from error
    except OSError as error:
        raise ConfigError(f"cannot read the fleet's state {path}: {error.strerror}") from error
    try:
        return msgspec.json.decode(data, type=FleetState)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} does not hold a fleet's state ({error}); if none of yours is up, remove it"
        ) from error


def save(state: FleetState, path: Path | None = None) -> None:
    """Remember ``state`` in ``path`` (default: this user's); a reader sees the old file or the new one, never half of one."""
    path = path or paths.fleet_state_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    # A draft of its own for each writer, mode 600: two `up` at once must not write into the same one.
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def forget(path: Path | None = None) -> bool:
    """Remove the remembered fleet; False when there was none."""
    path = path or paths.fleet_state_file()
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True
