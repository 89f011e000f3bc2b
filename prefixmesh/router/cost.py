"""What sending a request to a worker costs: one number in milliseconds.

    cost = own time to first token + spill_weight x work added for everyone else

*Own*: the prefill that stands before the request there, a wait for a free place where all are taken, and the prefill of what is not
cached. *Added*: the prefill that need not have been done elsewhere, and the slowing of the answers being decoded there.
A selfish cost scatters a shared prefix over all workers; pure affinity piles everything on one. With the weight at 1, a prefix is
computed a second time once the queue at its holder costs as much as twice its prefill.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from prefixmesh.router.endpoint import Endpoint

PRIOR_PREFILL_TOKENS_PER_S: Final = 2000.0
"""Assumed where nobody in the fleet has measured: a small model on a few CPU cores. Only its ratio to the next one matters."""

PRIOR_DECODE_STEP_MS: Final = 30.0
"""Assumed time of one decode step where nobody has measured."""

PRIOR_OUTPUT_TOKENS: Final = 64
"""Assumed length of an answer; a caller's ``max_tokens`` bounds it from above."""

DECODE_MARGINAL_SHARE: Final = 0.02
"""What one more sequence adds to a decode step, as a share of it: decoding reads all weights whatever the batch, so some fifty
sequences double a step."""

CROWDING_TOKENS: Final = 45
"""What a new request takes from each one that runs beside it, as so many tokens' worth of prefill. Once a step is bound by
arithmetic, a decoded token costs what a prefilled one costs; answers' lengths are not known beforehand, and this is a short one. In
tokens and not in milliseconds, so that decisions are the same on fast and slow machines. Large enough that ten answers under way
outweigh 200 cached tokens (F4), small enough that a burst with one prefix of 4,096 tokens stays on two workers (F6)."""

FULL_CROWD: Final = 10
"""Up to so many running requests, each one more counts in full as someone who is slowed; beyond, as a tenth. Without the bend, a
burst with one prefix would be scattered over the whole fleet for the sake of decode speed; without the rest, ten answers under
way and a hundred would look alike."""


class Rates(NamedTuple):
    """How fast a worker has been measured to be; 0 means not measured yet."""

    prefill_tokens_per_s: float
    decode_step_ms: float


class Candidate(NamedTuple):
    """A worker that could take the request, as a decision sees it."""

    endpoint: Endpoint
    matched_tokens: int
    """Leading prompt tokens that it is believed to hold."""

    in_flight: int
    prefill_ms: float
    """Prefill that stands before the request."""

    work_ms: float
    rates: Rates
    max_running_requests: int
    """Most requests it computes together; 0 means not known."""


class RequestSize(NamedTuple):
    """What matters of a request for its cost."""

    prompt_tokens: int
    output_tokens: int
    """Expected length of the answer."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The terms of one candidate's cost, all in milliseconds."""

    wait_ms: float
    """Until the worker turns to this request."""

    prefill_ms: float
    """Prefill of what is not cached."""

    crowding_ms: float
    """Time that others' answers lose to this one's decoding."""

    spill_weight: float

    @property
    def first_token_ms(self) -> float:
        """Expected time to the request's own first token."""
        return self.wait_ms + self.prefill_ms

    @property
    def total_ms(self) -> float:
        """What is compared."""
        return self.first_token_ms + self.spill_weight * (self.prefill_ms + self.crowding_ms)


def expected_output(max_tokens: int | None) -> int:
    """How long an answer is expected to be, in tokens."""
    return PRIOR_OUTPUT_TOKENS if max_tokens is None else min(max_tokens, PRIOR_OUTPUT_TOKENS)


def prefill_ms(tokens: int, rates: Rates) -> float:
    """Milliseconds to compute ``tokens`` prompt tokens at measured ``rates``."""
    return 1000.0 * max(0, tokens) / rates.prefill_tokens_per_s


def decode_ms(output_tokens: int, rates: Rates) -> float:
    """Milliseconds of engine time that one more answer adds, shared steps counted by its share of them."""
    return output_tokens * rates.decode_step_ms * DECODE_MARGINAL_SHARE


def estimate(candidate: Candidate, size: RequestSize, spill_weight: float) -> Cost:
    """The cost of sending a request of ``size`` to ``candidate``, whose rates are known. Pure; O(1)."""
    rates, running = candidate.rates, candidate.in_flight
    wait_ms = candidate.prefill_ms
    places = candidate.max_running_requests
    if places and running >= places:
        # Places free up at the rate at which a full batch ends its answers.
        wait_ms += (running - places + 1) * size.output_tokens * rates.decode_step_ms / places
    crowd = min(running, FULL_CROWD) + max(0, running - FULL_CROWD) / FULL_CROWD
    return Cost(
        wait_ms,
        prefill_ms(size.prompt_tokens - candidate.matched_tokens, rates),
        crowd * prefill_ms(CROWDING_TOKENS, rates),
        spill_weight,
    )


def fill_rates(rates: list[Rates]) -> list[Rates]:
    """``rates`` with what was not measured taken from the mean of those that were (a fleet is mostly alike), else from the priors."""
    prefill = _mean([r.prefill_tokens_per_s for r in rates], PRIOR_PREFILL_TOKENS_PER_S)
    decode = _mean([r.decode_step_ms for r in rates], PRIOR_DECODE_STEP_MS)
    return [Rates(r.prefill_tokens_per_s or prefill, r.decode_step_ms or decode) for r in rates]


def _mean(values: list[float], prior: float) -> float:
    measured = [value for value in values if value > 0]
    return sum(measured) / len(measured) if measured else prior
