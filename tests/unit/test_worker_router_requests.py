"""What each router is told of its own requests: everything once, to every reader, whenever it begins and however often it asks."""

import random
from contextlib import ExitStack

import pytest

from prefixmesh.errors import OverloadedError
from prefixmesh.ids import RequestId
from prefixmesh.worker.router_requests import OwnRequests, RouterRequests

A, B, C = (RequestId(name) for name in "abc")


def test_reader_is_told_each_step_once_in_the_order_of_the_steps() -> None:
    requests = RouterRequests()
    with requests.follow("r") as reader:
        assert reader.take() == OwnRequests()
        requests.accepted("r", A)
        requests.accepted("r", B)
        requests.prefilled("r", A)
        assert reader.take() == OwnRequests(("a", "b"), ("a",), (), 2)
        requests.prefilled("r", A)
        requests.ended("r", A)
        requests.ended("r", A)
        assert reader.take() == OwnRequests((), (), ("a",), 1)
        assert reader.take() == OwnRequests(running=1)


def test_request_that_came_and_went_between_two_reports_is_in_all_lists() -> None:
    requests = RouterRequests()
    with requests.follow("r") as reader:
        reader.take()
        requests.accepted("r", A)
        requests.prefilled("r", A)
        requests.ended("r", A)
        assert reader.take() == OwnRequests(("a",), ("a",), ("a",), 0)


def test_reader_that_begins_anew_is_told_what_runs_and_what_ended_meanwhile() -> None:
    requests = RouterRequests(max_kept_changes=4)
    with requests.follow("r") as first:
        for one in (A, B, C):
            requests.accepted("r", one)
            requests.prefilled("r", one)
        first.take()
    requests.ended("r", B)  # while nobody reads
    with requests.follow("r") as again:
        told = again.take()
    assert set(told.accepted) == {"a", "c"}, "of what ended long ago, only the end is kept"
    assert set(told.prefilled) == {"a", "b", "c"}
    assert told.ended == ("b",)
    assert told.running == 2


def test_routers_are_told_of_their_own_requests_only() -> None:
    requests = RouterRequests()
    with requests.follow("r") as mine, requests.follow("s") as others, requests.follow("") as nobodys:
        requests.accepted("r", A)
        requests.accepted("", B)
        assert mine.take().accepted == ("a",)
        assert others.take() == nobodys.take() == OwnRequests()
    assert len(requests) == 2


def test_id_that_comes_again_is_not_told_to_have_ended() -> None:
    requests = RouterRequests()
    with requests.follow("r") as reader:
        reader.take()
        for _ in range(2):
            requests.accepted("r", A)
            requests.ended("r", A)
        requests.accepted("r", A)
        assert reader.take() == OwnRequests(("a",), (), (), 1)
    with requests.follow("r") as other:
        assert other.take() == OwnRequests(("a",), (), (), 1)


def test_reader_that_is_left_behind_must_begin_anew() -> None:
    requests = RouterRequests(max_kept_changes=3)
    with requests.follow("r") as reader:
        reader.take()
        requests.accepted("r", A)
        reader.take()
        requests.accepted("r", B)
        requests.accepted("r", C)
        requests.prefilled("r", B)
        assert reader.take().accepted == ("b", "c")
        for one in (A, B, C):
            requests.ended("r", one)
        requests.accepted("r", A)
        with pytest.raises(OverloadedError, match="too slow"):
            reader.take()


def test_routers_that_nobody_needs_are_forgotten_and_the_others_never() -> None:
    requests = RouterRequests(max_routers=3)
    requests.accepted("runs", A)
    with requests.follow("reads"):
        for index in range(50):
            requests.accepted(f"restart-{index}", B)
            requests.ended(f"restart-{index}", B)
        assert len(requests) == 3
        with requests.follow("runs") as reader:
            assert reader.take().running == 1


@pytest.mark.parametrize("seed", range(20))
def test_any_readers_at_any_time_know_in_the_end_what_runs(seed: int) -> None:
    """Readers come, read, break off and come again; each that has read last knows exactly what runs, and nothing twice as new."""
    rng = random.Random(seed)
    requests = RouterRequests(max_kept_changes=40)
    running: set[str] = set()
    known: set[str] = set()
    is_first = True
    blocks = ExitStack()
    reader = blocks.enter_context(requests.follow("r"))
    for number in range(400):
        if rng.random() < 0.5 or not running:
            name = str(number)
            requests.accepted("r", RequestId(name))
            running.add(name)
        else:
            name = rng.choice(sorted(running))
            requests.prefilled("r", RequestId(name))
            if rng.random() < 0.9:
                requests.ended("r", RequestId(name))
                running.discard(name)
        if rng.random() < 0.2:
            try:
                told = reader.take()
            except OverloadedError:
                blocks.close()
                reader, is_first = blocks.enter_context(requests.follow("r")), True
                continue
            if is_first:
                known.clear()
            assert not known & set(told.accepted)
            known |= set(told.accepted)
            assert set(told.ended) <= known or is_first
            known -= set(told.ended)
            is_first = False
            assert known == running
            assert told.running == len(running)
        if rng.random() < 0.03:
            blocks.close()
            reader, is_first = blocks.enter_context(requests.follow("r")), True
    blocks.close()
