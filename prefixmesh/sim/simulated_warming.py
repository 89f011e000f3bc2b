"""A simulated worker's pins: what its front does about them (``worker.warming``), in simulated time.

The turns are the front's: pin first, then have the engine compute what is missing, then look whether all of it is held; a warming that fails lets go of
the pin that it has made. The engine and its pins are the real ones. KV is not copied here: what others have is computed.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Final

from prefixmesh.router.pins.wishes import Wish
from prefixmesh.worker.ended_errors import problem_of, refusal_of
from prefixmesh.worker.messages import Ended, EngineCommand, EngineSampling, Event, Refused, Submit
from prefixmesh.worker.prefix_messages import (
    ListPins,
    PinPrefix,
    PrefixAnswer,
    PrefixName,
    UnpinPrefix,
)
from prefixmesh.worker.warming import WARM_PRIORITY

NO_ANSWER: Final = EngineSampling(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=0, stop_token_ids=()
)
"""A request that is only for what it leaves."""

OnAnswer = Callable[[PrefixAnswer], object]
OnEnd = Callable[[str], object]
"""Takes what went wrong; empty where nothing did."""


class SimulatedWarming:
    """Of one life of a worker. What is under way when that ends is never heard of."""

    def __init__(self, command: Callable[[EngineCommand], None]) -> None:
        """``command`` gives the engine a command."""
        self._command = command
        self._number = 0
        self._questions: dict[int, OnAnswer] = {}
        self._requests: dict[str, OnEnd] = {}

    def list_pins(self, on_answer: OnAnswer) -> None:
        """All pins, and their budgets."""
        self._command(ListPins(question=self._ask(on_answer)))

    def unpin(self, pin_id: str, on_end: OnEnd) -> None:
        """Let go of a pin."""
        self._command(UnpinPrefix(question=self._ask(lambda _: on_end("")), pin_id=pin_id))

    def warm(self, wish: Wish, ttl_s: float, on_end: OnEnd) -> None:
        """Pin a version and have it computed."""
        version = wish.version
        prefix = PrefixName(
            version.namespace, version.tokens, version.boundary_tokens, version.tail_namespace
        )
        self._command(
            PinPrefix(
                question=self._ask(partial(self._on_pinned, wish, prefix, on_end)),
                pin_id=wish.pin_id,
                prefix=prefix,
                owner=wish.owner,
                tier=int(wish.tier),
                ttl_s=ttl_s,
            )
        )

    def take(self, event: Event) -> None:
        """What the engine says, where it is about this."""
        if isinstance(event, PrefixAnswer):
            self._questions.pop(event.question)(event)
        elif isinstance(event, Ended | Refused) and event.request_id in self._requests:
            problem = refusal_of(event) if isinstance(event, Refused) else problem_of(event)
            self._requests.pop(event.request_id)("" if problem is None else str(problem))

    def _ask(self, on_answer: OnAnswer) -> int:
        self._number += 1
        self._questions[self._number] = on_answer
        return self._number

    def _on_pinned(self, wish: Wish, prefix: PrefixName, on_end: OnEnd, answer: PrefixAnswer) -> None:
        if answer.error is not None:
            on_end(answer.problem)
            return
        self._number += 1
        request_id = f"warm-{self._number}"
        self._requests[request_id] = partial(self._on_computed, wish, on_end, is_made=answer.made)
        self._command(
            Submit(
                request_id=request_id,
                namespace=prefix.namespace,
                tokens=prefix.tokens,
                boundary_tokens=prefix.boundary_tokens,
                tail=prefix.tail,
                sampling=NO_ANSWER,
                owner=wish.owner,
                priority=WARM_PRIORITY,
                queue_timeout_s=math.inf,
                is_warming=True,
            )
        )

    def _on_computed(self, wish: Wish, on_end: OnEnd, problem: str, *, is_made: bool) -> None:
        if not problem:
            self.list_pins(lambda answer: on_end(_shortfall(wish.pin_id, answer)))
        elif is_made:
            self.unpin(wish.pin_id, lambda _: on_end(problem))
        else:
            on_end(problem)


def _shortfall(pin_id: str, answer: PrefixAnswer) -> str:
    for pin in answer.pins:
        if pin.pin_id == pin_id:
            return f"{pin.missing_tokens} tokens are missing" if pin.missing_tokens else ""
    return "somebody has let go of it meanwhile"
