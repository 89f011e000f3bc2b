"""A gate on the matched share, and one on imbalance: the rule of SGLang's router. Pure.

Source: the description of its ``cache_aware`` policy, with the defaults ``cache_threshold`` 0.3, ``balance_abs_threshold`` 64 and
``balance_rel_threshold`` 1.5. While the busiest worker has more than 64 requests more than the idlest, *and* more than 1.5 times as many,
the shortest queue is taken. Otherwise the worker that matches most, if that is at least the threshold's share of the prompt.

What it does below the threshold has differed between versions (the worker with the smallest tree, or the least busy one); here it is the
shortest queue. Theirs keeps a tree of texts that it has sent, and does not hear of what workers evict; this one is told what they hold.
"""

from typing import Final

from prefixmesh.sim.rivals.view import RivalView, least

MATCH_SHARE: Final = 0.3
IMBALANCE_REQUESTS: Final = 64
IMBALANCE_RATIO: Final = 1.5


def match_gate(view: RivalView) -> int:
    """See the module. Of those that match equally much, the one with the fewest requests. O(workers)."""
    busiest, idlest = max(view.in_flight), min(view.in_flight)
    is_uneven = busiest - idlest > IMBALANCE_REQUESTS and busiest > IMBALANCE_RATIO * idlest
    longest = max(view.held_blocks)
    if is_uneven or longest < MATCH_SHARE * view.prompt_blocks:
        return least(view.in_flight, view.turn)
    holders = [place for place, blocks in enumerate(view.held_blocks) if blocks == longest]
    return holders[least([view.in_flight[place] for place in holders], view.turn)]
