"""Agents that use tools: long prompts that grow by each result, and a tool's time between the steps. Pure."""

from dataclasses import dataclass

from prefixmesh.sim.workload import Workload
from prefixmesh.sim.workloads.draft import Draft
from prefixmesh.sim.workloads.draws import Draws


@dataclass(frozen=True, kw_only=True, slots=True)
class Agents:
    """Tasks for a few kinds of agents. Each kind has instructions and descriptions of tools of 6,000 tokens; a task has 300; 4 to 20 steps
    follow, each of which answers 120 tokens (a call), whose result of 100 to 2,000 tokens the next one reads, 0.2 to 4 s later."""

    requests: int = 10_000
    block_size: int = 64
    tasks_per_s: float = 0.5
    kinds: int = 4
    instruction_tokens: int = 6000
    task_tokens: int = 300
    call_tokens: int = 120
    least_steps: int = 4
    most_steps: int = 20
    least_result_tokens: int = 100
    most_result_tokens: int = 2000
    least_pause_ms: int = 200
    most_pause_ms: int = 4000

    def make(self, draws: Draws) -> Workload:
        """The workload. O(requests * blocks)."""
        draft = Draft("agents", self.block_size)
        kinds = [draft.piece(self.instruction_tokens) for _ in range(self.kinds)]
        begins_ms = 0.0
        while len(draft) < self.requests:
            read = [kinds[draws.whole(0, self.kinds - 1)], draft.piece(self.task_tokens)]
            call = draft.piece(self.call_tokens)
            after = draft.ask(read, call, arrival_ms=begins_ms, pin_tokens=self.instruction_tokens)
            for _ in range(draws.whole(self.least_steps, self.most_steps) - 1):
                result = draft.piece(draws.whole(self.least_result_tokens, self.most_result_tokens))
                read += [call, result]
                call = draft.piece(self.call_tokens)
                pause_ms = draws.whole(self.least_pause_ms, self.most_pause_ms)
                after = draft.ask(
                    read, call, after=after, pause_ms=pause_ms, pin_tokens=self.instruction_tokens
                )
            begins_ms += 1e3 * draws.exponential(1.0 / self.tasks_per_s)
        return draft.done()
