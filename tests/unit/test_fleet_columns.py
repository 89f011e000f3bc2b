"""The columns a decision reads, and how matches get into them."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefixmesh.errors import OverloadedError
from prefixmesh.router.block_index import Fall, Matches
from prefixmesh.router.fleet_columns import FIRST_ROWS, MAX_ROWS, FleetColumns
from prefixmesh.router.matched_tokens import FEW_SLOTS, SlotRows
from prefixmesh.router.measured_rates import (
    PRIOR_ADAPTER_LOAD_MS,
    PRIOR_DECODE_STEP_MS,
    PRIOR_LOAD_BACK_SHARE,
    PRIOR_PREFILL_MS_PER_TOKEN,
    load_back_ms,
)
from tests.support.column_fleet import Worker, add_row


def set_rates(columns: FleetColumns, row: int, *rates: float) -> None:
    linear, quadratic, step, load_back, adapter = rates
    columns.set_rates(
        row,
        prefill_ms_per_token=linear,
        prefill_ms_per_token2=quadratic,
        decode_step_ms=step,
        load_back_ms_per_token=load_back,
        adapter_load_ms=adapter,
    )


def rates_of(columns: FleetColumns, row: int) -> tuple[float, ...]:
    return tuple(float(column[row]) for column in columns.rates)


def test_unmeasured_rates_are_priors_where_nobody_has_measured() -> None:
    columns = FleetColumns()
    row = columns.open_row("a")
    assert rates_of(columns, row) == (
        PRIOR_PREFILL_MS_PER_TOKEN,
        0.0,
        PRIOR_DECODE_STEP_MS,
        0.0,
        PRIOR_ADAPTER_LOAD_MS,
    )
    assert load_back_ms(columns.rates)[row] == PRIOR_LOAD_BACK_SHARE * PRIOR_PREFILL_MS_PER_TOKEN


def test_load_back_that_nobody_has_measured_is_a_share_of_the_prefill_there() -> None:
    """On a machine a hundred times as fast as the prior's, too; by what it is now, and by the mean once somebody has measured it."""
    columns = FleetColumns()
    fast, slow, teller = (columns.open_row(name) for name in "abc")
    set_rates(columns, fast, 0.005, 0.0, 1.0, 0.0, 1.0)
    set_rates(columns, slow, 0.5, 0.0, 1.0, 0.0, 1.0)
    set_rates(columns, teller, 0.5, 0.0, 1.0, 0.0, 1.0)
    assert list(load_back_ms(columns.rates)) == pytest.approx([0.0005, 0.05, 0.05])
    set_rates(columns, fast, 0.01, 0.0, 1.0, 0.0, 1.0)
    assert load_back_ms(columns.rates)[fast] == pytest.approx(0.001)
    set_rates(columns, teller, 0.5, 0.0, 1.0, 0.002, 1.0)
    assert list(load_back_ms(columns.rates)) == pytest.approx([0.002] * 3)


def test_unmeasured_rates_are_the_mean_of_those_that_were_measured() -> None:
    """Both parts of the prefill's curve come from those who have measured it; a curve without a bend is no gap."""
    columns = FleetColumns()
    new, first, second = (columns.open_row(name) for name in "abc")
    set_rates(columns, first, 0.2, 0.0, 10.0, 0.0, 7.0)
    set_rates(columns, second, 0.4, 4e-5, 0.0, 0.0, 0.0)
    assert rates_of(columns, new) == pytest.approx((0.3, 2e-5, 10.0, 0.0, 7.0))
    assert rates_of(columns, first)[:2] == (0.2, 0.0)
    assert rates_of(columns, second)[2:] == (10.0, 0.0, 7.0)


def test_mean_follows_what_changes_and_who_leaves() -> None:
    columns = FleetColumns()
    new, first, second = (columns.open_row(name) for name in "abc")
    set_rates(columns, first, 0.2, 0.0, 0.0, 0.0, 0.0)
    set_rates(columns, second, 0.4, 0.0, 0.0, 0.0, 0.0)
    assert rates_of(columns, new)[0] == pytest.approx(0.3)
    set_rates(columns, second, 0.6, 0.0, 0.0, 0.0, 0.0)
    assert rates_of(columns, new)[0] == pytest.approx(0.4)
    columns.close_row(second)
    assert rates_of(columns, new)[0] == pytest.approx(0.2)
    columns.close_row(first)
    assert rates_of(columns, new)[0] == PRIOR_PREFILL_MS_PER_TOKEN


def test_row_that_is_given_again_remembers_nothing() -> None:
    """F14: a worker that is removed and added again has load 0, not less, and is not usable before it is said so."""
    columns = FleetColumns()
    kept = add_row(columns, "a", Worker())
    busy = Worker(in_flight=7, waiting_ms=9.0, decode_work_ms=5.0, pool=(500, 1, 1), host=(30, 40))
    gone = add_row(columns, "b", busy)
    some_demoted = columns.some_demote
    columns.close_row(gone)
    assert not columns.usable[gone]
    assert columns.open_row("b") == gone
    assert not columns.usable[gone]
    load = (
        columns.in_flight,
        columns.waiting_prefill_ms,
        columns.slowed_tokens,
        columns.slowed_ms,
        columns.trust,
        columns.demotes,
        columns.host_free_tokens,
        columns.host_evictable_tokens,
    )
    assert [float(column[gone]) for column in load] == [0.0] * len(load)
    assert (some_demoted, columns.some_demote) == (True, False)
    assert columns.least_free > 1e9
    assert columns.usable[kept]
    assert "2 workers, 1 usable" in repr(columns)


def test_columns_keep_what_they_hold_when_they_grow() -> None:
    columns = FleetColumns()
    for index in range(FIRST_ROWS):
        set_rates(
            columns, add_row(columns, str(index), Worker(in_flight=index)), 1.0 + index, 0.0, 2.0, 0.0, 0.0
        )
    before = columns.rates.linear.tolist(), columns.name_hash.tolist()
    last = add_row(columns, "one more", Worker())
    assert last == FIRST_ROWS
    assert columns.in_flight.tolist() == [*range(FIRST_ROWS), 0]
    assert (columns.rates.linear.tolist()[:-1], columns.name_hash.tolist()[:-1]) == before
    assert len(columns.usable) == FIRST_ROWS + 1


def test_there_is_a_most_of_workers_and_the_error_names_it() -> None:
    columns = FleetColumns()
    for index in range(MAX_ROWS):
        columns.open_row(str(index))
    with pytest.raises(OverloadedError, match=str(MAX_ROWS)):
        columns.open_row("one more")
    columns.close_row(17)
    assert columns.open_row("another") == 17


def test_least_room_is_that_of_the_usable_workers_now() -> None:
    columns = FleetColumns()
    small = add_row(columns, "a", Worker(context_length=1000))
    add_row(columns, "b", Worker(context_length=5000, pool=(3000, 0, 0)))
    assert columns.least_room == 1000
    columns.set_usable(small, usable=False)
    assert columns.least_room == 3000, "a pool that is smaller than the context bounds a request, too"
    columns.set_usable(small, usable=True)
    assert columns.least_room == 1000
    columns.close_row(small)
    assert columns.least_room == 3000
    assert FleetColumns().least_room == float("inf")


def test_least_pools_follow_every_report() -> None:
    columns = FleetColumns()
    first, second = (add_row(columns, name, Worker(pool=(9000, 500, 700))) for name in "ab")
    columns.set_pool(second, free_tokens=100, evictable_tokens=8000)
    assert (columns.least_free, columns.least_room_now) == (100, 1200)
    columns.set_pool(first, free_tokens=20, evictable_tokens=0)
    assert (columns.least_free, columns.least_room_now) == (20, 20)
    columns.close_row(first)
    assert (columns.least_free, columns.least_room_now) == (100, 8100)


SLOTS = 3 * FEW_SLOTS


@st.composite
def falls(draw: st.DrawFn) -> list[Fall]:
    """Slots leave a walk at growing depths, each once."""
    left: list[int] = draw(st.permutations(list(range(SLOTS))))
    result: list[Fall] = []
    depth = 0
    for _ in range(draw(st.integers(0, 6))):
        size = draw(st.integers(0, len(left)))
        depth += draw(st.integers(1, 5))
        result.append(Fall(sum(1 << slot for slot in left[:size]), depth))
        left = left[size:]
    return result


@settings(derandomize=True, max_examples=30, deadline=None)
@given(falls(), falls(), st.dictionaries(st.integers(0, SLOTS - 1), st.integers(0, 9)))
def test_spread_gives_each_row_what_its_slot_holds(
    device: list[Fall], total: list[Fall], bound: dict[int, int]
) -> None:
    """However many slots leave together, one by one or as a whole; slots without a row count for nobody."""
    rows = SlotRows()
    row_of = {slot: row for row, slot in enumerate(bound)}
    for slot, row in row_of.items():
        rows.bind(slot, row)
    spread = rows.spread(Matches(device, total), 64, SLOTS)
    for column, of in ((spread.device, device), (spread.total, total)):
        expected = [0.0] * len(row_of)
        for fall in of:
            for slot, row in row_of.items():
                if fall.slots >> slot & 1:
                    expected[row] = 64.0 * fall.blocks
        assert column[: len(row_of)].tolist() == expected


def test_slot_that_was_let_go_or_changed_over_counts_anew() -> None:
    """A worker's snapshot is complete: its other slot is its row's from now on."""
    rows, matches = SlotRows(), Matches([Fall(0b01, 2), Fall(0b10, 9)], [Fall(0b01, 2), Fall(0b10, 9)])
    rows.bind(0, 3)
    assert rows.spread(matches, 1, 4).device.tolist() == [0, 0, 0, 2]
    rows.unbind(0)
    rows.bind(1, 3)
    assert rows.spread(matches, 1, 4).device.tolist() == [0, 0, 0, 9]
    rows.unbind(77)


def test_slots_beyond_the_first_tables_are_known() -> None:
    rows = SlotRows()
    rows.bind(5000, 1)
    far = [Fall(1 << 5000 | (1 << 40) - 1, 3)]
    spread = rows.spread(Matches(far, far), 64, 2)
    assert spread.total[1] == 192
    assert spread.total is spread.device, "nobody would load anything back"


def test_usable_and_facts_may_come_in_any_order() -> None:
    """A worker is described, its engine tells of its pool, then it is ready."""
    columns = FleetColumns()
    row = columns.open_row("a")
    columns.set_usable(row, usable=True)
    assert columns.least_room == 0.0, "nothing fits a worker that has told nothing"
    columns.set_facts(row, match_unit=16, places=8, context_length=4096, total_tokens=0)
    assert columns.least_room == 4096
    assert np.isclose(columns.units_per_token[row] * columns.match_unit[row], 1.0)


CHANGE = st.one_of(
    st.tuples(st.just("load"), st.integers(0, 9), st.integers(0, 40), st.sampled_from([0.0, 3.5, 1200.0])),
    st.tuples(st.just("rates"), st.integers(0, 9), st.integers(0, 2), st.sampled_from([0.0, 0.2, 31.0])),
    st.tuples(st.just("open"), st.integers(0, 9), st.just(0), st.just(0.0)),
    st.tuples(st.just("close"), st.integers(0, 9), st.just(0), st.just(0.0)),
    st.tuples(st.just("ask"), st.just(0), st.just(0), st.sampled_from([0.25, 1.0])),
)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(changes=st.lists(CHANGE, max_size=30))
@example(changes=[("rates", 0, 1, 0.2), ("load", 0, 3, 0.0), ("rates", 0, 2, 31.0)])
def test_what_a_request_meets_is_kept_row_by_row_as_if_worked_out_anew(
    changes: list[tuple[str, int, int, float]],
) -> None:
    """Loads change one row of it, and rates all: in whatever order, it is what the columns themselves make."""
    columns, spill_weight = FleetColumns(), 1.0
    rows: list[int] = []
    for number, (kind, which, count, value) in enumerate([("open", 0, 0, 0.0), *changes]):
        row = rows[which % len(rows)] if rows else None
        match kind:
            case "open":
                row = columns.open_row(f"w{number}")
                columns.set_facts(row, match_unit=16, places=8, context_length=4096, total_tokens=0)
                rows.append(row)
            case "close" if row is not None:
                rows.remove(row)
                columns.close_row(row)
            case "load" if row is not None:
                columns.set_load(row, in_flight=count, waiting_prefill_ms=value, decode_work_ms=7.0 * count)
            case "rates" if row is not None:
                set_rates(columns, row, 0.1 * count, 0.0, value, 0.0, 0.0)
            case "ask":
                spill_weight = value
        met, rates = columns.standing(spill_weight), columns.rates
        wait = columns.place_wait_steps * rates.decode_step + columns.waiting_prefill_ms
        crowding = np.maximum(columns.slowed_tokens * rates.linear, columns.slowed_ms)
        assert np.array_equal(met.wait, wait)
        assert np.array_equal(met.crowding, crowding)
        assert np.array_equal(met.cost, wait + spill_weight * crowding)
