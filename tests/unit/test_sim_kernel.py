"""The simulation's event loop: order, time, chance."""

import pytest

from prefixmesh.errors import InvariantError
from prefixmesh.sim.kernel import Simulation


def test_calls_are_made_in_the_order_of_their_times() -> None:
    sim, made = Simulation(0), list[tuple[float, str]]()
    for when, name in ((3.0, "c"), (1.0, "a"), (2.0, "b")):
        sim.call_at(when, lambda name=name: made.append((sim.now, name)))
    sim.run_until_idle()
    assert made == [(1.0, "a"), (2.0, "b"), (3.0, "c")]


def test_calls_at_one_time_are_made_as_they_were_asked_for() -> None:
    sim, made = Simulation(0), list[int]()
    for number in range(100):
        sim.call_at(1.0, made.append, number)
    sim.run_until_idle()
    assert made == list(range(100))


def test_a_call_may_ask_for_another_at_the_same_time() -> None:
    sim, made = Simulation(0), list[str]()
    sim.call_at(1.0, lambda: sim.call_later(0.0, made.append, "later"))
    sim.call_at(1.0, made.append, "before")
    sim.run_until(1.0)
    assert made == ["before", "later"]


def test_what_is_past_is_now() -> None:
    sim, made = Simulation(0, start=5.0), list[float]()
    sim.call_at(1.0, lambda: made.append(sim.now))
    sim.run_until_idle()
    assert made == [5.0]


def test_a_cancelled_call_is_not_made_and_does_not_move_time() -> None:
    sim, made = Simulation(0), list[int]()
    timer = sim.call_at(1.0, made.append, 1)
    timer.cancel()
    timer.cancel()
    assert sim.next_due() is None
    assert not sim.step()
    assert (made, sim.now, sim.calls) == ([], 0.0, 0)


def test_running_until_a_time_leaves_later_calls_and_lets_that_time_be() -> None:
    sim, made = Simulation(0), list[int]()
    sim.call_at(1.0, made.append, 1)
    sim.call_at(3.0, made.append, 3)
    sim.run_until(2.0)
    assert (made, sim.now, sim.next_due()) == ([1], 2.0, 3.0)
    sim.run_for(1.0)
    assert made == [1, 3]


def test_what_a_call_raises_comes_out_and_the_rest_goes_on() -> None:
    sim, made = Simulation(0), list[int]()
    sim.call_at(1.0, lambda: 1 / 0)
    sim.call_at(2.0, made.append, 2)
    with pytest.raises(ZeroDivisionError):
        sim.run_until_idle()
    sim.run_until_idle()
    assert made == [2]


def test_what_never_comes_to_rest_is_found() -> None:
    sim = Simulation(0)

    def again() -> None:
        sim.call_later(1.0, again)

    again()
    with pytest.raises(InvariantError, match="not at rest after 10 calls"):
        sim.run_until_idle(limit=10)


def test_one_seed_is_one_run_and_forked_chance_stands_by_itself() -> None:
    def run(seed: int, *, others_draw: bool) -> list[float]:
        sim = Simulation(seed)
        own = sim.fork_rng("own")
        if others_draw:
            sim.rng.random()
            sim.fork_rng("other").random()
        return [own.random() for _ in range(5)]

    assert run(1, others_draw=False) == run(1, others_draw=True)
    assert run(1, others_draw=False) != run(2, others_draw=False)
