"""Whatever happens to a fleet, its adapter controller keeps to its bounds, touches no name that is none of its own, and has all as wished once
it is calm."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.support.machine_runs import own_chance
from tests.support.troubled_adapters import KINDS, TroubledAdapters

STEPS = 60
CALM_EVERY = 100
"""Steps of a long run between two rests."""


class AdapterControllerMachine(RuleBasedStateMachine):
    """Anything happens, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = TroubledAdapters()

    @rule(kind=st.sampled_from(KINDS), x=st.integers(0, 99), y=st.integers(0, 99))
    def do(self, kind: str, x: int, y: int) -> None:
        self.fleet.do(kind, x, y)

    def teardown(self) -> None:
        self.fleet.calm()


def run_machine(examples: int, *, repeatable: bool = True) -> None:
    how = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=repeatable,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    with own_chance():
        run_state_machine_as_test(AdapterControllerMachine, settings=how)


def run_long(steps: int, seed: int) -> TroubledAdapters:
    rng = random.Random(seed)
    fleet = TroubledAdapters()
    for number in range(steps):
        fleet.do(rng.choice(KINDS), rng.randrange(100), rng.randrange(100))
        if number % CALM_EVERY == CALM_EVERY - 1:
            fleet.calm()
    return fleet


def test_a_few_random_troubles_end_as_wished() -> None:
    run_machine(5)
    assert run_long(400, seed=1).happened["calm"] == 4


@pytest.mark.slow
def test_ten_thousand_random_steps_end_as_wished_each_time_it_is_calm() -> None:
    happened = run_long(10_000, seed=2).happened
    assert happened["calm"] == 100
    assert happened["loads"] > 1_000
    assert happened["unloads"] > 200


@pytest.mark.deep
def test_many_random_troubles_end_as_wished() -> None:
    for seed in range(3, 23):
        run_long(10_000, seed)
    run_machine(500, repeatable=False)
