"""How fast workers believe themselves to be, and what routers make of it, in simulated fleets: equals are equal whatever they have to do, who
differs is told apart, and who was slow once comes back."""

from dataclasses import replace

import pytest

from prefixmesh.router.policy import PolicyConfig
from prefixmesh.sim.replay_profiles import CPU_SMOLLM2
from prefixmesh.sim.simulated_question import Question
from prefixmesh.sim.timing import H100_8B, TimingModel
from tests.support.field_fleet import SPEC, CaseFleet, question

WORKERS = 4
FIRST = "worker-0"


def fleet(timing: TimingModel = H100_8B) -> CaseFleet:
    return CaseFleet(replace(SPEC, workers=WORKERS, timing=timing), PolicyConfig(slow_start_s=0.0))


def share(case: CaseFleet, per_s: float, seconds: float, tokens: int = 500) -> float:
    """Of a fair share of requests that are new, what the first worker gets."""
    begun = len(case.asked)
    case.poisson(
        per_s, seconds, lambda: question((f"prompt {len(case.asked)}", tokens), answer=8), to_end=False
    )
    taken = case.taken(case.asked[begun:])
    return taken[FIRST] * WORKERS / taken.total()


def told_ms(case: CaseFleet, tokens: int) -> list[float]:
    """What each worker says that a prompt takes it."""
    reports = [entry.report for entry in case.routers[0].core.registry]
    return [
        tokens * one.prefill_ms_per_token + tokens**2 * one.prefill_ms_per_token2 for one in reports if one
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("timing", "per_s", "answer", "shared"),
    [(H100_8B, 8.0, 96, 1536), (CPU_SMOLLM2, 0.8, 32, 384)],
    ids=["GPU", "CPU"],
)
def test_equal_workers_measure_the_same_speed_whatever_each_has_to_do(
    timing: TimingModel, per_s: float, answer: int, shared: int
) -> None:
    """One answers most requests, all of which go on from a prefix that it has, so that it decodes all the time; the others compute long
    prompts and short ones that are new, and are idle between them."""
    case = fleet(timing)
    prefix = ("a shared prefix", shared)
    case.ask(question(prefix))
    case.run_to_end()

    def next_question() -> Question:
        number = len(case.asked)
        if number % 4:
            return question(prefix, (f"tail {number}", 140 + number % 60), answer=answer)
        return question((f"prompt {number}", 300 if number % 8 else shared + 250), answer=4)

    case.poisson(per_s, 60 / per_s, next_question, to_end=False)
    busy = sorted(case.taken(case.asked).values())
    assert busy[-1] > 2 * busy[0], "they have different things to do"
    told = told_ms(case, 600)
    assert len(told) == WORKERS
    assert max(told) <= 1.15 * min(told)


@pytest.mark.slow
def test_worker_of_half_the_speed_is_told_apart_and_not_flooded() -> None:
    """It measures its own true speed, and gets the less: whether the others are busy or idle."""
    case = fleet()
    case.be_slow(FIRST, 2.0)
    share(case, 20.0, 3.0)
    assert share(case, 20.0, 8.0) < 1 / 2
    slow, *others = told_ms(case, 1024)
    assert slow == pytest.approx(2.0 * sum(others) / len(others), rel=0.15)
    assert share(case, 1.0, 120.0) < 1 / 2


@pytest.mark.slow
def test_slow_worker_is_not_flooded_by_prompts_too_short_to_rate() -> None:
    """What it measured becomes old however much it does; still a trial costs one request, and not all that come while it is idle."""
    case = fleet()
    case.be_slow(FIRST, 3.0)
    case.send_straight(FIRST, question(("a long prompt", 4000)))
    share(case, 20.0, 5.0)
    assert share(case, 2.0, 60.0, tokens=100) < 1 / 2


@pytest.mark.slow
@pytest.mark.parametrize(("per_s", "seconds"), [(4.0, 75.0), (1.0, 120.0)], ids=["busy", "nearly idle"])
def test_worker_that_was_slow_once_comes_back(per_s: float, seconds: float) -> None:
    """Three seconds in which it was ten times slower, and it believes that it is; then the machine is as good as any again."""
    case = fleet()
    share(case, per_s, 30 / per_s)
    case.be_slow(FIRST, 10.0)
    case.send_straight(FIRST, question(("a long prompt", 4000)))
    share(case, 10.0, 3.0)
    slow, *others = told_ms(case, 1024)
    assert slow > 1.5 * max(others)
    case.be_slow(FIRST, 1.0)
    share(case, per_s, seconds)
    assert share(case, per_s, 40.0) > 0.7


@pytest.mark.slow
@pytest.mark.parametrize(("per_s", "seconds"), [(10.0, 20.0), (1.0, 120.0)], ids=["busy", "nearly idle"])
def test_worker_that_stays_slow_is_tried_and_left_alone_for_minutes(per_s: float, seconds: float) -> None:
    """F10 over time: ten times slower, and however often it is tried, under a third of its fair share."""
    case = fleet()
    share(case, per_s, 10 / per_s)
    case.be_slow(FIRST, 10.0)
    share(case, 10.0, 5.0)
    assert max(share(case, per_s, seconds) for _ in range(2)) < 1 / 3
