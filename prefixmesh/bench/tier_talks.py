"""Conversations whose turns come in any order, as many users have them: the same questions for every engine that is compared.

A turn's prompt is all that was said, the engine's own answers among it, and a new question. Questions are random ids, all from one
seed, and equal in length, as answers are: so two engines are asked for equally many tokens also where rounding has them answer
differently. In each round every conversation gets its next turn, in an order of that round.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from prefixmesh.bench.engine_drive import EngineDrive, Served, greedy
from prefixmesh.bench.tier_plan import Effort
from prefixmesh.errors import InternalError

Draw = Callable[[int], list[int]]
"""So many random ids."""


@dataclass(frozen=True, slots=True)
class Talks:
    """What is asked, by conversation and turn, and in which order."""

    questions: Sequence[Sequence[list[int]]]
    rounds: Sequence[Sequence[int]]
    """By turn, conversations in the order in which it is theirs."""

    at_once: int
    turn_tokens: int


def make_talks(effort: Effort, draw: Draw, rng: np.random.Generator) -> Talks:
    """Of an effort's sizes."""
    return Talks(
        [[draw(effort.question_tokens) for _ in range(effort.talk_turns)] for _ in range(effort.talks)],
        [rng.permutation(effort.talks).tolist() for _ in range(effort.talk_turns)],
        effort.at_once,
        effort.turn_tokens,
    )


@dataclass(slots=True)
class Heard:
    """What an engine made of all conversations."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    """Of those, what came back from the host."""

    first_tokens_s: list[float] = field(default_factory=list)
    answers: list[tuple[int, ...]] = field(default_factory=list)
    """In the order of the turns."""

    @property
    def share(self) -> float:
        """Of the prompts' tokens, from cache."""
        return self.cached_tokens / self.prompt_tokens

    def notes(self, than: "Heard") -> dict[str, float]:
        """What is good to know of it, beside another engine's."""
        differ = sum(own != other for own, other in zip(self.answers, than.answers, strict=True))
        return {
            "prompts": len(self.answers),
            "prompt_tokens": self.prompt_tokens,
            "from_host_share": self.host_tokens / self.prompt_tokens,
            "first_token_ms": statistics.median(self.first_tokens_s) * 1e3,
            "answers_that_differ": differ,
        }


def hold_talks(drive: EngineDrive, talks: Talks) -> Heard:
    """Serve all turns, ``at_once`` conversations at a time. Raises InternalError when one is not answered."""
    heard = Heard()
    said: list[list[int]] = [[] for _ in talks.questions]
    for turn, order in enumerate(talks.rounds):
        for together in _groups(order, talks.at_once):
            prompts = [said[talk] + talks.questions[talk][turn] for talk in together]
            served = [drive.submit(prompt, greedy(talks.turn_tokens)) for prompt in prompts]
            drive.finish()
            for talk, prompt, one in zip(together, prompts, served, strict=True):
                _count(heard, prompt, one)
                said[talk] = prompt + one.token_ids
    return heard


def _count(heard: Heard, prompt: Sequence[int], served: Served) -> None:
    if served.ended != "length":
        raise InternalError(f"a turn of the bench ended as {served.ended!r}")
    heard.prompt_tokens += len(prompt)
    heard.cached_tokens += served.cached_tokens
    heard.host_tokens += served.host_tokens
    heard.first_tokens_s.append(served.first_token_s)
    heard.answers.append(tuple(served.token_ids))


def _groups(order: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(order), size):
        yield order[start : start + size]
