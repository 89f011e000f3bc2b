"""Who is refused for how long it would wait: the rule alone, and in the router's core, where a refused request leaves nothing."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from prefixmesh.errors import ConfigError, OverloadedError
from prefixmesh.router.overload import (
    BACKGROUND_SHARE,
    LEAST_RETRY_S,
    LEAST_SHARE,
    MOST_RETRY_S,
    NORMAL_SHARE,
    PRESSURE_S,
    Outlook,
    Overload,
    share_of,
)
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.router.routing import GATHER_S, RouterCore
from prefixmesh.router.worker_identity import Rates
from prefixmesh.router_config import RouterConfig
from tests.support.simulated_fleet import (
    NOW,
    ToldCache,
    add_ready,
    believed,
    entry_of,
    facts,
    make_core,
    prompt,
    unique,
)

NEVER = math.inf
URGENT, NORMAL, BACKGROUND = 1, 0, -1


def refusal(
    overload: Overload,
    wait_s: float,
    own_s: float = 1.0,
    *,
    priority: int = NORMAL,
    left_s: float = NEVER,
    now: float = NOW,
) -> OverloadedError | None:
    outlook = Outlook(wait_s * 1e3, own_s * 1e3, "w0")
    taken = overload.takes(outlook, priority, left_s, now)
    return None if taken else overload.refuse(outlook, priority, left_s, now)


def retry_s(error: OverloadedError | None) -> float:
    assert error is not None
    assert error.retry_after_s is not None
    return error.retry_after_s


@pytest.mark.parametrize("priority", [100, URGENT, NORMAL, BACKGROUND, -100])
def test_a_request_may_wait_its_prioritys_share_of_what_its_deadline_leaves(priority: int) -> None:
    """Of 11 s it needs one itself; of the ten that are left it may wait 9, 7 or 3.5."""
    bearable_s = 10.0 * share_of(priority)
    assert refusal(Overload(300.0), bearable_s - 0.01, priority=priority, left_s=11.0) is None
    error = refusal(Overload(300.0), bearable_s + 0.01, priority=priority, left_s=11.0)
    assert error is not None
    assert "w0 would begin" in str(error)
    assert "its deadline is in 11.0 s" in str(error)


def test_without_a_deadline_the_routers_own_bound_holds() -> None:
    assert refusal(Overload(300.0), 300.0 * NORMAL_SHARE - 0.01) is None
    error = refusal(Overload(300.0), 300.0 * NORMAL_SHARE + 0.01)
    assert error is not None
    assert "deadline" not in str(error)


def test_where_nobody_waits_nobody_is_refused() -> None:
    """Not even who could not end in time: there is room, and what is predicted may be wrong."""
    assert refusal(Overload(300.0), 0.0, own_s=100.0, left_s=0.1) is None
    assert refusal(Overload(300.0), 0.0, own_s=100.0, left_s=-1.0) is None


def test_who_cannot_end_in_time_anyhow_waits_next_to_nothing() -> None:
    bearable_s = 2.0 * LEAST_SHARE * NORMAL_SHARE
    assert refusal(Overload(300.0), bearable_s - 0.01, own_s=100.0, left_s=2.0) is None
    assert refusal(Overload(300.0), bearable_s + 0.01, own_s=100.0, left_s=2.0) is not None


@settings(derandomize=True)
@given(
    wait_s=st.floats(0.0, 500.0),
    own_s=st.floats(0.0, 100.0),
    left_s=st.floats(0.0, 1000.0) | st.just(NEVER),
    priority=st.sampled_from([URGENT, NORMAL, BACKGROUND]),
)
def test_who_comes_back_when_told_is_taken(wait_s: float, own_s: float, left_s: float, priority: int) -> None:
    """What waits before it has become less by then, as much as time has passed."""
    overload = Overload(300.0)
    error = refusal(overload, wait_s, own_s, priority=priority, left_s=left_s)
    if error is None:
        return
    after_s = retry_s(error)
    assert LEAST_RETRY_S <= after_s <= MOST_RETRY_S
    left_then = max(0.0, wait_s - after_s - 1e-9)
    assert refusal(overload, left_then, own_s, priority=priority, left_s=left_s, now=NOW + after_s) is None


def test_a_refusal_is_felt_by_those_of_lower_priority_for_a_while() -> None:
    """They are taken where nobody waits, and nowhere else; those of the same priority go on as before."""
    overload = Overload(300.0)
    assert refusal(overload, 20.0, priority=NORMAL, left_s=5.0) is not None
    assert refusal(overload, 0.1, priority=BACKGROUND) is not None
    assert refusal(overload, 0.0, priority=BACKGROUND) is None
    assert refusal(overload, 0.1, priority=NORMAL) is None
    error = refusal(overload, 0.1, priority=BACKGROUND)
    assert retry_s(error) == pytest.approx(PRESSURE_S)
    assert "higher priority" in str(error)
    assert refusal(overload, 0.1, priority=BACKGROUND, now=NOW + PRESSURE_S) is None


def test_pressure_from_above_is_not_lifted_by_a_refusal_below() -> None:
    overload = Overload(300.0)
    assert refusal(overload, 20.0, priority=URGENT, left_s=5.0) is not None
    assert refusal(overload, 20.0, priority=BACKGROUND, left_s=5.0) is not None
    assert refusal(overload, 0.1, priority=NORMAL) is not None, "an urgent one was refused"


def test_a_deadline_that_nobody_could_meet_presses_nobody() -> None:
    """A caller with an hour's answer and a second's deadline must not shut out all those below it."""
    overload = Overload(300.0)
    assert refusal(overload, 5.0, own_s=3600.0, priority=URGENT, left_s=1.0) is not None
    assert refusal(overload, 0.1, priority=BACKGROUND) is None


def test_a_bound_of_0_refuses_nobody() -> None:
    overload = Overload(0.0)
    assert refusal(overload, 1e9, left_s=0.1) is None
    assert overload.refused == 0


@pytest.mark.parametrize("max_wait_s", [-1.0, math.nan, math.inf])
def test_a_bound_that_is_none_is_refused_at_the_start(max_wait_s: float) -> None:
    with pytest.raises(ConfigError, match="max_wait_s"):
        RouterConfig(workers=("w:1",), max_wait_s=max_wait_s)


def busy_core(waiting_tokens: int = 10_000, config: PolicyConfig | None = None) -> RouterCore:
    """One worker that says how much waits there: 10 s of prefill, a millisecond a token."""
    core = make_core(0, config=config)
    cache = ToldCache(core, add_ready(core, "w0", tells=False))
    cache.open(NOW)
    cache.report(
        NOW,
        running_requests=1,
        uncached_tokens=waiting_tokens,
        prefill_ms_per_token=1.0,
        decode_step_ms=20.0,
        answer_tokens=49,
        token_interval_ms=20.0,
    )
    return core


def test_the_core_refuses_what_would_end_after_its_deadline() -> None:
    """10 s of others' prefill, 1 s of its own, 0.99 s of 49 steps and a half: the share of what is left must be more than 10 s."""
    request, own_s = prompt(unique(1, 1000), None), 1.0 + 0.99
    left_s = own_s + 10.0 / NORMAL_SHARE
    assert busy_core().route(request, NOW, time_left_s=left_s + 0.01).endpoint == "w0"
    with pytest.raises(OverloadedError) as caught:
        busy_core().route(request, NOW, time_left_s=left_s - 1.0)
    assert caught.value.retry_after_s == pytest.approx(NORMAL_SHARE)


def test_nobody_is_refused_while_a_worker_is_idle_that_seems_too_slow_to_be_chosen() -> None:
    """It seemed a hundred times as slow when it was measured, so waiting elsewhere was expected to be quicker. Taken, it is measured anew."""
    core = busy_core()
    add_ready(core, "slow", rates=Rates(10.0, 20.0), tells=False)
    request = prompt(unique(1, 1000), None)
    assert core.route(request, NOW, time_left_s=NEVER).endpoint == "w0"
    assert core.route(request, NOW, time_left_s=5.0).endpoint == "slow"
    with pytest.raises(OverloadedError):
        core.route(request, NOW, time_left_s=5.0)  # somebody waits there now, too


def test_nobody_is_refused_while_a_newcomer_that_is_held_back_is_idle() -> None:
    core = busy_core(config=PolicyConfig(slow_start_s=10.0))
    later = NOW + GATHER_S + 1.0
    new = add_ready(core, "new")
    core.described(new, facts("new", 2), later)  # in another life
    request = prompt(unique(1, 1000), None)
    assert core.route(request, later, time_left_s=5.0).endpoint == "new"


def test_a_callers_limit_shortens_the_answer_that_is_expected() -> None:
    """Eleven tokens take a fifth of a second, and not the whole that answers take there."""
    request = replace(prompt(unique(1, 1000), None), max_tokens=11)
    left_s = 1.0 + 0.23 + 10.0 / NORMAL_SHARE
    assert busy_core().route(request, NOW, time_left_s=left_s + 0.01)
    with pytest.raises(OverloadedError):
        busy_core().route(request, NOW, time_left_s=left_s - 0.01)


def test_the_core_refuses_the_lower_priority_sooner() -> None:
    core = busy_core()
    left_s = 2.0 + 10.0 / BACKGROUND_SHARE - 1.0
    background = replace(prompt(unique(1, 1000), None), priority=BACKGROUND)
    with pytest.raises(OverloadedError):
        core.route(background, NOW, time_left_s=left_s)
    assert core.route(replace(background, priority=NORMAL), NOW, time_left_s=left_s)


def test_a_refused_request_leaves_nothing() -> None:
    """No reservation, no prediction, no count, no session, no turn."""
    core = busy_core(config=PolicyConfig(affinity_ms=5.0))
    entry, request = entry_of(core, "w0"), prompt(unique(1, 1000), None)
    before = (entry.load.total, entry.totals.routed, core.fleet.columns.in_flight.tolist())
    with pytest.raises(OverloadedError):
        core.route(request, NOW, time_left_s=1.0, valid_s=5.0)
    assert (entry.load.total, entry.totals.routed, core.fleet.columns.in_flight.tolist()) == before
    assert (believed(core, request), len(core.view.predictions), core.open_tickets) == ({}, 0, 0)
    core.check_invariants()


def test_what_was_taken_once_goes_on_elsewhere_however_long_it_waits() -> None:
    core = busy_core(10_000_000)
    with pytest.raises(OverloadedError):
        core.route(prompt(unique(1, 1000), None), NOW, time_left_s=NEVER)
    assert core.route(prompt(unique(1, 1000), None), NOW).endpoint == "w0"
