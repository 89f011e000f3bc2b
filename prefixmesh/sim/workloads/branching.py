"""One prompt, many answers: several drafts of one question at once, and trees of thoughts. Pure."""

from dataclasses import dataclass
from typing import NamedTuple

from prefixmesh.sim.workload import Workload
from prefixmesh.sim.workloads.draft import Draft, Piece
from prefixmesh.sim.workloads.draws import Draws


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """Eight requests at one moment with one prompt of 1,500 tokens (500 of them instructions that all share), 300 answered each: sampling
    several answers to choose from, where the caller sends them one by one."""

    requests: int = 8000
    block_size: int = 64
    questions_per_s: float = 2.0
    branches: int = 8
    instruction_tokens: int = 500
    question_tokens: int = 1000
    answer_tokens: int = 300

    def make(self, draws: Draws) -> Workload:
        """The workload. O(requests * blocks)."""
        draft = Draft("fork", self.block_size)
        instructions = draft.piece(self.instruction_tokens)
        begins_ms = 0.0
        while len(draft) < self.requests:
            prompt = [instructions, draft.piece(self.question_tokens)]
            for _ in range(self.branches):
                draft.ask(prompt, draft.piece(self.answer_tokens), arrival_ms=begins_ms)
            begins_ms += 1e3 * draws.exponential(1.0 / self.questions_per_s)
        return draft.done()


class _Thought(NamedTuple):
    path: tuple[Piece, ...]
    request: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeOfThought:
    """Search over thoughts (Yao et al., "Tree of Thoughts", 2023; breadth first): from 1,200 tokens of instructions and a problem of 400,
    four thoughts of 150 tokens each; the best two of a level are gone on from, three levels deep. A level begins when the last answer of
    the level before has ended."""

    requests: int = 8000
    block_size: int = 64
    problems_per_s: float = 0.5
    instruction_tokens: int = 1200
    problem_tokens: int = 400
    thought_tokens: int = 150
    thoughts: int = 4
    """From each that is gone on from."""

    kept: int = 2
    levels: int = 3

    def make(self, draws: Draws) -> Workload:
        """The workload. O(requests * blocks)."""
        draft = Draft("tree-of-thought", self.block_size)
        instructions = draft.piece(self.instruction_tokens)
        begins_ms = 0.0
        while len(draft) < self.requests:
            problem = (instructions, draft.piece(self.problem_tokens))
            level = self._grow(draft, [problem], None, begins_ms)
            for _ in range(self.levels - 1):
                best = [level.pop(draws.whole(0, len(level) - 1)) for _ in range(min(self.kept, len(level)))]
                last = max(thought.request for thought in (*level, *best))
                level = self._grow(draft, [thought.path for thought in best], last, None)
            begins_ms += 1e3 * draws.exponential(1.0 / self.problems_per_s)
        return draft.done()

    def _grow(
        self, draft: Draft, paths: list[tuple[Piece, ...]], after: int | None, arrival_ms: float | None
    ) -> list[_Thought]:
        level = []
        for path in paths:
            for _ in range(self.thoughts):
                thought = draft.piece(self.thought_tokens)
                request = draft.ask(path, thought, after=after, arrival_ms=arrival_ms)
                level.append(_Thought((*path, thought), request))
        return level
