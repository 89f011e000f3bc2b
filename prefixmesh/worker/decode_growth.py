"""Room for the next token of everybody who decodes: a page where one is full, by preempting others if need be. Pure."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from prefixmesh.worker.kv_manager import KvManager
from prefixmesh.worker.preemption import choose_victim
from prefixmesh.worker.request import Request
from prefixmesh.worker.running_batch import RunningBatch


class Growth(NamedTuple):
    """What came of it."""

    grown: Collection[Request]
    """Those that got a page."""

    waiting: Collection[Request]
    """Those that sit this step out: the pages that they need come free in a moment."""


def grow_decoders(
    batch: RunningBatch, kv: KvManager, preempt: Callable[[Request], None], now: float, *, by_priority: bool
) -> Growth:
    """Give a page to every decoding request that stands at a page's end.

    Evicts first. When that is not enough, and copies in flight will not give enough either once they have ended, ``preempt``
    takes the request that loses least out of the batch, and so on: at the latest when nobody decodes any more there are pages
    enough. O(decoding), and O(running * depth) for each preemption.
    """
    page_size = kv.page_size
    short = {request: None for request in batch.decoding if request.computed == request.pages * page_size}
    while not kv.extend(list(short)):
        if kv.pages_coming(now) >= len(short):
            return Growth((), short)
        victim = choose_victim(batch, short, kv, by_priority=by_priority)
        short.pop(victim, None)
        preempt(victim)
    return Growth(short, ())
