"""Should the host give up first what the device has too? The hit share of multi-turn traffic on two tiers, both ways.

Without saving what the device gives up: the cache does give up such copies first, but for what it saves (``docs/adr/0007``), and this is what
it would cost if it did not. A model of blocks and not the cache itself: conversations of a skewed popularity grow turn by turn, everything is
backed up at once, and either tier forgets by the policy, a conversation's end before its front: ``python benchmarks/host_eviction.py``, about a
minute.
"""

import random
import statistics
from collections.abc import Callable

Block = tuple[int, int, int]
"""Conversation, which of those in its place, block."""

CONVERSATIONS = 60
FIRST_BLOCKS, LONGEST_BLOCKS = 8, 60
TURNS, WARM_UP = 1500, 300
SEEDS = (1, 2, 3)
POOLS = ((150, 300), (150, 600), (300, 600))
"""Blocks of the device and of the host; about 1,500 are in conversations."""


class Tier:
    """When each block was last used on a tier; ``rank`` is compared before that."""

    def __init__(self, room: int, rank: Callable[[Block], tuple[int, ...]]) -> None:
        self._room, self._rank = room, rank
        self.used: dict[Block, int] = {}

    def use(self, blocks: list[Block], now: int) -> None:
        """These are here, used now; what there is no room for goes, none of these."""
        self.used.update(dict.fromkeys(blocks, now))
        over = len(self.used) - self._room
        if over > 0:
            others = [block for block in self.used if self.used[block] != now]
            for block in sorted(others, key=lambda at: (*self._rank(at), self.used[at], -at[2]))[:over]:
                del self.used[block]


def hit_share(policy: str, pools: tuple[int, int], seed: int, *, prefer_shared: bool) -> float:
    """Share of the blocks asked for that either tier had."""
    rng = random.Random(seed)
    hits: dict[Block, int] = {}

    def rank(block: Block) -> tuple[int, ...]:
        return (hits[block] if policy == "lfu" else 0,)

    def shared_first(block: Block) -> tuple[int, ...]:
        return (*rank(block), block not in device.used)

    device = Tier(pools[0], rank)
    host = Tier(pools[1], shared_first if prefer_shared else rank)
    lengths, lives = [FIRST_BLOCKS] * CONVERSATIONS, [0] * CONVERSATIONS
    weights = [1 / (place + 1) ** 0.8 for place in range(CONVERSATIONS)]
    found = asked = 0
    for turn in range(TURNS):
        (which,) = rng.choices(range(CONVERSATIONS), weights)
        if rng.random() < 0.05 or lengths[which] > LONGEST_BLOCKS:
            lives[which], lengths[which] = lives[which] + 1, FIRST_BLOCKS
        prompt = [(which, lives[which], block) for block in range(lengths[which])]
        cached = (block in device.used or block in host.used for block in prompt)
        known = next((place for place, there in enumerate(cached) if not there), len(prompt))
        if turn >= WARM_UP:
            found, asked = found + known, asked + len(prompt)
        lengths[which] += rng.randint(2, 6)
        path = [(which, lives[which], block) for block in range(lengths[which])]
        for block in path:
            hits[block] = hits.get(block, 0) + 1
        device.use(path, turn)
        host.use(path, turn)
    return found / asked


def main() -> None:
    """Print the medians over the seeds."""
    print("policy  device  host   as the device ranks   what the device has too first")
    for policy in ("lru", "lfu"):
        for pools in POOLS:
            either = [
                statistics.median(hit_share(policy, pools, seed, prefer_shared=shared) for seed in SEEDS)
                for shared in (False, True)
            ]
            print(f"{policy:6} {pools[0]:7} {pools[1]:5} {either[0]:21.3f} {either[1]:31.3f}", flush=True)


if __name__ == "__main__":
    main()
