"""A fleet in simulated time around the real router core: no socket, no clock.

A simulated worker computes prompts one after the other at a fixed rate, then streams its answers side by side. Its cache is a set
of fingerprints without a bound, and it tells of it as a real one does: ``ToldCache`` is its end of the stream.
"""

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import xor

from prefixmesh.cache.events import CacheSummary, Event, Removed, SnapshotPart, Stored, TierState
from prefixmesh.cache.fingerprint import FINGERPRINT_VERSION, block_fingerprints
from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Epoch, Fingerprint, Incarnation, Namespace, WorkerId
from prefixmesh.proto.cache_news import EventBatch, News
from prefixmesh.proto.codec import PROTOCOL_VERSION
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.placement import Placement, RouteRequest
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.worker_entry import WorkerEntry
from prefixmesh.router.worker_identity import Expected, Rates, WorkerFacts
from prefixmesh.router.worker_view import Need
from prefixmesh.tokens import pack
from prefixmesh.worker_report import PagePool, WorkerReport

BLOCK = 64
NAMESPACE = Namespace(b"n" * 16)
EXPECTED = Expected(
    model_revision="revision",
    tokenizer_digest="tokenizer",
    protocol_version=PROTOCOL_VERSION,
    fingerprint_version=FINGERPRINT_VERSION,
)
UNMEASURED = Rates(0.0, 0.0)
NOW = 100.0
"""For tests in which no time passes."""

REPORT_S = 0.1


def facts(
    worker_id: str,
    incarnation: int = 1,
    *,
    rates: Rates = UNMEASURED,
    revision: str = "revision",
    tokenizer_digest: str = "tokenizer",
    context_length: int = 1_000_000,
    max_running_requests: int = 0,
    match_unit: int = 1,
    protocol_version: int = PROTOCOL_VERSION,
    fingerprint_version: int = FINGERPRINT_VERSION,
    block_size: int = BLOCK,
    adapters: Mapping[str, str] | None = None,
    host_pool: PagePool | None = None,
) -> WorkerFacts:
    return WorkerFacts(
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(incarnation),
        model="tiny",
        model_revision=revision,
        tokenizer_digest=tokenizer_digest,
        protocol_version=protocol_version,
        fingerprint_version=fingerprint_version,
        context_length=context_length,
        max_running_requests=max_running_requests,
        match_unit=match_unit,
        block_size=block_size,
        rates=rates,
        adapters=adapters or {},
        host_pool=host_pool,
    )


def make_core(
    workers: int, *, config: PolicyConfig | None = None, max_tree_blocks: int = 100_000
) -> RouterCore:
    """A router core with ``workers`` ready workers ``w0``, ``w1``, …"""
    core = RouterCore(
        EXPECTED,
        config or PolicyConfig(),
        block_size=BLOCK,
        max_tree_blocks=max_tree_blocks,
        draw=partial(random.Random(7).getrandbits, 64),
    )
    for index in range(workers):
        add_ready(core, f"w{index}")
    return core


def add_ready(
    core: RouterCore, name: str, incarnation: int = 1, rates: Rates = UNMEASURED, *, tells: bool = True
) -> Endpoint:
    """A worker that has answered and serves; ``tells``: its view is exact, and empty."""
    endpoint = Endpoint(name)
    core.add_worker(endpoint, NOW)
    core.described(endpoint, facts(name, incarnation, rates=rates), NOW)
    core.health_changed(endpoint, serving=True)
    if tells:
        ToldCache(core, endpoint).open(NOW)
    return endpoint


def entry_of(core: RouterCore, endpoint: str) -> WorkerEntry:
    entry = core.registry.get(Endpoint(endpoint))
    assert entry is not None
    return entry


def believed(core: RouterCore, request: RouteRequest) -> dict[str, int]:
    """Leading blocks of a request that each worker is matched with, held or predicted; those with none are left out."""
    tokens = core.view.slot_rows.spread(
        core.view.find_matches(request.fingerprints), BLOCK, core.fleet.columns.rows
    )
    return {e.endpoint: int(tokens.total[e.row]) // BLOCK for e in core.registry if tokens.total[e.row]}


class ToldCache:
    """A worker's cache as a router is told of it: blocks come, and every report proves the view. It may also go wrong on purpose."""

    def __init__(self, core: RouterCore, endpoint: Endpoint, epoch: int = 1) -> None:
        self.core = core
        self.endpoint = endpoint
        self.epoch, self.sequence = Epoch(epoch), 0
        self.held: set[Fingerprint] = set()
        """On the device."""

        self.on_host: set[Fingerprint] = set()
        self._incarnation = Incarnation(0)

    def open(self, now: float) -> None:
        """A stream begins: a snapshot of what is held, and the first report."""
        opening = self.core.fleet.opened(self.endpoint, REPORT_S, now)
        self._incarnation = opening.incarnation
        if opening.resume_from is None:
            for tier, blocks in ((Tier.DEVICE, self.held), (Tier.HOST, self.on_host)):
                part = SnapshotPart(self.epoch, self.sequence, tier, tuple(blocks), last=tier is Tier.HOST)
                self.tell(part, now)
        self.report(now)

    def store(self, fingerprints: Sequence[Fingerprint], now: float) -> None:
        """These blocks are held now, and told of."""
        new = tuple(name for name in fingerprints if name not in self.held)
        if new:
            self.held.update(new)
            self._tell_event(Stored(self.epoch, self.sequence + 1, Tier.DEVICE, None, new), now)

    def back_up(self, fingerprints: Sequence[Fingerprint], now: float) -> None:
        """These blocks are on the host, too."""
        new = tuple(name for name in fingerprints if name not in self.on_host)
        self.on_host.update(new)
        self._tell_event(Stored(self.epoch, self.sequence + 1, Tier.HOST, None, new), now)

    def evict(self, fingerprints: Sequence[Fingerprint], now: float, tier: Tier = Tier.DEVICE) -> None:
        """These blocks are on that tier no more."""
        (self.on_host if tier is Tier.HOST else self.held).difference_update(fingerprints)
        self._tell_event(Removed(self.epoch, self.sequence + 1, tier, tuple(fingerprints)), now)

    def _tell_event(self, event: Event, now: float) -> None:
        self.sequence += 1
        self.tell(EventBatch([event]), now)

    def report(self, now: float, **load: object) -> Need:
        states = tuple(TierState(len(blocks), reduce(xor, blocks, 0)) for blocks in (self.held, self.on_host))
        summary = CacheSummary(self.epoch, self.sequence, states)
        return self.tell(WorkerReport(summary=summary, **load), now)  # type: ignore[arg-type]

    def tell(self, news: News, now: float) -> Need:
        return self.core.stream_news(self.endpoint, self._incarnation, news, now)


def prompt(ids: Sequence[int], max_tokens: int | None = 16) -> RouteRequest:
    return RouteRequest(
        fingerprints=block_fingerprints(NAMESPACE, pack(ids), BLOCK),
        prompt_tokens=len(ids),
        max_tokens=max_tokens,
    )


def unique(seed: int, tokens: int) -> list[int]:
    """Token ids that share no block with another seed's."""
    return [seed * 1_000 + 7, *range(tokens - 1)]


@dataclass
class SimulatedFleet:
    """Drives ``core`` with arrivals; counts what the workers computed and found cached."""

    core: RouterCore
    prefill_tokens_per_s: dict[str, float]
    decode_s: float = 0.5
    held: dict[str, set[Fingerprint]] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    routed: Counter[str] = field(default_factory=Counter)
    busy_until: dict[str, float] = field(default_factory=dict)
    in_flight_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    told: dict[str, ToldCache] = field(default_factory=dict)
    _cached_of: dict[int, int] = field(default_factory=dict)
    _events: list[tuple[float, int, str, Placement]] = field(default_factory=list)
    _count: int = 0

    def arrive(self, request: RouteRequest, now: float) -> Placement:
        self.advance(now)
        placement = self.core.route(request, now)
        name = str(placement.endpoint)
        self.routed[name] += 1
        start = max(now, self.busy_until.get(name, 0.0))
        self._push(start, "admit", placement)
        # Known at once here, because one worker takes its prompts in order.
        held = self.held.setdefault(name, set())
        blocks = 0
        for fingerprint in request.fingerprints:
            if fingerprint not in held:
                break
            blocks += 1
        held.update(request.fingerprints)
        cached = min(blocks * BLOCK, request.prompt_tokens - 1)
        self._cached_of[id(placement)] = cached
        self.prompt_tokens += request.prompt_tokens
        self.cached_tokens += cached
        done = start + (request.prompt_tokens - cached) / self.prefill_tokens_per_s[name]
        self.busy_until[name] = done
        self._push(done, "first", placement)
        self._push(done + self.decode_s, "end", placement)
        self.in_flight_seconds[name] += done + self.decode_s - now
        return placement

    def advance(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            when, _, kind, placement = heapq.heappop(self._events)
            if kind == "admit":
                self.core.accepted(placement, self._cached_of.pop(id(placement)), when)
            elif kind == "first":
                self.core.first_token(placement, when)
                self._told(placement.endpoint).store(placement.request.fingerprints, when)
            else:
                self.core.finished(placement, when)

    def advance_to_next(self) -> float:
        """Go on to the next thing that happens; its time."""
        when = self._events[0][0]
        self.advance(when)
        return when

    @property
    def in_flight(self) -> int:
        return sum(entry.load.in_flight for entry in self.core.registry)

    def _told(self, endpoint: Endpoint) -> ToldCache:
        if endpoint not in self.told:
            # Another epoch than the empty cache's that the worker began with: a snapshot takes its place.
            self.told[endpoint] = ToldCache(self.core, endpoint, epoch=2)
            self.core.view.ended(endpoint, "test", NOW, is_void=True)
            self.told[endpoint].open(NOW)
        return self.told[endpoint]

    def _push(self, when: float, kind: str, placement: Placement) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, kind, placement))
