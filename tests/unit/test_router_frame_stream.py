"""Frames at the pace of the slower: as they come, joined for a slow caller, and no further than the backlog has room."""

import asyncio
from collections.abc import Callable

import grpc.aio
import pytest

from prefixmesh.answer_record import AnswerRecord
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.router import frame_stream
from prefixmesh.router.frame_stream import SLOW_S, FrameStream
from prefixmesh.tokens import pack, unpack


def delta(position: int) -> bytes:
    return pb.GenerateResponse(
        delta=pb.Delta(position=position, token_ids=pack([position]), text=f"{position},")
    ).SerializeToString()


class Worker:
    """A stream of so many deltas, and then its end or an error; counts what was read."""

    def __init__(self, frames: int, error: Exception | None = None) -> None:
        self.read_frames = 0
        self.is_cancelled = False
        self._frames = frames
        self._error = error
        self._never = asyncio.Event()
        self.is_hanging = asyncio.Event()
        self.hangs_at: int | None = None

    async def read(self) -> object:
        await asyncio.sleep(0)
        if self.read_frames == self.hangs_at:
            self.is_hanging.set()
            try:
                await self._never.wait()
            except asyncio.CancelledError:
                self.is_cancelled = True
                raise
        if self.read_frames == self._frames:
            if self._error is not None:
                raise self._error
            return grpc.aio.EOF
        self.read_frames += 1
        return delta(self.read_frames - 1)


class Caller:
    """Takes frames, and lets time pass before it takes the next where it is slow; everything else goes on meanwhile."""

    def __init__(self, worker: Worker, *, slowly: bool = False) -> None:
        self.worker = worker
        self.slowly = slowly
        self.now = 0.0
        self.frames: list[bytes] = []
        self.read_at_each: list[int] = []

    def stream(self, on_frame: Callable[[bytes], bytes | None] = lambda frame: frame) -> FrameStream:
        return FrameStream(self.worker.read, on_frame, self.take, lambda: self.now)

    async def take(self, frame: bytes) -> None:
        self.frames.append(frame)
        self.read_at_each.append(self.worker.read_frames)
        if self.slowly:
            self.now += 2 * SLOW_S
            for _ in range(300):
                await asyncio.sleep(0)

    @property
    def ids(self) -> list[int]:
        record = AnswerRecord()
        for frame in self.frames:
            record.told(frame)
        return [int(one) for one in unpack(record.branches[0].packed)]


async def test_a_caller_that_keeps_up_gets_every_frame_as_it_came() -> None:
    caller = Caller(Worker(50))
    await caller.stream().run()
    assert caller.frames == [delta(position) for position in range(50)]
    assert caller.read_at_each == list(range(1, 51)), "nothing is read ahead"


async def test_a_slow_caller_gets_everything_in_fewer_frames() -> None:
    caller = Caller(Worker(200), slowly=True)
    await caller.stream().run()
    assert caller.ids == list(range(200))
    assert len(caller.frames) < 20


@pytest.mark.parametrize("slowly", [False, True])
async def test_every_frame_is_noted_once_in_order_and_when_it_came(slowly: bool) -> None:
    caller, noted = Caller(Worker(200), slowly=slowly), list[bytes]()

    def note(frame: bytes) -> bytes:
        noted.append(frame)
        assert len(noted) == caller.worker.read_frames
        return frame

    await caller.stream(note).run()
    assert noted == [delta(position) for position in range(200)]


@pytest.mark.parametrize("slowly", [False, True])
async def test_a_frame_of_which_nothing_is_to_be_told_is_not_sent(slowly: bool) -> None:
    caller, dropped = Caller(Worker(40), slowly=slowly), {delta(7), delta(39)}
    await caller.stream(lambda frame: None if frame in dropped else frame).run()
    gap = AnswerRecord()
    for frame in caller.frames:
        gap.told(frame)
    assert len(gap.branches[0].packed) == 4 * 38


async def test_nothing_more_is_read_once_the_backlog_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the worker feels it; and when the caller takes again, it goes on."""
    monkeypatch.setattr(frame_stream, "MAX_BACKLOG_BYTES", 10 * len(delta(1)))
    caller = Caller(Worker(200), slowly=True)
    await caller.stream().run()
    assert caller.ids == list(range(200))
    before = [0, *(AnswerCount(caller.frames[:n]).tokens for n in range(1, len(caller.frames)))]
    assert all(read - sent <= 22 for read, sent in zip(caller.read_at_each, before, strict=True))


@pytest.mark.parametrize("slowly", [False, True])
async def test_an_error_comes_after_all_that_was_read_before_it(slowly: bool) -> None:
    caller = Caller(Worker(40, error=RuntimeError("the worker died")), slowly=slowly)
    with pytest.raises(RuntimeError, match="the worker died"):
        await caller.stream().run()
    assert caller.ids == list(range(40))


@pytest.mark.parametrize("slowly", [False, True])
async def test_a_caller_that_leaves_ends_the_reading_at_once(slowly: bool) -> None:
    worker = Worker(100)
    worker.hangs_at = 30
    passing = asyncio.create_task(Caller(worker, slowly=slowly).stream().run())
    await worker.is_hanging.wait()
    passing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await passing
    assert worker.is_cancelled
    assert len(asyncio.all_tasks()) == 1


async def test_a_call_that_is_cancelled_under_a_slow_caller_ends_the_stream() -> None:
    """What the relay does to a request that is stopped: its read raises, and so does the stream."""
    caller = Caller(Worker(40, error=asyncio.CancelledError()), slowly=True)  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        await caller.stream().run()
    assert caller.ids == list(range(40))


@pytest.mark.parametrize("slowly", [False, True])
async def test_it_tells_since_when_the_worker_is_waited_for_and_not_while_the_caller_is(slowly: bool) -> None:
    """A caller that reads slowly makes no worker silent."""
    worker, since_while_sending = Worker(40), list[float | None]()
    worker.hangs_at = 39
    caller = Caller(worker, slowly=slowly)

    def note(frame: bytes) -> bytes:
        since_while_sending.append(stream.reads_since)
        return frame

    stream = caller.stream(note)
    passing = asyncio.create_task(stream.run())
    await worker.is_hanging.wait()
    assert set(since_while_sending) == {None}
    assert stream.reads_since is not None
    passing.cancel()
    await asyncio.gather(passing, return_exceptions=True)


class AnswerCount:
    """How many tokens some frames have."""

    def __init__(self, frames: list[bytes]) -> None:
        self.tokens = sum(len(pb.GenerateResponse.FromString(frame).delta.token_ids) // 4 for frame in frames)
