"""Heat: which prefixes and adapters are to be on more workers than they would come to by themselves. Pure.

Every routed request is noted, which costs a few microseconds; about once a second ``review`` looks at what came of it, and gives wishes for
the pin controller, which serves them with what operators' pins leave of the budgets. It acts before queues grow, where the cost of a decision
acts once they have; both look at the same work, so neither undoes what the other does.

A prefix is charged with the work of the requests that it begins and no longer hot prefix does, so that a prompt that many share and its own
hot variants are not replicated for the same traffic twice (hierarchical heavy hitters: Cormode, Korn, Muthukrishnan and Srivastava, 2003).
A router keeps names of prompts, not prompts: the tokens of a prefix are kept from the time on that it is hot.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Fingerprint
from prefixmesh.router.heat.adapters import AdapterHeat, AdapterUse
from prefixmesh.router.heat.config import HeatConfig
from prefixmesh.router.heat.decay import DecayClock
from prefixmesh.router.heat.origin import Origin
from prefixmesh.router.heat.prefix_tree import PrefixNode, PrefixTree
from prefixmesh.router.heat.targets import Targets, target_of
from prefixmesh.router.pins.wishes import PinVersion, Wish
from prefixmesh.tokens import count

HEAT_OWNER: Final = "@heat"
"""Whom what is kept for heat is charged to. Nobody can pin by this name; a tenant that is called so pays for heat's warmings."""

LEAST_BLOCKS: Final = 2
"""Of a prefix that is worth a pin: what is shorter is computed along with the rest of a prompt in the same step."""

LEAST_REQUESTS: Final = 5.0
"""That have come, as far as they count still, before a prefix is looked at."""

FORGOTTEN: Final = 0.05
"""Requests, as far as they count still, below which a prefix is dropped: one is so little after three quarters of a minute."""

KEPT_FACTOR: Final = 1.5
"""Beyond the bounds what is wished already counts for so much more: two that are nearly alike do not take turns."""

WISH_S: Final = 60.0
"""Wishes are for so long, and up to twice that: they end by themselves when this router does. In whole steps of it, so that a wish stays equal
from one review to the next, and workers are not asked to keep what they keep."""

_MS_PER_S: Final = 1e3


class HeatFleet(NamedTuple):
    """The fleet as a review has to know it."""

    workers: int
    """That may be sent requests."""

    place_s: float = 0.0
    """Share of a worker's places that one request takes for as long as it is expected to, times that: seconds. 0 where places are boundless."""

    steps_s: float = 0.0
    """How long an answer's steps keep a worker busy, shared out evenly among those that workers decode together now: seconds. In a fleet with
    little to do that is most of what a request costs, for each step reads the whole model, be it for one answer or for ten."""


@dataclass(slots=True)
class HotPrefix:
    """A prefix that came often enough to be looked at."""

    last: Fingerprint
    """Of its last block: its name."""

    origin: Origin
    blocks: int
    requests_per_s: float = 0.0
    load: float = 0.0
    """In workers."""

    target: int = 1
    """Workers that are to hold it; 1: whoever does by itself."""

    version: PinVersion | None = None
    """As a wish tells it; None while it is not wished, and until a prompt has brought its tokens."""

    @property
    def name(self) -> str:
        """As in its wish."""
        return f"{self.last:016x}"


class HeatTracker:
    """One router's. Not thread-safe: one loop owns it. ``now`` is seconds of one clock that never goes back."""

    def __init__(self, config: HeatConfig, block_size: int) -> None:
        self.config = config
        self._block_size = block_size
        self._clock = DecayClock()
        self._tree = PrefixTree(block_size)
        self._adapters = AdapterHeat()
        self._targets = Targets()
        self._wished: dict[str, HotPrefix] = {}
        self._watched: list[HotPrefix] = []
        self._requests = self._work_ms = 0.0
        self._began: float | None = None

    def note(
        self, names: Sequence[Fingerprint], tokens: bytes, origin: Origin, work_ms: float, now: float
    ) -> None:
        """A request was routed: the names of its prompt's blocks, its packed tokens, where they live, and the work that it makes for a
        worker which holds what others hold. Only names are kept. O(log blocks), and O(blocks) where the prompt is new; O(nodes) for the first
        one after minutes without a review."""
        if not self.config.enabled:
            return
        self._let_time_pass(now)  # here too: while there are no workers nothing is reviewed
        weight = self._clock.weight
        self._began = now if self._began is None else self._began
        self._requests += weight
        self._work_ms += weight * work_ms
        if origin.adapter_digest:
            self._adapters.add(origin, weight, work_ms, now)
        if names:
            self._tree.add(names, tokens, origin, weight, work_ms, now)

    def review(self, now: float, fleet: HeatFleet) -> list[Wish]:
        """What is to be held on how many workers now. Call it about once a second. O(nodes of the tree): a millisecond or two."""
        if not self.config.enabled or self._began is None or not fleet.workers:
            return []
        self._let_time_pass(now)
        most = min(self.config.max_replicas or fleet.workers, fleet.workers)
        load_of = partial(self._load, now=now, fleet=fleet)
        mean_load = load_of(self._requests, self._work_ms, self._began) / fleet.workers
        nodes = self._find(load_of, mean_load, most, now)
        self._take_over(nodes, self._targets.step({one.name: one.target for one, _ in nodes}, now), most)
        weight = self._clock.weight
        gone = FORGOTTEN * weight
        adapters = self._adapters.review(
            lambda use: load_of(use.requests, use.work_ms, use.born), weight, mean_load, most, now
        )
        self._tree.make_room(gone)
        self._adapters.make_room(gone)
        expires_at = (math.floor(now / WISH_S) + 2.0) * WISH_S
        wishes = [
            _wish(one.name, one.target, one.version, expires_at)
            for one in self._wished.values()
            if one.version
        ]
        return wishes + [
            _wish(f"adapter-{one.digest[:32]}", one.target, one.version, expires_at)
            for one in adapters[: self.config.max_prefixes]
        ]

    @property
    def watched(self) -> Sequence[HotPrefix]:
        """The prefixes that are wished, and others that came nearest, as of the last review, the hottest first. At most twice as many as may
        be wished."""
        return self._watched

    @property
    def adapters(self) -> Sequence[AdapterUse]:
        """What is asked for of adapters, the hottest first. O(adapters * log adapters)."""
        return self._adapters.uses()

    def requests_per_s(self, use: AdapterUse, now: float) -> float:
        """At which an adapter is asked for. O(1), as for ``note``."""
        self._let_time_pass(now)
        return self._clock.per_s(use.requests, use.born, now)

    def check_invariants(self) -> None:
        """Recompute everything; raises InvariantError. O(nodes)."""
        self._tree.check_invariants()

    def __repr__(self) -> str:
        return f"<HeatTracker {len(self._wished)} wished | {self._tree!r}, {self._adapters!r}>"

    def _let_time_pass(self, now: float) -> None:
        factor = self._clock.rescale(now)
        if factor != 1.0:
            self._tree.scale(factor)
            self._adapters.scale(factor)
            self._requests *= factor
            self._work_ms *= factor
        self._clock.tick(now)

    def _load(self, requests: float, work_ms: float, since: float, *, now: float, fleet: HeatFleet) -> float:
        """Workers that requests keep busy: with arithmetic and the steps of their answers, or by the places that they take, whichever is
        more."""
        clock = self._clock
        requests_per_s = clock.per_s(requests, since, now)
        busy = clock.per_s(work_ms, since, now) / _MS_PER_S + requests_per_s * fleet.steps_s
        return max(busy, requests_per_s * fleet.place_s)

    def _find(
        self, load_of: Callable[[float, float, float], float], mean_load: float, most: int, now: float
    ) -> list[tuple[HotPrefix, PrefixNode]]:
        """Prefixes that came often enough, with what they alone are charged with. O(nodes)."""
        least = LEAST_REQUESTS * self._clock.weight
        # Of each node, what hot prefixes below it are charged with: requests and work.
        charged: dict[int, tuple[float, float]] = {}
        found = []
        for node in reversed(self._tree.nodes()):
            requests, work_ms = charged.pop(id(node), (0.0, 0.0))
            own, own_work_ms = node.requests - requests, node.work_ms - work_ms
            if own >= least and node.end >= LEAST_BLOCKS:
                load = load_of(own, own_work_ms, node.born)
                per_s = self._clock.per_s(own, node.born, now)
                target = target_of(load, own / self._clock.weight, mean_load, most)
                one = HotPrefix(node.names[-1], node.origin, node.end, per_s, load, target)
                found.append((one, node))
                if one.target > 1 or one.name in self._wished:
                    requests, work_ms = node.requests, node.work_ms
            if requests and node.parent is not None:
                others = charged.get(id(node.parent), (0.0, 0.0))
                charged[id(node.parent)] = (others[0] + requests, others[1] + work_ms)
        return found

    def _take_over(
        self, nodes: Sequence[tuple[HotPrefix, PrefixNode]], targets: Mapping[str, int], most: int
    ) -> None:
        """Wish what is to be on several workers, within the bounds, the hottest first."""
        now_seen = {one.name: (one, node) for one, node in nodes}
        was_wished, self._wished = self._wished, {}
        hot = [now_seen[name][0] if name in now_seen else was_wished.get(name) for name in targets]
        ranked = sorted(
            filter(None, hot),
            key=lambda one: -one.load * (KEPT_FACTOR if one.name in was_wished else 1.0),
        )
        tokens = 0
        for one in ranked:
            size = one.blocks * self._block_size
            if len(self._wished) == self.config.max_prefixes or tokens + size > self.config.max_tokens:
                continue
            tokens += size
            one.target = min(targets[one.name], most)
            known = was_wished.get(one.name)
            one.version = known.version if known else None
            if one.name not in now_seen:
                one.requests_per_s = one.load = 0.0
            if one.version is None and one.name in now_seen:
                one.version = self._version(now_seen[one.name][1])
            self._wished[one.name] = one
        others = sorted((one for one, _ in nodes if one.name not in self._wished), key=lambda one: -one.load)
        for one in others:
            one.target = 1
        shown = [*self._wished.values(), *others[: self.config.max_prefixes]]
        self._watched = sorted(shown, key=lambda one: -one.load)

    def _version(self, node: PrefixNode) -> PinVersion | None:
        """Of a prefix whose tokens a prompt has brought; None, and the next one is asked for them."""
        if node.tokens is None:
            node.is_wanted = True
            return None
        tokens, node.tokens = node.tokens, None
        origin = node.origin
        is_public = origin.boundary_tokens >= count(tokens)
        return PinVersion(
            generation=1,
            namespace=origin.namespace,
            tokens=tokens,
            fingerprints=node.path(),
            adapter=origin.adapter,
            adapter_digest=origin.adapter_digest,
            boundary_tokens=0 if is_public else origin.boundary_tokens,
            tail_namespace=b"" if is_public else origin.tail_namespace,
        )


def _wish(name: str, replicas: int, version: PinVersion, expires_at: float) -> Wish:
    return Wish(
        source="heat",
        owner=HEAT_OWNER,
        name=name,
        tier=Tier.DEVICE,
        replicas=replicas,
        version=version,
        expires_at=expires_at,
    )
