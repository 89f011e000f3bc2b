"""A simulated fleet under three times the load that it can bear (``benchmarks/overload.py`` is the same on real processes).

Real router core, schedulers, reports and network delays, in simulated time: what goes wrong here is a rule's fault, not a machine's.
"""

import random
import statistics
from dataclasses import dataclass, field

import pytest

from prefixmesh.config import EngineConfig
from prefixmesh.errors import OverloadedError, PrefixmeshError
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.sim.fake_engine import ModelIdentity
from prefixmesh.sim.fleet_run import TENANT, FleetSpec, SimulatedFleet
from prefixmesh.sim.simulated_router import Answered, Question
from prefixmesh.sim.timing import TimingModel
from prefixmesh.tokens import pack

PLACES, PROMPT_TOKENS, ANSWER_TOKENS, VOCABULARY = 8, 200, 16, 512
SPEC = FleetSpec(
    workers=2,
    engine=EngineConfig(max_total_tokens=50_000, max_running_requests=PLACES, page_size=8),
    identity=ModelIdentity(vocab_size=VOCABULARY),
    timing=TimingModel(
        step_ms=50.0, prefill_ms_per_token=0.1, prefill_ms_per_token2=0.0, decode_ms_per_sequence=2.0
    ),
    report_interval_s=0.1,
)
DEADLINE_S, CALM_S, OVERLOAD_S = 4.0, 10.0, 15.0
URGENT, NORMAL, BACKGROUND = 5, 0, -5


@dataclass
class Seen:
    """What has become of the requests of one phase."""

    began: float
    asked: int = 0
    ok: list[tuple[int, float, float]] = field(default_factory=list)
    """Priority, seconds to its end, and when that was."""

    refused: list[tuple[int, float, OverloadedError]] = field(default_factory=list)
    late: int = 0

    def share_ok(self, priority: int) -> float:
        ok = sum(one[0] == priority for one in self.ok)
        return ok / (ok + sum(one[0] == priority for one in self.refused))


class Drive:
    """A fleet, and questions to it."""

    def __init__(self, max_wait_s: float) -> None:
        self.fleet = SimulatedFleet(SPEC, PolicyConfig(max_wait_s=max_wait_s, slow_start_s=0.0))
        self.rng = random.Random(11)
        self.sim = self.fleet.sim

    def capacity(self, seconds: float = 15.0) -> float:
        """Answers by the second while all places are filled twice."""
        ends: list[float] = []

        def again(seen: Seen) -> None:
            ends.append(self.sim.now)
            if self.sim.now < until:
                self.ask(seen, NORMAL, None, again)

        until, warm = self.sim.now + seconds, self.sim.now + 5.0
        for _ in range(2 * PLACES * SPEC.workers):
            self.ask(Seen(self.sim.now), NORMAL, None, again)
        self.sim.run_for(seconds + DEADLINE_S)
        return sum(warm <= end < until for end in ends) / (until - warm)

    def poisson(self, rate: float, seconds: float, priorities: list[int]) -> Seen:
        """Arrivals whatever becomes of those before; runs until all have ended."""
        seen, due = Seen(self.sim.now), self.sim.now
        while (due := due + self.rng.expovariate(rate)) < seen.began + seconds:
            self.sim.call_at(due, self.ask, seen, self.rng.choice(priorities), DEADLINE_S)
        self.sim.run_for(seconds + DEADLINE_S + 1.0)
        assert len(seen.ok) + len(seen.refused) + seen.late == seen.asked, "each has ended"
        return seen

    def ask(self, seen: Seen, priority: int, deadline_s: float | None, on_ok: object = None) -> None:
        asked_at, seen.asked = self.sim.now, seen.asked + 1
        prompt = pack([self.rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)])
        question = Question(namespace=TENANT, prompt=prompt, max_tokens=ANSWER_TOKENS, priority=priority)

        def ended(_: Answered, error: PrefixmeshError | None) -> None:
            took_s = self.sim.now - asked_at
            if error is None:
                seen.ok.append((priority, took_s, self.sim.now))
                if callable(on_ok):
                    on_ok(seen)
            elif isinstance(error, OverloadedError):
                seen.refused.append((priority, took_s, error))
            else:
                seen.late += 1

        life = self.fleet.routers[0].life
        assert life is not None
        life.ask(question, ended, deadline=None if deadline_s is None else asked_at + deadline_s)

    def is_idle(self) -> bool:
        core = self.fleet.routers[0].core
        core.check_invariants()
        return all(entry.load.in_flight == 0 for entry in core.registry)


def goodput(seen: Seen, capacity: float) -> float:
    in_time = sum(ended <= seen.began + OVERLOAD_S for _, _, ended in seen.ok)
    return in_time / OVERLOAD_S / capacity


@pytest.mark.slow
def test_three_times_the_load_takes_nothing_from_what_is_done_in_time() -> None:
    """Refused at once, with when to come back; the urgent first; and right afterwards all is as before."""
    drive = Drive(max_wait_s=300.0)
    capacity = drive.capacity()
    before = drive.poisson(0.7 * capacity, CALM_S, [NORMAL])
    seen = drive.poisson(3.0 * capacity, OVERLOAD_S, [URGENT, NORMAL, NORMAL, NORMAL, BACKGROUND])
    assert drive.is_idle()
    after = drive.poisson(0.7 * capacity, CALM_S, [NORMAL])
    assert goodput(seen, capacity) >= 0.9
    assert seen.late <= 0.02 * len(seen.ok)
    assert all(took_s == 0.0 for _, took_s, _ in seen.refused), "at the decision itself"
    assert all(error.retry_after_s for _, _, error in seen.refused)
    assert seen.share_ok(URGENT) >= 0.95
    assert seen.share_ok(BACKGROUND) <= 0.1 < seen.share_ok(NORMAL)
    assert not before.late + after.late
    p50_before, p50_after = (statistics.median(one[1] for one in phase.ok) for phase in (before, after))
    assert p50_after <= 1.1 * p50_before


@pytest.mark.slow
def test_the_same_load_ends_in_vain_where_nobody_is_refused() -> None:
    """What the rule is for: the queue is longer than the deadline, and what is computed comes too late."""
    drive = Drive(max_wait_s=0.0)
    capacity = drive.capacity()
    seen = drive.poisson(3.0 * capacity, OVERLOAD_S, [NORMAL])
    assert not seen.refused
    assert goodput(seen, capacity) < 0.75
