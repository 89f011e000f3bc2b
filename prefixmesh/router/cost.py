"""What sending a request to a worker costs: one number in milliseconds, for all workers at once. Pure.

    cost = own time to first token + spill_weight x work added for everyone else

*Own*: the prefill that stands before the request there, a wait for a free place or free pages where there are none, the prefill of what
is not cached, the load-back of what is on the host, the load of its adapter; where that is quicker, a copy of what another worker holds in
the place of its prefill (``copy_cost``). *Added*: the prefill that need not have been done, the
useful KV evicted to make room (to a host tier, only as far as that is full, too), the slowing of the answers being decoded there. Every term is derived in ``docs/router.md``.

A selfish cost scatters a shared prefix over all workers; pure affinity piles everything on one.
"""

from typing import Final, NamedTuple

import numpy as np

from prefixmesh.router.copy_cost import Copying, by_copying
from prefixmesh.router.fleet_columns import ANSWER_TOKENS, FleetColumns, Mask
from prefixmesh.router.matched_tokens import MatchedTokens
from prefixmesh.router.measured_rates import Column, RateColumns, load_back_ms

ADAPTER_CHAIN: Final = 4.0
"""Loads that pushing an adapter out leads to. It is asked for again, and its load pushes out another, and so on until one goes that some other
worker has. In a fleet whose places for adapters are all taken that is long; 4 keeps 32 adapters on 8 workers with 4 places each where
they are."""

EVICTED_USE: Final = 1.0
"""Share of the KV that a full cache gives up which somebody would have asked for again. Caches give up first what was used longest ago, so
that it is below their hit rate; nobody measures it. All of it is counted even so: where the useful part was counted alone (a quarter),
a trace of conversations found less cached on every fleet that was tried (docs/benchmarks.md), since what goes is not only computed
again but pushes out something else, and so on."""

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

    home_row: int | None = None
    """Where the caller's session was before; None when it has none, or that is not known."""

    prefix_key: int = 0
    """What ``prefix_hash`` goes by: the fingerprint of the prompt's first blocks."""

    may_copy: bool = True
    """Whether a worker may copy what it lacks from another one."""


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
    copied_tokens: int = 0
    """Behind those that count: copied from another worker before the rest is computed."""

    copy_ms: float = 0.0

    @property
    def first_token_ms(self) -> float:
        """Expected time to the request's own first token."""
        return self.wait_ms + self.prefill_ms + self.load_back_ms + self.adapter_load_ms + self.copy_ms

    @property
    def cached_tokens(self) -> int:
        """Leading tokens that the worker finds cached when it begins."""
        return self.counted_tokens + self.copied_tokens


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

    copying: Copying | None = None
    """None where nobody would copy anything."""

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
            0 if self.copying is None else int(self.copying.tokens.item(row)),
            0.0 if self.copying is None else self.copying.copy_ms.item(row),
        )


class _Cached(NamedTuple):
    """What counts as cached."""

    counted: Column
    load_back: Column | None
    """Milliseconds to bring the host's part of it to the device; None where nobody would. So with the next."""

    loaded: Column | None
    """Tokens of that part: they take room on the device as those do that are computed."""


def decode_work_ms(columns: FleetColumns, row: int, max_tokens: int | None, branches: int) -> float:
    """Milliseconds that an answer, or each of several, is expected to add to the steps that it shares with others: arithmetic, of which a
    token that is decoded takes as much as one of a prompt. A caller's limit bounds its length from above."""
    length = ANSWER_TOKENS if max_tokens is None else min(max_tokens, ANSWER_TOKENS)
    return float(columns.rates.linear.item(row)) * length * branches


def expected_answer_ms(columns: FleetColumns, row: int, max_tokens: int | None) -> float:
    """Milliseconds that an answer takes beside its own prefill: as many steps as it is expected to have tokens, by the length of those that
    ended last there or by its caller's limit, and on the average half a step until the one that runs is over. O(1)."""
    length = columns.answer_tokens.item(row)
    if max_tokens is not None:
        length = min(max_tokens, length)
    step_ms = max(columns.token_interval_ms.item(row), columns.rates.decode_step.item(row))
    return (length + 0.5) * step_ms


def weigh(
    columns: FleetColumns, able: Mask | None, matches: MatchedTokens, demand: Demand, spill_weight: float
) -> Costs:
    """Every able row's cost of a request; ``able`` is None where all are. O(rows)."""
    standing = columns.standing(spill_weight)
    rates = standing.rates
    counted, load_back, loaded = _cached(columns, rates, matches, demand.prompt_tokens)
    whole = np.array(float(demand.prompt_tokens))
    uncached = whole - counted
    prefill = whole + counted
    prefill *= rates.quadratic
    prefill += rates.linear
    prefill *= uncached
    copying = None
    if columns.copies.some and demand.may_copy:
        is_counted = load_back is None and matches.total is matches.device
        held = counted if is_counted else _countable(columns, matches, matches.total, demand.prompt_tokens)
        copying = by_copying(columns.copies, rates, held, counted, prefill, demand.prompt_tokens)
        prefill = prefill if copying is None else copying.prefill_ms
    if able is not None:
        np.copyto(prefill, _UNABLE_MS, where=~able)
    # What a request needs where nothing is cached: where so much is free, nothing goes; where so much can be, nobody waits for pages.
    most = demand.prompt_tokens + ANSWER_TOKENS * demand.branches
    added = uncached + np.array(float(ANSWER_TOKENS * demand.branches)) if most > columns.least_free else None
    needed = added if added is None or loaded is None else added + loaded
    lacks = most > columns.least_room_now
    wait, crowding, met = standing.wait, standing.crowding, standing.cost
    if lacks or demand.branches > 1:
        wait = wait if needed is None else _wait(columns, rates, needed)
        crowding = crowding * demand.branches
        met = wait + spill_weight * crowding
    load = None if demand.not_resident is None else rates.adapter_load * demand.not_resident
    eviction = (
        None if added is None or needed is None else _eviction(columns, rates, needed, added, lacks=lacks)
    )
    if load is not None:
        # As far as anyone knows another adapter has to go for it.
        pushed_out = load * ADAPTER_CHAIN
        eviction = pushed_out if eviction is None else eviction + pushed_out
    compared = prefill * standing.prefill_share
    compared += met
    if eviction is not None:
        compared += spill_weight * eviction
    if load_back is not None:
        compared += load_back
    if load is not None:
        compared += load
    if copying is not None:
        compared += copying.copy_ms
    return Costs(counted, wait, prefill, load_back, load, eviction, crowding, spill_weight, compared, copying)


def _cached(
    columns: FleetColumns, rates: RateColumns, matches: MatchedTokens, prompt_tokens: int
) -> "_Cached":
    """What counts as cached, and what loading the host's part of it back costs. That part is loaded wherever it is cheaper than to compute
    it, and counts nowhere else."""
    device = _countable(columns, matches, matches.device, prompt_tokens)
    if matches.total is matches.device:
        return _Cached(device, None, None)
    total = _countable(columns, matches, matches.total, prompt_tokens)
    beyond = total - device
    loading = beyond * load_back_ms(rates)
    computing = (rates.linear + rates.quadratic * (total + device)) * beyond
    loads = loading < computing
    return _Cached(np.where(loads, total, device), loading * loads, beyond * loads)


def _countable(columns: FleetColumns, matches: MatchedTokens, held: Column, prompt_tokens: int) -> Column:
    """Tokens that a worker is expected to find cached: as far as its view is trusted, in whole units of its cache, and never the last
    one, which is always computed so that there is something to sample from."""
    whole = columns.whole_unit
    if whole and not matches.unit % whole and matches.most < prompt_tokens:
        return held
    counted = held * columns.trust
    np.minimum(counted, np.array(prompt_tokens - 1.0), out=counted)
    counted *= columns.units_per_token
    np.floor(counted, out=counted)
    counted *= columns.match_unit
    return counted


def _wait(columns: FleetColumns, rates: RateColumns, needed: Column) -> Column:
    """Until a worker turns to a request that needs so many tokens: the prefill before it, and the decode steps until places or pages that
    lack are given back. As many of the running must end as have to make room, and they end evenly over an answer's length."""
    lacking = needed - columns.room_now
    lacking *= columns.wait_steps_per_token
    wait: Column = np.maximum(columns.place_wait_steps, lacking)
    wait *= rates.decode_step
    wait += columns.waiting_prefill_ms
    return wait


def _eviction(
    columns: FleetColumns, rates: RateColumns, needed: Column, added: Column, *, lacks: bool
) -> Column:
    """What getting back the useful part of the KV that goes to make room would cost. Only where pages lack can less go than should.
    ``needed`` is on the device; what is ``added`` of it was on no tier before."""
    gone = needed - columns.free_tokens
    if lacks:
        np.minimum(gone, columns.evictable_tokens, out=gone)
    np.maximum(gone, _NOTHING, out=gone)
    eviction = _demotion(columns, rates, added, gone) if columns.some_demote else gone * rates.linear
    eviction *= _EVICTED_USE
    return eviction


def _demotion(columns: FleetColumns, rates: RateColumns, added: Column, gone: Column) -> Column:
    """The same where some workers have a host tier, before the share of it that is of use. What the device gives up stays on the host and is
    loaded back from there, or computed where that is cheaper. But the host has a copy of all that the device holds, the new request's too;
    when it is full, as much goes from its other end, and that is gone."""
    lost = added - columns.host_free_tokens
    np.minimum(lost, columns.host_evictable_tokens, out=lost)
    np.maximum(lost, _NOTHING, out=lost)
    demoted = gone * np.minimum(load_back_ms(rates), rates.linear)
    demoted += lost * rates.linear
    eviction: Column = np.where(columns.demotes > _NOTHING, demoted, gone * rates.linear)
    return eviction
