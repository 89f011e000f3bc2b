"""A workload replayed through a fleet, block by block: where requests go, what they find cached, and how long they wait.

The block-level form: fast enough to compare many policies on traces of ten thousands of requests, at the price of what it leaves out.

    real here            ``RouterCore`` and all that is in it: index, views, predictions, reservations, cost, every one of its policies
    in block form here   caches (``replay_cache``) and engines (``replay_worker``), whose modules say what they leave out
    not here             networks, faults, several routers, adapters' loads, pins, front ends

``fleet_run`` is the other form: real caches, schedulers and news over a network, some hundred times as slow. Nothing here is by the
machine's clock, so a run repeats to the microsecond.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import xxhash

from prefixmesh.config import RoutingPolicy
from prefixmesh.errors import ConfigError
from prefixmesh.ids import Fingerprint
from prefixmesh.router.policy import PICKS, PolicyConfig
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.replay_cache import BlockCache, Change
from prefixmesh.sim.replay_core import CoreRouter
from prefixmesh.sim.replay_figures import ReplayFigures, figures_of
from prefixmesh.sim.replay_routers import ReplayRouter, RuleRouter
from prefixmesh.sim.replay_worker import Job, ReplayWorker
from prefixmesh.sim.rivals.backlog import backlog
from prefixmesh.sim.rivals.catalogue import RULES
from prefixmesh.sim.timing import H100X2_70B, TimingModel
from prefixmesh.sim.workload import Workload

CEILINGS: Final = ("one_pooled_cache", "one_infinite_cache")
"""What no router can pass: all workers find in one cache what any of them has computed, or is about to."""

POLICIES: Final = tuple(dict.fromkeys(("cost", *RULES, *PICKS, *CEILINGS)))
"""By name: ours first, others' rules, those beside ours, ceilings."""

_OURS: Final[Mapping[str, RoutingPolicy]] = {name: name for name in PICKS}
_BOUNDLESS_BLOCKS: Final = 1 << 40
_MS_PER_S: Final = 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySpec:
    """Which fleet, and how it is driven."""

    workers: int = 8
    device_tokens: int = 2_000_000
    """Of each worker's cache."""

    host_tokens: int = 0
    """Of each worker's host tier, in which all that is on the device is as well; 0: none."""

    timing: TimingModel = H100X2_70B
    chunk_tokens: int = 2048
    """Most tokens of prefill in a step."""

    speed: float = 1.0
    """How many times faster than in the workload requests arrive. Pauses stay."""

    spill_weight: float = PolicyConfig().spill_weight
    """Of the policy ``cost``."""

    at_once: bool = False
    """Look caches up and fill them in the moment in which a request is sent, and let a whole prompt be found: how figures of studies by
    blocks are counted, and ceilings always, which nothing is to escape because it was asked for twice in a moment. Otherwise a
    request finds what is there when its turn comes, leaves its blocks when they are computed, and computes its last token."""

    seed: int = 0
    """For policies that draw."""

    def __post_init__(self) -> None:
        for name in ("workers", "device_tokens", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.host_tokens < 0:
            raise ConfigError(f"host_tokens must be from 0 on, got {self.host_tokens}")
        if not 0.0 < self.speed < math.inf:
            raise ConfigError(f"speed must be a number above 0, got {self.speed}")
        if not 0.0 <= self.spill_weight < math.inf:
            raise ConfigError(f"spill_weight must be a number from 0 on, got {self.spill_weight}")


def replay(
    workload: Workload,
    spec: ReplaySpec,
    policy: str,
    progress: Callable[[int], None] | None = None,
) -> ReplayFigures:
    """Replay a workload by one policy. ``progress`` is told how many requests have ended, now and then.

    Some half a millisecond a request of this machine's time. Raises ConfigError for a policy that is none, and for a cache that is too small for a request.
    """
    if policy not in POLICIES:
        raise ConfigError(f"no policy is called {policy!r}; there are: {', '.join(POLICIES)}")
    largest = max(one.input_length + one.output_length for one in workload.requests)
    if spec.device_tokens < largest:
        raise ConfigError(
            f"device_tokens must hold the largest request, {largest} tokens, got {spec.device_tokens}"
        )
    fleet = _Fleet(workload, spec, policy)
    fleet.run(progress)
    return figures_of(fleet.jobs, fleet.workers)


class _Fleet:
    """Workers, a router, and the requests of one run."""

    def __init__(self, workload: Workload, spec: ReplaySpec, policy: str) -> None:
        self._sim = Simulation(spec.seed)
        self._spec = spec
        self.jobs = list(_jobs(workload))
        self._followers = _followers(workload)
        self._left = len(self.jobs)
        self.workers = self._make_workers(workload.block_size, policy)
        self._router = self._make_router(workload.block_size, policy)
        for job in self.jobs:
            if job.request.arrival_ms is not None:
                when = job.request.arrival_ms / _MS_PER_S / spec.speed
                self._sim.call_at(when, partial(self._arrive, job))

    def run(self, progress: Callable[[int], None] | None) -> None:
        """Until every request has its end."""
        told = 0
        while self._left and self._sim.step():
            done = len(self.jobs) - self._left
            if progress is not None and done >= told + len(self.jobs) // 100:
                told = done
                progress(done)

    # What happens (``Listener``).

    def begun(self, job: Job) -> None:
        """See ``Listener.begun``."""
        self._router.begun(job)

    def first_token(self, job: Job) -> None:
        """See ``Listener.first_token``."""
        self._router.first_token(job)

    def ended(self, job: Job) -> None:
        """See ``Listener.ended``."""
        self._router.ended(job)
        self._left -= 1
        for number in self._followers.get(job.number, ()):
            follower = self.jobs[number]
            self._sim.call_later(follower.request.pause_ms / _MS_PER_S, partial(self._arrive, follower))

    def changed(self, worker: int, changes: Sequence[Change]) -> None:
        """See ``Listener.changed``."""
        self._router.changed(worker, changes)

    # How it is made.

    def _arrive(self, job: Job) -> None:
        job.arrived_at = self._sim.now
        job.worker = self._router.route(job)
        self.workers[job.worker].take(job)

    def _make_workers(self, block_size: int, policy: str) -> list[ReplayWorker]:
        spec, is_ceiling = self._spec, policy in CEILINGS
        device, host = spec.device_tokens // block_size, spec.host_tokens // block_size
        if policy == "one_infinite_cache":
            shared = BlockCache(_BOUNDLESS_BLOCKS)
        else:
            shared = BlockCache(
                spec.workers * spec.device_tokens // block_size, spec.workers * spec.host_tokens // block_size
            )
        return [
            ReplayWorker(
                self._sim,
                place,
                shared if is_ceiling else BlockCache(device, host),
                spec.timing,
                self,
                block_size=block_size,
                chunk_tokens=spec.chunk_tokens,
                at_once=is_ceiling or spec.at_once,
            )
            for place in range(spec.workers)
        ]

    def _make_router(self, block_size: int, policy: str) -> ReplayRouter:
        rng = self._sim.fork_rng("router")
        if policy in CEILINGS or policy in RULES:
            return RuleRouter(RULES.get(policy, backlog), self.workers, rng, block_size)
        # Nobody is refused: what is refused is not compared. Nobody is new: all begin together.
        config = PolicyConfig(
            policy=_OURS[policy], spill_weight=self._spec.spill_weight, slow_start_s=0.0, max_wait_s=0.0
        )
        return CoreRouter(
            self._sim,
            self.workers,
            config,
            rng,
            block_size=block_size,
            chunk_tokens=self._spec.chunk_tokens,
        )


def _jobs(workload: Workload) -> Iterable[Job]:
    """Each request with names for its blocks that are those of whole prefixes, whatever the workload's ids are."""
    names: dict[tuple[Fingerprint | None, int], Fingerprint] = {}

    def chain(ids: Iterable[int], before: Fingerprint | None) -> list[Fingerprint]:
        chained = []
        for one in ids:
            name = names.get((before, one))
            if name is None:
                name = Fingerprint(xxhash.xxh3_64_intdigest(f"{before}/{one}".encode()))
                names[before, one] = name
            chained.append(name)
            before = name
        return chained

    for number, request in enumerate(workload.requests):
        prompt = chain(request.block_ids, None)
        whole = request.input_length // workload.block_size
        answer = chain(request.answer_ids, prompt[whole - 1] if whole else None)
        yield Job(number, request, prompt, [*prompt[:whole], *answer] if answer else [])


def _followers(workload: Workload) -> Mapping[int, Sequence[int]]:
    """By a request's number, those that come after its end."""
    followers: dict[int, list[int]] = defaultdict(list)
    for number, request in enumerate(workload.requests):
        if request.after is not None:
            followers[request.after].append(number)
    return followers
