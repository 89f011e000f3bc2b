"""Turns of conversations per CPU second: everything that the prefix cache does for a request, one request after another."""

from collections.abc import Callable, Iterator, Sequence
from time import process_time
from typing import Final

import numpy as np

from prefixmesh.bench.conversations import Conversations, Talk, Turn
from prefixmesh.bench.timing import Sample
from prefixmesh.bench.trees import NOW, make_tree
from prefixmesh.cache.misses import last_fingerprint
from prefixmesh.errors import InternalError

POOL_TOKENS: Final = 1_000_000

WARM_TURNS: Final = 240

TURNS_PER_STEP: Final = 8
"""Turns whose keys are made together, off the clock, and after which publisher and collector are told that a step has ended, on
the clock. (An engine serves a turn in many steps; and what it is asked, it has just received.)"""


class Replay:
    """One pool under one stream of turns. Warm (the pool full, something to evict in every turn) once made."""

    def __init__(
        self,
        page_size: int,
        pool_tokens: int,
        open_conversations: int,
        after_step: Callable[[], None],
        *,
        talk: Talk,
        prompts_first: bool,
    ) -> None:
        """``prompts_first``: insert a prompt once it is computed, and not only with its answer."""
        self._prompts_first = prompts_first
        self.tree = make_tree(page_size, pool_tokens // page_size)
        self._after_step = after_step
        self._conversations = Conversations(page_size, open_conversations, talk)
        self._served = self._evicted_pages = 0
        while not self._evicted_pages:
            self.run(WARM_TURNS)
        self._served = self._evicted_pages = 0
        self._before = self.tree.ledger.totals()

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were cached, since it was warm."""
        now, before = self.tree.ledger.totals(), self._before
        return (sum(now.hit_tokens) - sum(before.hit_tokens)) / (now.prompt_tokens - before.prompt_tokens)

    @property
    def evicted_tokens_per_turn(self) -> float:
        """How much had to go for one turn."""
        return self._evicted_pages * self.tree.cache.page_size / self._served

    def run(self, turns: int) -> float:
        """Serve so many turns; returns the CPU seconds that took, the making of the keys left out."""
        elapsed = 0.0
        for _ in range(0, turns, TURNS_PER_STEP):
            batch = list(self._conversations.turns(TURNS_PER_STEP))
            started = process_time()
            self._serve(batch)
            self.tree.publisher.catch_up()
            self._after_step()
            elapsed += process_time() - started
            self._served += TURNS_PER_STEP
        return elapsed

    def _serve(self, turns: Sequence[Turn]) -> None:
        """Match and lock, and count in the ledger what was found and why not more; take pages for the rest of the prompt and for
        the answer, evicting what is short; insert both; release; give back the pages beyond the last whole one. With
        ``prompts_first``, as a worker's ``KvManager`` does it: insert the prompt and move the lock to its end, insert it again with
        the answer, and move the lock again. Where an insert returns other pages than were passed, they take their place.
        """
        cache, pages, ledger, misses, _ = self.tree
        for turn in turns:
            owner = turn.owner
            match = cache.match_prefix(turn.match_key, NOW)
            receipt = cache.lock(match.last_device_node)
            shared = match.device_indices
            found = misses.explain(
                turn.match_key,
                turn.prompt_tokens,
                match.matched_tokens,
                match.host_hit_length,
                last_fingerprint(match.last_device_node),
            )
            ledger.open_query(owner.namespace).record(found)
            wanted = turn.pages - len(shared)
            missing = wanted - pages.free_pages
            if missing > 0:
                self._evicted_pages += cache.evict(missing, owner.name)
            fresh = pages.allocate(wanted)
            if fresh is None:
                raise InternalError(f"the replay's pool is too small: {cache!r}")
            table = np.concatenate((shared, fresh))
            if self._prompts_first:
                kept = cache.insert(turn.prompt_key, table, NOW, owner=owner.name)
                table[: len(kept.device_indices)] = kept.device_indices
                newer = cache.lock(kept.last_device_node)
                cache.release(receipt)
                receipt = newer
            kept = cache.insert(turn.answer_key, table, NOW, owner=owner.name)
            cache.release(receipt)
            if len(kept.device_indices) < len(table):
                pages.free(table[len(kept.device_indices) :])


def replay_turns(replay: Replay, repeats: int, turns: int) -> Iterator[Sample]:
    """Turns per CPU second."""
    turns = -(-turns // TURNS_PER_STEP) * TURNS_PER_STEP
    for _ in range(repeats):
        yield Sample(turns / replay.run(turns), None, None, turns)
