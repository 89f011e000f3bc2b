"""Somebody who guesses what others have asked, by how soon and in which order its own requests are answered; in simulated time.

The fleet is the real router's core before workers with the real scheduler and cache, whose steps take the time that a model would. In each
trial somebody asks a prompt, or another one of equal length; then (or meanwhile) the prober asks that prompt itself. What the prober can
see tells the two cases apart as far as the area under the curve is away from a half.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

import numpy as np

from prefixmesh.cache.namespace import derive_namespace, public_namespace
from prefixmesh.config import EngineConfig
from prefixmesh.ids import Namespace
from prefixmesh.router.pins.wishes import PinVersion
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.sim.fake_engine import ModelIdentity
from prefixmesh.sim.fleet_run import FleetSpec, SimulatedFleet
from prefixmesh.sim.network import LinkQuality
from prefixmesh.sim.simulated_question import Question
from prefixmesh.sim.simulated_router import Answered
from prefixmesh.sim.timing import TimingModel
from prefixmesh.tokens import pack

SECRET: Final = bytes(range(32))
PIN_TOKENS: Final = 64
OWN_TOKENS: Final = 192
VOCAB: Final = 256
SPEC: Final = FleetSpec(
    workers=2,
    engine=EngineConfig(page_size=16, max_total_tokens=60_000, max_running_requests=16),
    timing=TimingModel(step_ms=2.0, prefill_ms_per_token=0.08, decode_ms_per_sequence=0.05),
    identity=ModelIdentity(vocab_size=VOCAB, context_length=1 << 14),
    quality=LinkQuality(delay_s=0.0005, jitter_s=0.001),
    report_interval_s=1.0,
)
"""A prompt whose own part is computed takes some 19 ms, a hit 6, and messages up to 3 of them: noise, but not much beside the signal. A shorter own
part would be computed on an idle worker sooner than found on a busy one."""

REST_S: Final = 0.05
"""Between two trials: longer than any message or step takes."""

Probe = Literal["after", "meanwhile", "order"]
"""Ask when the other's request is over, while it runs, or two prompts at once, of which one is the guess."""


class Seen(NamedTuple):
    """What the prober can see of one request."""

    first_token_s: float
    cached_tokens: int
    worker: str


@dataclass(kw_only=True)
class Trial:
    """What the prober saw, and how strongly that speaks for its guess."""

    was_asked: bool
    seen: list[Seen]
    score: float = field(init=False)

    def __post_init__(self) -> None:
        guess, *others = self.seen
        self.score = others[0].first_token_s - guess.first_token_s if others else -guess.first_token_s


def tenant(name: str) -> Namespace:
    return derive_namespace(SECRET, tenant=name, adapter_digest="", model_revision="r", caller_key="")


class Probing:
    """One fleet, and one after the other the trials on it."""

    def __init__(self, seed: int, *, prober: str, pinned: bool) -> None:
        """Who is probed is ``victim``. ``pinned``: all prompts begin with what is public, else with the same tokens, which are not."""
        self.fleet = SimulatedFleet(replace(SPEC, seed=seed), PolicyConfig())
        self._rng = self.fleet.sim.fork_rng("prompts")
        self._victim, self._prober = tenant("victim"), tenant(prober)
        self._system = self._draw(PIN_TOKENS)
        if pinned:
            namespace = public_namespace(SECRET, adapter_digest="", model_revision="r")
            version = PinVersion(
                generation=1, namespace=namespace, tokens=pack(self._system), fingerprints=()
            )
            self.fleet.routers[0].public.set([version], SPEC.engine.page_size)
        for name in (self._victim, self._prober):  # whoever works here has asked before
            self._finish([self._ask(name, self._prompt())])

    def trial(self, probe: Probe, *, was_asked: bool) -> Trial:
        """The same draws whether the guess was asked or another prompt."""
        guess, other, fresh = self._prompt(), self._prompt(), self._prompt()
        pause_s, comes_first = self._rng.uniform(0.0, 0.04), self._rng.random() < 0.5
        is_long = probe == "meanwhile"
        asked = [self._ask(self._victim, guess if was_asked else other, 16 if is_long else 1)]
        if is_long:
            self.fleet.sim.run_for(pause_s)
        else:
            self._finish(asked)
        prompts = [guess] if probe != "order" else [guess, fresh] if comes_first else [fresh, guess]
        mine = [self._ask(self._prober, prompt) for prompt in prompts]
        self._finish([*asked, *mine])
        if probe == "order" and not comes_first:
            mine.reverse()
        return Trial(was_asked=was_asked, seen=[_seen(one) for one in mine])

    def busy(self, *, is_busy: bool) -> Trial:
        """Whether somebody else works at all: a long prompt is computed, or nothing is."""
        guess, other = self._prompt(), [self._prompt() for _ in range(8)]
        asked = [self._ask(self._victim, prompt) for prompt in other if is_busy]
        self.fleet.sim.run_for(0.002)
        mine = self._ask(self._prober, guess)
        self._finish([*asked, mine])
        return Trial(was_asked=is_busy, seen=[_seen(mine)])

    def _prompt(self) -> list[int]:
        return [*self._system, *self._draw(OWN_TOKENS)]

    def _draw(self, count: int) -> list[int]:
        return self._rng.choices(range(VOCAB), k=count)

    def _ask(self, who: Namespace, prompt: Sequence[int], max_tokens: int = 1) -> Answered:
        question = Question(namespace=who, prompt=pack(prompt), max_tokens=max_tokens)
        return self.fleet.routers[0].ask(question, lambda _: None)

    def _finish(self, asked: Sequence[Answered]) -> None:
        """Until all have ended, and what they have set off."""
        while any(one.ended_at is None for one in asked):
            assert self.fleet.sim.step()
        assert not any(one.error for one in asked)
        self.fleet.sim.run_for(REST_S)


def area_under_curve(trials: Sequence[Trial]) -> float:
    """How often a case where the guess was asked scores higher than one where it was not; of equal ones half count. O(n log n)."""
    scores = np.array([trial.score for trial in trials])
    is_asked = np.array([trial.was_asked for trial in trials])
    positive, negative = scores[is_asked], np.sort(scores[~is_asked])
    below = np.searchsorted(negative, positive, side="left")
    ties = np.searchsorted(negative, positive, side="right") - below
    return float((below + 0.5 * ties).sum() / (len(positive) * len(negative)))


def _seen(one: Answered) -> Seen:
    assert one.first_token_at is not None
    return Seen(one.first_token_at - one.asked_at, one.cached_tokens, one.worker)
