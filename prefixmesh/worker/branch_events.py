"""A call's requests to the engine as one stream of events.

A call with several branches is as many requests, submitted together and ended together: whichever way the joined stream ends (read to
its end, closed, cancelled, an error in any of them), every request of it that still runs is aborted in the engine.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from prefixmesh.errors import InternalError, UnavailableError
from prefixmesh.ids import RequestId
from prefixmesh.worker.engine_client import EngineClient, RequestEvent
from prefixmesh.worker.messages import Ended, Refused, Submit


class BranchEvent(NamedTuple):
    """What happened to one of a call's branches."""

    branch: int
    event: RequestEvent


def branch_ids(request_id: RequestId, branches: int) -> tuple[str, ...]:
    """The names by which the engine knows a call's requests: the call's own where there is one."""
    if branches == 1:
        return (request_id,)
    return tuple(f"{request_id}/{branch}" for branch in range(branches))


async def branch_events(engine: EngineClient, submits: Sequence[Submit]) -> AsyncGenerator[BranchEvent, None]:
    """Submit the requests, in order and with nothing in between, and join their events as they come.

    Ends when each has had its last event. Raises what the engine raises for any of them, and UnavailableError when a stream
    ends without one.
    """
    if len(submits) == 1:
        async with aclosing(_events(engine, submits[0])) as events:
            async for event in events:
                yield BranchEvent(0, event)
        return
    arrived: asyncio.Queue[BranchEvent | asyncio.Task[None]] = asyncio.Queue()
    readers = [
        asyncio.create_task(_read(engine, submit, branch, arrived)) for branch, submit in enumerate(submits)
    ]
    for reader in readers:
        reader.add_done_callback(arrived.put_nowait)
    left = len(readers)
    try:
        while left:
            next_ = await arrived.get()
            if isinstance(next_, BranchEvent):
                yield next_
                continue
            left -= 1
            if next_.cancelled():
                # Nobody cancels a reader before the end: a library's own cancellation leaked, and must not pass for the caller's.
                raise InternalError("a branch of this call was cancelled by itself")
            next_.result()
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(
    engine: EngineClient,
    submit: Submit,
    branch: int,
    arrived: "asyncio.Queue[BranchEvent | asyncio.Task[None]]",
) -> None:
    # The queue needs no bound of its own: it holds no more than the engine's, whose streams have the same events.
    async with aclosing(_events(engine, submit)) as events:
        async for event in events:
            arrived.put_nowait(BranchEvent(branch, event))


async def _events(engine: EngineClient, submit: Submit) -> AsyncGenerator[RequestEvent, None]:
    async with aclosing(engine.submit(submit)) as events:
        async for event in events:
            yield event
            if isinstance(event, Ended | Refused):
                return
    raise UnavailableError("the engine ended the stream before the answer")
