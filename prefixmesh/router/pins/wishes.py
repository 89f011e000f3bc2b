"""What is wished of the fleet's caches, what is seen of them, and what can be done: the words of the pin controller. Pure data.

A *wish* comes from an operator's pin or from heat; a *version* is one prompt of it, as tokens in a namespace. What is seen of a worker is what it
tells itself (``ListPins``) and what its events prove. Sizes are tokens, since workers' pages may differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Fingerprint, Incarnation, Namespace
from prefixmesh.kv_source import KvSource
from prefixmesh.router.endpoint import Endpoint

WishSource = Literal["pin", "heat"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PinVersion:
    """One prompt of a wish, as workers know it."""

    generation: int
    """Counts a wish's prompts, namespaces (an adapter loaded anew gives another) and tiers: a worker keeps one pin by one id."""

    namespace: Namespace
    tokens: bytes = field(repr=False)
    """Packed. None: only the adapter is to be resident, and nothing is pinned."""

    fingerprints: Sequence[Fingerprint] = field(repr=False)
    """Of its whole blocks: what events tell of."""

    adapter: str = ""
    adapter_digest: str = ""
    boundary_tokens: int = 0
    tail_namespace: bytes = b""
    """Of a prefix that hangs below a public one (``cache.public``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """A prefix that is to be cached on some workers. Equal wishes ask for the same."""

    source: WishSource
    owner: str
    name: str
    tier: Tier
    replicas: int
    """0: all workers that can."""

    version: PinVersion
    expires_at: float | None = None
    """On the controller's clock; None: never by itself."""

    @property
    def key(self) -> str:
        """Its name among all wishes."""
        return f"{self.source}/{self.owner}/{self.name}"

    @property
    def pin_id(self) -> str:
        """What a worker is to call its pin of this version."""
        return f"{self.key}@{self.version.generation}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PinSeen:
    """A pin that a worker says it keeps."""

    owner: str
    tier: Tier
    size_tokens: int
    """What it is charged with."""

    held_tokens: int
    missing_tokens: int
    expires_at: float | None = None
    """When the worker lets go of it by itself, on the controller's clock; None: it does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSeen:
    """What is known of a worker now."""

    endpoint: Endpoint
    worker_id: str
    incarnation: Incarnation
    host: str
    """Where it runs: copies are spread over different ones."""

    usable: bool
    """It may be sent work: ready, and not draining."""

    draining: bool
    page_size: int
    work_ms: float
    """Work that it has accepted and not done."""

    budget_tokens: int
    """All pins on its device together, and one owner's, at most; -1 while it has not told."""

    owner_budget_tokens: int
    pins: Mapping[str, PinSeen]
    """By pin id, as it told last."""

    pins_at: float
    """When that list was asked for, on the controller's clock: what ended before is in it."""

    proven: Mapping[str, int]
    """By pin id of the wishes: leading tokens of it that the worker's events prove it holds on the wish's tier; 0 where the view is not to
    be believed."""

    kv_layout: str = ""
    """Workers with equal ones can copy from each other; empty: not at all."""

    adapters: frozenset[str] = frozenset()
    """Digests of the adapters that it knows."""

    resident_adapters: frozenset[str] = frozenset()
    """Digests of those whose weights are on its device."""

    host_budget_tokens: int = 0
    """As ``budget_tokens``, of its host tier; 0 where it has none."""

    host_owner_budget_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Warm:
    """Have a worker pin a version, and bring it."""

    number: int
    """Of this action; its outcome is told by it."""

    endpoint: Endpoint
    incarnation: Incarnation
    wish: Wish
    sources: Sequence[KvSource] = ()
    """Whom to copy from, the best first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unpin:
    """Have a worker let go of a pin."""

    number: int
    endpoint: Endpoint
    incarnation: Incarnation
    pin_id: str


Action = Warm | Unpin

ReplicaState = Literal["held", "warming", "waiting", "leaving", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaStatus:
    """How far one worker is with a wish."""

    endpoint: Endpoint
    worker_id: str
    state: ReplicaState
    held_tokens: int
    generation: int
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WishStatus:
    """How far a wish is: ``wanted`` workers are to hold it, ``held`` do."""

    wanted: int
    held: int
    why: str = ""
    """Why some are missing; empty where none is."""

    replicas: Sequence[ReplicaStatus] = ()

    @property
    def missing(self) -> int:
        """Workers that lack."""
        return max(0, self.wanted - self.held)
