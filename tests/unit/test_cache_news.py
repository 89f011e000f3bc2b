"""The news of a cache on the wire: what is sent arrives as itself, and what is malformed is refused by the name of its field."""

import math
from dataclasses import fields

import pytest

from prefixmesh.cache.events import CacheSummary, Cleared, Removed, SnapshotPart, Stored, TierState
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import InvalidRequestError
from prefixmesh.ids import Epoch, Fingerprint
from prefixmesh.proto.cache_news import EventBatch, News, decode_news, decode_place, encode_news, encode_place
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.worker_report import PagePool, WorkerReport

EPOCH = Epoch(2**64 - 1)
NAMES = (Fingerprint(0), Fingerprint(2**64 - 1), Fingerprint(1 << 40))

REPORT = WorkerReport(
    summary=CacheSummary(EPOCH, 7, (TierState(3, 2**64 - 1), TierState(1, 5))),
    device_pool=PagePool(total_pages=10, free_pages=5, evictable_pages=3, protected_pages=2),
    host_pool=PagePool(total_pages=40, free_pages=30, evictable_pages=9, protected_pages=1),
    running_requests=4,
    queued_requests=6,
    uncached_tokens=2**40,
    uncached_squares=2**60,
    answer_tokens=33,
    token_interval_ms=14.5,
    prefill_ms_per_token=0.25,
    prefill_ms_per_token2=2.0**-20,
    decode_step_ms=12.5,
    load_back_ms_per_token=0.125,
    copy_ms_per_token=0.375,
    pins_version=41,
    rated_prefills=7,
    adapter_load_ms=80.5,
    resident_adapters=("ad" * 16, "be" * 16),
    draining=True,
    unix_ms=2**41,
    accepted=("r1", "r2", "r3"),
    prefilled=("r1", "r2"),
    ended=("r1",),
    own_requests=2,
)


@pytest.mark.parametrize(
    "news",
    [
        SnapshotPart(EPOCH, 3, Tier.HOST, NAMES, False),
        SnapshotPart(EPOCH, 0, Tier.DEVICE, (), True),
        EventBatch(
            [
                Stored(EPOCH, 8, Tier.DEVICE, None, NAMES),
                Stored(EPOCH, 9, Tier.HOST, Fingerprint(0), NAMES[:1]),
                Removed(EPOCH, 10, Tier.HOST, NAMES),
            ]
        ),
        EventBatch([Cleared(EPOCH, 0), Stored(EPOCH, 1, Tier.DEVICE, None, NAMES)]),
        REPORT,
    ],
)
def test_news_arrive_as_they_were_sent(news: News) -> None:
    sent = encode_news(news).SerializeToString()
    assert decode_news(pb.WatchCacheResponse.FromString(sent)) == news


def test_report_of_these_tests_says_something_in_every_field() -> None:
    """Otherwise a field that the codec left out would arrive as it was sent: as nothing."""
    empty = WorkerReport(summary=REPORT.summary)
    same = [
        field.name for field in fields(REPORT) if getattr(REPORT, field.name) == getattr(empty, field.name)
    ]
    assert same == ["summary"]


@pytest.mark.parametrize("place", [None, (EPOCH, 12)])
def test_places_arrive_as_they_were_sent(place: tuple[Epoch, int] | None) -> None:
    assert decode_place(pb.WatchCacheRequest(resume_from=encode_place(place))) == place


def test_a_worker_without_a_host_tier_tells_of_no_pool_there() -> None:
    """As those did that are older than host tiers; an empty pool would be another thing."""
    report = WorkerReport(summary=REPORT.summary, device_pool=REPORT.device_pool)
    message = encode_news(report)
    assert [tier.HasField("pool") for tier in message.report.tiers] == [True, False]
    assert decode_news(message) == report


def test_news_of_a_kind_that_is_not_known_are_left_out() -> None:
    assert decode_news(pb.WatchCacheResponse()) is None


STORED = pb.CacheEvent(stored=pb.BlocksStored(fingerprints=b"8 bytes!"))
TIERS = [pb.TierReport(), pb.TierReport()]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.WatchCacheResponse(part=pb.SnapshotPart(fingerprints=b"7 bytes")), "part.fingerprints"),
        (pb.WatchCacheResponse(part=pb.SnapshotPart(tier=9)), "part.tier"),  # type: ignore[arg-type]
        (
            pb.WatchCacheResponse(part=pb.SnapshotPart(place=pb.CachePlace(sequence=-1))),
            "part.place.sequence",
        ),
        (pb.WatchCacheResponse(events=pb.CacheEvents(first_sequence=1)), "events.events"),
        (
            pb.WatchCacheResponse(events=pb.CacheEvents(first_sequence=-1, events=[STORED])),
            "events.first_sequence",
        ),
        (
            pb.WatchCacheResponse(events=pb.CacheEvents(first_sequence=1, events=[STORED, pb.CacheEvent()])),
            "events.events[1]",
        ),
        (
            pb.WatchCacheResponse(
                events=pb.CacheEvents(first_sequence=1, events=[pb.CacheEvent(removed=pb.BlocksRemoved())])
            ),
            "events.events[0].removed.fingerprints",
        ),
        (
            pb.WatchCacheResponse(
                events=pb.CacheEvents(first_sequence=1, events=[pb.CacheEvent(cleared=pb.CacheCleared())])
            ),
            "events.events[0].cleared",
        ),
        (pb.WatchCacheResponse(report=pb.WorkerReport(tiers=TIERS[:1])), "report.tiers"),
        (
            pb.WatchCacheResponse(report=pb.WorkerReport(tiers=TIERS, queued_requests=-1)),
            "report.queued_requests",
        ),
        (pb.WatchCacheResponse(report=pb.WorkerReport(tiers=TIERS, own_requests=-1)), "report.own_requests"),
        (
            pb.WatchCacheResponse(report=pb.WorkerReport(tiers=TIERS, decode_step_ms=math.nan)),
            "report.decode_step_ms",
        ),
        (
            pb.WatchCacheResponse(report=pb.WorkerReport(tiers=TIERS, adapter_load_ms=math.inf)),
            "report.adapter_load_ms",
        ),
        (
            pb.WatchCacheResponse(report=pb.WorkerReport(tiers=TIERS, copy_ms_per_token=-1.0)),
            "report.copy_ms_per_token",
        ),
        (
            pb.WatchCacheResponse(report=pb.WorkerReport(tiers=TIERS, load_back_ms_per_token=1e300)),
            "report.load_back_ms_per_token",
        ),
        (
            pb.WatchCacheResponse(
                report=pb.WorkerReport(tiers=[pb.TierReport(pool=pb.PoolState(free_pages=-1)), *TIERS[:1]])
            ),
            "report.tiers[0].pool.free_pages",
        ),
        *(
            (
                pb.WatchCacheResponse(
                    report=pb.WorkerReport(tiers=[*TIERS[:1], pb.TierReport(pool=pb.PoolState(**{name: -1}))])
                ),
                f"report.tiers[1].pool.{name}",
            )
            for name in ("total_pages", "free_pages", "evictable_pages", "protected_pages")
        ),
        *(
            (
                pb.WatchCacheResponse(
                    report=pb.WorkerReport(
                        tiers=[
                            pb.TierReport(pool=pool) if index == tier else pb.TierReport() for index in (0, 1)
                        ]
                    )
                ),
                f"report.tiers[{tier}].pool",
            )
            for tier in (0, 1)
            for pool in (
                pb.PoolState(total_pages=5, free_pages=6),
                pb.PoolState(total_pages=5, free_pages=2, evictable_pages=2, protected_pages=2),
            )
        ),
        (
            pb.WatchCacheResponse(
                report=pb.WorkerReport(tiers=TIERS, prefill=pb.PrefillRate(quadratic_ms_per_token2=-1e-9))
            ),
            "report.prefill.quadratic_ms_per_token2",
        ),
    ],
)
def test_malformed_news_are_refused_by_the_name_of_their_field(
    message: pb.WatchCacheResponse, field: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        decode_news(message)
    assert refused.value.field == field
