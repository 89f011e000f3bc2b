"""Simulated workers under traffic, followed by views of their caches over a network that can be made to fail."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from prefixmesh.cache.events import SnapshotPart
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.cache.tier import Tier
from prefixmesh.config import EngineConfig
from prefixmesh.proto.cache_news import EventBatch, News
from prefixmesh.router.block_index import BlockIndex
from prefixmesh.router.predictions import Predictions
from prefixmesh.router.worker_view import Need, WorkerView
from prefixmesh.sim.fake_engine import ModelIdentity
from prefixmesh.sim.fake_model import expected_answer
from prefixmesh.sim.faults import FaultScript
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.network import LinkQuality, Network
from prefixmesh.sim.simulated_calls import Watch, open_call
from prefixmesh.sim.simulated_life import Call, WorkerMessage
from prefixmesh.sim.simulated_news import Place
from prefixmesh.sim.simulated_worker import SimulatedWorker
from prefixmesh.sim.timing import TimingModel
from prefixmesh.tokens import pack
from prefixmesh.worker.messages import Admitted, Ended, EngineSampling, Submit, TokensOut

VOCAB: Final = 64
NAMESPACES: Final = (b"a" * 16, b"b" * 16)
REPORT_S: Final = 0.1
SMALL: Final = EngineConfig(max_total_tokens=2000, max_running_requests=6, chunked_prefill_size=128)
"""A pool for some eight prompts, so that what is old is evicted all the time."""

QUICK: Final = TimingModel(
    step_ms=1.0, prefill_ms_per_token=0.02, load_back_ms_per_token=0.005, offload_ms_per_token=0.005
)


class ViewTaker:
    """One worker's view, alone in an index."""

    def __init__(self, now: float) -> None:
        self.index = BlockIndex(max_blocks=100_000)
        self.view = WorkerView(self.index, Predictions(), report_interval_s=REPORT_S, now=now)

    def opened(self, now: float) -> Place | None:
        place = self.view.resume_from
        self.view.on_opened()
        return place

    def take(self, news: News, now: float) -> Need:
        if isinstance(news, SnapshotPart):
            self.view.on_part(news, now)
            return Need.NOTHING
        if isinstance(news, EventBatch):
            needs = [self.view.on_event(event, now) for event in news.events]
            return Need.SNAPSHOT if Need.SNAPSHOT in needs else Need.NOTHING
        return self.view.on_report(news.summary, now)

    def ended(self, cause: str, now: float) -> None:
        self.view.on_broken()


class Asked:
    """One request and what has come of it."""

    def __init__(self, namespace: bytes, prompt: list[int], count: int) -> None:
        self.expected = expected_answer(namespace, prompt, count, VOCAB)
        self.tokens: list[int] = []
        self.cached: int | None = None
        self.end = ""

    def on_event(self, event: WorkerMessage) -> None:
        match event:
            case Admitted():
                self.cached = event.cached_tokens
            case TokensOut():
                self.tokens += event.token_ids
            case Ended():
                self.end = event.reason

    def on_broken(self) -> None:
        self.end = "broken"


class Scene:
    """One worker, one reader, one caller."""

    def __init__(
        self,
        seed: int,
        *,
        quality: LinkQuality | None = None,
        faults: FaultScript | None = None,
        host_ratio: float = 0.0,
    ) -> None:
        self.sim = Simulation(seed)
        self.network = Network(self.sim, quality)
        self.worker = SimulatedWorker(
            self.sim,
            "worker",
            replace(SMALL, hicache_ratio=host_ratio),
            QUICK,
            identity=ModelIdentity(vocab_size=VOCAB),
            faults=faults,
        )
        self.taker = ViewTaker(self.sim.now)
        self.watch = Watch(
            self.sim,
            self.network,
            "router",
            self.worker,
            self.taker,
            router_id="r",
            report_interval_s=REPORT_S,
            silent_s=0.5,
        )
        self.asked: list[Asked] = []

    @property
    def view(self) -> WorkerView:
        return self.taker.view

    def ask(self, rng: random.Random) -> Asked:
        """Send a request that begins like every fifth of its namespace."""
        namespace = rng.choice(NAMESPACES)
        begun = random.Random(rng.randrange(5)).choices(range(VOCAB), k=rng.randrange(10, 150))
        return self.ask_for(
            begun + rng.choices(range(VOCAB), k=rng.randrange(1, 150)), rng.randrange(1, 40), namespace
        )

    def ask_for(self, prompt: list[int], count: int, namespace: bytes = NAMESPACES[0]) -> Asked:
        asked = Asked(namespace, prompt, count)
        sampling = EngineSampling(
            temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=count, stop_token_ids=()
        )
        submit = Submit(
            request_id=str(len(self.asked)), namespace=namespace, tokens=pack(prompt), sampling=sampling
        )
        self.asked.append(asked)
        open_call(
            self.network,
            "caller",
            "worker",
            lambda answer: self.worker.generate(Call(submit=submit, router_id="r", answer=answer)),
            asked.on_event,
            asked.on_broken,
        )
        return asked

    def run_until(self, condition: Callable[[], bool], at_most_s: float = 60.0) -> None:
        """Go on until a condition holds."""
        end = self.sim.now + at_most_s
        while not condition():
            assert self.sim.now < end, f"not within {at_most_s} s: {self.worker!r} {self.view!r}"
            self.sim.step()

    def differs(self) -> str:
        """How the view differs from the cache's own tree; empty when it does not."""
        assert self.worker.life is not None
        cache = self.worker.life.engine.scheduler.kv._cache
        assert isinstance(cache, RadixCache)
        for tier in Tier:
            held, there = self.taker.index.held(self.view.slot, tier), cache.blocks(tier)
            if held != there:
                return (
                    f"{tier.name}: {len(held - there)} too many, {len(there - held)} missing; {self.view!r}"
                )
        return ""
