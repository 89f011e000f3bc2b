"""A simulated fleet as a case of the field needs it: its questions by name, requests that reach a worker past its routers, and what came of all.

What runs are the product's own cores (routers, schedulers, caches, publishers) and the simulated network between them. Requests that no
router has sent stand for those of a router elsewhere: the fleet's own hear of them only by the workers' reports.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import partial

import xxhash

from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.cache.tier import Tier
from prefixmesh.config import EngineConfig
from prefixmesh.ids import Namespace
from prefixmesh.proto.cache_news import EventBatch, News
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.fleet_view import Followed
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.router.worker_entry import WorkerEntry
from prefixmesh.router.worker_view import Trust
from prefixmesh.sim.fake_engine import ModelIdentity
from prefixmesh.sim.fleet_run import FleetSpec, SimulatedFleet
from prefixmesh.sim.network import LinkQuality
from prefixmesh.sim.simulated_calls import open_call
from prefixmesh.sim.simulated_life import Call, Life, WorkerMessage
from prefixmesh.sim.simulated_question import Question, as_route_request, as_submit
from prefixmesh.sim.simulated_request import Answered
from prefixmesh.sim.simulated_router import SimulatedRouter
from prefixmesh.sim.timing import H100_8B, TimingModel
from prefixmesh.tokens import pack
from prefixmesh.worker.messages import Ended, Refused

NAMESPACE = Namespace(b"a case's tenant!")
VOCABULARY = 512
"""Small: a step fills so many logits for each who samples."""

BLOCK = 64
REPORTED_S = 0.3
"""In which every router has heard of what has happened at a worker."""

SPEC = FleetSpec(
    workers=2,
    engine=EngineConfig(
        page_size=16, max_total_tokens=400_000, max_running_requests=64, max_queued_requests=4096
    ),
    identity=ModelIdentity(vocab_size=VOCABULARY, context_length=1 << 17),
    timing=H100_8B,
    quality=LinkQuality(jitter_s=0.002),
)
"""What the cases have in common: workers like one H100 with a model of 8 billion parameters."""

NO_SLOW_START = PolicyConfig(slow_start_s=0.0)
"""The fleet has been up for long."""


def tokens(name: str, count: int) -> list[int]:
    """The same for the same name, and like no other's from the first token on."""
    return random.Random(name).choices(range(VOCABULARY), k=count)


def question(*parts: tuple[str, int], answer: int = 1, priority: int = 0) -> Question:
    """A prompt of so many tokens by each name, and the length of its answer."""
    prompt = pack([token for name, count in parts for token in tokens(name, count)])
    return Question(namespace=NAMESPACE, prompt=prompt, max_tokens=answer, priority=priority)


@dataclass
class Straight:
    """A request that no router of the fleet has sent."""

    has_ended: bool = False


@dataclass
class CaseFleet:
    """A fleet at its beginning: everyone is known and idle."""

    spec: FleetSpec
    policy: PolicyConfig = NO_SLOW_START
    done: list[Answered] = field(default_factory=list)
    """In the order of their ends."""

    asked: list[Answered] = field(default_factory=list)
    """In the order in which they came."""

    def __post_init__(self) -> None:
        self.fleet = SimulatedFleet(self.spec, self.policy)
        self.sim, self.network, self.routers = self.fleet.sim, self.fleet.network, self.fleet.routers
        self.rng = self.sim.fork_rng("case")
        self.names = [str(endpoint) for endpoint in self.fleet.workers]

    def ask(
        self, asked: Question, router: int | None = None, on_end: Callable[[], object] | None = None
    ) -> Answered:
        """Ask a router now, or the next in turn. Where it was sent stands in what is returned."""
        number = len(self.asked) if router is None else router

        def ended(answered: Answered) -> None:
            self.done.append(answered)
            if on_end is not None:
                on_end()

        answered = self.routers[number % len(self.routers)].ask(asked, ended)
        self.asked.append(answered)
        return answered

    def send_straight(self, worker: str, asked: Question) -> Straight:
        """A request that reaches a worker from elsewhere."""
        sent = Straight()

        def on_message(message: WorkerMessage) -> None:
            sent.has_ended = sent.has_ended or isinstance(message, Ended | Refused)

        submit = as_submit(asked, f"straight {self.rng.getrandbits(64):016x}", float("inf"))
        server = self.fleet.workers[Endpoint(worker)]
        open_call(
            self.network,
            "elsewhere",
            worker,
            lambda answer: server.generate(
                Call(submit=submit, router_id="elsewhere", answer=answer, every_token=False)
            ),
            on_message,
            lambda: None,
        )
        return sent

    def have_cached(self, worker: str, questions: Iterable[Question]) -> None:
        """Have prompts computed at a worker, until they are and every router knows."""
        self.have_cached_at((worker, one) for one in questions)

    def have_cached_at(self, prompts: Iterable[tuple[str, Question]]) -> None:
        """The same of prompts at several workers."""
        sent = [self.send_straight(worker, one) for worker, one in prompts]
        self.run_while(lambda: not all(one.has_ended for one in sent))
        self.sim.run_for(REPORTED_S)

    def closed_loop(self, questions: Iterable[Question], at_once: int) -> None:
        """Ask them with so many under way, until all have ended."""
        left = iter(questions)

        def next_one() -> None:
            if (one := next(left, None)) is not None:
                self.ask(one, on_end=next_one)

        for _ in range(at_once):
            next_one()
        self.run_to_end()

    def poisson(
        self,
        rate_per_s: float,
        seconds: float,
        make: Callable[[], Question],
        *,
        to_end: bool = True,
        router: int | None = None,
    ) -> None:
        """Ask at random times, whatever becomes of it, for so long from now on; ``to_end``: go on until all has ended."""
        when, until = self.sim.now, self.sim.now + seconds
        while (when := when + self.rng.expovariate(rate_per_s)) < until:
            self.sim.call_at(when, lambda: self.ask(make(), router))
        self.sim.run_until(until)
        if to_end:
            self.run_to_end()

    def run_to_end(self) -> None:
        """Until all that was asked has ended."""
        self.run_while(lambda: len(self.done) < len(self.asked))

    def run_while(self, condition: Callable[[], bool], at_most_s: float = 3600.0) -> None:
        """Go on for as long as a condition holds."""
        end = self.sim.now + at_most_s
        while condition():
            assert self.sim.now < end, f"not within {at_most_s} s of simulated time"
            assert self.sim.step(), "nothing is left that could happen"

    def be_slow(self, worker: str, times: float) -> None:
        """From now on every step of a worker takes so many times as long, and nobody is told."""
        timing = self.spec.timing
        slow = {one.name: times * getattr(timing, one.name) for one in fields(timing)}
        self.life(worker).engine.runner._timing = TimingModel(**slow)

    def life(self, worker: str) -> Life:
        """That of a worker which is up."""
        life = self.fleet.workers[Endpoint(worker)].life
        assert life is not None, worker
        return life

    def in_flight(self, worker: str) -> int:
        """Requests in a worker, by its own front."""
        load = self.life(worker).load
        return load.running + load.queued

    def entry(self, router: SimulatedRouter, worker: str) -> WorkerEntry:
        """What a router knows of a worker."""
        entry = router.core.registry.get(Endpoint(worker))
        assert entry is not None, worker
        return entry

    def credited(self, router: SimulatedRouter, asked: Question) -> dict[str, int]:
        """Tokens of a prompt that a router counts on, by worker; of others it counts on none."""
        core = router.core
        names = as_route_request(asked, router.public).fingerprints
        matched = core.view.slot_rows.spread(core.view.find_matches(names), BLOCK, core.fleet.columns.rows)
        return {
            str(entry.endpoint): int(matched.total[entry.row])
            for entry in core.registry
            if matched.total[entry.row]
        }

    def hear_badly(self, may_garble: Callable[[str, EventBatch], bool]) -> None:
        """Routers begin anew, and of the news of caches that come to them those are lost, doubled or late, as the link's quality says, of which
        ``may_garble`` is true, given the router's name. All else comes in order."""
        for router in self.routers:
            router.crash()
            router.news_may_garble = partial(_is_garbled, router.name, may_garble)
            router.start()
        self.sim.run_for(1.0)

    def view(self, router: SimulatedRouter, worker: str) -> Followed:
        """What a router believes of a worker's cache."""
        followed = router.core.view.get(Endpoint(worker))
        assert followed is not None, worker
        return followed

    def resyncs(self) -> Counter[tuple[str, str]]:
        """How often each router has asked each worker for a snapshot because something was wrong."""
        return Counter(
            {
                (router.name, worker): self.view(router, worker).view.causes.total()
                for router in self.routers
                for worker in self.names
            }
        )

    def epoch(self, worker: str) -> int:
        """Of the life of a worker's cache."""
        return self.life(worker).publisher.epoch

    def held(self, worker: str, tier: Tier = Tier.DEVICE) -> set[int]:
        """Blocks that a worker has, by its own tree."""
        cache = self.life(worker).engine.scheduler.kv._cache
        assert isinstance(cache, RadixCache)
        return set(cache.blocks(tier))

    def check_views(self) -> None:
        """In a moment every router believes of every worker just what that has, on each tier, and believes it wholly."""
        self.sim.run_for(REPORTED_S)
        for router in self.routers:
            for worker in self.names:
                followed = self.view(router, worker)
                assert followed.view.trust(self.sim.now) is Trust.EXACT, (router, worker)
                for tier in (Tier.DEVICE, Tier.HOST):
                    seen = router.core.view.index.held(followed.slot, tier)
                    assert seen == self.held(worker, tier), (router, worker, tier)
            router.core.check_invariants()

    def taken(self, answers: Iterable[Answered] | None = None) -> Counter[str]:
        """Requests that each worker got, of all or of those given."""
        return Counter(one.worker for one in (self.asked if answers is None else answers))

    def cached_share(self, answers: Iterable[Answered] | None = None) -> float:
        """Of the prompt tokens of all, or of those given."""
        some = list(self.done if answers is None else answers)
        return sum(one.cached_tokens for one in some) / sum(one.prompt_tokens for one in some)

    def forget(self) -> None:
        """What has ended, where there is too much of it to be kept."""
        self.done.clear()
        self.asked.clear()
        self.fleet.answered.clear()

    def check_ended_well(self) -> None:
        """Everything asked has its answer, and nothing is left of it at any router."""
        assert all(one.ended_at is not None and not one.error for one in self.asked)
        self.sim.run_for(REPORTED_S)
        for router in self.routers:
            router.core.check_invariants()
            assert all(entry.load.total == (0, 0.0, 0.0) for entry in router.core.registry)

    def digest(self) -> str:
        """Of all that became of what was asked, and of all that the simulation did: one seed, one digest."""
        return xxhash.xxh3_64_hexdigest(f"{self.sim.calls} {self.sim.now} {self.asked}".encode())


def _is_garbled(router: str, may_garble: Callable[[str, EventBatch], bool], news: News) -> bool:
    return isinstance(news, EventBatch) and may_garble(router, news)
