"""The field's cases of bounds, F34 and F56, in simulated fleets: what a router keeps of prompts without end, and how long a cold request waits
while hot ones keep coming."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from prefixmesh.config import SchedulePolicy
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.router.block_index import SWEEP_BLOCKS
from prefixmesh.sim import simulated_router
from prefixmesh.sim.network import LinkQuality
from prefixmesh.sim.simulated_question import Question
from tests.support.field_fleet import BLOCK, SPEC, CaseFleet, question
from tests.support.object_sizes import reachable_bytes

# F34

LOOKS = 20


@dataclass
class Kept:
    """What a router has kept, looked at now and then."""

    blocks: list[int] = field(default_factory=list)
    size_bytes: list[int] = field(default_factory=list)

    def look(self, case: CaseFleet) -> None:
        life = case.routers[0].life
        assert life is not None
        self.blocks.append(len(life.core.view.index))
        self.size_bytes.append(reachable_bytes((life.core, life.budget, life.requests, life.answers)))


def keep_unique_prompts(
    monkeypatch: pytest.MonkeyPatch, *, prompts: int, prompt_tokens: int, bound_blocks: int, held_blocks: int
) -> Kept:
    """Prompts that have nothing in common, 64 at once, through one router before four workers that together hold more than its index may."""
    monkeypatch.setattr(simulated_router, "MAX_INDEX_BLOCKS", bound_blocks)
    engine = replace(SPEC.engine, max_total_tokens=held_blocks * BLOCK // 4)
    case, kept = CaseFleet(replace(SPEC, workers=4, engine=engine)), Kept()
    for part in range(LOOKS):
        names = range(part * prompts // LOOKS, (part + 1) * prompts // LOOKS)
        case.closed_loop((question((f"prompt {name}", prompt_tokens)) for name in names), at_once=64)
        case.check_ended_well()
        kept.look(case)
        case.forget()
    assert prompts * prompt_tokens // BLOCK > 3 * held_blocks > 3 * bound_blocks, "else no bound was met"
    return kept


def check_plateau(kept: Kept, bound_blocks: int, *, growth: float) -> None:
    """The index stays within its bound, and all that the router has grows no more once that is met: by ``growth`` at most, since its tables
    fill unevenly."""
    assert max(kept.blocks) <= bound_blocks + SWEEP_BLOCKS
    assert min(kept.blocks[LOOKS // 2 :]) >= 0.5 * bound_blocks, "it is used"
    assert max(kept.size_bytes[LOOKS // 2 :]) <= growth * max(kept.size_bytes[LOOKS // 4 : LOOKS // 2])


def test_memory_of_a_router_reaches_a_plateau_under_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """F34, scaled down: unique prompts without end."""
    kept = keep_unique_prompts(
        monkeypatch, prompts=250, prompt_tokens=1024, bound_blocks=700, held_blocks=1300
    )
    check_plateau(kept, 700, growth=1.25)


@pytest.mark.deep
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("prompts", "bound_blocks"), [(10_000, 20_000), (200_000, 200_000)])
def test_two_hundred_thousand_prompts_leave_a_router_as_large_as_its_bound(
    monkeypatch: pytest.MonkeyPatch, prompts: int, bound_blocks: int
) -> None:
    """F34: 200k unique prompts of 2k tokens, and first fewer of them."""
    kept = keep_unique_prompts(
        monkeypatch,
        prompts=prompts,
        prompt_tokens=2048,
        bound_blocks=bound_blocks,
        held_blocks=5 * bound_blocks // 4,
    )
    check_plateau(kept, bound_blocks, growth=1.05)


# F56

HOT = ("hot", 1024)
PLACES, AT_ONCE = 4, 24


@dataclass
class Starts:
    """Requests in the order in which they came and in which workers began with them."""

    case: CaseFleet
    came: list[int] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    worker_of: dict[int, str] = field(default_factory=dict)
    left: int = 0

    def ask(self, asked: Question) -> int:
        """Its number."""
        number = len(self.came)
        self.came.append(number)
        self.left += 1
        life = self.case.routers[number % len(self.case.routers)].life
        assert life is not None

        def tell(response: pb.GenerateResponse) -> None:
            if response.HasField("started"):
                self.begun.append(number)

        def ended(*_: object) -> None:
            self.left -= 1

        self.worker_of[number] = life.ask(asked, ended, tell=tell).answered.worker
        return number

    def passed_over(self, number: int) -> int:
        """How many that came later began earlier, at the same worker."""
        before = self.begun[: self.begun.index(number)]
        return sum(one > number and self.worker_of[one] == self.worker_of[number] for one in before)


def hot(number: int) -> Question:
    return question(HOT, (f"tail {number}", 32), answer=8)


def hot_rate_per_s(case: CaseFleet) -> float:
    """Hot requests that the fleet answers by the second when it has all it can do."""
    began = case.sim.now
    case.closed_loop((hot(-1 - number) for number in range(60)), at_once=AT_ONCE)
    return 60 / (case.sim.now - began)


def one_cold(policy: SchedulePolicy, max_passed_over: int, *, workers: int, routers: int) -> int:
    """Hot requests come in bursts, at nine tenths of capacity; a cold one in the middle of a burst. How many passed it over."""
    engine = replace(
        SPEC.engine, schedule_policy=policy, max_passed_over=max_passed_over, max_running_requests=PLACES
    )
    quality = LinkQuality()  # of one delay: what is sent first comes first
    case = CaseFleet(replace(SPEC, workers=workers, routers=routers, engine=engine, quality=quality))
    case.have_cached_at((name, question(HOT, ("warm", 1))) for name in case.names)
    a_burst = AT_ONCE * workers
    pause_s = a_burst / (0.9 * hot_rate_per_s(case))
    starts, cold = Starts(case), -1
    for number in range(5):
        for place in range(a_burst):
            if (number, place) == (1, a_burst // 2):
                cold = starts.ask(question(("cold", 600), answer=8, priority=-1))
            starts.ask(hot(len(starts.came)))
        case.sim.run_for(pause_s)
    case.run_while(lambda: starts.left > 0)
    assert sorted(starts.begun) == starts.came
    return starts.passed_over(cold)


def check_bounds(workers: int, routers: int, policies: Sequence[SchedulePolicy], bound: int) -> None:
    """F56."""
    for policy in policies:
        # Under priority the last that came before it lets so many pass, and then its turn as the oldest of all comes within as many.
        most = {"lpm": bound, "fcfs": 0, "priority": 2 * bound}[policy]
        assert one_cold(policy, bound, workers=workers, routers=routers) <= most, policy
        unbound = one_cold(policy, 10_000, workers=workers, routers=routers)
        assert (unbound > most) == (policy != "fcfs"), "else it would not have waited longer without a bound"


@pytest.mark.slow
def test_cold_request_among_hot_ones_starts_within_the_bound_of_each_policy() -> None:
    """F56: hot arrivals at 90 % of capacity and one cold request → it starts within the stated bound, which it needs."""
    check_bounds(1, 1, ("lpm", "fcfs", "priority"), bound=3)


@pytest.mark.slow
def test_cold_request_starts_within_the_bound_in_a_fleet() -> None:
    """F56, with three workers that two routers keep busy."""
    check_bounds(3, 2, ("lpm",), bound=4)
