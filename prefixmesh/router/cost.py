"""What sending a request to a worker costs: one number in milliseconds, for all workers at once. Pure.

    cost = own time to first token + spill_weight x work added for everyone else

*Own*: the prefill that stands before the request there, a wait for a free place or free pages where there are none, the prefill of what
is not cached, the load-back of what is on the host, the load of its adapter. *Added*: the prefill that need not have been done, the
useful KV evicted to make room, the slowing of the answers being decoded there. Every term is derived in ``docs/router.md``.

A selfish cost scatters a shared prefix over all workers; pure affinity piles everything on one.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.fleet_columns import ANSWER_TOKENS, Column, FleetColumns, Mask
from prefixmesh.router.matched_tokens import MatchedTokens

ADAPTER_CHAIN: Final = 4.0
"""Loads that pushing an adapter out leads to. It is asked for again, and its load pushes out another, and so on until one goes that some other
worker has. In a fleet whose places for adapters are all taken that is long; 4 keeps 32 adapters on 8 workers with 4 places each where
they are."""

Scalar = Column
"""An array of no dimension."""

EVICTED_USE: Final = 0.25
"""Share of the KV that a full cache gives up which somebody would have asked for again. Caches give up first what was used longest
ago, so that it is well below their hit rate; nobody measures it."""


_NOTHING: Final = np.array(0.0)
_UNABLE_MS: Final = np.array(1e200)
_EVICTED_USE: Final = np.array(EVICTED_USE)
"""As arrays: numpy takes as long to make one of a number as to add sixty. No worker costs what those do that are not able; not infinite,
because nothing times infinity is no number."""


class Demand(NamedTuple):
    """What a request asks of the worker that takes it."""

    prompt_tokens: int
    most_tokens: int
    """Prompt and answer at the caller's limit, each answer by itself: what must fit for the request to be served at all."""

    branches: int = 1
    """Answers computed from the one prompt."""

    not_resident: Mask | None = None
    """Rows that would have to load the request's adapter first; None where nobody would."""

    pushes_out: Mask | None = None
    """Those of them where another adapter would have to go; None: all of them, as far as anyone knows."""

    home_row: int | None = None
    """Where the caller's session was before; None when it has none, or that is not known."""

    prefix_key: int = 0
    """What ``prefix_hash`` goes by: the fingerprint of the prompt's first blocks."""


class CandidateTerms(NamedTuple):
    """What one worker would cost, in milliseconds but for the tokens. Named as on the wire (``CandidateCost``)."""

    row: int
    device_tokens: int
    host_tokens: int
    """Beyond those on the device."""

    counted_tokens: int
    wait_ms: float
    prefill_ms: float
    load_back_ms: float
    adapter_load_ms: float
    recompute_ms: float
    eviction_ms: float
    crowding_ms: float
    affinity_ms: float
    """Taken off."""

    total_ms: float

    @property
    def first_token_ms(self) -> float:
        """Expected time to the request's own first token."""
        return self.wait_ms + self.prefill_ms + self.load_back_ms + self.adapter_load_ms


class Costs(NamedTuple):
    """The terms of all rows; beyond any real cost for those that are not able."""

    counted: Column
    """Tokens of the prompt that count as cached."""

    wait: Column
    prefill: Column
    load_back: Column | None
    """None where nobody would load anything back; so with the next."""

    adapter_load: Column | None
    eviction: Column | None
    crowding: Column
    spill_weight: float
    compared: Column
    """What workers are compared by: the total, but with all of the prefill in the place of what need not have been done. That is more
    by the same for everybody, and it is what rates that wobble make wobble."""

    def of(self, row: int, matches: MatchedTokens, affinity_ms: float) -> CandidateTerms:
        """The terms of one row that is able."""
        device, prefill_ms = matches.device.item(row), self.prefill.item(row)
        least_ms = self.prefill.item(self.prefill.argmin())
        return CandidateTerms(
            row,
            int(device),
            int(matches.total.item(row) - device),
            int(self.counted.item(row)),
            self.wait.item(row),
            prefill_ms,
            0.0 if self.load_back is None else self.load_back.item(row),
            0.0 if self.adapter_load is None else self.adapter_load.item(row),
            prefill_ms - least_ms,
            0.0 if self.eviction is None else self.eviction.item(row),
            self.crowding.item(row),
            affinity_ms,
            self.compared.item(row) - self.spill_weight * least_ms - affinity_ms,
        )


def prefill_work_ms(columns: FleetColumns, row: int, prompt_tokens: int, cached_tokens: int) -> float:
    """Milliseconds that a worker needs for what is not cached of a prompt: what a reservation claims of it."""
    linear, quadratic = columns.prefill_ms_per_token.item(row), columns.prefill_ms_per_token2.item(row)
    uncached = max(prompt_tokens - cached_tokens, 0)
    return float((linear + quadratic * (prompt_tokens + cached_tokens)) * uncached)


def decode_work_ms(columns: FleetColumns, row: int, max_tokens: int | None, branches: int) -> float:
    """Milliseconds that an answer, or each of several, is expected to add to the steps that it shares with others: arithmetic, of which a
    token that is decoded takes as much as one of a prompt. A caller's limit bounds its length from above."""
    length = ANSWER_TOKENS if max_tokens is None else min(max_tokens, ANSWER_TOKENS)
    return float(columns.prefill_ms_per_token.item(row)) * length * branches


def weigh(
    columns: FleetColumns, able: Mask, matches: MatchedTokens, demand: Demand, spill_weight: float
) -> Costs:
    """Every able row's cost of a request. O(rows)."""
    counted, load_back = _cached(columns, matches, demand.prompt_tokens)
    uncached = np.array(float(demand.prompt_tokens)) - counted
    prefill = _prefill(columns, able, demand.prompt_tokens, uncached)
    # What a request needs where nothing is cached: where so much is free, nothing goes and nobody waits for pages.
    most = demand.prompt_tokens + ANSWER_TOKENS * demand.branches
    needed = uncached + float(ANSWER_TOKENS * demand.branches) if most > columns.least_free else None
    wait = _wait(columns, needed if most > columns.least_room_now else None)
    crowding = np.maximum(columns.slowed_tokens * columns.prefill_ms_per_token, columns.slowed_ms)
    if demand.branches > 1:
        crowding *= demand.branches
    load = None if demand.not_resident is None else columns.adapter_load_ms * demand.not_resident
    eviction = _eviction(columns, needed, load, demand.pushes_out)
    compared = prefill + crowding
    if eviction is not None:
        compared += eviction
    compared *= spill_weight
    compared += prefill
    compared += wait
    for own in (load_back, load):
        if own is not None:
            compared += own
    return Costs(counted, wait, prefill, load_back, load, eviction, crowding, spill_weight, compared)


def _cached(
    columns: FleetColumns, matches: MatchedTokens, prompt_tokens: int
) -> tuple[Column, Column | None]:
    """What counts as cached, and what loading the host's part of it back costs. That part is loaded wherever it is cheaper than to compute
    it, and counts nowhere else."""
    most = np.array(float(prompt_tokens - 1))
    device = _countable(columns, matches.device, most)
    if matches.total is matches.device:
        return device, None
    total = _countable(columns, matches.total, most)
    beyond = total - device
    loading = beyond * columns.load_back_ms_per_token
    computing = (columns.prefill_ms_per_token + columns.prefill_ms_per_token2 * (total + device)) * beyond
    loads = loading < computing
    return np.where(loads, total, device), loading * loads


def _countable(columns: FleetColumns, held: Column, most: Scalar) -> Column:
    """Tokens that a worker is expected to find cached: as far as its view is trusted, in whole units of its cache, and never the last
    one, which is always computed so that there is something to sample from."""
    counted = held * columns.trust
    np.minimum(counted, most, out=counted)
    counted *= columns.units_per_token
    np.floor(counted, out=counted)
    counted *= columns.match_unit
    return counted


def _prefill(columns: FleetColumns, able: Mask, prompt_tokens: int, uncached: Column) -> Column:
    """Computing the uncached end of a prompt: ``linear * (L - h) + quadratic * (L**2 - h**2)``."""
    prefill = np.array(2.0 * prompt_tokens) - uncached
    prefill *= columns.prefill_ms_per_token2
    prefill += columns.prefill_ms_per_token
    prefill *= uncached
    np.copyto(prefill, _UNABLE_MS, where=~able)
    return prefill


def _wait(columns: FleetColumns, needed: Column | None) -> Column:
    """Until a worker turns to the request: the prefill before it, and the decode steps until places or pages that lack are given back. As
    many of the running must end as have to make room, and they end evenly over an answer's length."""
    steps = columns.place_wait_steps
    if needed is not None:
        lacking = needed - columns.room_now
        lacking *= columns.wait_steps_per_token
        steps = np.maximum(steps, lacking)
    wait: Column = steps * columns.decode_step_ms
    wait += columns.waiting_prefill_ms
    return wait


def _eviction(
    columns: FleetColumns, needed: Column | None, load: Column | None, pushes_out: Mask | None
) -> Column | None:
    """What computing the useful part of the KV that goes to make room would cost, and loading again the adapter that goes."""
    eviction = None
    if needed is not None:
        eviction = needed - columns.free_tokens
        np.minimum(eviction, columns.evictable_tokens, out=eviction)
        np.maximum(eviction, _NOTHING, out=eviction)
        eviction *= columns.prefill_ms_per_token
        eviction *= _EVICTED_USE
    if load is not None:
        pushed = load * ADAPTER_CHAIN
        if pushes_out is not None:
            pushed *= pushes_out
        eviction = pushed if eviction is None else eviction + pushed
    return eviction


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
