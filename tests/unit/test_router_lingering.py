"""What stays predicted after a request has ended: until the worker has told, or for a while."""

from collections.abc import Sequence

import pytest

from prefixmesh.ids import Fingerprint
from prefixmesh.router import lingering as lingering_module
from prefixmesh.router.lingering import BELIEF_S, LINGER_S, Lingering
from prefixmesh.router.predictions import Predictions

SLOT = 3
A, B, C = (Fingerprint(n) for n in (1, 2, 3))


class Scene:
    def __init__(self, *, tells: bool = True) -> None:
        self.predictions = Predictions()
        self.lingering = Lingering(self.predictions)
        self.lingering.tells = tells

    def leave(
        self, request_id: str, *names: Fingerprint, after: Sequence[Fingerprint] = (), now: float = 0.0
    ) -> None:
        answers = [self.predictions.expect(SLOT, after)] if after else []
        self.lingering.keep(request_id, self.predictions.expect(SLOT, names), answers, now)

    @property
    def expected(self) -> set[Fingerprint]:
        self.predictions.check_invariants()
        return set(self.predictions.masks)


def test_it_stays_until_the_worker_has_told() -> None:
    scene = Scene()
    scene.leave("one", A, B)
    scene.leave("two", A, C)
    scene.lingering.told(["one", "unknown"])
    assert scene.expected == {A, C}
    scene.lingering.told(["one", "two"])
    assert scene.expected == set()


def test_it_stays_no_longer_than_a_while() -> None:
    scene = Scene()
    scene.leave("one", A)
    scene.leave("two", B, now=1.0)
    scene.lingering.expire(LINGER_S - 0.1)
    assert scene.expected == {A, B}
    scene.lingering.expire(LINGER_S)
    assert scene.expected == {B}
    scene.lingering.expire(LINGER_S + 1.0)
    assert (scene.expected, len(scene.lingering)) == (set(), 0)


def test_of_a_cache_that_tells_nothing_it_is_believed_longer_and_a_report_ends_nothing() -> None:
    scene = Scene(tells=False)
    scene.leave("one", A)
    scene.lingering.told(["one"])
    scene.lingering.expire(BELIEF_S - 1.0)
    assert scene.expected == {A}
    scene.lingering.expire(BELIEF_S)
    assert scene.expected == set()


def test_what_was_not_found_takes_back_all_that_goes_on_from_there() -> None:
    scene = Scene(tells=False)
    scene.leave("one", A, B)
    scene.leave("two", A, C)
    scene.lingering.take_back([A, B, C], keep=2)
    assert scene.expected == {A, B, C}, "nobody went on to C after B"
    scene.lingering.take_back([A, B], keep=1)
    assert scene.expected == {A, C}
    scene.lingering.take_back([A], keep=0)
    assert scene.expected == set()


def test_what_an_answer_left_goes_with_its_prompt_and_not_the_other_way_round() -> None:
    scene = Scene(tells=False)
    scene.leave("one", A, after=[B, C])
    scene.lingering.take_back([A, B, C], keep=2)
    assert scene.expected == {A}, "the answer's blocks stay or go together"
    scene.leave("two", A, after=[B])
    scene.lingering.take_back([A], keep=0)
    assert scene.expected == set()


def test_an_id_that_comes_again_takes_the_place_of_the_first() -> None:
    scene = Scene()
    scene.leave("one", A, after=[B])
    scene.leave("one", C)
    assert (scene.expected, len(scene.lingering)) == ({C}, 1)


def test_the_events_of_a_cache_that_tells_are_not_overruled_by_what_a_request_found() -> None:
    scene = Scene()
    scene.leave("one", A, B)
    scene.lingering.take_back([A, B], keep=0)
    assert scene.expected == {A, B}


def test_what_is_kept_is_bounded_and_the_oldest_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering_module, "BELIEF_BLOCKS", 4)
    scene = Scene(tells=False)
    for number in range(1, 100):
        scene.leave(str(number), Fingerprint(2 * number), Fingerprint(2 * number + 1))
    assert scene.expected == {196, 197, 198, 199}
    assert len(scene.lingering) == 2


def test_a_prediction_that_others_have_ended_is_no_error() -> None:
    """The worker's life was over meanwhile."""
    scene = Scene()
    scene.leave("one", A)
    scene.predictions.end_all(SLOT)
    scene.lingering.told(["one"])
    scene.lingering.expire(LINGER_S)
    scene.leave("two", B)
    scene.lingering.clear()
    assert scene.expected == set()
