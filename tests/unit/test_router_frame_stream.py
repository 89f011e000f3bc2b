"""Frames at the pace of the slower: as they come, joined for a slow caller, and no further than the backlog has room."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import grpc.aio
import pytest

from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.router import frame_stream
from prefixmesh.router.frame_stream import SLOW_S, pass_frames
from prefixmesh.router.frames import Answer, read_answers
from prefixmesh.tokens import pack


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

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.now = 0.0
        self.frames: list[bytes] = []

    def stream(self, on_frame: Callable[[bytes], bytes] = lambda frame: frame) -> AsyncGenerator[bytes]:
        return pass_frames(self.worker.read, on_frame, lambda: self.now)

    async def take(self, frame: bytes, *, slowly: bool) -> None:
        self.frames.append(frame)
        if slowly:
            self.now += 2 * SLOW_S
            for _ in range(300):
                await asyncio.sleep(0)

    async def take_all(self, *, slowly: bool) -> None:
        async with aclosing(self.stream()) as frames:
            async for frame in frames:
                await self.take(frame, slowly=slowly)

    @property
    def ids(self) -> list[int]:
        answers: dict[int, Answer] = {}
        read_answers(self.frames, answers)
        return answers[0].ids if answers else []


async def test_a_caller_that_keeps_up_gets_every_frame_as_it_came() -> None:
    caller = Caller(Worker(50))
    async for frame in caller.stream():
        await caller.take(frame, slowly=False)
        assert caller.worker.read_frames == len(caller.frames), "nothing is read ahead"
    assert caller.frames == [delta(position) for position in range(50)]


async def test_a_slow_caller_gets_everything_in_fewer_frames() -> None:
    caller = Caller(Worker(200))
    await caller.take_all(slowly=True)
    assert caller.ids == list(range(200))
    assert len(caller.frames) < 20


async def test_every_frame_is_noted_once_in_order_and_when_it_came() -> None:
    noted: list[bytes] = []

    def note(frame: bytes) -> bytes:
        noted.append(frame)
        return frame

    caller = Caller(Worker(200))
    async for frame in caller.stream(note):
        await caller.take(frame, slowly=True)
        assert len(noted) == caller.worker.read_frames
    assert noted == [delta(position) for position in range(200)]


async def test_nothing_more_is_read_once_the_backlog_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the worker feels it; and when the caller takes again, it goes on."""
    monkeypatch.setattr(frame_stream, "MAX_BACKLOG_BYTES", 10 * len(delta(1)))
    caller = Caller(Worker(200))
    async for frame in caller.stream():
        held = caller.worker.read_frames - len(caller.ids)
        await caller.take(frame, slowly=True)
        assert caller.worker.read_frames - len(caller.ids) <= 11, held
    assert caller.ids == list(range(200))


@pytest.mark.parametrize("slowly", [False, True])
async def test_an_error_comes_after_all_that_was_read_before_it(slowly: bool) -> None:
    caller = Caller(Worker(40, error=RuntimeError("the worker died")))
    with pytest.raises(RuntimeError, match="the worker died"):
        await caller.take_all(slowly=slowly)
    assert caller.ids == list(range(40))


@pytest.mark.parametrize("slowly", [False, True])
async def test_a_caller_that_leaves_ends_the_reading_at_once(slowly: bool) -> None:
    worker = Worker(100)
    worker.hangs_at = 30
    caller = Caller(worker)

    taking = asyncio.create_task(caller.take_all(slowly=slowly))
    await worker.is_hanging.wait()
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert worker.is_cancelled
    assert len(asyncio.all_tasks()) == 1


async def test_a_call_that_is_cancelled_under_a_slow_caller_ends_the_stream() -> None:
    """What the relay does to a request that is stopped: its read raises, and so does the stream."""
    caller = Caller(Worker(40, error=asyncio.CancelledError()))  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        await caller.take_all(slowly=True)
    assert caller.ids == list(range(40))
