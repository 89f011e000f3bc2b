"""Pins in a replay: where the controller puts them, that they stay, and that every policy finds them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from prefixmesh.config import DEFAULT_PIN_OWNER_SHARE, DEFAULT_PIN_SHARE
from prefixmesh.errors import ConfigError
from prefixmesh.ids import Fingerprint
from prefixmesh.sim.replay import replay
from prefixmesh.sim.replay_cache import BlockCache
from prefixmesh.sim.replay_fleet import chained
from prefixmesh.sim.replay_pins import PinPlan, PinWish, pin_wishes, place_pins
from prefixmesh.sim.replay_spec import CEILINGS, ReplaySpec
from prefixmesh.sim.timing import TimingModel
from prefixmesh.sim.workload import Workload, WorkloadRequest

BLOCK = 10
TIMING = TimingModel(step_ms=1.0, prefill_ms_per_token=0.1)
SPEC = ReplaySpec(workers=4, device_tokens=600, timing=TIMING, pins=True)
POLICY = tuple(range(6))


def request(
    at: int, ids: tuple[int, ...], *, pin: int = 0, replicas: int = 1, tenant: str = ""
) -> WorkloadRequest:
    return WorkloadRequest(
        arrival_ms=at,
        input_length=BLOCK * len(ids) + 1,
        output_length=1,
        block_ids=ids,
        pin_tokens=pin,
        pin_replicas=replicas,
        tenant=tenant,
    )


def pressed(replicas: int = 1) -> Workload:
    """A question behind a pinned text now and then, and so many others meanwhile that no cache holds what it does not use."""
    requests = []
    for turn in range(80):
        if turn % 20 == 0:
            requests.append(request(100 * turn, (*POLICY, 1000 + turn), pin=60, replicas=replicas))
        else:
            requests.append(request(100 * turn, tuple(range(9000 + 50 * turn, 9040 + 50 * turn))))
    return Workload(name="pressed", block_size=BLOCK, requests=requests)


def placed(wishes: Sequence[PinWish], workers: int = 4, device_tokens: int = 600) -> PinPlan:
    names = [chained(wish.block_ids, None) for wish in wishes]
    return place_pins(wishes, names, workers=workers, device_tokens=device_tokens, block_size=BLOCK)


def test_prefix_is_wished_once_with_the_most_replicas_that_any_request_wants() -> None:
    requests = [
        request(0, (1, 2, 3), pin=25),
        request(0, (1, 2, 4), pin=20, replicas=3),
        request(0, (1, 2), pin=20, tenant="other", replicas=2),
        request(0, (5, 6), pin=20, replicas=2),
        request(0, (5, 6), pin=20, replicas=0),
        request(0, (7, 8), pin=9),
        request(0, (7, 8)),
    ]
    assert pin_wishes(requests, BLOCK) == [
        PinWish("", (1, 2), 3),
        PinWish("other", (1, 2), 2),
        PinWish("", (5, 6), 0),
    ]


def test_replicas_are_spread_over_workers() -> None:
    plan = placed([PinWish("", (number, number), 2) for number in range(10, 14)])
    assert plan.held == plan.wanted == 8
    assert all(len(set(places)) == 2 for places in plan.holders)
    on = [sum(place in places for places in plan.holders) for place in range(4)]
    assert on == [2, 2, 2, 2]


@pytest.mark.parametrize("replicas", [0, 4, 4096])
def test_all_workers_are_as_many_as_there_are(replicas: int) -> None:
    plan = placed([PinWish("", (1,), replicas)])
    assert sorted(plan.holders[0]) == [0, 1, 2, 3]
    assert plan.wanted == 4


def test_what_engines_would_not_let_be_pinned_is_short() -> None:
    """Of a hundred blocks an engine pins thirty, fifteen of them for one owner."""
    assert (DEFAULT_PIN_SHARE, DEFAULT_PIN_OWNER_SHARE) == (0.3, 0.15)
    wishes = [PinWish(owner, tuple(range(n, n + 10)), 0) for n, owner in enumerate("aabcd")]
    plan = placed(wishes, workers=1, device_tokens=1000)
    assert [len(places) for places in plan.holders] == [1, 0, 1, 1, 0]
    assert (plan.held, plan.wanted) == (3, 5)


def test_pinned_blocks_stay_whatever_comes_and_what_they_take_is_in_use() -> None:
    cache = BlockCache(8)
    pinned = [Fingerprint(name) for name in (1, 2, 3)]
    (change,) = cache.pin(pinned)
    assert list(change.came) == pinned
    for name in range(10, 100, 5):
        chain = [Fingerprint(name + depth) for depth in range(5)]
        assert cache.begin((), 5) is not None
        cache.leave(chain, 0)
        cache.end(chain, 0)
    assert cache.held(pinned) == (3, 3)
    assert cache.used_blocks == 3
    assert cache.begin((), 6) is None, "it is not room for others"
    assert cache.pin(pinned) == [], "what is there does not come again"


@pytest.mark.parametrize("policy", ["cost", "match_gate", "longest_match"])
def test_pinned_text_is_found_from_the_first_request_on_and_after_any_pressure(policy: str) -> None:
    """A view of our router that differed from the caches would raise."""
    found = replay(pressed(), SPEC, policy)
    assert found.cached_share * found.prompt_tokens == pytest.approx(4 * 60)
    assert (found.pin_replicas, found.pin_replicas_wanted) == (1, 1)
    without = replay(pressed(), replace(SPEC, pins=False), policy)
    assert without.cached_share == 0.0
    assert without.pin_replicas_wanted == 0


def test_replicas_are_kv_that_is_there_more_than_once() -> None:
    one, everywhere = (replay(pressed(replicas), SPEC, "cost").copies for replicas in (1, 0))
    assert one == 1.0 < everywhere


@pytest.mark.parametrize("policy", ["round_robin", *CEILINGS])
def test_ceilings_pin_nothing_and_neither_does_who_keeps_nothing(policy: str) -> None:
    kept = replace(SPEC, cache="off") if policy == "round_robin" else SPEC
    assert replay(pressed(), kept, policy) == replay(pressed(), replace(kept, pins=False), policy)


def test_pins_that_could_not_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="pins cannot be with at_once, where caches lock nothing"):
        replace(SPEC, at_once=True)
    with pytest.raises(ConfigError, match=r"largest request, 410 tokens, beside what is pinned, 60, got 460"):
        replay(pressed(), replace(SPEC, device_tokens=460), "cost")
