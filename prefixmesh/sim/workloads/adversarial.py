"""What routers get wrong: nothing to share, one thing that all share, and new things that many share in the same moment. Pure."""

from dataclasses import dataclass

from prefixmesh.sim.workload import Workload
from prefixmesh.sim.workloads.draft import Draft
from prefixmesh.sim.workloads.draws import Draws


@dataclass(frozen=True, kw_only=True, slots=True)
class AllUnique:
    """Prompts of 2,000 tokens that share nothing, answers of 200: a cache is of no use, and must not cost anything."""

    requests: int = 10_000
    block_size: int = 64
    questions_per_s: float = 20.0
    prompt_tokens: int = 2000
    answer_tokens: int = 200

    def make(self, draws: Draws) -> Workload:
        """The workload. O(requests * blocks)."""
        draft = Draft("all-unique", self.block_size)
        arrival_ms = 0.0
        while len(draft) < self.requests:
            draft.ask(
                [draft.piece(self.prompt_tokens)], draft.piece(self.answer_tokens), arrival_ms=arrival_ms
            )
            arrival_ms += 1e3 * draws.exponential(1.0 / self.questions_per_s)
        return draft.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class HotPrefix:
    """One prefix of 4,000 tokens before every question of 200, answers of 200: who follows the longest match alone piles all on one."""

    requests: int = 10_000
    block_size: int = 64
    questions_per_s: float = 40.0
    prefix_tokens: int = 4000
    question_tokens: int = 200
    answer_tokens: int = 200

    def make(self, draws: Draws) -> Workload:
        """The workload. O(requests * blocks)."""
        draft = Draft("hot-prefix", self.block_size)
        prefix = draft.piece(self.prefix_tokens)
        arrival_ms = 0.0
        while len(draft) < self.requests:
            prompt = [prefix, draft.piece(self.question_tokens)]
            draft.ask(prompt, draft.piece(self.answer_tokens), arrival_ms=arrival_ms)
            arrival_ms += 1e3 * draws.exponential(1.0 / self.questions_per_s)
        return draft.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class Bursts:
    """Every two seconds 32 requests in one moment, with one new prefix of 4,000 tokens and 200 of their own, answers of 128: who knows of a
    prefix only when it is computed scatters it over all workers."""

    requests: int = 8000
    block_size: int = 64
    every_ms: int = 2000
    burst: int = 32
    prefix_tokens: int = 4000
    question_tokens: int = 200
    answer_tokens: int = 128

    def make(self, draws: Draws) -> Workload:
        """The workload; nothing of it goes by chance. O(requests * blocks)."""
        draft = Draft("bursts", self.block_size)
        arrival_ms = 0
        while len(draft) < self.requests:
            prefix = draft.piece(self.prefix_tokens)
            for _ in range(self.burst):
                prompt = [prefix, draft.piece(self.question_tokens)]
                draft.ask(prompt, draft.piece(self.answer_tokens), arrival_ms=arrival_ms)
            arrival_ms += self.every_ms
        return draft.done()
