"""What a decision reads of the workers, as columns: one array a quantity, one row a worker. Pure.

A decision looks at every worker, and between two decisions few of them change. So each piece of news is written where a decision will
read it, by whoever hears it, in one row; a decision then computes with whole columns and never visits a worker. Nothing is decided here.

A row is a small number that lives as long as the router knows the worker; rows that nobody has are never usable. What a worker has not
measured is taken from the mean of those that have (a fleet is mostly alike), and from a prior where none has.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from prefixmesh.errors import OverloadedError
from prefixmesh.router.copy_columns import CopyColumns
from prefixmesh.router.measured_rates import Column, MeasuredRates, RateColumns

Mask = npt.NDArray[np.bool_]

MAX_ROWS: Final = 4096
"""Most workers of one router: what its decisions and its index are measured for."""

FIRST_ROWS: Final = 64
"""Room at the start; it doubles when it is used up."""

BOUNDLESS: Final = 1e18
"""Tokens that nobody has: room that is not known. Not infinite, because nothing times infinity is no number."""

ANSWER_TOKENS: Final = 64
"""How long an answer is expected to be that nobody knows anything of."""


_COLUMNS: Final = 20


BOTH_SIDES: Final = 2
"""Two answers that are decoded together each slow the other."""


class Standing(NamedTuple):
    """What a request with one answer meets at each worker, whatever its prompt: milliseconds by row. A decision changes one row of it."""

    rates: RateColumns
    spill_weight: float
    """What it was made with."""

    wait: Column
    """Until a worker turns to it, as long as no pages lack."""

    crowding: Column
    """The slowing of the answers that are decoded beside its own."""

    cost: Column
    """``wait + spill_weight * crowding``."""

    prefill_share: Column
    """How much a millisecond of prefill counts: once for the request, and by the weight for everyone else. An array of no dimension."""


class FleetColumns:
    """Columns over the workers of one router. Not thread-safe: one loop owns it.

    ``open_row`` and ``close_row``, the setters, and the columns, which are to be read only. Setters take O(1).
    """

    in_flight: Column
    """Requests accepted and not ended."""

    waiting_prefill_ms: Column
    slowed_tokens: Column
    """Tokens of answers that one more answer slows, or is slowed by, as the requests in flight let expect."""

    slowed_ms: Column
    """The same in milliseconds of decoding, as their expected work tells."""

    place_wait_steps: Column
    """Decode steps until a place is free for one more request."""

    per_place: Column
    """Share of the requests computed together that one is; 0 where any number may be."""

    room: Column
    """Most tokens of prompt and answer together."""

    pool_tokens: Column
    free_tokens: Column
    evictable_tokens: Column
    room_now: Column
    """Free and evictable tokens together."""

    wait_steps_per_token: Column
    """Decode steps until one more token than those is free; 0 where the pool is not known."""

    demotes: Column
    """1 where what the device gives up stays on the host, else 0."""

    host_free_tokens: Column
    host_evictable_tokens: Column
    """Of the host tier; both 0 without one."""

    answer_tokens: Column
    """How long an answer is expected to become there: the mean of those that ended last."""

    token_interval_ms: Column
    """From one of its tokens to the next, beside others' prefills; 0 where that is not known."""

    trust: Column
    match_unit: Column
    units_per_token: Column

    def __init__(self) -> None:
        self._table = np.zeros((_COLUMNS, FIRST_ROWS))
        self._rates = MeasuredRates(FIRST_ROWS)
        self._discounted: set[int] = set()
        self._usable = np.zeros(FIRST_ROWS, dtype=np.bool_)
        self._name_hash = np.zeros(FIRST_ROWS, dtype=np.uint64)
        self.copies = CopyColumns(FIRST_ROWS)
        self._free: list[int] = []
        self._whole_unit: int | None = None
        self._least_room: float | None = None
        self._least_room_now: float | None = None
        self._least_free: float | None = None
        self._some_demote: bool | None = None
        self._standing: Standing | None = None
        self.rows = 0
        """Rows are below this; all columns are so long."""

        self._cut_columns()

    def open_row(self, name: str) -> int:
        """The row of a worker that is new, not usable before it is said so. ``name`` is its address: what ``prefix_hash`` goes by, so that
        routers agree. Raises OverloadedError beyond ``MAX_ROWS``. O(1), but for doubling."""
        if self._free:
            row = self._free.pop()
        else:
            if self.rows == MAX_ROWS:
                raise OverloadedError(f"a router knows at most {MAX_ROWS} workers")
            row = self.rows
            self.rows += 1
            if self.rows > len(self._usable):
                self._double()
            self._cut_columns()
        self._rates.open()
        self._clear(row)
        self.name_hash[row] = xxhash.xxh3_64_intdigest(name.encode())
        return row

    def close_row(self, row: int) -> None:
        """The worker of a row is known no longer; the row may be given to another. O(1)."""
        self._rates.close(row)
        self._clear(row)
        self._free.append(row)

    def set_facts(
        self,
        row: int,
        *,
        match_unit: int,
        places: int,
        context_length: int,
        total_tokens: int,
    ) -> None:
        """What a worker is. ``match_unit``: its cache matches whole multiples of so many tokens, 0 when it has none. ``places``: most
        requests it computes together. 0 in ``places`` or ``total_tokens``: not known, and taken for boundless."""
        self.match_unit[row] = match_unit
        self.units_per_token[row] = 1.0 / match_unit if match_unit else 0.0
        self.per_place[row] = 1.0 / places if places else 0.0
        self.pool_tokens[row] = total_tokens or BOUNDLESS
        self.room[row] = min(context_length, total_tokens or context_length)
        self._least_room = self._whole_unit = None

    def set_rates(
        self,
        row: int,
        *,
        prefill_ms_per_token: float,
        prefill_ms_per_token2: float,
        decode_step_ms: float,
        load_back_ms_per_token: float,
        adapter_load_ms: float,
    ) -> None:
        """How fast a worker has measured itself to be; 0 where it has not. The first two are one curve: computing the tokens from ``a`` to
        ``b`` of a prompt takes ``first * (b - a) + second * (b**2 - a**2)`` milliseconds."""
        told = (
            prefill_ms_per_token,
            prefill_ms_per_token2,
            decode_step_ms,
            load_back_ms_per_token,
            adapter_load_ms,
        )
        if self._rates.set(row, told):
            self._standing = None
            self._discounted.discard(row)

    def discount_rates(self, row: int, share: float) -> None:
        """Count a row's computing as if it took this share of what its worker told last, for as long as it is idle. O(1)."""
        self._rates.discount(row, share)
        self._standing = None
        self._discounted.add(row)

    def prefill_ms_told(self, tokens: float) -> Column:
        """What a prompt of this length takes by what workers told, whatever of it counts; 0 where nothing was measured. O(rows)."""
        return self._rates.prefill_ms_told(self.rows, tokens)

    def set_load(self, row: int, *, in_flight: int, waiting_prefill_ms: float, decode_work_ms: float) -> None:
        """What a worker has accepted and not done: requests, prefill that stands before a new one, decoding still expected."""
        if in_flight and row in self._discounted:
            self._discounted.discard(row)
            self._rates.discount(row, 1.0)
            self._standing = None
        self.in_flight[row] = in_flight
        self.slowed_tokens[row] = BOTH_SIDES * ANSWER_TOKENS * in_flight
        over = (in_flight + 1) * self.per_place.item(row) - 1.0
        steps = over * self.answer_tokens.item(row) if over > 0.0 else 0.0
        self.place_wait_steps[row] = steps
        self.waiting_prefill_ms[row] = waiting_prefill_ms
        self.slowed_ms[row] = slowed_ms = BOTH_SIDES * decode_work_ms
        if self._standing is not None:
            rates, spill_weight, waits, crowdings, costs, _ = self._standing
            waits[row] = wait = steps * rates.decode_step.item(row) + waiting_prefill_ms
            crowdings[row] = crowding = max(self.slowed_tokens.item(row) * rates.linear.item(row), slowed_ms)
            costs[row] = wait + spill_weight * crowding

    def set_pool(self, row: int, *, free_tokens: int, evictable_tokens: int) -> None:
        """Room on a worker's device: empty, and cached but not in use; its facts are known by then. Before this, room is taken for
        boundless."""
        self.free_tokens[row] = free_tokens
        self.evictable_tokens[row] = evictable_tokens
        self.room_now[row] = room = free_tokens + evictable_tokens
        # An answer at least is in use: there may be nothing to divide by.
        length = self.answer_tokens.item(row)
        self.wait_steps_per_token[row] = length / max(self.pool_tokens.item(row) - room, length)
        self._least_free = self._least_room_now = None

    def set_host_pool(self, row: int, *, free_tokens: int, evictable_tokens: int) -> None:
        """A worker has a host tier, with so much room: what its device gives up for others is not gone."""
        if not self.demotes[row]:
            self.demotes[row] = 1.0
            self._some_demote = None
        self.host_free_tokens[row] = free_tokens
        self.host_evictable_tokens[row] = evictable_tokens

    def forget_host_pool(self, row: int) -> None:
        """A worker has no host tier, as far as it has told."""
        if self.demotes[row]:
            self.demotes[row] = 0.0
            self._some_demote = None
        self.host_free_tokens[row] = self.host_evictable_tokens[row] = 0.0

    def set_answers(self, row: int, *, tokens: int, token_interval_ms: float) -> None:
        """Mean length of the answers that ended last on a worker, and the time from token to token; 0: not known. What load and pool say
        counts by it from the next time on that they are set."""
        self.answer_tokens[row] = tokens or ANSWER_TOKENS
        self.token_interval_ms[row] = token_interval_ms

    def forget_pool(self, row: int) -> None:
        """What is free there is not known any more, and taken for boundless until it is told again."""
        self.free_tokens[row] = self.room_now[row] = BOUNDLESS
        self.evictable_tokens[row] = self.wait_steps_per_token[row] = 0.0
        self._least_free = self._least_room_now = None

    def set_trust(self, row: int, share: float) -> None:
        """How much of a match counts: 1 where the view is exact, less where it may be wrong."""
        if self.trust[row] != share:
            self.trust[row] = share
            self._whole_unit = None

    def set_usable(self, row: int, *, usable: bool) -> None:
        """Whether a worker may be sent requests: ready, and not draining."""
        if self.usable[row] != usable:
            self.usable[row] = usable
            self._least_room = self._whole_unit = None

    @property
    def rates(self) -> RateColumns:
        """The workers' rates, filled in where they were not measured. O(1), and O(rows) after a change while some were not."""
        return self._rates.filled()

    def standing(self, spill_weight: float) -> Standing:
        """What a request meets whatever its prompt. O(1), and O(rows) after a change of rates or with another weight than before."""
        rates, standing = self._rates.filled(), self._standing
        if standing is None or standing.rates is not rates or standing.spill_weight != spill_weight:
            wait = self.place_wait_steps * rates.decode_step + self.waiting_prefill_ms
            crowding = np.maximum(self.slowed_tokens * rates.linear, self.slowed_ms)
            cost, prefill_share = wait + spill_weight * crowding, np.array(1.0 + spill_weight)
            standing = Standing(rates, spill_weight, wait, crowding, cost, prefill_share)
            self._standing = standing
        return standing

    @property
    def whole_unit(self) -> int:
        """Matches of whole multiples of this count as they are: every usable worker's view is exact, and its cache matches such multiples.
        0 where that is not so. O(1), and O(rows) after a change."""
        if self._whole_unit is None:
            units = self.match_unit[self.usable]
            is_whole = (self.trust[self.usable] == 1.0).all() and (units > 0.0).all()
            self._whole_unit = int(np.lcm.reduce(units.astype(np.int64), initial=1)) if is_whole else 0
        return self._whole_unit

    @property
    def least_room(self) -> float:
        """The smallest ``room`` of the usable rows: what is not larger fits everywhere. Infinite when none is usable. O(1), and O(rows)
        after a change."""
        if self._least_room is None:
            self._least_room = float(np.min(self.room, where=self.usable, initial=np.inf))
        return self._least_room

    @property
    def least_room_now(self) -> float:
        """The smallest ``room_now`` of all rows: who needs no more waits for no pages anywhere. O(1), and O(rows) after a change."""
        if self._least_room_now is None:
            self._least_room_now = float(self.room_now.min())
        return self._least_room_now

    @property
    def some_demote(self) -> bool:
        """Whether any worker has a host tier. O(1), and O(rows) after a change."""
        if self._some_demote is None:
            self._some_demote = bool(self.demotes.any())
        return self._some_demote

    @property
    def least_free(self) -> float:
        """The smallest ``free_tokens`` of all rows: who needs no more evicts nothing anywhere. O(1), and O(rows) after a change."""
        if self._least_free is None:
            self._least_free = float(self.free_tokens.min())
        return self._least_free

    def __repr__(self) -> str:
        return f"<FleetColumns {self.rows - len(self._free)} workers, {int(self.usable.sum())} usable>"

    def _clear(self, row: int) -> None:
        self.set_usable(row, usable=False)
        self.set_facts(row, match_unit=0, places=0, context_length=0, total_tokens=0)
        self.set_answers(row, tokens=0, token_interval_ms=0.0)
        self.set_load(row, in_flight=0, waiting_prefill_ms=0.0, decode_work_ms=0.0)
        self.forget_pool(row)
        self.forget_host_pool(row)
        self.trust[row] = 0.0
        self.name_hash[row] = 0
        self.copies.clear(row)

    def _double(self) -> None:
        self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
        self._usable = np.concatenate([self._usable, np.zeros_like(self._usable)])
        self._name_hash = np.concatenate([self._name_hash, np.zeros_like(self._name_hash)])

    def _cut_columns(self) -> None:
        """Columns are views, cut once for every new row and not once for every decision."""
        (
            self.in_flight,
            self.waiting_prefill_ms,
            self.slowed_tokens,
            self.slowed_ms,
            self.place_wait_steps,
            self.per_place,
            self.room,
            self.pool_tokens,
            self.free_tokens,
            self.evictable_tokens,
            self.room_now,
            self.wait_steps_per_token,
            self.demotes,
            self.host_free_tokens,
            self.host_evictable_tokens,
            self.answer_tokens,
            self.token_interval_ms,
            self.trust,
            self.match_unit,
            self.units_per_token,
        ) = self._table[:, : self.rows]
        self.usable: Mask = self._usable[: self.rows]
        self.name_hash: npt.NDArray[np.uint64] = self._name_hash[: self.rows]
        self._rates.cut(self.rows)
        self.copies.cut(self.rows)
        self._standing = None
