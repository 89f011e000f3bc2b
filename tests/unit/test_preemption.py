"""Who gives way: of requests whose pages are told, without a scheduler."""

from typing import NamedTuple, cast

import pytest

from prefixmesh.worker.kv_manager import KvManager
from prefixmesh.worker.preemption import choose_victim
from prefixmesh.worker.request import Request
from tests.support.scheduling import make_request


class Alone(NamedTuple):
    """What a request holds that nobody else does."""

    pages: int
    computed_tokens: int


class ToldPages:
    """A KvManager that knows nothing else."""

    def __init__(self, held: dict[str, Alone]) -> None:
        self._held = held

    def held_alone(self, request: Request) -> Alone:
        return self._held[request.request_id]


def victim_of(*held: Alone, short: tuple[int, ...] = (), priorities: tuple[int, ...] = ()) -> int:
    """The number of the request that gives way; in order of admission."""
    priorities = priorities or (0,) * len(held)
    running = [
        make_request([1, 2], number=number, priority=priority) for number, priority in enumerate(priorities)
    ]
    kv = ToldPages({request.request_id: one for request, one in zip(running, held, strict=True)})
    chosen = choose_victim(
        running,
        [running[number] for number in short],
        cast(KvManager, kv),
        by_priority=any(priorities),
    )
    return chosen.number


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_that_gives_nothing_back_is_passed_over(place: int) -> None:
    """It would lose least of all, and the pool would be as full as before."""
    held = [Alone(3, 30), Alone(2, 20)]
    held.insert(place, Alone(0, 0))
    assert victim_of(*held, short=(held.index(Alone(3, 30)),)) == held.index(Alone(2, 20))


def test_one_that_gives_nothing_back_gives_way_for_itself() -> None:
    """Where it is short of pages itself, its preemption ends the want."""
    assert victim_of(Alone(3, 30), Alone(0, 0), short=(1,)) == 1


def test_of_those_that_lose_as_much_the_last_admitted_gives_way() -> None:
    assert victim_of(Alone(3, 30), Alone(3, 20), Alone(9, 20), short=(0,)) == 2


def test_a_lower_priority_gives_way_whatever_it_loses() -> None:
    assert victim_of(Alone(1, 1), Alone(9, 90), short=(0,), priorities=(1, 0)) == 1
