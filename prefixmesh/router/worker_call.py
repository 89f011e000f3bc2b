"""One request's call at one worker, as whoever carries the request sees it: read from it, cancel it, and know why the link gave it up.

A call that hangs on a worker that has stalled would never end by itself: nothing comes, and nothing breaks. So the link to a worker that
is put out ends the calls that are there, and leaves its reason. Whoever reads meets a cancellation, and tells by the reason that it was
not the caller's: the request goes on elsewhere. What becomes of a request is not decided here.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

GenerateCall = grpc.aio.UnaryStreamCall[bytes, bytes]


class WorkerCall:
    """A Generate call that has been sent. One event loop owns it."""

    __slots__ = ("_call", "given_up", "read")

    def __init__(self, call: GenerateCall) -> None:
        self._call = call
        self.read: Callable[[], Awaitable[Any]] = call.read
        """gRPC's own: the next frame, or its mark for the end. Bound, so that nothing stands before each frame. Raises CancelledError once
        the call was cancelled or given up, AioRpcError when it ends in any other error."""

        self.given_up = ""
        """Why the link has ended the call before the worker did; empty while it has not."""

    def cancel(self) -> None:
        """End the call; the worker is told as soon as it can be. Ended already: nothing happens."""
        self._call.cancel()

    def give_up(self, why: str) -> None:
        """End the call because nothing is expected of its worker any more. Ended already: nothing happens, and it keeps its own end."""
        if self._call.cancel():  # its reader wakes up after this
            self.given_up = why
