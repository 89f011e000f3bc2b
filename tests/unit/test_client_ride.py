"""How long a call waits for its router, and when it does not."""

import random

import pytest

from prefixmesh.client.ride import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MAX_ROUTER_DEATHS,
    PATIENCE_S,
    Broken,
    Failure,
    Ride,
    RouterMemory,
)
from prefixmesh.errors import DeadlineError, PrefixmeshError, StoppingError, UnavailableError

GONE = Broken(UnavailableError("refused"), Failure.UNREACHED)
DIED = Broken(UnavailableError("socket closed"), Failure.DIED)
NO_WORKER = Broken(UnavailableError("no worker is ready"), Failure.REFUSED)


def ride(*, known: bool = True, rides: bool = True, draw: float = 0.5) -> Ride:
    memory = RouterMemory()
    memory.has_answered = known
    return Ride(memory, rides=rides, draw=lambda: draw)


def pauses(one: Ride, left_s: float | None = None) -> list[float]:
    """Until it gives up, each followed by another call in vain."""
    made: list[float] = []

    def wait_in_vain() -> None:
        while True:
            made.append(one.broke(GONE, sum(made), None if left_s is None else left_s - sum(made)))

    with pytest.raises(UnavailableError) as caught:
        wait_in_vain()
    assert str(caught.value) == f"refused (waited {sum(made):.1f} s for it)"
    return made


def test_pauses_grow_up_to_a_bound_and_end_with_the_patience() -> None:
    """A tenth of a second, twice that, and so on; half a minute in all."""
    made = pauses(ride())
    assert made[:6] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0])
    assert max(made) == LONGEST_PAUSE_S
    assert PATIENCE_S - LONGEST_PAUSE_S < sum(made) < PATIENCE_S


def test_a_deadline_is_waited_for_instead() -> None:
    """Shorter or longer than the patience, and never beyond it."""
    assert sum(pauses(ride(), left_s=1.0)) < 1.0
    assert 60.0 - LONGEST_PAUSE_S < sum(pauses(ride(), left_s=60.0)) < 60.0


def test_callers_do_not_come_back_together() -> None:
    """Pauses are drawn from half to one and a half of what they would be."""
    chance = random.Random(1)
    memory = RouterMemory()
    memory.has_answered = True
    first = [Ride(memory, rides=True, draw=chance.random).broke(GONE, 0.0, None) for _ in range(200)]
    assert 0.5 * FIRST_PAUSE_S <= min(first) < 0.6 * FIRST_PAUSE_S
    assert 1.4 * FIRST_PAUSE_S < max(first) < 1.5 * FIRST_PAUSE_S


def test_an_answer_begins_the_next_wait_anew() -> None:
    """Pauses and patience are for one absence of the router."""
    one = ride()
    for now_s in (0.0, 20.0):
        assert one.broke(GONE, now_s, None) == pytest.approx(FIRST_PAUSE_S)
        assert one.is_waiting
        one.answered()
        assert not one.is_waiting
    assert one.broke(GONE, 40.0, None) == pytest.approx(FIRST_PAUSE_S)


def test_nobody_waits_for_a_router_that_never_was() -> None:
    """A wrong address is told at once; one that was reached once is known, also by its death."""
    stranger = ride(known=False)
    with pytest.raises(UnavailableError, match=r"^refused$"):
        stranger.broke(GONE, 0.0, None)
    assert ride(known=False).broke(DIED, 0.0, None) > 0


@pytest.mark.parametrize(
    "broken", [NO_WORKER, Broken(DeadlineError("too late"), Failure.CALLERS)], ids=["refused", "callers"]
)
def test_what_a_router_answers_is_told(broken: Broken) -> None:
    """It is there, and would say the same again."""
    with pytest.raises(type(broken.error), match=str(broken.error)):
        ride().broke(broken, 0.0, None)


def test_one_that_has_just_come_back_may_refuse_for_want_of_workers() -> None:
    """So may one that leaves; a caller's own error is told even then."""
    one = ride()
    assert one.broke(GONE, 0.0, None) > 0
    assert one.broke(NO_WORKER, 1.0, None) > 0
    with pytest.raises(PrefixmeshError, match="too late"):
        one.broke(Broken(DeadlineError("too late"), Failure.CALLERS), 2.0, None)
    assert ride().broke(Broken(StoppingError("this router is stopping"), Failure.REFUSED), 0.0, None) > 0


def test_a_call_that_kills_its_routers_is_given_up() -> None:
    """After some deaths without a token; one in between makes up for them."""
    one = ride()
    for _ in range(3 * MAX_ROUTER_DEATHS):
        one.broke(DIED, 0.0, None)
        one.progressed()
    for _ in range(MAX_ROUTER_DEATHS):
        one.broke(DIED, 0.0, None)
    with pytest.raises(UnavailableError, match="socket closed"):
        one.broke(DIED, 0.0, None)


def test_without_riding_every_failure_is_told() -> None:
    """``resume=False``."""
    for broken in (GONE, DIED):
        with pytest.raises(UnavailableError, match=str(broken.error)):
            ride(rides=False).broke(broken, 0.0, None)
