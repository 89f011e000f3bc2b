"""The demo's figures from rows made by hand."""

import dataclasses

import pytest

from prefixmesh.demo.pinned import Pinned, PinnedPolicy, Visit
from prefixmesh.demo.summary import Row, Summary, as_json, compare, find_problems, summarise


def row(cached: int, first_token_ms: float, *, worker: str = "worker-0", leaked: int = 0) -> Row:
    """A request of 100 prompt tokens."""
    return Row(
        number=1,
        tenant="t",
        user="u",
        turn=1,
        worker=worker,
        prompt_tokens=100,
        cached_tokens=cached,
        possible_tokens=90,
        leaked_tokens=leaked,
        first_token_ms=first_token_ms,
        prefill_ms=2 * first_token_ms,
    )


ON = summarise(
    [row(0, 400), row(49, 600), row(50, 80), row(90, 100, worker="worker-1"), row(95, 90)], wall_s=3.0
)
OFF = summarise([row(0, 500)] * 5, wall_s=9.0)


def policy(tenant: str, held: int = 2, cached: int = 90) -> PinnedPolicy:
    """80 tokens pinned on two workers, and a question of 100 to each."""
    visits = tuple(
        Visit(worker=f"worker-{n}", prompt_tokens=100, cached_tokens=cached, first_token_ms=9) for n in (0, 1)
    )
    why = "" if held == 2 else "worker-1: no room"
    return PinnedPolicy(tenant=tenant, tokens=80, wanted=2, held=held, why=why, visits=visits)


PINNED = Pinned(policies=(policy("a"), policy("b")), seconds=1.25)


def test_pins_that_worked_are_told_in_a_line() -> None:
    assert PINNED.headline() == "pinned: 2 of 2 workers hold each policy · 1.2 s after they were asked to"
    assert PINNED.problems() == []


def test_pins_that_did_not_work_are_problems() -> None:
    """A worker that lacks one, by its reason; a worker that says it has one, and was found without; no worker at all."""
    lacking = Pinned(policies=(policy("a", held=1), policy("b", cached=79)), seconds=60)
    assert "1 of 2 hold a's, 2 of 2 hold b's" in lacking.headline()
    assert lacking.problems() == [
        "1 of 2 workers hold a's policy: worker-1: no room",
        "worker-0 had 79 of b's 80 pinned tokens",
        "worker-1 had 79 of b's 80 pinned tokens",
    ]
    nobody = dataclasses.replace(policy("a"), wanted=0, held=0, visits=())
    assert len(Pinned(policies=(nobody,), seconds=60).problems()) == 1


def test_shares_are_of_prompt_tokens() -> None:
    """All requests together, not a mean of means."""
    assert ON.cached_share == pytest.approx(284 / 500)
    assert ON.cached_share_possible == pytest.approx(0.9)


def test_cold_is_less_than_half_cached() -> None:
    """And the medians are of each kind alone."""
    assert (ON.ttft_cold_ms, ON.ttft_warm_ms) == (500, 90)
    assert (OFF.ttft_cold_ms, OFF.ttft_warm_ms) == (500, None)


def test_the_json_has_both_passes() -> None:
    """The keys that others read, at the top for caching and under ``cache_off`` without it."""
    figures = as_json(ON, OFF, PINNED)
    keys = {
        "requests",
        "cached_share",
        "cached_share_possible",
        "ttft_cold_ms",
        "ttft_warm_ms",
        "cross_tenant_cached_tokens",
    }
    assert keys <= figures.keys()
    assert keys <= figures["cache_off"].keys()
    assert figures["requests_per_worker"] == {"worker-0": 4, "worker-1": 1}
    assert figures["cache_off"]["ttft_warm_ms"] is None
    assert [one["held"] for one in figures["pinned"]] == [2, 2]


def test_prefill_saved_is_against_the_pass_without_caches() -> None:
    """216 tokens were computed instead of 500."""
    lines = {name.strip(): (on, off) for name, on, off in compare(ON, OFF)}
    assert lines["prefill computed"] == ("216 (56.8% saved)", "500")
    assert lines["first token, warm"] == ("90 ms", "-")


def test_a_pass_that_worked_has_no_problems() -> None:
    """Nothing to report."""
    assert find_problems(ON, OFF, expected_requests=5) == []


@pytest.mark.parametrize(
    ("on", "off", "problem"),
    [
        (dataclasses.replace(ON, requests=4), OFF, "with caching on, 4 of 5 requests"),
        (ON, dataclasses.replace(OFF, requests=0), "with caching off, 0 of 5 requests"),
        (summarise([row(50, 1, leaked=7)] * 5, 1.0), OFF, "35 cached tokens came from another tenant"),
        (OFF, OFF, "of 450 tokens that could come from the cache, none did"),
        (ON, ON, "with caching off, 284 tokens came from a cache"),
    ],
)
def test_what_makes_the_demo_fail(on: Summary, off: Summary, problem: str) -> None:
    """Each in a line of its own."""
    assert any(problem in text for text in find_problems(on, off, expected_requests=5))
