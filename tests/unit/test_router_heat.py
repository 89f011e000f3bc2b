"""Heat: what is found hot, how many workers are to hold it, and when it is let go."""

import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.ids import Namespace
from prefixmesh.router.heat import prefix_tree
from prefixmesh.router.heat.config import HeatConfig
from prefixmesh.router.heat.decay import FADE_S, SCALES, DecayClock
from prefixmesh.router.heat.origin import Origin
from prefixmesh.router.heat.prefix_tree import PrefixTree
from prefixmesh.router.heat.targets import LET_GO_S, Targets, target_of
from prefixmesh.router.heat.tracker import HEAT_OWNER, HeatFleet, HeatTracker
from prefixmesh.router.pins.wishes import Wish
from prefixmesh.tokens import pack

BLOCK = 4
NAMESPACE = Namespace(b"n" * 16)
HERE = Origin(NAMESPACE)
EIGHT = HeatFleet(8)


class Traffic:
    """Requests at a steady rate, noted as a router does, and a review every second."""

    def __init__(self, config: HeatConfig | None = None, seed: int = 1) -> None:
        self.tracker = HeatTracker(config or HeatConfig(), BLOCK)
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.number = 0
        self.wishes: list[Wish] = []

    def note(self, shared: list[int], work_ms: float, origin: Origin = HERE) -> None:
        """A request that goes on behind what it shares with tokens that nobody else has."""
        self.number += 1
        packed = pack([*shared, *(10_000 + self.number * 8 + at for at in range(8))])
        names = block_fingerprints(origin.namespace, packed, BLOCK)
        self.tracker.note(names, packed, origin, work_ms, self.now)

    def run(
        self, seconds: int, mix: list[tuple[list[int], float, float]], fleet: HeatFleet = EIGHT
    ) -> list[Wish]:
        """``mix``: what is shared, requests a second, work of each in milliseconds."""
        for _ in range(seconds):
            arrivals = sorted(
                (at, shared, work_ms) for shared, per_s, work_ms in mix for at in self._arrivals(per_s)
            )
            for at, shared, work_ms in arrivals:
                self.now = math.floor(self.now) + at
                self.note(shared, work_ms)
            self.now = math.floor(self.now) + 1.0
            self.wishes = self.tracker.review(self.now, fleet)
            self.tracker.check_invariants()
        return self.wishes

    def _arrivals(self, per_s: float) -> Iterator[float]:
        at = self.rng.expovariate(per_s)
        while at < 1.0:
            yield at
            at += self.rng.expovariate(per_s)


def seq(seed: int, tokens: int) -> list[int]:
    return [seed * 1000 + at for at in range(tokens)]


@pytest.mark.parametrize("hours", [2.5, 12.0, 24.0 * 365])
def test_fleet_that_was_away_for_long_begins_anew(hours: float) -> None:
    """Nothing is reviewed while there is no worker, and weights grow all the same: the first request after a night is one like any, and what it
    comes to is still a number."""
    traffic, shared = Traffic(), seq(1, 40)
    mix = [(shared, 40.0, 80.0), *((seq(n, 40), 1.0, 80.0) for n in range(2, 12))]
    traffic.run(20, mix)
    traffic.now += hours * 3600.0
    assert traffic.tracker.review(traffic.now, HeatFleet(0)) == []
    traffic.note(shared, 80.0)
    assert traffic.run(int(LET_GO_S) + 2, [(shared, 0.1, 80.0)]) == []
    (wish,) = traffic.run(20, mix)
    assert wish.version.tokens == pack(shared)


def test_prefix_that_most_share_is_wished_on_most_workers_with_its_tokens() -> None:
    """80 % of what keeps four of eight workers busy: no holder is to do more than an average worker and a little."""
    traffic = Traffic()
    shared = seq(1, 40)
    mix = [(shared, 40.0, 80.0), *((seq(n, 40), 1.0, 80.0) for n in range(2, 12))]
    (wish,) = traffic.run(20, mix)
    assert (wish.source, wish.owner) == ("heat", HEAT_OWNER)
    assert wish.version.tokens == pack(shared)
    assert wish.version.fingerprints == block_fingerprints(NAMESPACE, pack(shared), BLOCK)
    assert wish.version.namespace == NAMESPACE
    assert wish.name == f"{wish.version.fingerprints[-1]:016x}"
    assert wish.replicas in {6, 7}
    assert wish.expires_at is not None
    assert traffic.now + 60.0 <= wish.expires_at <= traffic.now + 120.0


def test_hot_prefix_is_wished_within_three_seconds() -> None:
    """A rate that is young is not taken for small."""
    assert Traffic().run(3, [(seq(1, 40), 20.0, 100.0)])[0].replicas >= 4


def test_what_holders_can_serve_is_not_replicated() -> None:
    """Eight prefixes, one for each of eight workers; a fleet that idles; a prefix that is too short to be worth a pin."""
    assert Traffic().run(30, [(seq(n, 40), 5.0, 80.0) for n in range(8)]) == []
    assert Traffic().run(30, [(seq(1, 40), 1.0, 10.0)]) == []
    assert Traffic().run(30, [(seq(1, BLOCK), 40.0, 80.0)]) == []


def test_prompts_that_share_nothing_leave_no_wish_and_stay_within_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what is hot among them is found all the same."""
    monkeypatch.setattr(prefix_tree, "MAX_NODES", 64)
    traffic = Traffic()
    assert traffic.run(10, [(seq(n, 8), 2.0, 80.0) for n in range(40, 80)]) == []
    wishes = traffic.run(20, [([], 200.0, 5.0), (seq(1, 40), 20.0, 100.0)])
    assert [wish.version.tokens for wish in wishes] == [pack(seq(1, 40))]


def test_prefix_and_its_hot_variant_are_not_replicated_for_the_same_requests() -> None:
    """Nearly all that begins alike goes on alike: the longer one alone. With traffic of its own the shorter one, too."""
    shorter, longer = seq(1, 20), [*seq(1, 20), *seq(2, 20)]
    (wish,) = Traffic().run(20, [(longer, 40.0, 80.0), (shorter, 0.5, 80.0)])
    assert wish.version.tokens == pack(longer)
    wishes = Traffic().run(20, [(longer, 20.0, 80.0), (shorter, 20.0, 80.0)])
    assert {wish.version.tokens for wish in wishes} == {pack(longer), pack(shorter)}
    assert all(wish.replicas <= 5 for wish in wishes)


def test_heat_that_ends_lets_go_after_a_while_and_not_at_once() -> None:
    """A minute below its target, and then step by step to nothing."""
    traffic = Traffic()
    shared, others = seq(1, 40), [(seq(n, 40), 4.0, 80.0) for n in range(2, 10)]
    before = traffic.run(20, [(shared, 40.0, 80.0), *others])[0].replicas
    kept = traffic.run(20, others)
    assert [wish.replicas for wish in kept] == [before]
    assert traffic.run(300, others) == []


def test_rate_that_wobbles_around_a_step_changes_no_target() -> None:
    """Once the higher one was reached, it stays."""
    traffic, seen = Traffic(seed=3), set[int]()
    for _ in range(10):
        (wish,) = traffic.run(9, [(seq(1, 40), 30.0, 40.0), *((seq(n, 40), 3.0, 40.0) for n in range(2, 22))])
        seen.add(wish.replicas)
    assert len(seen) <= 2


def test_bounds_hold_and_the_hottest_come_first() -> None:
    """Prefixes at a time, tokens of all, workers of each."""
    mix = [(seq(n, 40), 10.0 + 5.0 * n, 50.0) for n in range(1, 5)]
    by_count = Traffic(HeatConfig(max_prefixes=2)).run(20, mix)
    assert [wish.version.tokens for wish in by_count] == [pack(seq(4, 40)), pack(seq(3, 40))]
    by_tokens = Traffic(HeatConfig(max_tokens=100)).run(20, mix)
    assert len(by_tokens) == 2
    by_replicas = Traffic(HeatConfig(max_replicas=2)).run(20, mix)
    assert {wish.replicas for wish in by_replicas} == {2}
    assert Traffic(HeatConfig(enabled=False)).run(20, mix) == []


def test_places_count_where_they_are_scarcer_than_arithmetic() -> None:
    """Long answers of short prompts keep places taken."""
    mix = [(seq(1, 40), 8.0, 1.0)]
    assert Traffic().run(20, mix) == []
    (wish,) = Traffic().run(20, mix, HeatFleet(8, place_s=0.5))
    assert wish.replicas >= 6


def test_prefix_below_a_public_one_tells_both_namespaces() -> None:
    origin = Origin(NAMESPACE, "math", "d" * 64, boundary_tokens=8, tail_namespace=b"t" * 16)
    traffic = Traffic()
    for _ in range(200):
        traffic.note(seq(1, 40), 100.0, origin)
        traffic.now += 0.05
        traffic.tracker.review(traffic.now, EIGHT)
    prefix, adapter = traffic.tracker.review(traffic.now, EIGHT)
    assert prefix.version.boundary_tokens == 8
    assert prefix.version.tail_namespace == b"t" * 16
    assert (prefix.version.adapter, prefix.version.adapter_digest) == ("math", "d" * 64)
    assert (adapter.version.tokens, adapter.version.adapter_digest) == (b"", "d" * 64)
    assert adapter.replicas >= 4
    assert adapter.name == "adapter-" + "d" * 32


def test_rates_survive_that_their_clock_begins_anew() -> None:
    """Hours of it, with a rate that does not change."""
    traffic = Traffic()
    for _ in range(3):
        traffic.now += SCALES * FADE_S
        (wish,) = traffic.run(20, [(seq(1, 40), 20.0, 100.0)])
        (watched, *_) = traffic.tracker.watched
        assert watched.requests_per_s == pytest.approx(20.0, rel=0.5)
        assert wish.replicas >= 4


def test_rate_is_told_right_from_the_beginning_on() -> None:
    clock, total = DecayClock(), 0.0
    for tenth in range(1, 3000):
        now = 50.0 + tenth / 10
        total += clock.tick(now)
        if tenth in {30, 300, 2999}:
            assert clock.per_s(total, 50.0, now) == pytest.approx(10.0, rel=0.1)


def test_targets_rise_at_once_and_fall_to_the_highest_of_the_last_minute() -> None:
    targets = Targets()
    assert targets.step({"a": 3, "b": 1}, 0.0) == {"a": 3}
    assert targets.step({"a": 5}, 1.0) == {"a": 5}
    assert targets.step({"a": 2}, 2.0) == {"a": 5}
    assert targets.step({"a": 4}, 30.0) == {"a": 5}
    assert targets.step({}, 2.0 + LET_GO_S) == {"a": 4}
    assert targets.step({}, 3.0 + LET_GO_S) == {"a": 4}
    assert targets.step({}, 3.0 + 2 * LET_GO_S) == {}


@pytest.mark.parametrize(
    ("load", "mean", "target"),
    [(0.0, 0.5, 1), (0.02, 0.001, 1), (0.3, 0.001, 3), (0.5, 0.5, 1), (3.2, 0.5, 6), (6.4, 1.0, 8)],
    ids=["nothing", "idle fleet", "nearly idle", "as much as others", "most of it", "full fleet"],
)
def test_target_follows_load_and_the_fleets_average(load: float, mean: float, target: int) -> None:
    """Nobody is relieved of a tenth of a worker; in a full fleet everybody helps."""
    assert target_of(load, 10_000.0, mean, 8) == target


def test_steps_of_answers_count_beside_what_prompts_take() -> None:
    """Short tails behind a shared prefix, and every fifth prompt new and long: by arithmetic it is a third of the work. Where each answer's
    steps keep a worker busy for a third of a second, it is most of it."""
    mix = [(seq(1, 40), 16.0, 9.0), *((seq(n, 40), 0.4, 80.0) for n in range(2, 12))]
    (by_arithmetic,) = Traffic().run(20, mix)
    (with_steps,) = Traffic().run(20, mix, HeatFleet(8, steps_s=0.3))
    assert by_arithmetic.replicas <= 3
    assert with_steps.replicas >= 6


def test_load_of_few_requests_is_taken_for_less() -> None:
    """Two times the average: believed after a hundred, not after ten."""
    assert target_of(1.0, 100.0, 0.5, 8) == 2
    assert target_of(1.0, 10.0, 0.5, 8) == 1
    assert target_of(1.0, 0.5, 0.5, 8) == 1


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=40), st.integers(2, 400))
def test_tree_counts_as_a_list_of_prompts_does(prompts: list[list[int]], room: int) -> None:
    """Every node's sums are those of the prompts that begin with it; making room leaves the rest as it is."""
    tree = PrefixTree(1)
    chains = [block_fingerprints(NAMESPACE, pack(ids), 1) for ids in prompts]
    for number, (ids, chain) in enumerate(zip(prompts, chains, strict=True)):
        tree.add(chain, pack(ids), HERE, 1.0, float(number), 0.0)
    tree.check_invariants()
    for _ in range(2):
        for node in tree.nodes():
            path = node.path()
            below = [number for number, chain in enumerate(chains) if chain[: node.end] == path]
            assert node.requests == len(below)
            assert node.work_ms == sum(below)
        tree.make_room(room / 100)
        tree.check_invariants()
    assert all(node.requests >= room / 100 for node in tree.nodes())


def test_node_takes_its_tokens_from_the_next_prompt_that_brings_them() -> None:
    tree = PrefixTree(BLOCK)
    for last in (7, 8):
        packed = pack([*seq(1, 12), *[last] * 4])
        tree.add(block_fingerprints(NAMESPACE, packed, BLOCK), packed, HERE, 1.0, 1.0, 0.0)
    (shared,) = (node for node in tree.nodes() if node.end == 3)
    assert shared.tokens is None
    shared.is_wanted = True
    packed = pack([*seq(1, 12), *[9] * 4])
    tree.add(block_fingerprints(NAMESPACE, packed, BLOCK), packed, HERE, 1.0, 1.0, 0.0)
    assert shared.tokens == pack(seq(1, 12))
