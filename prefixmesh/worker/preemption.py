"""Who gives way when pages run out and nothing more can be evicted. Pure.

What a preempted request had computed stays in the cache, where its resumption finds it again; but the pages are wanted, and
sooner or later they go. What others hold as well does not: the prefix of a conversation, the prompt of a call's other branches. So
a preemption loses, at worst, what the request holds alone; and what it gains is the pages of just that. Among equals the one
that was admitted last gives way, for the others are nearer to their end.
"""

from collections.abc import Collection, Iterable

from prefixmesh.worker.kv_manager import KvManager
from prefixmesh.worker.request import Request


def choose_victim(
    running: Iterable[Request], short: Collection[Request], kv: KvManager, *, by_priority: bool
) -> Request:
    """Of the running requests, in order of admission, the one that loses least; with ``by_priority`` of the lowest priority there
    is. One that gives nothing back is chosen only if it is ``short`` of pages itself. O(running * depth)."""
    best: Request | None = None
    least = (0, 0)
    for request in running:
        held_alone = kv.held_alone(request)
        if not held_alone.pages and request not in short:
            continue
        loss = (request.priority if by_priority else 0, held_alone.computed_tokens)
        if best is None or loss <= least:
            best, least = request, loss
    assert best is not None, "whoever is short of pages runs"
    return best
