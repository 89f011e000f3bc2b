"""Heat as a router's core sees it: what is read off a decision, and what of the fleet a review goes by. Pure."""

from collections.abc import Sequence
from typing import Final

from prefixmesh.cache.namespace import tail_namespace
from prefixmesh.ids import Namespace
from prefixmesh.router.fleet_columns import FleetColumns
from prefixmesh.router.heat.config import HeatConfig
from prefixmesh.router.heat.decay import FADE_S
from prefixmesh.router.heat.origin import Origin
from prefixmesh.router.heat.tracker import HeatFleet, HeatTracker
from prefixmesh.router.pins.wishes import Wish, WorkerSeen
from prefixmesh.router.placement import PLAIN, Placement, RouteRequest
from prefixmesh.router.routing import RouterCore

REVIEW_S: Final = 1.0
"""Between two reviews: a replica takes about as long to come, and a review a millisecond or two."""

KNOWN_S: Final = 2.0 * FADE_S
"""After so long a router that has begun knows what is not hot: until then, what an earlier one has made stays."""

_S_PER_MS: Final = 1e-3


class HeatWatch:
    """Of one router. ``routed`` for every decision, ``wishes`` as often as wished. Not thread-safe: one loop owns it."""

    def __init__(self, core: RouterCore, config: HeatConfig, block_size: int) -> None:
        self._core = core
        self.tracker = HeatTracker(config, block_size)
        self._wishes: Sequence[Wish] = ()
        self._began: float | None = None
        self._reviewed_at = 0.0

    @property
    def is_known(self) -> bool:
        """Whether it has measured for long enough to say what is not hot."""
        return self._began is not None and self._reviewed_at - self._began >= KNOWN_S

    def routed(self, placement: Placement, namespace: Namespace, tokens: bytes) -> None:
        """A new request was placed; ``tokens`` are its prompt's, packed. Costs as ``HeatTracker.note``."""
        if not self.tracker.config.enabled:
            return
        terms, request, chain = placement.decision.terms, placement.request, placement.decision.chain
        # What a holder would have to compute: that nobody held it before is over once it is computed.
        work_ms = terms.prefill_ms - terms.recompute_ms + placement.reservation.decode_ms
        origin = _origin(request, namespace, chain)
        self.tracker.note(request.chain(chain), tokens, origin, work_ms, placement.routed_at)

    def wishes(self, now: float, workers: Sequence[WorkerSeen]) -> Sequence[Wish]:
        """What is to be replicated, as of the last review, which is made where it is due. ``workers`` are not looked at: what they can do is in
        the core. O(1), and once a second a review."""
        if self._began is None:
            self._began = self._reviewed_at = now
        elif now - self._reviewed_at >= REVIEW_S:
            self._reviewed_at = now
            self._wishes = self.tracker.review(now, _fleet(self._core.fleet.columns))
        return self._wishes

    def __repr__(self) -> str:
        return f"<HeatWatch {self.tracker!r}>"


def _origin(request: RouteRequest, namespace: Namespace, chain: int) -> Origin:
    if chain == PLAIN:
        return Origin(namespace, request.adapter, request.adapter_digest)
    prefix = request.public[chain - 1].prefix
    tail = tail_namespace(namespace, prefix.fingerprint)
    return Origin(prefix.namespace, request.adapter, request.adapter_digest, prefix.boundary_tokens, tail)


def _fleet(columns: FleetColumns) -> HeatFleet:
    """How many workers there are, and what of one an answer takes on the average: of its places, and of its time, which it shares with those
    that are decoded beside it. O(rows)."""
    usable = columns.usable
    workers = int(usable.sum())
    if not workers:
        return HeatFleet(0)
    step_ms = columns.token_interval_ms.clip(min=columns.rates.decode_step)
    answer_s = (columns.answer_tokens * step_ms)[usable] * _S_PER_MS
    place_s = answer_s * columns.per_place[usable]
    together = max(1.0, float(columns.in_flight[usable].mean()))
    return HeatFleet(workers, float(place_s.mean()), float(answer_s.mean()) / together)
