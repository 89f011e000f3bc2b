"""The workers, the router and the requests of one replay, while it runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import xxhash

from prefixmesh.errors import ConfigError, InvariantError
from prefixmesh.ids import Fingerprint
from prefixmesh.router.policy import PICKS, PolicyConfig
from prefixmesh.router_config import RoutingPolicy
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.replay_arrivals import Arrivals
from prefixmesh.sim.replay_cache import BlockCache, CacheKind, Change, unit_blocks
from prefixmesh.sim.replay_cascade import SharedReads
from prefixmesh.sim.replay_core import CoreRouter, SeveralRouters
from prefixmesh.sim.replay_job import Job
from prefixmesh.sim.replay_log import ReplayLog
from prefixmesh.sim.replay_pins import NO_PINS, PinPlan, pin_wishes, place_pins
from prefixmesh.sim.replay_routers import ReplayRouter, RuleRouter
from prefixmesh.sim.replay_spec import CEILINGS, ReplaySpec
from prefixmesh.sim.replay_worker import ReplayWorker
from prefixmesh.sim.rivals.backlog import backlog
from prefixmesh.sim.rivals.catalogue import RULES
from prefixmesh.sim.workload import Workload, WorkloadRequest
from prefixmesh.worker.cascade_plan import CascadeRule

ROUTED_BLOCK_TOKENS: Final = 64
"""Routers know blocks of so many tokens, as the real ones do, or those of a workload with larger ones."""

MAX_SIMULATED_S: Final = 7 * 86_400.0
"""A week: routers look at time four times a second and workers report, which is minutes of this machine's time."""

_OURS: Final[Mapping[str, RoutingPolicy]] = {name: name for name in PICKS}
_BOUNDLESS_BLOCKS: Final = 1 << 40


class Fleet:
    """One run. Its log has every request that has ended."""

    def __init__(self, workload: Workload, spec: ReplaySpec, policy: str) -> None:
        self._sim = Simulation(spec.seed)
        self._spec = spec
        self._requests = workload.requests
        self._block_size = block_size = workload.block_size
        # Larger blocks of routers are so many of the workload's where they are whole ones of those.
        whole = ROUTED_BLOCK_TOKENS % block_size == 0
        self._routed_every = ROUTED_BLOCK_TOKENS // block_size if whole else 1
        # Ceilings have trees, whatever workers keep.
        self._cache_kind: CacheKind = "radix" if policy in CEILINGS else spec.cache
        self._unit = unit_blocks(self._cache_kind, block_size)
        self.log = ReplayLog()
        self.workers = self._make_workers(policy)
        self.router = self._make_router(policy)
        self.pins = NO_PINS if policy in CEILINGS else self._pin()
        """Where pins are, and how many are wanted."""

        self._arrivals = Arrivals(
            self._sim, self._requests, self._arrive, speed=spec.speed, concurrency=spec.concurrency
        )

    @property
    def decisions_s(self) -> "list[float] | None":
        """What each decision of our router's core took of this machine's time; None where a rule decides."""
        return self.router.decisions_s()

    def run(self, progress: Callable[[int], None] | None) -> None:
        """Until every request has its end. ``progress`` is told of so many ends, some hundred times. Raises ConfigError after
        ``MAX_SIMULATED_S``."""
        told, total, log = 0, len(self._requests), self.log
        while len(log) < total:
            if not self._sim.step():
                raise InvariantError(f"{total - len(log)} requests wait and nothing is to come")
            if self._sim.now > MAX_SIMULATED_S:
                raise ConfigError(
                    f"a replay lasts at most {MAX_SIMULATED_S:,.0f} s, and after them {total - len(log)} of {total} requests have no answer"
                )
            if progress is not None and len(log) >= told + total // 100:
                told = len(log)
                progress(told)

    # What happens (``Listener``).

    def begun(self, job: Job) -> None:
        """See ``Listener.begun``."""
        self.router.begun(job)

    def first_token(self, job: Job) -> None:
        """See ``Listener.first_token``."""
        self.router.first_token(job)

    def ended(self, job: Job) -> None:
        """See ``Listener.ended``."""
        self.router.ended(job)
        self.log.note(job)
        self._arrivals.ended(job.number)

    def changed(self, worker: int, changes: Sequence[Change]) -> None:
        """See ``Listener.changed``."""
        self.router.changed(worker, changes)

    # How it is made.

    def _arrive(self, number: int) -> None:
        job = self._make_job(number, self._requests[number])
        job.arrived_at = self._sim.now
        job.worker = self.router.route(job)
        self.workers[job.worker].take(job)

    def _make_job(self, number: int, request: WorkloadRequest) -> Job:
        """With names for its blocks that are those of whole prefixes, whatever the workload's ids are. Its answer leaves the blocks that it
        fills but for its last token, whose KV nobody has computed."""
        whole = request.input_length // self._block_size
        names = chained(request.block_ids if self._unit == 1 else request.block_ids[:whole], None)
        if not request.answer_ids:
            return Job(number, request, names, ())
        answer = chained(request.answer_ids, names[whole - 1] if whole else None)
        left = (request.input_length + request.output_length - 1) // self._block_size
        return Job(number, request, names, [*names[:whole], *answer][:left])

    def _make_workers(self, policy: str) -> list[ReplayWorker]:
        spec, is_ceiling = self._spec, policy in CEILINGS
        caches: Iterable[BlockCache]
        if policy == "one_infinite_cache":
            caches = [BlockCache(_BOUNDLESS_BLOCKS)] * spec.workers
        elif is_ceiling:
            caches = [self._make_cache(spec.workers)] * spec.workers
        else:
            caches = (self._make_cache(1) for _ in range(spec.workers))
        return [
            ReplayWorker(
                self._sim,
                place,
                cache,
                spec.timing,
                self,
                block_size=self._block_size,
                chunk_tokens=spec.chunk_tokens,
                max_running=spec.max_running,
                at_once=is_ceiling or spec.at_once,
                shared=self._make_shared(),
                max_adapters=0 if is_ceiling else spec.max_resident_adapters,
            )
            for place, cache in enumerate(caches)
        ]

    def _pin(self) -> PinPlan:
        """Raises ConfigError where the largest request would have no room beside what is pinned."""
        spec, size = self._spec, self._block_size
        if not spec.pins or spec.cache == "off":
            return NO_PINS
        wishes = pin_wishes(self._requests, size)
        names = [chained(wish.block_ids, None) for wish in wishes]
        plan = place_pins(
            wishes, names, workers=spec.workers, device_tokens=spec.device_tokens, block_size=size
        )
        for blocks, places in zip(names, plan.holders, strict=True):
            for place in places:
                self.workers[place].pin(blocks)
        most = max(worker.cache.used_blocks for worker in self.workers)
        largest = blocks_of_largest(self._requests, size, self._unit) * self._unit
        if most + largest > spec.device_tokens // size:
            raise ConfigError(
                f"device_tokens must hold the largest request, {largest * size} tokens, beside what is pinned, {most * size}, "
                f"got {spec.device_tokens}"
            )
        return plan

    def _make_cache(self, workers: int) -> BlockCache:
        spec, size = self._spec, self._block_size
        return BlockCache(
            workers * spec.device_tokens // size,
            workers * spec.host_tokens // size,
            kind=self._cache_kind,
            unit=self._unit,
            told_every=self._routed_every,
        )

    def _make_shared(self) -> SharedReads | None:
        spec = self._spec
        return SharedReads(self._block_size, CascadeRule(spec.cascade_min_reads)) if spec.cascade else None

    def _make_router(self, policy: str) -> ReplayRouter:
        spec = self._spec
        if policy in CEILINGS or policy in RULES:
            rng = self._sim.fork_rng("router")
            return RuleRouter(RULES.get(policy, backlog), self.workers, rng, self._block_size)
        # Nobody is refused: what is refused is not compared. Nobody is new: all begin together.
        config = PolicyConfig(
            policy=_OURS[policy], spill_weight=spec.spill_weight, slow_start_s=0.0, max_wait_s=0.0
        )
        adapters = {one.adapter for one in self._requests if one.adapter and spec.max_resident_adapters}
        return SeveralRouters(
            [
                CoreRouter(
                    self._sim,
                    self.workers,
                    config,
                    self._sim.fork_rng(f"router-{number}" if number else "router"),
                    block_size=self._block_size * self._routed_every,
                    routed_every=self._routed_every,
                    chunk_tokens=spec.chunk_tokens,
                    adapters=adapters,
                )
                for number in range(spec.routers)
            ]
        )


def blocks_of_largest(requests: Sequence[WorkloadRequest], block_size: int, unit: int) -> int:
    """Units of blocks that a device must have for each to run. Whoever goes on from a rest that has a name keeps both; in units of several
    rests have none. O(requests)."""
    size = block_size * unit
    return max(
        -(-(one.input_length + one.output_length) // size)
        + (unit == 1 and bool(one.answer_ids) and len(one.block_ids) > one.input_length // block_size)
        for one in requests
    )


def chained(ids: Iterable[int], before: Fingerprint | None) -> list[Fingerprint]:
    """A name for each block that stands for all before it too. O(blocks)."""
    names = []
    for one in ids:
        before = Fingerprint(xxhash.xxh3_64_intdigest(b"%d/%d" % (-1 if before is None else before, one)))
        names.append(before)
    return names
