"""Pins of the host tier in an engine: what they want is copied there whatever the policy, stays when it leaves the device, and comes back."""

from typing import Any

import pytest

from prefixmesh.cache.pins import PinBudget
from prefixmesh.cache.tier import Tier
from prefixmesh.tokens import pack
from prefixmesh.worker.prefix_messages import (
    ListPins,
    PinInfo,
    PinPrefix,
    PrefixAnswer,
    PrefixName,
    UnpinPrefix,
)
from tests.support.scheduling import NAMESPACE_A
from tests.support.tier_bench import TierBench

PROMPT = list(range(1, 11))


def bench_with(policy: Any = "write_through", **fields: Any) -> TierBench:
    budget = PinBudget(pool_share=1.0)
    options = {"host_pin_budget": budget, "pin_budget": budget}
    return TierBench(write_policy=policy, options=options, **fields)


def pin(bench: TierBench, tier: Tier = Tier.HOST, tokens: list[int] = PROMPT) -> PinInfo:
    name = PrefixName(NAMESPACE_A, pack(tokens))
    command = PinPrefix(question=1, pin_id="p", prefix=name, owner="acme", tier=int(tier))
    return told(bench, command)[0]


def told(bench: TierBench, command: PinPrefix | ListPins) -> tuple[PinInfo, ...]:
    answers = [event for event in bench.core.handle(command, bench.now) if isinstance(event, PrefixAnswer)]
    bench.core.check_invariants()
    assert answers[0].error is None, answers[0]
    return answers[0].pins


def let_go(bench: TierBench) -> None:
    """The pin was the last that held anything."""
    bench.core.handle(UnpinPrefix(question=3, pin_id="p"), bench.now)
    bench.check_at_rest()


def held(bench: TierBench) -> int:
    return told(bench, ListPins(question=2))[0].held_tokens


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective"])
def test_what_a_host_pin_wants_is_copied_whatever_the_policy(policy: str) -> None:
    """The selective one would wait until somebody asks for it again."""
    bench = bench_with(policy, device_pages=64)
    assert pin(bench).missing_tokens == 10
    bench.serve("warm", PROMPT)
    assert held(bench) == 10
    let_go(bench)


def test_what_is_on_the_device_already_is_copied_once_it_is_asked_for() -> None:
    """As Warm does: by a request that computes its last page."""
    bench = bench_with("write_through_selective", device_pages=64)
    bench.serve("before", PROMPT)
    assert pin(bench).held_tokens == 0
    bench.serve("warm", PROMPT)
    assert held(bench) == 10
    let_go(bench)


def test_a_copy_for_a_pin_pushes_out_what_no_pin_keeps() -> None:
    bench = bench_with(device_pages=64, host_pages=12)
    bench.serve("other", [*range(20, 32)])
    assert bench.cache.host_pages == 12, "the host is full"
    pin(bench)
    bench.serve("warm", PROMPT)
    assert held(bench) == 10
    let_go(bench)


def test_what_a_host_pin_keeps_is_loaded_back_when_the_device_has_given_it_up() -> None:
    bench = bench_with(device_pages=16, host_pages=32)
    pin(bench)
    bench.serve("warm", PROMPT)
    for number in range(8):
        bench.serve(f"other-{number}", [30 + number, *range(12, 24)])
        assert held(bench) == 10
    assert bench.cache.peek_tiers(PrefixName(NAMESPACE_A, pack(PROMPT)).key()) == (0, 10)
    before = bench.keeper.counts().loaded_back_tokens
    bench.serve("again", [*PROMPT, 25])
    assert bench.keeper.counts().loaded_back_tokens - before == 10
    let_go(bench)


def test_a_flush_leaves_the_wish_on_both_tiers() -> None:
    bench = bench_with(device_pages=64)
    pin(bench)
    bench.serve("warm", PROMPT)
    bench.flush()
    assert held(bench) == 0
    bench.serve("warm again", PROMPT)
    assert held(bench) == 10
    let_go(bench)
