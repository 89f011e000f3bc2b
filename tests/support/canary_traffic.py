"""Mixed traffic through the real scheduler, KV manager and radix cache, over a canary pool that is always too small.

``CanaryRun.serve`` submits, steps, aborts, fails and flushes as a seed says, until so many requests have come and all have ended;
``settle`` then takes the books. What really happened is counted in a ``Tally``, because a run that preempts nobody proves nothing
about preemption.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from prefixmesh.cache.radix_cache import RadixOptions
from prefixmesh.worker.messages import Admitted, Ended, Refused, TokensOut
from prefixmesh.worker.scheduler import Scheduler, SchedulerConfig, Step
from tests.support.canary_cache import CanaryCache
from tests.support.canary_model import CanaryModel
from tests.support.canary_pool import CanaryAllocator, CanaryPool
from tests.support.canary_workload import Ask, Workload
from tests.support.fake_model import FAKE_VOCAB

IDLE_STEPS: Final = 1000
"""So many steps without an event mean that the scheduler is stuck."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficOptions:
    """How much of what; the defaults keep every shortage common."""

    requests: int
    seed: int = 1
    page_size: int = 1
    pool_tokens: int = 960
    context_length: int = 320
    chunk: int = 64
    """Most prompt tokens in a step: less than most cold prompts have."""

    max_running: int = 16
    max_queued: int = 12
    abort_rate: float = 0.12
    """Aborts per step."""

    failure_rate: float = 0.005
    flush_rate: float = 0.003
    public_blocks: int = 0
    """Tokens in a block, where system prompts are public in whole blocks and pages; 0: nothing is public."""

    check_every: int = 50
    """Steps between two recomputations of all invariants; 0 leaves everything to the canary."""


@dataclass(slots=True)
class Tally:
    """What happened in a run."""

    steps: int = 0
    submitted: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    """By reason; ``refused`` among them."""

    aborts: Counter[str] = field(default_factory=Counter)
    """By the phase in which they came."""

    preemptions: int = 0
    chunked_prefills: int = 0
    """Parts of a prompt that were computed before its last part."""

    cached_tokens: int = 0
    flushes: int = 0
    failed_steps: int = 0
    in_flight_aborts: int = 0
    """Between a step's computation and its completion."""


class CanaryRun:
    """One scheduler, one canary pool, one seed."""

    def __init__(self, options: TrafficOptions) -> None:
        self.options = options
        total_pages = options.pool_tokens // options.page_size
        self.pool = CanaryPool(total_pages, options.page_size)
        self.allocator = CanaryAllocator(self.pool)
        block_size = options.public_blocks
        self.cache = CanaryCache(self.allocator, RadixOptions(block_size=block_size) if block_size else None)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_running_requests=options.max_running,
                max_queued_requests=options.max_queued,
                chunked_prefill_size=options.chunk,
                schedule_policy="lpm",
                context_length=options.context_length,
                vocab_size=FAKE_VOCAB,
                hold_min_tokens=64,  # so much that relatives often prefill side by side, and one frees duplicates
                decode_room_tokens=0,  # so little that the running run out of pages again and again
            ),
            self.allocator,
            self.cache,
        )
        self.model = CanaryModel(self.pool, options.max_running, options.context_length)
        self.rng = random.Random(options.seed)
        self.workload = Workload(
            random.Random(options.seed + 1), options.context_length, options.page_size, block_size
        )
        self.tally = Tally()
        self.now = 0.0
        self._asks: dict[str, Ask] = {}
        self._answers: dict[str, list[int]] = {}
        self._preempted: set[str] = set()

    def serve(self) -> Tally:
        """All requests, from the first submit to the last end."""
        idle = 0
        while self.tally.submitted < self.options.requests or self.scheduler.has_work:
            if self.tally.submitted < self.options.requests:
                self.arrive()
            self._disturb()
            self.step()
            idle = 0 if self._take_events() else idle + 1
            assert idle < IDLE_STEPS, f"nothing happens any more: {self.scheduler!r}"
            if self.options.check_every and self.tally.steps % self.options.check_every == 0:
                self.scheduler.check_invariants()
        return self.tally

    def arrive(self) -> None:
        """Mostly the queue is short, so that there is a choice; now and then it overflows."""
        while self.scheduler.queued < 6 or self.rng.random() < 0.05:
            for ask in self.workload.burst():
                request_id = ask.command.request_id
                self._asks[request_id], self._answers[request_id] = ask, []
                self.model.submitted(ask.command)
                self.scheduler.submit(ask.command, self._tick())
                self.tally.submitted += 1
            self._take_events()

    def step(self) -> None:
        """One step of the scheduler, or a failure of one."""
        before = {request.request_id for request in self.scheduler.running}
        step = self.scheduler.next_step(self._tick())
        running = {request.request_id for request in self.scheduler.running}
        self.tally.preemptions += len(before - running)
        self._preempted = (self._preempted | before) - running
        self.model.still_running(running)
        if step is None:
            return
        self.tally.steps += 1
        self.tally.chunked_prefills += sum(
            request.computed + new_tokens < request.length for request, new_tokens, _ in step.parts
        )
        if self.rng.random() < self.options.failure_rate:
            self._fail(step)
        else:
            self._complete(step)

    def settle(self) -> None:
        """All have ended: nobody owns or locks anything, and when the cache has given up all of its pages, all are free."""
        tally, kv = self.tally, self.scheduler.kv
        assert not self._asks
        assert sum(tally.ends.values()) == tally.submitted == self.workload.made
        self.scheduler.check_invariants()
        assert (kv.protected_pages, kv.double_releases) == (0, 0)
        assert kv.free_pages + kv.evictable_pages == kv.total_pages
        self.cache.evict(kv.total_pages)
        assert kv.free_pages == self.pool.free_pages == kv.total_pages
        self.scheduler.check_invariants()

    def _disturb(self) -> None:
        if self.rng.random() < self.options.abort_rate:
            self._abort()
        if self.rng.random() < self.options.flush_rate:
            self.scheduler.flush()
            self.tally.flushes += 1

    def _abort(self) -> None:
        """Somebody in a phase that was drawn first: the rare phases are met as often as the common ones."""
        by_phase: dict[str, list[str]] = {}
        for request in self.scheduler.running:
            by_phase.setdefault(request.phase.value, []).append(request.request_id)
        for request_id in self._asks.keys() - {request.request_id for request in self.scheduler.running}:
            phase = "preempted" if request_id in self._preempted else "waiting"
            by_phase.setdefault(phase, []).append(request_id)
        if not by_phase:
            return
        phase = self.rng.choice(sorted(by_phase))
        self.tally.aborts[phase] += 1
        self.scheduler.abort(self.rng.choice(sorted(by_phase[phase])), self._tick())
        self._take_events()

    def _complete(self, step: Step) -> None:
        next_tokens = self.model.run(step)
        failures = {}
        if step.sampled and self.rng.random() < self.options.failure_rate:
            failures[self.rng.randrange(len(step.sampled))] = "planted"
        if self.rng.random() < self.options.failure_rate:
            self.tally.in_flight_aborts += 1
            self.scheduler.abort(self.rng.choice(step.parts).request.request_id, self._tick())
        self.scheduler.complete(step, next_tokens, self._tick(), failures)

    def _fail(self, step: Step) -> None:
        """A step that raises, before it wrote anything or after it wrote everything."""
        self.tally.failed_steps += 1
        if self.rng.random() < 0.5:
            self.model.run(step)
        self.scheduler.fail(step, "planted", self._tick())

    def _take_events(self) -> bool:
        events = self.scheduler.take_events()
        for event in events:
            match event:
                case TokensOut():
                    answer = self._answers[event.request_id]
                    assert event.position == len(answer), "a token was lost or repeated"
                    answer += event.token_ids
                case Ended():
                    self.tally.ends[event.reason] += 1
                    self._end(event)
                case Refused():
                    self.tally.ends["refused"] += 1
                    del self._asks[event.request_id], self._answers[event.request_id]
                    self.model.ended(event.request_id)
                case Admitted():
                    self.tally.cached_tokens += event.cached_tokens
                case _:
                    raise AssertionError(f"an event that a scheduler does not send: {event}")
        return bool(events)

    def _end(self, event: Ended) -> None:
        """An answer is what the model said, whoever was preempted, aborted or flushed meanwhile."""
        ask, answer = self._asks.pop(event.request_id), self._answers.pop(event.request_id)
        self._preempted.discard(event.request_id)
        start = len(ask.prompt)
        said = self.model.ended(event.request_id).tokens[start : start + len(answer)].tolist()
        assert answer == said
        assert event.completion_tokens == len(answer)
        if event.reason != "failed":
            self.workload.answered(ask, answer)

    def _tick(self) -> float:
        self.now += 1.0
        return self.now
