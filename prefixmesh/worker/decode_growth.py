"""Room for the next token of everybody who decodes: a page where one is full, by preempting others if need be. Pure."""

from collections.abc import Callable

from prefixmesh.worker.kv_manager import KvManager
from prefixmesh.worker.preemption import choose_victim
from prefixmesh.worker.request import Request
from prefixmesh.worker.running_batch import RunningBatch


def grow_decoders(
    batch: RunningBatch, kv: KvManager, preempt: Callable[[Request], None], *, by_priority: bool
) -> list[Request]:
    """Give a page to every decoding request that stands at a page's end; returns those that got one and still run.

    Evicts first. When that is not enough, ``preempt`` takes the request that loses least out of the batch, and so on: at
    the latest when nobody decodes any more there are pages enough. O(decoding), and O(running * depth) for each preemption.
    """
    page_size = kv.page_size
    short = {request: None for request in batch.decoding if request.computed == request.pages * page_size}
    while not kv.extend(list(short)):
        victim = choose_victim(batch, short, kv, by_priority=by_priority)
        short.pop(victim, None)
        preempt(victim)
    return list(short)
