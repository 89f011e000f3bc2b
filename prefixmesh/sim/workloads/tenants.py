"""Many tenants with an adapter each: nobody shares anything with another, and popular ones share much with themselves. Pure."""

from dataclasses import dataclass

from prefixmesh.sim.workload import Workload
from prefixmesh.sim.workloads.draft import Draft
from prefixmesh.sim.workloads.draws import Draws, Popularity


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterTenants:
    """64 tenants, asked for by Zipf's law, each with a LoRA adapter and instructions of 1,200 tokens; questions of 200, answers of 150."""

    requests: int = 10_000
    block_size: int = 64
    questions_per_s: float = 20.0
    tenants: int = 64
    skew: float = 1.0
    instruction_tokens: int = 1200
    question_tokens: int = 200
    answer_tokens: int = 150

    def make(self, draws: Draws) -> Workload:
        """The workload. O(requests * blocks)."""
        draft = Draft("lora-tenants", self.block_size)
        instructions = [draft.piece(self.instruction_tokens) for _ in range(self.tenants)]
        popularity = Popularity(self.tenants, self.skew)
        arrival_ms = 0.0
        while len(draft) < self.requests:
            tenant = draws.pick(popularity)
            draft.ask(
                [instructions[tenant], draft.piece(self.question_tokens)],
                draft.piece(self.answer_tokens),
                arrival_ms=arrival_ms,
                tenant=f"tenant-{tenant}",
                adapter=f"adapter-{tenant}",
            )
            arrival_ms += 1e3 * draws.exponential(1.0 / self.questions_per_s)
        return draft.done()
