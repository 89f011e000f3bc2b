"""Coroutines in simulated time: they go on when what they wait for has come, and end where they are told to."""

import pytest

from prefixmesh.errors import UnavailableError
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.simulated_tasks import Reply, Task, pause


def test_coroutines_go_on_in_the_order_of_what_they_wait_for() -> None:
    sim, told = Simulation(0), list[str]()

    async def wait(name: str, duration_s: float) -> None:
        for _ in range(2):
            await pause(sim, duration_s)
            told.append(f"{name} at {sim.now:g}")

    tasks = [Task(wait("slow", 2.0)), Task(wait("quick", 1.5))]
    sim.run_until(10.0)
    assert told == ["quick at 1.5", "slow at 2", "quick at 3", "slow at 4"]
    assert all(task.is_over for task in tasks)


def test_reply_comes_once_and_a_failure_is_raised_where_it_is_awaited() -> None:
    seen = list[object]()

    async def ask(reply: Reply[int]) -> None:
        try:
            seen.append(await reply)
        except UnavailableError as error:
            seen.append(str(error))

    given, failed, here = Reply[int](), Reply[int](), Reply[int]()
    here.give(3)
    for reply in (given, failed, here):
        Task(ask(reply))
    given.give(1)
    given.give(2)
    given.fail(UnavailableError("late"))
    failed.fail(UnavailableError("gone"))
    assert seen == [3, 1, "gone"]


def test_task_that_is_cancelled_tidies_up_and_hears_no_more() -> None:
    reply, told = Reply[None](), list[str]()

    async def wait() -> None:
        try:
            await reply
            told.append("went on")
        finally:
            told.append("tidied")

    task = Task(wait())
    task.cancel()
    task.cancel()
    reply.give(None)
    assert task.is_over
    assert told == ["tidied"]


def test_what_a_coroutine_raises_comes_out_of_the_simulation() -> None:
    sim = Simulation(0)

    async def break_down() -> None:
        await pause(sim, 1.0)
        raise ZeroDivisionError

    task = Task(break_down())
    with pytest.raises(ZeroDivisionError):
        sim.run_until(2.0)
    assert task.is_over
