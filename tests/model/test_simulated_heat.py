"""F9 with automatic replication, in simulated time: real routers, controller, engines and caches; only the model is none."""

import random
from functools import partial

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
WORKERS = 8
REQUESTS = 800
VOCABULARY = FleetSpec().identity.vocab_size


def question(rng: random.Random, shared: bool) -> Question:
    """Eight of ten begin alike; the others are as long, and like none."""
    own = [rng.randrange(10, VOCABULARY) for _ in range(OWN_TOKENS if shared else SHARED_TOKENS + OWN_TOKENS)]
    prefix = [7] * SHARED_TOKENS if shared else []
    return Question(namespace=NAMESPACE, prompt=pack([*prefix, *own]), max_tokens=ANSWER_TOKENS)


def drive(policy: RoutingPolicy, heat: HeatConfig | None, *, per_s: float, seconds: float) -> FleetFigures:
    """Requests at random times."""
    spec = FleetSpec(
        workers=WORKERS,
        engine=EngineConfig(page_size=64, max_total_tokens=200_000, max_running_requests=64),
        timing=H100_8B,
        heat=heat,
        seed=5,
    )
    fleet = SimulatedFleet(spec, PolicyConfig(policy=policy))
    rng, began = random.Random(9), fleet.sim.now
    when = began
    while (when := when + rng.expovariate(per_s)) < began + seconds:
        fleet.ask_at(when, partial(question, rng, rng.random() < 0.8))
    fleet.run()
    return fleet.figures(began)


@pytest.mark.slow
def test_popular_prefix_is_spread_over_eight_busy_workers_and_stays_cached() -> None:
    """F9: 80 % share one prefix, workers busy five sixths of the time → max/mean load (time that they compute) at most 1.3, hit rate at least
    95 % of pure affinity's."""
    per_s = 60.0
    hot = drive("cost", HeatConfig(), per_s=per_s, seconds=REQUESTS / per_s)
    affinity = drive("longest_match", None, per_s=per_s, seconds=REQUESTS / per_s)
    assert hot.failed == 0
    assert hot.busy_max_over_mean <= 1.3
    assert hot.cached_share >= 0.95 * affinity.cached_share
    assert affinity.busy_max_over_mean > 1.5, "else there was nothing to spread"
