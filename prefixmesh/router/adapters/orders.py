"""What the adapter controller goes by, and what it orders: workers as they were seen, loads and unloads. Pure."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from prefixmesh.ids import Incarnation
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.pins.failures import Failure

State = Literal["held", "loading", "waiting", "failed", "refused", "leaving", "away", "none"]
"""How far a worker is with a name."""


class WorkerSeen(NamedTuple):
    """One worker in one step."""

    endpoint: Endpoint
    incarnation: Incarnation
    is_ready: bool
    """Whether it may be sent requests, and loads."""

    is_reachable: bool
    """Whether it can be told to forget a name, ready or not."""

    adapters: Mapping[str, str]
    """Digests of what it has, by name, as it told last."""

    pinned: frozenset[str]
    """Names of those that it keeps in the device's memory."""


class Load(NamedTuple):
    """A worker is to load an adapter."""

    number: int
    endpoint: Endpoint
    incarnation: Incarnation
    name: str
    path: str
    pinned: bool
    generation: int


class Unload(NamedTuple):
    """A worker is to forget a name."""

    number: int
    endpoint: Endpoint
    incarnation: Incarnation
    name: str
    generation: int


Order = Load | Unload


class Ended(NamedTuple):
    """How an order ended."""

    problem: str = ""
    """Why it failed; empty where it did not."""

    is_refused: bool = False
    """Whether the worker refused the request itself: the same again is in vain until somebody mends something."""

    digest: str = ""
    """Of the content that was loaded."""


class Standing(NamedTuple):
    """How far a worker is with a name."""

    state: State
    failure: Failure | None = None
    """The last one in a row, where it has failed."""
