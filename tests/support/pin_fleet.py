"""A fleet for the pin controller: wishes and workers that are made in a line, and workers that do what they are told at once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Incarnation, Namespace
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.pins.controller import PinController
from prefixmesh.router.pins.sizes import size_tokens
from prefixmesh.router.pins.wishes import (
    Action,
    PinSeen,
    PinVersion,
    Unpin,
    Warm,
    Wish,
    WishSource,
    WorkerSeen,
)
from prefixmesh.tokens import TOKEN_BYTES

BLOCK: int = 4


def wish(
    name: str = "p",
    size: int = 8,
    *,
    replicas: int = 2,
    owner: str = "alice",
    generation: int = 1,
    source: WishSource = "pin",
    tier: Tier = Tier.DEVICE,
    expires_at: float | None = None,
    adapter_digest: str = "",
) -> Wish:
    """A wish for ``size`` tokens."""
    return Wish(
        source=source,
        owner=owner,
        name=name,
        tier=tier,
        replicas=replicas,
        expires_at=expires_at,
        version=PinVersion(
            generation=generation,
            namespace=Namespace(bytes(16)),
            tokens=bytes(size * TOKEN_BYTES),
            fingerprints=(),
            adapter_digest=adapter_digest,
        ),
    )


@dataclass
class PinWorker:
    """A worker that pins what it is told to."""

    name: str
    host: str = ""
    page_size: int = 2
    budget: int = 100
    owner_budget: int = 60
    host_budget: int = 0
    """Of its host tier, all of which one owner may have."""

    work_ms: float = 0.0
    usable: bool = True
    draining: bool = False
    incarnation: int = 1
    layout: str = "L"
    adapters: frozenset[str] = frozenset()
    resident: frozenset[str] = frozenset()
    pins: dict[str, PinSeen] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    """Leading tokens of a version, by its pin id, whether it is pinned or not."""

    def seen(self, now: float) -> WorkerSeen:
        """What a router sees of it, all of it true and new."""
        return WorkerSeen(
            endpoint=Endpoint(self.name),
            worker_id=self.name,
            incarnation=Incarnation(self.incarnation),
            host=self.host or self.name,
            usable=self.usable and not self.draining,
            draining=self.draining,
            page_size=self.page_size,
            work_ms=self.work_ms,
            budget_tokens=self.budget,
            owner_budget_tokens=self.owner_budget,
            pins=dict(self.pins),
            pins_at=now,
            proven=dict(self.cached),
            kv_layout=self.layout,
            adapters=self.adapters,
            resident_adapters=self.resident,
            host_budget_tokens=self.host_budget,
            host_owner_budget_tokens=self.host_budget,
        )

    def perform(self, action: Action) -> None:
        """Do what is ordered."""
        if isinstance(action, Unpin):
            self.pins.pop(action.pin_id, None)
            return
        if action.wish.version.tokens:
            self.pin(action.wish)
        else:
            self.resident |= {action.wish.version.adapter_digest}

    def pin(self, wish: Wish) -> None:
        """It has and pins all of a version."""
        size = size_tokens(wish.version, self.page_size)
        self.cached[wish.pin_id] = size
        self.pins[wish.pin_id] = PinSeen(
            owner=wish.owner,
            tier=wish.tier,
            size_tokens=size,
            held_tokens=size,
            missing_tokens=0,
            expires_at=wish.expires_at,
        )

    def restart(self) -> None:
        """Another life, which has nothing."""
        self.incarnation += 1
        self.pins, self.cached, self.resident = {}, {}, frozenset()

    def flush(self) -> None:
        """The cache is empty, the pins are wishes."""
        self.cached = {}
        self.pins = {
            pin_id: replace(pin, held_tokens=0, missing_tokens=pin.size_tokens)
            for pin_id, pin in self.pins.items()
        }


class PinFleet:
    """Some workers, and a controller whose actions they perform between two steps."""

    def __init__(self, controller: PinController, *workers: PinWorker) -> None:
        self.controller = controller
        self.workers = {worker.name: worker for worker in workers}
        self.now = 100.0

    def step(
        self, wishes: Iterable[Wish] | None, *, after_s: float = 1.0, heat_is_known: bool = True
    ) -> Sequence[Action]:
        """One step, and nothing done."""
        self.now += after_s
        seen = [worker.seen(self.now) for worker in self.workers.values()]
        return self.controller.step(self.now, wishes, seen, heat_is_known=heat_is_known)

    def settle(self, wishes: Sequence[Wish] | None, *, steps: int = 50) -> list[Action]:
        """Steps, all of whose actions are performed at once, until nothing more is ordered; returns what was."""
        done: list[Action] = []
        for _ in range(steps):
            actions = self.step(wishes)
            if not actions:
                return done
            for action in actions:
                self.workers[action.endpoint].perform(action)
                self.controller.ended(action.number, "", self.now)
            done += actions
        raise AssertionError(f"still busy after {steps} steps: {actions}")

    def holders(self, of: Wish) -> list[str]:
        """Who has its pin, whole."""
        return sorted(
            worker.name
            for worker in self.workers.values()
            if of.pin_id in worker.pins and not worker.pins[of.pin_id].missing_tokens
        )


def warms(actions: Iterable[Action]) -> list[tuple[str, str]]:
    """Workers and pin ids of the ``Warm`` among them."""
    return [(a.endpoint, a.wish.pin_id) for a in actions if isinstance(a, Warm)]


def unpins(actions: Iterable[Action]) -> list[tuple[str, str]]:
    """Workers and pin ids of the ``Unpin`` among them."""
    return [(a.endpoint, a.pin_id) for a in actions if isinstance(a, Unpin)]
