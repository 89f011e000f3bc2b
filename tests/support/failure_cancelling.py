"""Cancelling a request at a random point of its answer, by one of the three who can."""

import asyncio
import random
from collections.abc import Callable
from typing import Final, Literal, get_args

from prefixmesh.client import AsyncClient
from tests.support.failure_load import Sent, run

Way = Literal["client", "router", "worker"]
"""Who cancels: the caller leaves; it asks the router to abort; somebody asks the worker to."""

EARLY_SHARE: Final = 0.2
"""Of the callers that leave, those that do so at any time, be it before anything has come."""

EARLY_S: Final = 0.05


async def cancel_somehow(
    client: AsyncClient,
    worker_of: Callable[[Sent], AsyncClient],
    request: Sent,
    rng: random.Random,
    *,
    early_share: float = EARLY_SHARE,
) -> Sent:
    """Send ``request`` and cancel it when it has a number of tokens that is drawn; returns it when its call is over. ``worker_of`` gives a
    client of the worker that has begun with it."""
    way: Way = rng.choice(get_args(Way))
    point, leaves_early, early_s = (
        rng.randrange(request.max_tokens),
        rng.random() < early_share,
        rng.random() * EARLY_S,
    )
    reached = asyncio.Event()

    def look(sent: Sent) -> None:
        if sent.request_id and len(sent.tokens) >= point:
            reached.set()

    task = asyncio.create_task(run(client, request, look))
    if way == "client" and leaves_early:
        await asyncio.wait({task}, timeout=early_s)
    else:
        waiting = asyncio.create_task(reached.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
    if way == "client":
        task.cancel()
    elif way == "router" and request.request_id:
        await client.abort(request.request_id)
    elif request.request_id:
        await worker_of(request).abort(request.request_id)
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    return request
