"""The thread that looks at direct streams: whom it ends, and when it is gone."""

import threading
import time

from prefixmesh.client.idle_thread import IdleThread

TIMEOUT_S = 60


class Stream:
    """It is silent for ever, or owes nothing for the first ``looks``."""

    def __init__(self, looks: int = 0) -> None:
        self.looks_left = looks
        self.ended = threading.Event()

    def silent_since_s(self) -> float | None:
        if self.looks_left > 0:
            self.looks_left -= 1
            return None
        return time.monotonic() - 3600

    def end_silent(self, since_s: float) -> None:
        self.ended.set()


def test_silent_stream_is_ended() -> None:
    idle, stream = IdleThread(0.02), Stream()
    idle.watch(stream)
    assert stream.ended.wait(TIMEOUT_S)
    idle.forget(stream)


def test_stream_that_owes_no_token_is_left_alone() -> None:
    """Before its first token, and while its reader does something else, a stream may be silent for as long as it likes."""
    idle, stream = IdleThread(0.02), Stream(looks=5)
    idle.watch(stream)
    assert stream.ended.wait(TIMEOUT_S)
    assert stream.looks_left == 0
    idle.forget(stream)


def test_thread_ends_with_the_last_stream_and_comes_back_with_the_next() -> None:
    idle = IdleThread(0.02)
    for _ in range(2):
        stream = Stream()
        idle.watch(stream)
        thread = idle.thread
        assert thread is not None
        assert stream.ended.wait(TIMEOUT_S)
        idle.forget(stream)
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_stream_that_nobody_holds_is_not_kept() -> None:
    idle = IdleThread(0.02)
    idle.watch(Stream())
    thread = idle.thread
    if thread is not None:  # it may be gone already
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_without_a_timeout_nothing_is_watched() -> None:
    idle, stream = IdleThread(0.0), Stream()
    idle.watch(stream)
    assert idle.thread is None
