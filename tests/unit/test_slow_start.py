"""Workers that join a running fleet are fed at a paced rate."""

import numpy as np
import pytest

from prefixmesh.router.slow_start import FIRST_SHARE, MOST_CREDIT, SlowStart

EVERYONE = np.ones(4, dtype=np.bool_)
NEW = 3


def fed(slow: SlowStart, decisions: int, now: float) -> int:
    """How often the newcomer is taken when it is taken as often as it may be."""
    taken = 0
    for _ in range(decisions):
        if slow.hold_back(EVERYONE, now)[NEW]:
            slow.taken(NEW)
            taken += 1
    return taken


def test_newcomer_gets_a_share_that_grows_to_a_fair_one() -> None:
    """Of 400 decisions among four: a tenth of 100 at first, half way about half, and then the cost alone decides."""
    slow = SlowStart(10.0)
    slow.joined(NEW, 100.0)
    assert fed(slow, 400, 100.0) == pytest.approx(100 * FIRST_SHARE, abs=1)
    assert fed(slow, 400, 105.0) == pytest.approx(100 * (1 + FIRST_SHARE) / 2, abs=2)
    assert fed(slow, 400, 110.0) == 400
    assert len(slow) == 0


def test_what_a_newcomer_did_not_take_is_not_made_good_in_a_burst() -> None:
    slow = SlowStart(10.0)
    slow.joined(NEW, 0.0)
    for _ in range(1000):
        slow.hold_back(EVERYONE, 9.0)
    assert fed(slow, 20, 9.0) <= MOST_CREDIT + 20 / 4


def test_nobody_is_held_back_while_only_newcomers_could_take_a_request() -> None:
    """A fleet that starts serves at once; so does the last worker that is left."""
    slow = SlowStart(10.0)
    for row in range(4):
        slow.joined(row, 0.0)
    assert slow.hold_back(EVERYONE, 0.0).all()
    alone = np.array([False, False, False, True])
    assert slow.hold_back(alone, 0.0)[NEW]
    assert not SlowStart(10.0).hold_back(np.zeros(4, dtype=np.bool_), 0.0).any()


def test_others_are_never_touched() -> None:
    """Neither those that are able nor those that are not."""
    slow = SlowStart(10.0)
    slow.joined(NEW, 0.0)
    able = np.array([True, False, True, True])
    assert slow.hold_back(able, 0.0).tolist() == [True, False, True, False]
    assert able.tolist() == [True, False, True, True]


def test_restart_begins_anew_and_who_leaves_is_forgotten() -> None:
    slow = SlowStart(10.0)
    slow.joined(NEW, 0.0)
    slow.joined(NEW, 9.0)
    assert not slow.hold_back(EVERYONE, 11.0)[NEW], "its second life is two seconds old"
    slow.left(NEW)
    slow.taken(NEW)
    assert slow.hold_back(EVERYONE, 11.0)[NEW]


def test_no_warm_up_knows_no_newcomers() -> None:
    slow = SlowStart(0.0)
    slow.joined(NEW, 0.0)
    assert len(slow) == 0
    assert slow.hold_back(EVERYONE, 0.0) is EVERYONE
