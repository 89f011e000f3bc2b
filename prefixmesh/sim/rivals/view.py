"""What a rule may look at when a request has come: the same for all of them. Pure.

Everything in it is exact and of this moment, better than what any router knows of its workers. So a rule is shown at its best, and what is
compared is the rule. Blocks are of the size that the workload names.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class RivalView(NamedTuple):
    """One request, and every worker by its place."""

    block_tokens: int
    prompt_tokens: int
    prompt_blocks: int
    """Of the request, its rest that fills none among them."""

    device_blocks: Sequence[int]
    """Leading blocks of the prompt that are on the worker's device, or will be when those before it there have been computed."""

    held_blocks: Sequence[int]
    """The same on the device or, from there on, on the host: never less."""

    in_flight: Sequence[int]
    """Requests that were sent there and have not ended."""

    queued: Sequence[int]
    """Those among them whose prefill has not begun."""

    kv_use: Sequence[float]
    """Share of the device's KV room that is in use, 0 to 1, each block once: by running requests, for all of their answers too, and by pins; what
    is cached and not in use is no use."""

    prefill_blocks: Sequence[float]
    """Blocks of prompts that were sent there and are still to be computed."""

    active_blocks: Sequence[float]
    """Blocks of KV of the requests that were sent there and have not ended: of whole prompts from the beginning, and of answers as far as they
    are."""

    turn: int
    """The request's number: decides between equals, so that they take turns."""

    chance: float
    """A number from 0 to below 1, for rules that draw."""

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self.in_flight)


Rule = Callable[[RivalView], int]
"""Which worker takes it."""


def least(values: Sequence[float], turn: int) -> int:
    """The place of the least value; equals in turn. O(workers)."""
    lowest = min(values)
    places = [place for place, value in enumerate(values) if value == lowest]
    return places[turn % len(places)]
