"""When requests of a replay come: in the open loop by their times, in the closed one so many conversations at a time."""

from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.replay_arrivals import RAMP_S, Arrivals
from prefixmesh.sim.workload import WorkloadRequest

ANSWER_S = 3.0


def first(arrival_ms: int) -> WorkloadRequest:
    return WorkloadRequest(arrival_ms=arrival_ms, input_length=1, output_length=1, block_ids=())


def after(number: int, pause_ms: int = 0) -> WorkloadRequest:
    return WorkloadRequest(after=number, pause_ms=pause_ms, input_length=1, output_length=1, block_ids=())


def coming(
    requests: list[WorkloadRequest], concurrency: int = 0, speed: float = 1.0
) -> list[tuple[float, int]]:
    """When each comes, where an answer takes three seconds."""
    sim, came = Simulation(0), list[tuple[float, int]]()

    def arrive(number: int) -> None:
        came.append((sim.now, number))
        sim.call_later(ANSWER_S, lambda: arrivals.ended(number))

    arrivals = Arrivals(sim, requests, arrive, speed=speed, concurrency=concurrency)
    sim.run_until_idle()
    return came


def test_open_loop_goes_by_times_and_pauses_whatever_the_order_of_numbers() -> None:
    requests = [first(8000), first(0), after(1, 1500), first(0)]
    assert coming(requests) == [(0.0, 1), (0.0, 3), (4.5, 2), (8.0, 0)]
    assert coming(requests, speed=2.0) == [(0.0, 1), (0.0, 3), (4.0, 0), (4.5, 2)]


def test_closed_loop_has_so_many_conversations_at_a_time_and_their_turns_in_order() -> None:
    requests = [first(0), after(0), first(10**6), after(2, 500), first(10**7), first(5)]
    came = coming(requests, concurrency=2)
    assert [number for _, number in came[:2]] == [0, 1]
    assert {number: when for when, number in came} == {
        0: 0.0,
        1: ANSWER_S,
        5: RAMP_S / 2,
        2: 2 * ANSWER_S,
        4: RAMP_S / 2 + ANSWER_S,
        3: 2 * ANSWER_S + ANSWER_S + 0.5,
    }


def test_conversation_with_branches_is_over_when_all_of_them_are() -> None:
    requests = [first(0), after(0), after(0, 7000), first(0)]
    assert coming(requests, concurrency=1)[-1] == (ANSWER_S + 7.0 + ANSWER_S, 3)


def test_more_places_than_conversations_are_no_matter() -> None:
    assert len(coming([first(0), first(0)], concurrency=100)) == 2
