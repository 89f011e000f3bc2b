"""The load as the front counts it: every call once, whichever way it ends, and the engine's figures brought up to date."""

from contextlib import suppress

import pytest

from prefixmesh.ids import RequestId
from prefixmesh.worker.front_load import FrontLoad
from prefixmesh.worker.messages import Admitted, Ended, Refused, TokensOut

A, B = RequestId("a"), RequestId("b")


def admitted() -> Admitted:
    return Admitted(request_id="a", cached_tokens=0, queued_ms=0.0)


def token() -> TokensOut:
    return TokensOut(request_id="a", position=0, token_ids=(1,))


def ended() -> Ended:
    return Ended(
        request_id="a", reason="stop", completion_tokens=1, prefill_ms=0.0, first_token_ms=0.0, decode_ms=0.0
    )


def counts(load: FrontLoad) -> tuple[int, int]:
    return load.queued, load.running


def test_a_call_waits_runs_and_is_gone() -> None:
    load = FrontLoad()
    changes: list[tuple[int, int]] = []
    load.on_change = lambda: changes.append(counts(load))
    with load.enter("r", A, 1) as place:
        place.on_event(0, admitted())
        place.on_event(0, token())
        place.on_event(0, token())
        place.on_event(0, ended())
    assert changes == [(1, 0), (0, 1), (0, 1), (0, 0)]


def test_each_branch_counts_and_the_request_ends_with_the_last() -> None:
    load = FrontLoad()
    with load.requests.follow("r") as reader:
        reader.take()
        with load.enter("r", A, 3) as place:
            place.on_event(1, admitted())
            assert counts(load) == (2, 1)
            place.on_event(1, ended())
            place.on_event(0, admitted())
            assert counts(load) == (1, 1)
            assert reader.take().ended == ()
            place.on_event(0, ended())
            place.on_event(2, Refused(request_id="a", field="", problem="full"))
            assert reader.take().ended == ("a",), "told although the caller may still be reading"
        assert counts(load) == (0, 0)


def test_whatever_ends_a_call_takes_all_of_it_away() -> None:
    load = FrontLoad()
    with load.requests.follow("r") as reader:
        with suppress(ValueError), load.enter("r", A, 2) as place:
            place.on_event(0, admitted())
            raise ValueError("inside")
        assert counts(load) == (0, 0)
        assert reader.take().running == 0


def test_what_was_submitted_after_the_engines_figures_is_added_to_them() -> None:
    load = FrontLoad()
    with load.enter("r", A, 1) as first, load.enter("r", B, 1) as second:
        first.submitted(100)
        mark = load.mark()
        assert load.uncached_tokens(100, mark) == 100
        second.submitted(70)
        assert load.uncached_tokens(60, mark) == 130, (
            "nothing was measured yet, so nothing is thought to be cached"
        )
        assert load.uncached_tokens(130, load.mark()) == 130


def test_what_has_come_and_is_computed_since_the_engines_figures_is_no_work_any_more() -> None:
    """Else a worker that answers ten short requests one after the other between two figures would seem to have ten of them before it."""
    load = FrontLoad()
    mark = load.mark()
    for _ in range(10):
        with load.enter("r", A, 1) as place:
            place.submitted(100)
            place.on_event(0, admitted())
            place.on_event(0, token())
    with load.enter("r", A, 1) as running, load.enter("r", B, 1) as waits:
        running.submitted(100)
        running.on_event(0, admitted())
        running.on_event(0, token())
        waits.submitted(70)
        assert load.uncached_tokens(0, mark) == 70
        waits.on_event(0, Admitted(request_id="b", cached_tokens=30, queued_ms=0.0))
        assert load.uncached_tokens(0, mark) == 40, "as found, and not as expected"


@pytest.mark.parametrize(("host", "disk"), [(0, 0), (800, 0), (500, 400)])
def test_new_prompts_are_expected_to_be_cached_as_those_before_them_were(host: int, disk: int) -> None:
    """On whatever tier: what is loaded back is not to be computed."""
    load = FrontLoad()
    met = Admitted(
        request_id="a", cached_tokens=900, queued_ms=0.0, host_tokens=host, disk_tokens=disk, load_back_ms=5.0
    )
    for _ in range(100):
        with load.enter("r", A, 1) as place:
            place.submitted(1000)
            place.on_event(0, met)
    mark = load.mark()
    with load.enter("r", A, 2) as place:
        place.submitted(2000)
        assert load.uncached_tokens(0, mark) == pytest.approx(200, abs=2)


def test_a_new_prompt_counts_by_the_square_of_its_length_as_well() -> None:
    """300 tokens with nothing cached are 300**2; of those before, what the engine told."""
    load = FrontLoad()
    with load.enter("r", A, 1) as place:
        mark = load.mark()
        place.submitted(300)
        assert load.uncached_squares(1000, mark) == 1000 + 300**2
        assert load.uncached_squares(1000, load.mark()) == 1000
    assert load.uncached_squares(1000, mark) == 0, "nobody is there"


def test_without_requests_there_is_nothing_to_compute_whatever_the_engine_said_last() -> None:
    load = FrontLoad()
    with load.enter("r", A, 1) as place:
        place.submitted(10)
    assert load.uncached_tokens(5000, 0.0) == 0
