"""Something slow beside the event loop: its result or its error comes back, and nobody waits for what was given up."""

import asyncio
import threading

import pytest

from prefixmesh.side_thread import run_aside
from tests.support.servers import eventually


async def test_result_and_error_come_back_from_another_thread() -> None:
    assert await run_aside(threading.current_thread, "aside") is not threading.current_thread()

    def fail() -> None:
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        await run_aside(fail, "aside")


def test_program_ends_although_what_was_given_up_goes_on() -> None:
    """``asyncio.run`` returns while the thread is still at it."""
    begun, gate, ended = threading.Event(), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        gate.wait()
        ended.set()

    async def give_up() -> None:
        waiting = asyncio.create_task(run_aside(wait, "aside"))
        await eventually(begun.is_set)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(give_up())
    assert not ended.is_set()
    gate.set()
    assert ended.wait(10)
