"""What a direct request's course says of a worker that says nothing."""

from prefixmesh.client.answer_builder import AnswerBuilder
from prefixmesh.client.course import Course
from prefixmesh.client.direct import DirectPlan, RouteMemory
from prefixmesh.client.ride import Broken, Failure, Ride, RouterMemory
from prefixmesh.errors import UnavailableError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import router_pb2
from tests.support.fake_inference import delta, finished, started

DIED = Broken(UnavailableError("has said nothing for 60 s"), Failure.DIED)


def make_course() -> Course:
    ride = Ride(RouterMemory(), rides=True, draw=lambda: 0.5)
    request = pb.GenerateRequest(text="hello")
    return Course(request, AnswerBuilder(0.0), ride, plan=DirectPlan(request), memory=RouteMemory())


def routed(course: Course, worker: str) -> None:
    course.routed(router_pb2.RouteResponse(address=worker, request_id=f"at {worker}"))


def test_worker_owes_nothing_before_its_own_first_token() -> None:
    """One that goes on with an answer computes its whole prompt first, and others may be in front of it: as at the first attempt."""
    course = make_course()
    for worker, position in (("127.0.0.1:1", 0), ("127.0.0.1:2", 1)):
        routed(course, worker)
        owed = [course.owes_token]
        for message in (started(), delta(position, "word")):
            course.received(message, 1.0)
            owed.append(course.owes_token)
        assert owed == [False, False, True]
        course.failed(DIED, 3.0, None)


def test_after_the_last_message_the_streams_end_is_owed() -> None:
    """Also of an answer without a token."""
    course = make_course()
    routed(course, "127.0.0.1:1")
    course.received(started(), 1.0)
    course.received(finished(0), 2.0)
    assert course.owes_token
