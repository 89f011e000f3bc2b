"""Drives an engine's core as its process does, step after step, and writes down when each request got what.

What a step costs around the model is measured here: the core's step, the frame for the front, the walk of the garbage collector,
less the time inside ``forward``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec
import torch

from prefixmesh import tokens
from prefixmesh.collector import StepCollector
from prefixmesh.errors import InternalError
from prefixmesh.worker.batch_plan import BatchPlan
from prefixmesh.worker.engine import EngineCore, Runner
from prefixmesh.worker.framing import encode_frame
from prefixmesh.worker.messages import (
    Admitted,
    Ended,
    EngineSampling,
    Event,
    Refused,
    StepEvents,
    Submit,
    TokensOut,
)

NAMESPACE: Final = b"bench".ljust(16, b"\0")

GREEDY: Final = EngineSampling(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=1, stop_token_ids=()
)
"""Nothing ends an answer but its length."""


def greedy(max_tokens: int) -> EngineSampling:
    """The same for so many tokens."""
    return msgspec.structs.replace(GREEDY, max_tokens=max_tokens)


class AfterStep(Protocol):
    """What the loop does between steps: ``StepCollector``."""

    def after_step(self) -> None:
        """Called after every step."""
        ...


class TimedRunner:
    """A runner that knows how long it has computed."""

    def __init__(self, runner: Runner, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._clock = clock
        self.spent_s = 0.0

    def forward(self, plan: BatchPlan) -> torch.Tensor:
        """The runner's own, timed. On a GPU it would be the launch that is timed: the bench is for CPUs."""
        started = self._clock()
        logits = self._runner.forward(plan)
        self.spent_s += self._clock() - started
        return logits


@dataclass(slots=True)
class Served:
    """What became of one request, in the clock's seconds."""

    submitted_at: float
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    generated: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    """Of those, what came back from the host."""

    disk_tokens: int = 0
    load_back_s: float = 0.0
    """From admission until they had come."""

    token_ids: list[int] = field(default_factory=list)
    ended: str = ""
    """Why; empty while it runs."""

    @property
    def first_token_s(self) -> float:
        """From submission to the first token."""
        return self.first_token_at - self.submitted_at

    @property
    def tokens_per_s(self) -> float:
        """After the first token."""
        return (self.generated - 1) / (self.last_token_at - self.first_token_at)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Where one step's time went."""

    forward_s: float
    loop_s: float


class EngineDrive:
    """One engine and its requests. ``runner`` is the one inside ``core``."""

    def __init__(
        self,
        core: EngineCore,
        runner: TimedRunner,
        clock: Callable[[], float],
        housekeeper: AfterStep | None = None,
    ) -> None:
        self.core = core
        self._runner = runner
        self._clock = clock
        self._housekeeper = housekeeper or StepCollector()
        self._submitted = 0
        self.served: dict[str, Served] = {}

    def submit(self, prompt: Sequence[int], sampling: EngineSampling) -> Served:
        """Queue a request now. One that is refused has ended as ``refused``."""
        self._submitted += 1
        request_id = f"bench-{self._submitted:06d}"
        now = self._clock()
        served = self.served[request_id] = Served(now)
        packed = tokens.pack(prompt)
        self._note(
            self.core.submit(
                Submit(request_id=request_id, namespace=NAMESPACE, tokens=packed, sampling=sampling), now
            )
        )
        return served

    def step(self) -> StepCost:
        """One round of the engine's loop, as its process makes it: step, frame, garbage."""
        computed = self._runner.spent_s
        started = self._clock()
        events = self.core.step(started)
        if events:
            encode_frame(StepEvents(events=events))
        self._housekeeper.after_step()
        took = self._clock() - started
        self._note(events)
        forward_s = self._runner.spent_s - computed
        return StepCost(forward_s, took - forward_s)

    def finish(self) -> float:
        """Step until nothing is left to do; the seconds that took."""
        started = self._clock()
        while self.core.has_work:
            self.step()
        return self._clock() - started

    def answer(self, prompt: Sequence[int], sampling: EngineSampling) -> Served:
        """Serve one request alone. Raises InternalError when it does not come to its end."""
        served = self.submit(prompt, sampling)
        self.finish()
        if served.ended != "length":
            raise InternalError(f"a request of the bench ended as {served.ended!r}")
        return served

    def clear(self) -> None:
        """End what runs, forget who was served and empty the cache."""
        for request_id, served in self.served.items():
            if not served.ended:
                self.core.abort(request_id, self._clock())
        self.core.flush()
        self.served = {}

    def _note(self, events: Sequence[Event]) -> None:
        now = self._clock()
        for event in events:
            match event:
                case Admitted():
                    served = self.served[event.request_id]
                    served.cached_tokens = event.cached_tokens
                    served.host_tokens = event.host_tokens
                    served.disk_tokens = event.disk_tokens
                    served.load_back_s = event.load_back_ms / 1e3
                case TokensOut():
                    served = self.served[event.request_id]
                    served.first_token_at = served.first_token_at or now
                    served.last_token_at = now
                    served.generated += len(event.token_ids)
                    served.token_ids += event.token_ids
                case Ended():
                    self.served[event.request_id].ended = event.reason
                case Refused():
                    self.served[event.request_id].ended = "refused"
                case _:
                    pass
