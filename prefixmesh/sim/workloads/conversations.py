"""Conversations: each turn's prompt is all that was said before, and comes when the last answer has been read. Pure.

Customer service is a closed loop: so many customers at a time, each of whom follows the one before in its place without a pause. Chat
is open: conversations begin when they like, lengths are spread, people take their time.
"""

from dataclasses import dataclass
from typing import Final

from prefixmesh.sim.workload import Workload
from prefixmesh.sim.workloads.draft import Draft, Piece
from prefixmesh.sim.workloads.draws import Draws, Popularity

RAMP_MS: Final = 10_000
"""First customers come one after the other over so long: nobody opens 512 conversations in one moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomerService:
    """Agents that follow a policy text: 2,048 tokens of it, 60 tokens asked, 180 answered, 6 to 12 turns. The number of requests is reached,
    and exceeded by no more than the last conversations' turns."""

    requests: int = 20_000
    block_size: int = 64
    concurrent: int = 512
    """Customers at a time."""

    policies: int = 8
    """Different policy texts: one a line of business. Each conversation follows one."""

    policy_tokens: int = 2048
    question_tokens: int = 60
    answer_tokens: int = 180
    least_turns: int = 6
    most_turns: int = 12

    def make(self, draws: Draws) -> Workload:
        """The workload. O(requests * blocks)."""
        draft = Draft("customer-service", self.block_size)
        policies = [draft.piece(self.policy_tokens) for _ in range(self.policies)]
        last_of: list[int | None] = [None] * self.concurrent
        while len(draft) < self.requests:
            for place, last in enumerate(last_of):
                policy = policies[draws.whole(0, self.policies - 1)]
                begins_ms = RAMP_MS * place / self.concurrent if last is None else None
                last_of[place] = self._converse(draft, draws, policy, last, begins_ms)
                if len(draft) >= self.requests:
                    break
        return draft.done()

    def _converse(
        self, draft: Draft, draws: Draws, policy: Piece, after: int | None, arrival_ms: float | None
    ) -> int:
        said = [policy]
        for _ in range(draws.whole(self.least_turns, self.most_turns)):
            question, answer = draft.piece(self.question_tokens), draft.piece(self.answer_tokens)
            said.append(question)
            after = draft.ask(said, answer, arrival_ms=arrival_ms, after=after, pin_tokens=self.policy_tokens)
            arrival_ms = None
            said.append(answer)
        assert after is not None, "a conversation has a turn"
        return after


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """Plain chat: a short system prompt of 100 tokens that all share, questions of 40 tokens at the median, answers of 250, 1 to 10 turns,
    and 20 seconds on the mean from an answer to the next question."""

    requests: int = 10_000
    block_size: int = 64
    conversations_per_s: float = 4.0
    system_tokens: int = 100
    question_tokens: int = 40
    answer_tokens: int = 250
    length_spread: float = 0.8
    """Deviation of the lengths' logarithms: one in six is 2.2 times the median or more."""

    longest_tokens: int = 4000
    most_turns: int = 10
    turns_skew: float = 1.0
    """Conversations of n turns are as frequent as ``1 / n ** turns_skew``: most are short."""

    pause_s: float = 20.0

    def make(self, draws: Draws) -> Workload:
        """The workload. O(requests * blocks)."""
        draft = Draft("chat", self.block_size)
        system = draft.piece(self.system_tokens)
        turns = Popularity(self.most_turns, self.turns_skew)
        begins_ms = 0.0
        while len(draft) < self.requests:
            said, after = [system], None
            for _ in range(1 + draws.pick(turns)):
                said.append(self._piece(draft, draws, self.question_tokens))
                answer = self._piece(draft, draws, self.answer_tokens)
                if after is None:
                    after = draft.ask(said, answer, arrival_ms=begins_ms)
                else:
                    after = draft.ask(
                        said, answer, after=after, pause_ms=1e3 * draws.exponential(self.pause_s)
                    )
                said.append(answer)
            begins_ms += 1e3 * draws.exponential(1.0 / self.conversations_per_s)
        return draft.done()

    def _piece(self, draft: Draft, draws: Draws, median: int) -> Piece:
        return draft.piece(draws.log_normal(median, self.length_spread, self.longest_tokens))
