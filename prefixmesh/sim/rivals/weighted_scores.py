"""Scores from 0 to 1, weighted and added: the rule of llm-d's scheduler (Gateway API Inference Extension). Pure.

Source: the description of its filter, score and pick cycle, and the weights of its published profile for prefix caches: queue depth 2, use of
KV 2, prefix 3. The queue's score is 1 for the shortest and 0 for the longest of the candidates, and 1 for all when they are equal; that
of KV is the share that is not in use; that of the prefix is the matched share of the prompt. The highest sum is taken.

Its own prefix score comes from what it has sent, or from the workers' events; here it is told what they hold.
"""

from typing import Final

from prefixmesh.sim.rivals.view import RivalView, least

QUEUE_WEIGHT: Final = 2.0
KV_USE_WEIGHT: Final = 2.0
PREFIX_WEIGHT: Final = 3.0


def weighted_scores(view: RivalView) -> int:
    """See the module. O(workers)."""
    longest, shortest = max(view.queued), min(view.queued)
    spread = longest - shortest
    blocks = max(1, view.prompt_blocks)
    missing = [
        -(
            QUEUE_WEIGHT * ((longest - queued) / spread if spread else 1.0)
            + KV_USE_WEIGHT * (1.0 - use)
            + PREFIX_WEIGHT * held / blocks
        )
        for queued, use, held in zip(view.queued, view.kv_use, view.held_blocks, strict=True)
    ]
    return least(missing, view.turn)
