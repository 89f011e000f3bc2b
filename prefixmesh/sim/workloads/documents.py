"""Retrieval: questions with documents before them, which many questions have in common, in an order of their own. Pure."""

from dataclasses import dataclass

from prefixmesh.sim.workload import Workload
from prefixmesh.sim.workloads.draft import Draft
from prefixmesh.sim.workloads.draws import Draws, Popularity


@dataclass(frozen=True, kw_only=True, slots=True)
class Retrieval:
    """Instructions of 400 tokens, four of 2,000 documents of 1,000 tokens each, a question of 60; 250 answered.

    Documents are asked for by Zipf's law and stand in the order in which they were found: a document is shared only by those that have
    the same ones before it, so a cache of prefixes finds the instructions, and the first document of those that are popular.
    """

    requests: int = 10_000
    block_size: int = 64
    questions_per_s: float = 8.0
    instruction_tokens: int = 400
    documents: int = 2000
    document_tokens: int = 1000
    found: int = 4
    skew: float = 1.0
    question_tokens: int = 60
    answer_tokens: int = 250

    def make(self, draws: Draws) -> Workload:
        """The workload. O(requests * blocks)."""
        draft = Draft("rag", self.block_size)
        instructions = draft.piece(self.instruction_tokens)
        documents = [draft.piece(self.document_tokens) for _ in range(self.documents)]
        popularity = Popularity(self.documents, self.skew)
        arrival_ms = 0.0
        while len(draft) < self.requests:
            found: dict[int, None] = {}
            while len(found) < min(self.found, self.documents):
                found[draws.pick(popularity)] = None
            prompt = [
                instructions,
                *(documents[one] for one in found),
                draft.piece(self.question_tokens),
            ]
            draft.ask(prompt, draft.piece(self.answer_tokens), arrival_ms=arrival_ms)
            arrival_ms += 1e3 * draws.exponential(1.0 / self.questions_per_s)
        return draft.done()
