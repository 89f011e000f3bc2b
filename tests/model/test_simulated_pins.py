"""Pins of a whole fleet in simulated time: kept by the real controller on real engines, whatever becomes of the workers."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.cache.tier import Tier
from prefixmesh.config import EngineConfig
from prefixmesh.ids import Namespace
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.pins.wishes import PinVersion, Wish
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.sim.fake_engine import ModelIdentity
from prefixmesh.sim.fault_run import FaultReport, first_failing
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.network import LinkQuality, Network
from prefixmesh.sim.simulated_question import Question
from prefixmesh.sim.simulated_request import SimulatedRequest
from prefixmesh.sim.simulated_router import Answered, SimulatedRouter
from prefixmesh.sim.simulated_worker import SimulatedWorker
from prefixmesh.sim.timing import TimingModel
from prefixmesh.tokens import pack
from prefixmesh.worker.prefix_messages import ListPins

NAMESPACE = Namespace(b"n" * 16)
VOCAB = 64
PIN_TOKENS = 512
POOL_TOKENS = 4096


def prompt_of(seed: int, length: int) -> list[int]:
    return [(seed * 7 + i * i) % VOCAB for i in range(length)]


def wish_for(ids: Sequence[int], *, replicas: int, generation: int = 1, name: str = "system") -> Wish:
    tokens = pack(ids)
    return Wish(
        source="pin",
        owner="ops",
        name=name,
        tier=Tier.DEVICE,
        replicas=replicas,
        version=PinVersion(
            generation=generation,
            namespace=NAMESPACE,
            tokens=tokens,
            fingerprints=block_fingerprints(NAMESPACE, tokens),
        ),
    )


class PinnedFleet:
    """Some workers, one router that keeps their pins, and callers."""

    def __init__(self, workers: int, *wishes: Wish) -> None:
        self.sim = Simulation(5)
        self.network = Network(self.sim, LinkQuality(jitter_s=0.001))
        config = EngineConfig(
            page_size=16, max_total_tokens=POOL_TOKENS, chunked_prefill_size=256, pin_owner_share=0.3
        )
        timing = TimingModel(step_ms=5.0, prefill_ms_per_token=0.2, decode_ms_per_sequence=0.2)
        identity = ModelIdentity(vocab_size=VOCAB, context_length=2048)
        self.sim.run_for(0.0)
        self.workers = {
            Endpoint(name): SimulatedWorker(self.sim, name, config, timing, identity=identity)
            for name in (f"worker-{number}" for number in range(workers))
        }
        self.wishes = list(wishes)
        self.router = SimulatedRouter(
            self.sim,
            self.network,
            "router",
            self.workers,
            PolicyConfig(slow_start_s=0.0),
            wishes=lambda: self.wishes,
        )
        self.answers: list[Answered] = []

    def holders(self, wish: Wish) -> list[str]:
        """Workers that hold a wish's pin whole, by their engines' own word."""
        return [worker.name for worker in self.workers.values() if wish.pin_id in self.whole_pins(worker)]

    def whole_pins(self, worker: SimulatedWorker) -> set[str]:
        if worker.life is None:
            return set()
        answer = worker.life.engine.core.handle(ListPins(question=0), self.sim.now)[0]
        return {pin.pin_id for pin in answer.pins if not pin.missing_tokens}  # type: ignore[union-attr]

    def ask(self, ids: Sequence[int]) -> SimulatedRequest:
        question = Question(namespace=NAMESPACE, prompt=pack(ids), max_tokens=4)
        life = self.router.life
        assert life is not None
        return life.ask(question, lambda answered, _: self.answers.append(answered))

    def pins_left(self) -> dict[str, int]:
        """Of all engines."""
        kinds = {"pins": 0, "locks": 0, "lost": 0}
        for worker in self.workers.values():
            assert worker.life is not None
            kv, stats = worker.life.engine.scheduler.kv, worker.life.engine.core.stats()
            kinds["pins"] += stats.pins.pins
            kinds["locks"] += kv.receipts_out
            kinds["lost"] += kv.total_pages - kv.free_pages - kv.evictable_pages
            worker.life.engine.core.check_invariants()
        return kinds


def test_a_killed_holder_is_replaced_within_ten_seconds_and_requests_hit_all_the_while() -> None:
    ids = prompt_of(1, PIN_TOKENS)
    wish = wish_for(ids, replicas=2)
    fleet = PinnedFleet(3, wish)
    fleet.sim.run_for(10.0)
    before = fleet.holders(wish)
    assert len(before) == 2
    killed = fleet.workers[Endpoint(before[0])]
    killed.crash()
    for number in range(20):
        fleet.sim.run_for(0.5)
        fleet.ask([*ids, number % VOCAB, 1, 2])
    assert len(fleet.holders(wish)) == 2
    assert killed.name not in fleet.holders(wish)
    fleet.sim.run_for(5.0)
    assert [answer.error for answer in fleet.answers] == [""] * 20
    assert min(answer.cached_tokens for answer in fleet.answers) == PIN_TOKENS


def test_a_pin_stays_a_hit_everywhere_while_other_traffic_fills_the_pools() -> None:
    ids = prompt_of(1, PIN_TOKENS)
    wish = wish_for(ids, replicas=0)
    fleet = PinnedFleet(2, wish)
    fleet.sim.run_for(10.0)
    assert len(fleet.holders(wish)) == 2
    for number in range(60):
        fleet.ask(prompt_of(100 + number, 700))
        fleet.sim.run_for(0.5)
    fleet.answers.clear()
    for number in range(6):
        fleet.ask([*ids, number, 1, 2])
        fleet.sim.run_for(1.0)
    assert [answer.cached_tokens for answer in fleet.answers] == [PIN_TOKENS] * 6
    assert len(fleet.holders(wish)) == 2


def test_a_new_version_rolls_and_a_removed_pin_leaves_nothing() -> None:
    old, new = wish_for(prompt_of(1, 512), replicas=2), wish_for(prompt_of(2, 512), replicas=2, generation=2)
    fleet = PinnedFleet(3, old)
    fleet.sim.run_for(10.0)
    fleet.wishes[:] = [new]
    for _ in range(100):
        fleet.sim.run_for(0.1)
        assert fleet.holders(old) or fleet.holders(new)
    assert len(fleet.holders(new)) == 2
    assert not fleet.holders(old)
    fleet.wishes.clear()
    fleet.sim.run_for(3.0)
    assert fleet.pins_left() == {"pins": 0, "locks": 0, "lost": 0}


def test_a_worker_that_is_flushed_or_restarts_holds_again_what_all_are_to_hold() -> None:
    wish = wish_for(prompt_of(1, PIN_TOKENS), replicas=0)
    fleet = PinnedFleet(3, wish)
    fleet.sim.run_for(10.0)
    first, second, _ = fleet.workers.values()
    first.flush()
    second.crash()
    second.start()
    fleet.sim.run_for(10.0)
    assert len(fleet.holders(wish)) == 3


def test_a_router_that_restarts_finds_its_pins_and_moves_nothing() -> None:
    wish = wish_for(prompt_of(1, PIN_TOKENS), replicas=2)
    fleet = PinnedFleet(3, wish)
    fleet.sim.run_for(10.0)
    before = fleet.holders(wish)
    fleet.router.crash()
    fleet.sim.run_for(1.0)
    fleet.router.start()
    fleet.sim.run_for(10.0)
    assert fleet.holders(wish) == before
    assert fleet.router.life is not None
    assert fleet.router.life.pins is not None
    assert fleet.router.life.pins.ordered_at == 0.0


def check_seeds(seeds: range) -> int:
    """Pins that are held at the end of all of them."""
    held = 0

    def count(report: FaultReport) -> None:
        nonlocal held
        held += report.pins_held

    report = first_failing(seeds, count, has_pins=True)
    assert report is None, str(report)
    return held


def test_pins_are_as_wished_when_mixed_faults_are_over() -> None:
    assert check_seeds(range(1)) > 0


@pytest.mark.slow
def test_pins_are_as_wished_when_mixed_faults_of_many_seeds_are_over() -> None:
    assert check_seeds(range(4)) > 3 * 4


@pytest.mark.deep
def test_pins_are_as_wished_when_mixed_faults_of_a_thousand_seeds_are_over() -> None:
    assert check_seeds(range(1000)) > 3 * 1000


def hit_rate(answers: Sequence[Answered]) -> float:
    return sum(answer.cached_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers)


def come_and_go(lookups: int, every_s: float) -> list[float]:
    """Callers ask and leave, and operators wish this and that, for two hours of so many lookups each; returns how well each hit. F51."""
    wishes = [wish_for(prompt_of(seed, 256), replicas=2, name=f"p{seed}") for seed in range(3)]
    fleet = PinnedFleet(2, *wishes)
    rng = fleet.sim.fork_rng("callers")
    fleet.sim.run_for(10.0)
    hours: list[float] = []
    for _ in range(2):
        fleet.answers.clear()
        for number in range(lookups):
            ids = [*prompt_of(rng.randrange(8), 256), *rng.choices(range(VOCAB), k=20)]
            request = fleet.ask(ids)
            if rng.random() < 0.1:
                fleet.sim.call_later(rng.expovariate(20.0), request.stop)
            if number % 50 == 0:
                one = rng.randrange(len(wishes))
                version = replace(wishes[one].version, generation=wishes[one].version.generation + 1)
                wishes[one] = replace(wishes[one], version=version, replicas=rng.randint(0, 2))
                fleet.wishes[:] = rng.sample(wishes, rng.randint(1, 3))
            fleet.sim.run_for(every_s)
        hours.append(hit_rate([answer for answer in fleet.answers if answer.worker]))
    fleet.wishes.clear()
    fleet.sim.run_for(30.0)
    assert fleet.pins_left() == {"pins": 0, "locks": 0, "lost": 0}
    return hours


@pytest.mark.slow
def test_lookups_and_cancels_leave_no_pin_and_no_lock_and_hit_as_ever() -> None:
    first, second = come_and_go(500, 0.3)
    assert second == pytest.approx(first, abs=0.02)
    assert first > 0.5


@pytest.mark.deep
def test_ten_thousand_lookups_in_two_hours_leave_no_pin_and_no_lock_and_hit_as_ever() -> None:
    first, second = come_and_go(5_000, 0.72)
    assert second == pytest.approx(first, abs=0.02)
    assert first > 0.5
