"""What a client keeps of the workers it streams from: connections up to a bound, and who was out of reach."""

import pytest

from prefixmesh.client.direct import (
    AVOID_S,
    FORGET_ROUTE_S,
    MAX_AVOIDED,
    MOST_RETRIES,
    RETRY_SHARE,
    RETRY_WINDOW_S,
    DirectPlan,
    RefusalBudget,
    RouteMemory,
)
from prefixmesh.client.worker_channels import Taken, WorkerChannels
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import router_pb2


def test_one_connection_serves_all_streams_of_a_worker() -> None:
    """It is opened once, also after it was idle."""
    opened: list[str] = []

    def open_channel(address: str) -> str:
        opened.append(address)
        return address

    channels = WorkerChannels(open_channel)
    assert channels.take("a:1") == channels.take("a:1") == Taken("a:1", None)
    channels.release("a:1")
    channels.release("a:1")
    channels.take("a:1")
    assert opened == ["a:1"]
    assert repr(channels) == "WorkerChannels(1 in use, 0 idle)"


def test_least_recently_used_idle_connection_makes_room() -> None:
    """The caller is told what to close; one in use stays."""
    channels = WorkerChannels(str.upper, limit=3)
    for address in ("a", "b", "c"):
        channels.take(address)
    channels.release("b")
    channels.release("c")
    channels.take("b")
    channels.release("b")
    assert channels.take("d") == Taken("D", "C")
    assert channels.take("e") == Taken("E", "B")
    assert len(channels) == 3


def test_full_of_streams_there_is_no_room() -> None:
    """None, until one of them ends."""
    channels = WorkerChannels(str.upper, limit=1)
    channels.take("a")
    assert channels.take("b") is None
    channels.release("a")
    assert channels.take("b") == Taken("B", "A")


def test_releasing_twice_is_a_fault_of_the_caller() -> None:
    """It would give up a channel that another stream uses."""
    channels = WorkerChannels(str.upper)
    channels.take("a")
    channels.release("a")
    with pytest.raises(AssertionError):
        channels.release("a")


def test_closed_pool_hands_over_everything_and_gives_nothing_more() -> None:
    """A call that was asking for its way finds no channel, and streams that end afterwards release nothing."""
    channels = WorkerChannels(str.upper)
    channels.take("a")
    assert channels.close() == ["A"]
    assert channels.take("a") is None
    channels.release("a")
    assert channels.close() == []


def test_worker_out_of_reach_is_avoided_for_a_while() -> None:
    """And a bounded number of them, the newest."""
    memory = RouteMemory()
    memory.unreached("a", 0.0)
    assert memory.avoided(AVOID_S - 0.1) == ["a"]
    assert memory.avoided(AVOID_S) == []
    for number in range(MAX_AVOIDED + 1):
        memory.unreached(str(number), 1.0)
    memory.unreached("1", 2.0)
    assert memory.avoided(3.0) == [*map(str, range(2, MAX_AVOIDED + 1)), "1"]


def test_router_without_route_is_asked_again_some_day() -> None:
    """It may have been replaced by a newer one."""
    memory = RouteMemory()
    memory.no_route(10.0)
    assert not memory.knows_route(10.0 + FORGET_ROUTE_S - 0.1)
    assert memory.knows_route(10.0 + FORGET_ROUTE_S)


def test_tries_after_refusals_are_a_share_of_what_is_asked() -> None:
    """A few at first and after a while, a fifth of the requests, and no endless credit for a long time of peace."""
    budget = RefusalBudget()
    assert [budget.may_retry(0.0) for _ in range(4)] == [True, True, True, False]
    tried = 0
    for _ in range(1000):
        budget.asked()
        tried += budget.may_retry(0.0)
    assert tried == pytest.approx(1000 * RETRY_SHARE, abs=1)
    assert [budget.may_retry(RETRY_WINDOW_S) for _ in range(4)] == [True, True, True, False]
    for _ in range(10_000):
        budget.asked()
    assert sum(budget.may_retry(RETRY_WINDOW_S) for _ in range(1000)) == MOST_RETRIES


def test_callers_own_message_stays_as_it_was() -> None:
    """What goes to the worker is another message: the next attempt needs the whole request."""
    request = pb.GenerateRequest(text="hello", extra_key="mine", model="named")
    plan = DirectPlan(request)
    sent = plan.routed(router_pb2.RouteResponse(address="a:1", prompt_ids=b"\1\0\0\0"))
    assert (sent.tokens.ids, sent.text) == (b"\1\0\0\0", "")
    assert request == pb.GenerateRequest(text="hello", extra_key="mine", model="named")
