"""Decisions over time: simulated workers, real index and columns."""

import random
from collections import Counter

import pytest

from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Fingerprint, Namespace
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.router_config import RoutingPolicy
from prefixmesh.tokens import pack
from tests.support.column_fleet import PREFILL_MS
from tests.support.column_traffic import ColumnTraffic

NAMESPACE = Namespace(b"n" * 16)


def names_of(*parts: tuple[int, int]) -> list[Fingerprint]:
    """Blocks of a prompt of (seed, tokens) parts."""
    ids = [seed * 1000 + at % 997 for seed, tokens in parts for at in range(tokens)]
    return block_fingerprints(NAMESPACE, pack(ids))


def test_unloaded_worker_gets_new_prompts_whatever_it_holds() -> None:
    """F1: A empty with load 50, B with a big tree and load 0; unique prompts → 95 % of those sent before the loads meet go to B."""
    traffic = ColumnTraffic([PREFILL_MS] * 2, answer_ms=1e9)
    a, b = traffic.workers
    traffic.columns.set_usable(b.row, usable=False)
    for _ in range(50):
        traffic.arrive(0.0, 300)
    traffic.columns.set_usable(b.row, usable=True)
    traffic.index.stored(b.slot, Tier.DEVICE, names_of((1, 64_000)))
    taken = Counter[int]()
    while b.in_flight < a.in_flight:
        taken[traffic.arrive(0.0, 300).row] += 1
    assert taken[b.row] >= 0.95 * taken.total()


def test_unique_prompts_spread_evenly() -> None:
    """F2 for the decision alone: 200 unique prompts, 32 at once, 2 workers → 40 to 60 % each."""
    traffic = ColumnTraffic([PREFILL_MS] * 2, answer_ms=2000.0)
    now = 0.0
    for number in range(200):
        while sum(worker.in_flight for worker in traffic.workers) >= 32:
            now += 10.0
            traffic.advance(now)
        traffic.arrive(now, 300, names_of((number, 300)))
    assert 80 <= traffic.taken[0] <= 120


def test_slow_worker_gets_less_than_a_third_of_its_share() -> None:
    """F10: one of four is ten times slower, and nobody knows before its first prompt."""
    rng, traffic, now = random.Random(2), ColumnTraffic([10 * PREFILL_MS, *[PREFILL_MS] * 3]), 0.0
    late = Counter[int]()
    while now < 30_000:
        now += rng.expovariate(6.0 / 1000)
        row = traffic.arrive(now, 500).row
        if now > 10_000:
            late[row] += 1
    assert late[0] < late.total() / 4 / 3


def test_popular_prefix_is_balanced_and_stays_cached() -> None:
    """F9: 80 % share one prefix, 4 busy workers → max/mean load at most 1.5, hit rate at least 90 % of pure affinity's."""
    rng, traffic, now, possible = random.Random(1), ColumnTraffic([PREFILL_MS] * 4, answer_ms=800.0), 0.0, 0
    in_flight = Counter[int]()
    for number in range(600):
        while sum(worker.in_flight for worker in traffic.workers) >= 32:
            now += 5.0
            traffic.advance(now)
            in_flight.update({worker.row: worker.in_flight for worker in traffic.workers})
        shared = rng.random() < 0.8
        possible += 1024 if shared and number else 0
        own = (1000 + number, 200 if shared else 1024)
        traffic.arrive(now, 1224 if shared else 1024, names_of((1, 1024), own) if shared else names_of(own))
    assert max(in_flight.values()) <= 1.5 * in_flight.total() / 4
    assert traffic.cached_tokens >= 0.9 * possible


def loads_of(policy: RoutingPolicy, requests_per_s: float) -> int:
    rng, traffic, now = (
        random.Random(3),
        ColumnTraffic([PREFILL_MS] * 8, config=PolicyConfig(policy=policy)),
        0.0,
    )
    for _ in range(600):
        now += rng.expovariate(requests_per_s / 1000)
        traffic.arrive(now, 300, adapter=f"adapter-{rng.randrange(32)}")
    return traffic.adapter_loads


@pytest.mark.parametrize("requests_per_s", [2.0, 8.0, 14.0])
def test_many_adapters_stay_where_they_are(requests_per_s: float) -> None:
    """32 adapters on 8 workers that hold 4 each: at most a fifth of round robin's loads, from idle to busy."""
    assert loads_of("cost", requests_per_s) <= loads_of("round_robin", requests_per_s) / 5


def test_worker_that_joins_is_fed_at_a_paced_rate() -> None:
    """Three busy workers and a cold one: within the first second it gets about a tenth of a fair share; in the end a fair one."""
    rng, now = random.Random(4), 0.0
    traffic = ColumnTraffic([PREFILL_MS] * 3, warm_up_s=10.0)

    def second() -> Counter[int]:
        nonlocal now
        before, until = Counter(traffic.taken), now + 1000.0
        while now < until:
            now += rng.expovariate(20.0 / 1000)
            traffic.arrive(now, 150)
        return traffic.taken - before

    for _ in range(3):
        second()
    newcomer = traffic.join(PREFILL_MS, now)
    first = second()
    assert first[newcomer] <= 0.2 * first.total() / 4 + 1
    for _ in range(11):
        second()
    later = second() + second() + second()
    assert later[newcomer] >= 0.7 * later.total() / 4
