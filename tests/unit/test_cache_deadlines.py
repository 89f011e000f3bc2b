"""Deadlines: which ends first, however often that is changed."""

import math
import random

from prefixmesh.cache.deadlines import STALE_ENTRIES, Deadlines


def test_the_first_to_end_is_known_whatever_is_changed_or_forgotten() -> None:
    """Beside a dictionary, under a few hundred random changes with many equal times."""
    chance = random.Random(7)
    deadlines: Deadlines[str] = Deadlines()
    model: dict[str, float] = {}
    for _ in range(500):
        thing = chance.choice("abcdef")
        if chance.random() < 0.4:
            deadlines.forget(thing)
            model.pop(thing, None)
        else:
            model[thing] = float(chance.randrange(5))
            deadlines.set(thing, model[thing])
        soonest = min(model.values(), default=math.inf)
        first = deadlines.first()
        assert deadlines.soonest == soonest
        assert first is None if not model else (first is not None and model[first] == soonest)
        assert {name: deadlines.when(name) for name in model} == model
        assert len(deadlines) == len(model)
        assert deadlines.entries <= 2 * len(model) + STALE_ENTRIES


def test_things_are_never_compared() -> None:
    """What ends at one time needs no order."""
    deadlines: Deadlines[object] = Deadlines()
    things = [object() for _ in range(5)]
    for thing in things:
        deadlines.set(thing, 1.0)
    for thing in things:
        assert deadlines.first() is thing
        deadlines.forget(thing)
    assert deadlines.first() is None


def test_a_thing_that_is_renewed_for_ever_keeps_one_place() -> None:
    """Later and later, behind another that never comes up: the old entries go all the same."""
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("first", 0.0)
    for when in range(1, 10_000):
        deadlines.set("renewed", float(when))
        assert deadlines.entries <= 2 * 2 + STALE_ENTRIES
    assert (deadlines.soonest, deadlines.when("renewed")) == (0.0, 9999.0)
