"""Uncached tokens and backlog: the plainest rule that knows both caches and load. Pure.

Nobody's product: the first token cannot come before what stands before it has been computed and what is not cached of its own prompt, so
the worker is taken where that is least. It is what ours is without the work that a choice adds for others, and by a count of tokens in
the place of milliseconds.
"""

from prefixmesh.sim.rivals.view import RivalView


def backlog(view: RivalView) -> int:
    """See the module. Of equals the first. O(workers)."""
    costs = [
        waiting * view.block_tokens - min(held * view.block_tokens, view.prompt_tokens)
        for waiting, held in zip(view.prefill_blocks, view.held_blocks, strict=True)
    ]
    return costs.index(min(costs))
