"""F9 with automatic replication, in simulated time: real routers, controller, engines and caches; only the model is none."""

import random
from functools import cache, partial

import pytest

from prefixmesh.config import EngineConfig
from prefixmesh.ids import Namespace
from prefixmesh.router.heat.config import HeatConfig
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.router_config import RoutingPolicy
from prefixmesh.sim.fleet_run import FleetFigures, FleetSpec, SimulatedFleet
from prefixmesh.sim.simulated_router import Question
from prefixmesh.sim.timing import H100_8B
from prefixmesh.tokens import pack

NAMESPACE = Namespace(b"n" * 16)
SHARED_TOKENS, OWN_TOKENS, ANSWER_TOKENS = 2048, 256, 32
REQUESTS = 400
VOCABULARY = FleetSpec().identity.vocab_size


def question(rng: random.Random, shared: bool) -> Question:
    """Eight of ten begin alike; the others are as long, and like none."""
    own = [rng.randrange(10, VOCABULARY) for _ in range(OWN_TOKENS if shared else SHARED_TOKENS + OWN_TOKENS)]
    prefix = [7] * SHARED_TOKENS if shared else []
    return Question(namespace=NAMESPACE, prompt=pack([*prefix, *own]), max_tokens=ANSWER_TOKENS)


def drive(policy: RoutingPolicy, heat: HeatConfig | None, *, per_s: float, workers: int) -> FleetFigures:
    """Requests at random times."""
    spec = FleetSpec(
        workers=workers,
        engine=EngineConfig(page_size=64, max_total_tokens=200_000, max_running_requests=64),
        timing=H100_8B,
        heat=heat,
        seed=5,
    )
    fleet = SimulatedFleet(spec, PolicyConfig(policy=policy))
    rng, began = random.Random(9), fleet.sim.now
    when = began
    while (when := when + rng.expovariate(per_s)) < began + REQUESTS / per_s:
        fleet.ask_at(when, partial(question, rng, rng.random() < 0.8))
    fleet.run()
    return fleet.figures(began)


@cache
def pure_affinity() -> FleetFigures:
    """The same requests come at any rate, and are all served by one worker."""
    figures = drive("longest_match", None, per_s=40.0, workers=8)
    assert figures.busy_max_over_mean > 1.5, "else there was nothing to spread"
    return figures


@pytest.mark.slow
@pytest.mark.parametrize("per_s", [20.0, 40.0, 60.0])
def test_popular_prefix_is_spread_over_eight_workers_and_stays_cached(per_s: float) -> None:
    """F9: 80 % share one prefix, workers busy from three quarters of the time to nearly all → max/mean load (time that they compute) at most
    1.3, hit rate at least 95 % of pure affinity's."""
    hot = drive("cost", HeatConfig(), per_s=per_s, workers=8)
    assert hot.failed == 0
    assert hot.busy_max_over_mean <= 1.3
    assert hot.cached_share >= 0.95 * pure_affinity().cached_share


@pytest.mark.slow
@pytest.mark.parametrize("heat", [HeatConfig(), None], ids=["with heat", "by cost alone"])
def test_popular_prefix_is_spread_over_four_busy_workers_and_stays_cached(heat: HeatConfig | None) -> None:
    """F9 as it stands: 4 workers, max/mean at most 1.5, 90 % of pure affinity's hits."""
    hot = drive("cost", heat, per_s=30.0, workers=4)
    assert hot.failed == 0
    assert hot.busy_max_over_mean <= 1.5
    assert hot.cached_share >= 0.9 * pure_affinity().cached_share
