"""A simulated router's pins: the real controller, and around it what the real shell does (``router.pins.pin_keeper``), by messages over a simulated
network.

Wishes are given. Where routers share a store, the one that holds the lease in it acts; else whoever builds a fleet lets one router keep its pins.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE
from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Incarnation
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.pins.config import PinControllerConfig
from prefixmesh.router.pins.controller import PinController
from prefixmesh.router.pins.wishes import Action, PinSeen, Unpin, Wish, WishStatus
from prefixmesh.router.pins.worker_pins import ToldPins
from prefixmesh.router.pins.workers_seen import Proofs, prove, seen_workers
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.worker_entry import WorkerEntry
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.network import Network, Stream
from prefixmesh.sim.simulated_calls import open_call
from prefixmesh.sim.simulated_warming import SimulatedWarming
from prefixmesh.sim.simulated_worker import SimulatedWorker
from prefixmesh.worker.prefix_messages import PrefixAnswer

ROUND_S: Final = 0.25
"""As ``pin_keeper.ROUND_S``."""

LIST_S: Final = 1.0
"""Every worker is asked so often for its pins: here nobody goes by its reports."""

Wishes = Callable[[], Sequence[Wish] | None]
"""None: they are not known."""


class Keeping(Protocol):
    """The router's life that pins are kept by."""

    sim: Simulation
    network: Network
    name: str
    core: RouterCore

    def worker_at(self, endpoint: Endpoint) -> SimulatedWorker | None:
        """Whose address it is."""
        ...


class SimulatedPins:
    """See the module. It begins at once; ``end`` is the life's end."""

    def __init__(
        self,
        router: Keeping,
        wishes: Wishes,
        config: PinControllerConfig,
        *,
        may_act: Callable[[], bool] = lambda: True,
        on_order: Callable[[Action], object] = lambda _: None,
    ) -> None:
        """``may_act``: whether this router is the one that acts; ``on_order`` is told of whatever is ordered."""
        self._router = router
        self._wishes = wishes
        self._config = config
        self._may_act = may_act
        self._on_order = on_order
        self._was_acting = False
        self.controller = PinController(config)
        self.ordered_at = 0.0
        """When something was ordered last."""

        self._told: dict[Endpoint, ToldPins] = {}
        self._asked_at: dict[Endpoint, float] = {}
        self._is_over = False
        self._round()

    def end(self) -> None:
        """Order nothing any more."""
        self._is_over = True

    def statuses(self) -> list[WishStatus]:
        """How far each wish is, as of the last round."""
        return [self.controller.status(wish) for wish in self._wishes() or ()]

    def _round(self) -> None:
        if self._is_over:
            return
        core, now = self._router.core, self._router.sim.now
        for entry in core.registry:
            if entry.facts is not None and now - self._asked_at.get(entry.endpoint, -LIST_S) >= LIST_S:
                self._list(entry)
        wishes = self._wishes()
        proofs: Proofs = {}
        prove(core.view, wishes or (), DEFAULT_BLOCK_SIZE, proofs)
        acts = self._may_act()
        if acts != self._was_acting:
            # As ``PinKeeper``: whoever acts anew goes by what it sees, and by nothing that was ordered in another term.
            self.controller, self._was_acting = PinController(self._config), acts
        seen = seen_workers(core.fleet, self._told_by, proofs)
        for action in self.controller.step(now, wishes, seen, acts=acts):
            self.ordered_at = now
            self._on_order(action)
            self._order(action)
        self._router.sim.call_later(ROUND_S, self._round)

    def _told_by(self, entry: WorkerEntry) -> ToldPins:
        told = self._told.get(entry.endpoint)
        if told is None or told.incarnation != entry.load.incarnation:
            return ToldPins(incarnation=entry.load.incarnation, version=0, asked_at=-1.0)
        return told

    def _list(self, entry: WorkerEntry) -> None:
        now = self._asked_at[entry.endpoint] = self._router.sim.now
        incarnation = entry.load.incarnation

        def on_told(answer: PrefixAnswer) -> None:
            assert entry.facts is not None
            self._told[entry.endpoint] = _read(answer, entry.facts.page_size, incarnation, now)

        self._call(entry.endpoint, lambda pins, tell: pins.list_pins(tell), on_told, lambda: None)

    def _order(self, action: Action) -> None:
        controller = self.controller

        def on_end(problem: str) -> None:
            if controller is self.controller:  # else it was ordered in another term
                controller.ended(action.number, problem, self._router.sim.now)
            self._asked_at.pop(action.endpoint, None)

        def begin(pins: SimulatedWarming, tell: Callable[[str], object]) -> None:
            if isinstance(action, Unpin):
                pins.unpin(action.pin_id, tell)
            else:
                ends = action.wish.expires_at
                pins.warm(action.wish, 0.0 if ends is None else ends - self._router.sim.now, tell)

        self._call(action.endpoint, begin, on_end, lambda: on_end("the connection broke"))

    def _call(
        self,
        endpoint: Endpoint,
        begin: Callable[[SimulatedWarming, Callable[..., object]], None],
        on_told: Callable[..., object],
        on_broken: Callable[[], object],
    ) -> None:
        worker = self._router.worker_at(endpoint)
        if worker is None:
            on_broken()
            return

        def told(message: object) -> None:
            answer.close()
            if not self._is_over:
                on_told(message)

        answer: Stream[object] = open_call(
            self._router.network,
            self._router.name,
            worker.name,
            lambda stream: worker.ask_pins(partial(_begin, begin, stream), stream),
            told,
            lambda: None if self._is_over else on_broken(),
        )


def _begin(
    begin: Callable[[SimulatedWarming, Callable[..., object]], None],
    stream: Stream[object],
    pins: SimulatedWarming,
) -> None:
    begin(pins, lambda message: stream.send(message) if stream.is_open else None)


def _read(answer: PrefixAnswer, page_size: int, incarnation: Incarnation, asked_at: float) -> ToldPins:
    totals = answer.totals
    assert totals is not None
    return ToldPins(
        incarnation=incarnation,
        version=totals.version,
        asked_at=asked_at,
        pins={
            pin.pin_id: PinSeen(
                owner=pin.owner,
                tier=Tier(pin.tier),
                size_tokens=pin.pages * page_size,
                held_tokens=pin.held_tokens,
                missing_tokens=pin.missing_tokens,
                expires_at=asked_at + pin.expires_in_s if pin.expires_in_s else None,
            )
            for pin in answer.pins
        },
        budget_tokens=totals.budget_pages * page_size,
        owner_budget_tokens=totals.owner_budget_pages * page_size,
        host_budget_tokens=totals.host_budget_pages * page_size,
        host_owner_budget_tokens=totals.host_owner_budget_pages * page_size,
    )
