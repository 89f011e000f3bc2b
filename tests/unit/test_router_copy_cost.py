"""The cost's copy term: when a worker copies what it lacks from another one, and from whom."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.cache.events import CacheSummary, SnapshotPart, TierState
from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Epoch
from prefixmesh.router.copy_columns import CopyColumns
from prefixmesh.router.copy_cost import COPY_BEGIN_MS
from prefixmesh.router.cost import CandidateTerms, Demand
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.routing import RouterCore
from prefixmesh.worker_report import WorkerReport
from tests.support.column_fleet import ColumnFleet, Worker, column_fleet
from tests.support.simulated_fleet import NOW, add_ready, facts, make_core, prompt, unique

RATE = 0.05
NOTHING_HELD = CacheSummary(Epoch(7), 0, tuple(TierState(0, 0) for _ in Tier))


def copying_fleet(workers: list[Worker], layouts: list[str], rate: float = RATE) -> ColumnFleet:
    """Workers that can copy from those of their own layout, and be copied from."""
    fleet = column_fleet(workers)
    for row, layout in enumerate(layouts):
        fleet.columns.copies.set_layout(row, layout)
        fleet.columns.copies.set_rate(row, rate if layout else 0.0)
        fleet.columns.copies.set_gives(row, gives=True)
    return fleet


def terms_of(fleet: ColumnFleet, prompt_tokens: int = 1000) -> list[CandidateTerms]:
    return fleet.terms(prompt_tokens)


def test_copy_stands_in_for_the_prefill_of_what_another_holds() -> None:
    """Begin + rate * tokens + prefill of the rest, and no work for others."""
    holder, other = terms_of(copying_fleet([Worker(device=800), Worker(device=100)], ["a", "a"]))
    assert (holder.copied_tokens, holder.copy_ms) == (0, 0.0)
    assert other.copied_tokens == 700
    assert other.copy_ms == pytest.approx(COPY_BEGIN_MS + RATE * 700)
    assert other.prefill_ms == pytest.approx(holder.prefill_ms)
    assert other.recompute_ms == pytest.approx(0.0)
    assert other.cached_tokens == 800
    assert other.counted_tokens == 100
    assert other.first_token_ms == pytest.approx(other.prefill_ms + other.copy_ms)
    assert other.total_ms == pytest.approx(holder.total_ms + other.copy_ms)


@pytest.mark.parametrize(
    ("layouts", "rate"),
    [(["a", "b"], RATE), (["a", ""], RATE), (["", "a"], RATE), (["a", "a"], 0.0), (["a", "a"], 0.6)],
    ids=[
        "laid out otherwise",
        "cannot copy",
        "cannot be copied from",
        "rate not known",
        "slower than to compute",
    ],
)
def test_nothing_is_copied_where_it_cannot_be_or_takes_longer(layouts: list[str], rate: float) -> None:
    workers = [Worker(device=800), Worker()]
    assert terms_of(copying_fleet(workers, layouts, rate)) == terms_of(column_fleet(workers))


def test_holder_that_is_gone_gives_nothing_and_one_that_ends_does() -> None:
    """A worker that takes no requests may be copied from, as long as it answers."""
    fleet = copying_fleet([Worker(device=800, usable=False), Worker()], ["a", "a"])
    (other,) = terms_of(fleet)
    assert other.copied_tokens == 800
    fleet.columns.copies.set_gives(0, gives=False)
    (other,) = terms_of(fleet)
    assert other.copied_tokens == 0


def test_rest_of_a_prompt_is_not_copied_whole_and_holders_are_trusted_as_far_as_they_are() -> None:
    """The last token is always computed; half a trust, half the copy."""
    whole, half = Worker(device=1000), Worker(device=1000, trust=0.5)
    assert terms_of(copying_fleet([whole, Worker()], ["a", "a"]))[1].cached_tokens == 999
    assert terms_of(copying_fleet([half, Worker()], ["a", "a"]))[1].cached_tokens == 500


def test_each_layout_has_its_own_best_holder() -> None:
    fleet = copying_fleet([Worker(device=800), Worker(), Worker(device=400), Worker()], ["a", "a", "b", "b"])
    assert [one.copied_tokens for one in terms_of(fleet)] == [0, 800, 0, 400]


def test_busy_holder_is_relieved_sooner_where_its_prefix_can_be_copied() -> None:
    """A queue at the holder that is not worth 800 tokens' prefill elsewhere is worth their copy."""
    workers = [Worker(device=800, waiting_ms=150.0, in_flight=2), Worker()]
    assert column_fleet(workers).takers(1000) == {0}
    assert copying_fleet(workers, ["a", "a"]).takers(1000) == {1}


@settings(derandomize=True, max_examples=150, deadline=None)
@given(
    held=st.lists(st.integers(0, 1200), min_size=2, max_size=6),
    rate=st.floats(0.0, 1.0),
    layouts=st.lists(st.sampled_from(["", "a", "b"]), min_size=6, max_size=6),
)
def test_copies_only_ever_make_a_worker_cheaper(held: list[int], rate: float, layouts: list[str]) -> None:
    """And never copy from nobody, or more than anybody holds."""
    workers = [Worker(device=tokens) for tokens in held]
    plain = terms_of(column_fleet(workers))
    fleet = copying_fleet(workers, layouts[: len(held)], rate)
    for before, after in zip(plain, terms_of(fleet), strict=True):
        assert after.first_token_ms <= before.first_token_ms + 1e-9
        alike = [one for row, one in enumerate(held) if layouts[row] == layouts[after.row] != ""]
        assert after.cached_tokens <= max([before.counted_tokens, *alike])


def test_decision_looks_at_copies_only_where_somebody_can_copy() -> None:
    """``some`` follows what rows can do, also when they go."""
    copies = CopyColumns(1)
    copies.cut(3)
    changes = [
        partial(copies.set_rate, 0, RATE),
        partial(copies.set_layout, 0, "a"),
        partial(copies.set_layout, 2, "b"),
        partial(copies.set_rate, 2, RATE),
        partial(copies.clear, 0),
        partial(copies.set_layout, 2, ""),
    ]
    seen = []
    for change in changes:
        change()
        seen.append((copies.some, copies.has_one_layout))
    assert seen == [(False, True), (True, True), (True, False), (True, False), (True, True), (False, True)]
    np.testing.assert_array_equal(copies.ms_per_token, [0.0, 0.0, RATE])


def copying_core(count: int) -> RouterCore:
    """Workers that have told how their KV lies, and how long a copy takes."""
    core = make_core(0)
    for index in range(count):
        endpoint = add_ready(core, f"w{index}")
        core.described(endpoint, replace(facts(f"w{index}"), kv_layout="a"), NOW)
        core.on_report(endpoint, WorkerReport(summary=NOTHING_HELD, copy_ms_per_token=RATE), NOW)
    return core


def tell(core: RouterCore, worker: str, ids: list[int], count: int) -> None:
    """A worker tells that it holds the first blocks of a prompt."""
    names = tuple(prompt(ids).fingerprints[:count])
    part = SnapshotPart(epoch=Epoch(7), sequence=1, tier=Tier.DEVICE, fingerprints=names, last=True)
    entry = core.registry.get(Endpoint(worker))
    assert entry is not None
    core.stream_news(entry.endpoint, entry.load.incarnation, part, NOW)


def test_request_that_leaves_a_busy_holder_takes_along_whom_to_copy_from() -> None:
    """Those who hold it by their own word, the fullest first, and at most two."""
    core, ids = copying_core(5), unique(1, 1000)
    for worker, blocks in (("w0", 15), ("w1", 12), ("w2", 15), ("w3", 15)):
        tell(core, worker, ids, blocks)
    taker = core.route(prompt(ids), NOW, exclude=[Endpoint(f"w{n}") for n in range(4)])
    assert [source.address for source in taker.sources] == ["w0", "w2"]
    assert {source.tokens for source in taker.sources} == {960}
    assert taker.predicted_cached_tokens == 960


def test_what_is_only_expected_is_not_copied() -> None:
    """The first request of a burst has not been computed: who goes elsewhere computes it."""
    core, ids = copying_core(2), unique(1, 1000)
    first = core.route(prompt(ids), NOW)
    second = core.route(prompt(ids), NOW, exclude=[first.endpoint])
    assert second.sources == ()
    assert second.predicted_cached_tokens == 0


def test_worker_that_leaves_is_sent_nothing_and_can_be_copied_from() -> None:
    """It hands over what it holds; its next life is another matter."""
    core, ids = copying_core(2), unique(1, 1000)
    tell(core, "w0", ids, 15)
    core.fleet.set_leaving(Endpoint("w0"), leaving=True)
    taker = core.route(prompt(ids), NOW)
    assert taker.endpoint == "w1"
    assert [source.address for source in taker.sources] == ["w0"]
    core.described(Endpoint("w0"), replace(facts("w0", incarnation=2), kv_layout="a"), NOW)
    entry = core.registry.get(Endpoint("w0"))
    assert entry is not None
    assert not entry.leaving


def test_policies_that_stand_beside_are_not_given_copies() -> None:
    demand = Demand(1000, 1000, may_copy=False)
    fleet = copying_fleet([Worker(device=800), Worker()], ["a", "a"])
    assert fleet.terms(1000, demand=demand)[1].copied_tokens == 0
