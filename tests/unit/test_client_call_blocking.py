"""A blocking call whose streams are ended from another thread when they are silent."""

from collections.abc import Iterator
from typing import Any

from prefixmesh.client.call_blocking import Call
from prefixmesh.client.target import TimeLeft
from prefixmesh.proto.v1 import inference_pb2 as pb


class Stream(Iterator[pb.GenerateResponse]):
    """Says when each of its messages has been waited for."""

    def __init__(self) -> None:
        self.call: Call | None = None
        self.waited_since: list[float] = []
        self.is_cancelled = False

    def __next__(self) -> pb.GenerateResponse:
        assert self.call is not None
        since_s = self.call.silent_since_s()
        assert since_s is not None
        if self.waited_since:  # a look at the message before this one, that took so long
            self.call.end_silent(self.waited_since[-1])
        self.waited_since.append(since_s)
        return pb.GenerateResponse(delta=pb.Delta())

    def cancel(self) -> None:
        self.is_cancelled = True


class Connection:
    """It answers ``Generate`` with one stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def unary_stream(self, *_: Any, **__: Any) -> Any:
        return lambda *_, **__: self._stream

    def unary_unary(self, *_: Any, **__: Any) -> Any:
        return None


class Course:
    """All that it is told is the caller's."""

    plan = None
    request = pb.GenerateRequest()
    owes_token = True

    def give_back(self) -> None:
        return None

    def received(self, response: pb.GenerateResponse, now_s: float) -> pb.GenerateResponse:
        return response


class Target:
    metadata = ()


def make_call(stream: Stream) -> Call:
    time_left = TimeLeft(None, lambda: 0.0)
    call = Call(Target(), Connection(stream), Course(), time_left)  # type: ignore[arg-type]
    stream.call = call
    return call


def test_look_that_comes_late_does_not_end_what_is_read_now() -> None:
    """Between the look at the clock and the end of the stream its reader may have gone on, even to another worker."""
    stream = Stream()
    call = make_call(stream)
    for _ in range(3):
        next(call)
    assert len(set(stream.waited_since)) == 3
    assert not stream.is_cancelled
    call.end_silent(stream.waited_since[-1])  # nobody reads
    assert not stream.is_cancelled


def test_stream_whose_reader_still_waits_is_ended() -> None:
    class Silent(Stream):
        def __next__(self) -> pb.GenerateResponse:
            assert self.call is not None
            since_s = self.call.silent_since_s()
            assert since_s is not None
            self.call.end_silent(since_s)
            return pb.GenerateResponse(delta=pb.Delta())

    stream = Silent()
    next(make_call(stream))
    assert stream.is_cancelled
