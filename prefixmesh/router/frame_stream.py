"""Frames from a worker to a caller, at the pace of the slower: one by one while the caller takes them as they come, joined when it does not.

    caller takes at once     read, send, read, send: nothing is held
    caller is slow           one task reads on into a backlog, the other sends all that is there, joined, and waits for the caller again
    backlog is full          nothing is read: HTTP/2's windows fill up, and the worker's own backlog of this answer holds what comes

So a caller that was slow for a while catches up in a few messages, and one that is slow for ever costs a bounded number of bytes here.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc.aio

from prefixmesh.router.frames import join_frames

SLOW_S: Final = 0.02
"""Sending a frame took longer: the caller, or this process, does not keep up. One that does takes a tenth of a millisecond. From then on
there are two tasks for the stream, which takes some 5 µs more for a frame, and saves ten times that for one that is joined to another."""

MAX_BACKLOG_BYTES: Final = 64 * 1024
"""Read and not sent, of one stream: a thousand frames of a token each. Beside it stands what HTTP/2's windows hold, as much again."""

Read = Callable[[], Awaitable[Any]]
"""The stream's next frame, or gRPC's mark for its end."""

OnFrame = Callable[[bytes], bytes | None]
"""Takes note of a frame; what to send instead, or None for nothing."""

Send = Callable[[bytes], Awaitable[object]]
"""Gives a frame to the caller; returns once there is room for another."""


class FrameStream:
    """One worker's stream on its way to a caller. ``run`` it once."""

    __slots__ = ("_clock", "_on_frame", "_read", "_send", "reads_since")

    def __init__(self, read: Read, on_frame: OnFrame, send: Send, clock: Callable[[], float]) -> None:
        """``clock`` gives seconds."""
        self._read = read
        self._on_frame = on_frame
        self._send = send
        self._clock = clock
        self.reads_since: float | None = None
        """Since when the worker's next frame is waited for; None while it is the caller who is waited for, or nobody."""

    async def run(self) -> None:
        """Pass everything on, through ``on_frame``, which is called with every frame as soon as it is here, and once.

        Returns at the stream's end. Raises what reading, sending and ``on_frame`` raise, of reading once all that was read was sent.
        """
        read, on_frame, send, clock = self._read, self._on_frame, self._send, self._clock
        now = clock()
        while True:
            self.reads_since = now
            frame = await read()
            if frame is grpc.aio.EOF:
                return
            self.reads_since = None
            ours = on_frame(frame)
            began = now = clock()
            if ours is not None:
                await send(ours)
                now = clock()
                if now - began > SLOW_S:
                    await self._run_joined()
                    return

    async def _run_joined(self) -> None:
        backlog = _Backlog()
        reading = asyncio.ensure_future(self._read_on(backlog))
        try:
            while frames := await backlog.take():
                for frame in join_frames(frames):
                    await self._send(frame)
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read_on(self, backlog: "_Backlog") -> None:
        try:
            while True:
                self.reads_since = self._clock()
                frame = await self._read()
                if frame is grpc.aio.EOF:
                    return
                self.reads_since = None
                ours = self._on_frame(frame)
                if ours is not None:
                    await backlog.put(ours)
        finally:
            backlog.end()


class _Backlog:
    """Frames that are read and not sent."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._bytes = 0
        self._has_ended = False
        self._changed = asyncio.Event()

    async def put(self, frame: bytes) -> None:
        """Add a frame; returns when there is room for another."""
        self._frames.append(frame)
        self._bytes += len(frame)
        self._changed.set()
        while self._bytes >= MAX_BACKLOG_BYTES:
            await self._wait()

    def end(self) -> None:
        """Nothing more will come."""
        self._has_ended = True
        self._changed.set()

    async def take(self) -> list[bytes]:
        """All that is there, at least one frame; none when nothing more will come."""
        while not self._frames and not self._has_ended:
            await self._wait()
        frames, self._frames, self._bytes = self._frames, [], 0
        self._changed.set()
        return frames

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()
