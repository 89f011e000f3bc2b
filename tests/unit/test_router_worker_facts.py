"""A worker's answer about itself is taken as it is, or refused where decisions could not reckon with its figures."""

import math

import pytest

from prefixmesh.errors import InvalidRequestError
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.router.worker_facts import (
    LEAST_TOKENS_PER_S,
    MAX_COUNT,
    MAX_LAYOUT_CHARS,
    MAX_REQUESTS,
    MAX_TOKENS,
    MAX_UNIT,
    MAX_UNIX_MS,
    facts_of,
)
from prefixmesh.router.worker_identity import Rates
from prefixmesh.worker_report import PagePool


def test_measured_figures_come_through() -> None:
    answer = pb.DescribeResponse(
        unix_ms=MAX_UNIX_MS, rates=pb.Rates(prefill_tokens_per_s=LEAST_TOKENS_PER_S, decode_step_ms=30.0)
    )
    assert facts_of(answer).rates[:2] == (LEAST_TOKENS_PER_S, 30.0)
    assert facts_of(pb.DescribeResponse()).rates[:2] == (0.0, 0.0)


def test_a_workers_curve_comes_through_and_a_mere_rate_stands_for_one() -> None:
    """Earlier workers tell only what a token costs on the whole."""
    told = pb.Rates(
        prefill_tokens_per_s=500.0,
        prefill=pb.PrefillRate(linear_ms_per_token=0.5, quadratic_ms_per_token2=0.001),
        load_back_ms_per_token=0.25,
        adapter_load_ms=70.0,
    )
    rates = facts_of(pb.DescribeResponse(rates=told)).rates
    assert rates == Rates(500.0, 0.0, 0.5, 0.001, 0.25, 70.0)
    assert rates.linear_ms_per_token == 0.5
    assert Rates(500.0, 0.0).linear_ms_per_token == 2.0
    assert Rates(0.0, 0.0).linear_ms_per_token == 0.0


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0, 5e-324])
def test_a_prefill_rate_that_makes_no_milliseconds_is_refused(rate: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"rates\.prefill_tokens_per_s"):
        facts_of(pb.DescribeResponse(rates=pb.Rates(prefill_tokens_per_s=rate)))


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0, 1e300])
def test_a_decode_step_of_no_measure_is_refused(rate: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"rates\.decode_step_ms"):
        facts_of(pb.DescribeResponse(rates=pb.Rates(decode_step_ms=rate)))


@pytest.mark.parametrize("unix_ms", [-(2**63), -1, MAX_UNIX_MS + 1, 2**63 - 1])
def test_a_clock_that_no_ticket_can_tell_is_refused(unix_ms: int) -> None:
    with pytest.raises(InvalidRequestError, match="unix_ms"):
        facts_of(pb.DescribeResponse(unix_ms=unix_ms))


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("context_length", MAX_TOKENS),
        ("max_total_tokens", MAX_TOKENS),
        ("page_size", MAX_UNIT),
        ("block_size", MAX_UNIT),
        ("max_running_requests", MAX_REQUESTS),
    ],
)
def test_a_whole_number_that_is_negative_or_larger_than_anything_is_refused_by_its_name(
    field: str, most: int
) -> None:
    facts_of(pb.DescribeResponse(**{field: most}))  # type: ignore[arg-type]
    for figure in (-1, most + 1):
        with pytest.raises(InvalidRequestError, match=f"^{field}: must be 0 to {most}, got {figure}$"):
            facts_of(pb.DescribeResponse(**{field: figure}))  # type: ignore[arg-type]


def test_a_host_tier_comes_through_and_none_is_none() -> None:
    """Workers without one, and those older than host tiers, tell of no pool there."""
    answer = pb.DescribeResponse(
        host_pool=pb.PoolState(total_pages=8, free_pages=5, evictable_pages=2, protected_pages=1),
        tiers=pb.TierCounts(backed_up_tokens=7),
    )
    facts = facts_of(answer)
    assert facts.host_pool == PagePool(total_pages=8, free_pages=5, evictable_pages=2, protected_pages=1)
    assert facts.tiers["backed_up_tokens"] == 7
    assert set(facts.tiers) == {field.name for field in pb.TierCounts.DESCRIPTOR.fields}
    none = facts_of(pb.DescribeResponse())
    assert (none.host_pool, none.tiers) == (None, {})


def test_what_a_worker_can_copy_and_has_copied_comes_through() -> None:
    """Workers that are older than copies tell of none."""
    answer = pb.DescribeResponse(kv_layout="a" * MAX_LAYOUT_CHARS, copies=pb.CopyCounts(copied_tokens=7))
    facts = facts_of(answer)
    assert (facts.kv_layout, facts.copies["copied_tokens"]) == ("a" * MAX_LAYOUT_CHARS, 7)
    assert set(facts.copies) == {field.name for field in pb.CopyCounts.DESCRIPTOR.fields}
    none = facts_of(pb.DescribeResponse())
    assert (none.kv_layout, none.copies) == ("", {})
    with pytest.raises(InvalidRequestError, match=r"^kv_layout: "):
        facts_of(pb.DescribeResponse(kv_layout="a" * (MAX_LAYOUT_CHARS + 1)))


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        (pb.DescribeResponse(copies=pb.CopyCounts(given_bytes=-1)), r"copies\.given_bytes"),
        (pb.DescribeResponse(host_pool=pb.PoolState(total_pages=-1)), r"host_pool\.total_pages"),
        (pb.DescribeResponse(host_pool=pb.PoolState(total_pages=1, free_pages=2)), "host_pool"),
        (pb.DescribeResponse(tiers=pb.TierCounts(disk_bytes=-1)), r"tiers\.disk_bytes"),
        (pb.DescribeResponse(tiers=pb.TierCounts(dropped_tokens=MAX_COUNT + 1)), r"tiers\.dropped_tokens"),
        (
            pb.DescribeResponse(rates=pb.Rates(load_back_ms_per_token=math.nan)),
            r"rates\.load_back_ms_per_token",
        ),
    ],
)
def test_a_host_tier_that_cannot_be_is_refused_by_its_name(answer: pb.DescribeResponse, field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}: "):
        facts_of(answer)


def test_a_count_that_went_below_zero_is_refused_by_its_name() -> None:
    answer = pb.DescribeResponse()
    answer.cache.miss_tokens.evicted = -1
    with pytest.raises(InvalidRequestError, match=r"^cache\.miss_tokens\.evicted: "):
        facts_of(answer)
