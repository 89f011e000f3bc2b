"""Sorting an engine's events into streams, where the engine goes while somebody is waiting."""

import asyncio

import pytest

from prefixmesh.cache.ledger import CacheLedger
from prefixmesh.errors import UnavailableError
from prefixmesh.worker.event_streams import EventStreams
from prefixmesh.worker.messages import Abort, Command, Stats, TokensOut
from tests.support.scheduling import submit_command

STATS = Stats(
    running=0,
    queued=0,
    total_pages=1,
    free_pages=1,
    evictable_pages=0,
    protected_pages=0,
    prefill_tokens_per_s=1.0,
    decode_step_ms=1.0,
    cache=CacheLedger().totals(),
    double_releases=0,
    steps=0,
)


async def _drained() -> None:
    return None


async def test_a_cancel_stays_a_cancel_when_the_engine_cannot_be_told() -> None:
    """F22: the connection is closing already, so the abort has nowhere to go; the reader's own end is not replaced."""

    def send(command: Command) -> None:
        if isinstance(command, Abort):
            raise UnavailableError("the engine is not running")

    streams = EventStreams(send, _drained)

    async def read() -> None:
        async for _ in streams.stream(submit_command("r", [1, 2], max_tokens=4)):
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_events_that_come_after_the_end_are_dropped() -> None:
    """Answers that were under way when the engine went find nobody waiting, and disturb nobody."""
    streams = EventStreams(lambda command: None, _drained)
    asked = asyncio.create_task(streams.stats())
    await asyncio.sleep(0)
    streams.fail_all(UnavailableError("gone"))
    with pytest.raises(UnavailableError, match="gone"):
        await asked
    streams.dispatch([STATS, TokensOut(request_id="r", position=0, token_ids=(1,))])
    assert streams.closed.is_set()


async def test_a_question_that_could_not_be_sent_waits_for_no_answer() -> None:
    """The next answer belongs to the next question."""
    fail = True

    def send(command: Command) -> None:
        if fail:
            raise UnavailableError("the engine is not running")

    streams = EventStreams(send, _drained)
    with pytest.raises(UnavailableError):
        await streams.stats()
    fail = False
    asked = asyncio.create_task(streams.stats())
    await asyncio.sleep(0)
    streams.dispatch([STATS])
    assert await asked == STATS
