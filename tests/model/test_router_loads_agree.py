"""Two and four routers before three workers, in simulated time: each sees the whole load through the workers and counts nobody twice,
whatever happens to workers and links, whether requests pass through a router or stream past it; and at rest nothing is left anywhere."""

import random
from contextlib import suppress
from dataclasses import replace

import pytest

from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE, block_fingerprints
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.cache.tier import Tier
from prefixmesh.config import EngineConfig
from prefixmesh.errors import UnavailableError
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.placement import RouteRequest
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.router.reservation import ReservationState
from prefixmesh.router.worker_view import Trust
from prefixmesh.sim.fake_engine import ModelIdentity
from prefixmesh.sim.fleet_run import TENANT, FleetSpec, SimulatedFleet
from prefixmesh.sim.network import LinkQuality, Stream
from prefixmesh.sim.simulated_calls import open_call
from prefixmesh.sim.simulated_life import Call, WorkerMessage
from prefixmesh.sim.simulated_router import Question, SimulatedRouter
from prefixmesh.sim.timing import TimingModel
from prefixmesh.tokens import pack
from prefixmesh.worker.messages import EngineSampling, Submit

SPEC = FleetSpec(
    workers=3,
    engine=EngineConfig(
        page_size=16, max_total_tokens=6_000, max_running_requests=16, chunked_prefill_size=512
    ),
    timing=TimingModel(step_ms=5.0, prefill_ms_per_token=0.1, decode_ms_per_sequence=0.5),
    identity=ModelIdentity(vocab_size=64, context_length=1 << 12),
    quality=LinkQuality(delay_s=0.001, jitter_s=0.004),
)
AGREE_S = 0.3
"""Within this each router's sum is the worker's own."""

VALID_S = 2.0
QUIET_S = 12.0
"""Longer than any request, ticket, silence and prediction takes."""

SLOW = replace(SPEC, timing=TimingModel(step_ms=100.0, prefill_ms_per_token=0.1, decode_ms_per_sequence=0.5))
LONG_ANSWER = 60
"""Six seconds of a slow worker's time: nothing ends while a burst is looked at."""


class Traffic:
    """Requests of both kinds, and troubles."""

    def __init__(self, seed: int, routers: int, spec: FleetSpec = SPEC) -> None:
        self.fleet = SimulatedFleet(replace(spec, routers=routers, seed=seed), PolicyConfig())
        self.rng = self.fleet.sim.fork_rng("traffic")

    def ask(self, max_tokens: int) -> None:
        """One prompt, which shares its beginning with a quarter of the others, in one of three ways."""
        router = self.rng.choice(self.fleet.routers)
        kind = self.rng.random()
        begin = random.Random(self.rng.randrange(4)).choices(range(64), k=300)
        prompt = pack([*begin, *self.rng.choices(range(64), k=self.rng.randrange(1, 200))])
        if kind < 0.6:
            question = Question(namespace=TENANT, prompt=prompt, max_tokens=max_tokens)
            with suppress(UnavailableError):
                router.ask(question, lambda _: None)
        else:
            self._direct(router, prompt, max_tokens, is_used=kind < 0.9)

    def trouble(self) -> None:
        """A worker is flushed, or crashes and comes back; a link breaks and is mended."""
        name, worker = self.rng.choice(list(self.fleet.workers.items()))
        router = self.rng.choice(self.fleet.routers)
        sim, network = self.fleet.sim, self.fleet.network
        match self.rng.randrange(3):
            case 0:
                worker.flush()
            case 1:
                worker.crash()
                sim.call_later(0.5, worker.start)
            case _:
                network.cut(router.name, name, silently=bool(self.rng.randrange(2)))
                sim.call_later(self.rng.uniform(0.1, 4.0), network.mend, router.name, name)

    def _direct(self, router: SimulatedRouter, prompt: bytes, max_tokens: int, *, is_used: bool) -> None:
        """A caller takes a ticket, and streams from the worker itself: the router hears nothing of it but by reports."""
        request = RouteRequest(
            fingerprints=block_fingerprints(TENANT, prompt, DEFAULT_BLOCK_SIZE),
            prompt_tokens=len(prompt) // 4,
            max_tokens=max_tokens,
        )
        try:
            placement = router.core.route(request, self.fleet.sim.now, valid_s=VALID_S)
        except UnavailableError:
            return
        if not is_used:
            return
        worker = self.fleet.workers[placement.endpoint]
        submit = Submit(
            request_id=placement.request_id,
            namespace=TENANT,
            tokens=prompt,
            sampling=EngineSampling(
                temperature=0.0,
                top_k=0,
                top_p=1.0,
                min_p=0.0,
                seed=0,
                max_tokens=max_tokens,
                stop_token_ids=(),
            ),
        )

        def begin(answer: "Stream[WorkerMessage]") -> None:
            life = worker.life
            if life is None or life.incarnation != placement.incarnation:
                answer.break_off()  # a worker refuses the ticket of another life
            else:
                assert router.life is not None
                worker.generate(Call(submit=submit, router_id=router.life.router_id, answer=answer))

        open_call(
            self.fleet.network, "caller", worker.name, begin, lambda _: None, lambda: None, buffer=1 << 16
        )

    def there(self, endpoint: Endpoint) -> int:
        """Answers in a worker, by its own front."""
        life = self.fleet.workers[endpoint].life
        assert life is not None
        return life.news.load.running + life.news.load.queued

    def check_agreement(self) -> None:
        for router in self.fleet.routers:
            for entry in router.core.registry:
                unused = sum(
                    reservation.state is ReservationState.RESERVED
                    for reservation in entry.load.open_reservations()
                )
                assert entry.load.total.in_flight - unused == self.there(entry.endpoint), (router, entry.load)

    def check_rest(self) -> None:
        for router in self.fleet.routers:
            router.core.check_invariants()
            assert len(router.core.view.predictions) == 0
            for entry in router.core.registry:
                assert entry.load.total == (0, 0.0, 0.0)
                followed, life = router.core.view.get(entry.endpoint), self.fleet.workers[entry.endpoint].life
                assert followed is not None
                assert life is not None
                assert followed.trust is Trust.EXACT
                cache = life.engine.scheduler.kv._cache
                assert isinstance(cache, RadixCache)
                assert router.core.view.index.held(followed.slot, Tier.DEVICE) == set(
                    cache.blocks(Tier.DEVICE)
                )


@pytest.mark.parametrize("routers", [2, 4])
def test_every_routers_sum_is_the_workers_own_within_three_hundred_milliseconds(routers: int) -> None:
    """Requests come in bursts and stay for long; after each burst all agree, and after the last end all are at zero."""
    traffic = Traffic(routers, routers, SLOW)
    sim = traffic.fleet.sim
    for _ in range(6):
        for _ in range(4):
            traffic.ask(LONG_ANSWER)
        sim.run_for(AGREE_S)
        traffic.check_agreement()
    assert sum(traffic.there(endpoint) for endpoint in traffic.fleet.workers) > 10
    sim.run_for(QUIET_S)
    traffic.check_agreement()
    traffic.check_rest()


def check_seed(seed: int, routers: int) -> None:
    traffic = Traffic(seed, routers)
    for _ in range(2):
        for _ in range(50):
            traffic.fleet.sim.run_for(traffic.rng.expovariate(20.0))
            traffic.ask(traffic.rng.choice([1, 8, 60]))
            if traffic.rng.random() < 0.1:
                traffic.trouble()
        for router in traffic.fleet.routers:
            router.core.check_invariants()
        traffic.fleet.sim.run_for(QUIET_S)
        traffic.check_rest()


def test_after_any_troubles_nothing_is_left_of_one_seed() -> None:
    check_seed(12, routers=2)


@pytest.mark.slow
def test_after_any_troubles_nothing_is_left_of_four_routers() -> None:
    check_seed(14, routers=4)
    check_seed(15, routers=4)


@pytest.mark.deep
@pytest.mark.parametrize("routers", [2, 4])
def test_after_any_troubles_nothing_is_left_with_many_seeds(routers: int) -> None:
    for seed in range(50):
        check_seed(100 + seed, routers)
