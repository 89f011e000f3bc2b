"""The news of a worker's cache on the wire (``WatchCache``): parts of a snapshot, batches of events, reports; both ways.

What arrives is checked here once, and a message that breaks the form raises InvalidRequestError with the field's name: to a reader that
is a broken stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from prefixmesh.cache.events import (
    CacheSummary,
    Cleared,
    Event,
    Removed,
    SnapshotPart,
    Stored,
    TierState,
)
from prefixmesh.cache.packed_names import NAME_BYTES, pack_names, unpack_names
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import InvalidRequestError
from prefixmesh.ids import Epoch, Fingerprint
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.worker_report import PagePool, WorkerReport

MAX_RATE_MS: Final = 1e9
"""Milliseconds: eleven days for one step or one token. No worker is so slow; who says so has divided by nearly nothing."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events that follow each other, all of one epoch; never empty."""

    events: Sequence[Event]


News = SnapshotPart | EventBatch | WorkerReport


def encode_news(news: News) -> pb.WatchCacheResponse:
    """One message of the stream. O(its fingerprints)."""
    match news:
        case SnapshotPart():
            return pb.WatchCacheResponse(part=_encode_part(news))
        case EventBatch():
            first = news.events[0]
            events = pb.CacheEvents(
                epoch=first.epoch, first_sequence=first.sequence, events=map(_encode_event, news.events)
            )
            return pb.WatchCacheResponse(events=events)
        case WorkerReport():
            return pb.WatchCacheResponse(report=_encode_report(news))


def decode_news(message: pb.WatchCacheResponse) -> News | None:
    """What a message says; None when it is of a kind that this version does not know. Raises InvalidRequestError."""
    match message.WhichOneof("news"):
        case "part":
            return _decode_part(message.part)
        case "events":
            return _decode_events(message.events)
        case "report":
            return _decode_report(message.report)
        case _:
            return None


def decode_place(message: pb.WatchCacheRequest) -> tuple[Epoch, int] | None:
    """Where a reader wants to go on; None for a snapshot. Raises InvalidRequestError."""
    if not message.HasField("resume_from"):
        return None
    place = message.resume_from
    return Epoch(place.epoch), _not_negative(place.sequence, "resume_from.sequence")


def encode_place(place: tuple[Epoch, int] | None) -> pb.CachePlace | None:
    """The other way round."""
    return None if place is None else pb.CachePlace(epoch=place[0], sequence=place[1])


def _encode_part(part: SnapshotPart) -> pb.SnapshotPart:
    return pb.SnapshotPart(
        place=pb.CachePlace(epoch=part.epoch, sequence=part.sequence),
        tier=_encode_tier(part.tier),
        fingerprints=pack_names(part.fingerprints),
        last=part.last,
    )


def _decode_part(part: pb.SnapshotPart) -> SnapshotPart:
    return SnapshotPart(
        Epoch(part.place.epoch),
        _not_negative(part.place.sequence, "part.place.sequence"),
        _decode_tier(part.tier, "part.tier"),
        _decode_names(part.fingerprints, "part.fingerprints"),
        part.last,
    )


def _encode_event(event: Event) -> pb.CacheEvent:
    match event:
        case Stored():
            stored = pb.BlocksStored(
                tier=_encode_tier(event.tier),
                parent=event.parent,
                fingerprints=pack_names(event.fingerprints),
            )
            return pb.CacheEvent(stored=stored)
        case Removed():
            removed = pb.BlocksRemoved(
                tier=_encode_tier(event.tier), fingerprints=pack_names(event.fingerprints)
            )
            return pb.CacheEvent(removed=removed)
        case Cleared():
            return pb.CacheEvent(cleared=pb.CacheCleared())


def _decode_events(batch: pb.CacheEvents) -> EventBatch:
    first = _not_negative(batch.first_sequence, "events.first_sequence")
    if not batch.events:
        raise InvalidRequestError("events.events", "a batch has at least one event")
    return EventBatch(
        [
            _decode_event(event, Epoch(batch.epoch), first + index, f"events.events[{index}]")
            for index, event in enumerate(batch.events)
        ]
    )


def _decode_event(event: pb.CacheEvent, epoch: Epoch, sequence: int, field: str) -> Event:
    match event.WhichOneof("event"):
        case "stored":
            stored = event.stored
            return Stored(
                epoch,
                sequence,
                _decode_tier(stored.tier, f"{field}.stored.tier"),
                Fingerprint(stored.parent) if stored.HasField("parent") else None,
                _decode_names(stored.fingerprints, f"{field}.stored.fingerprints", at_least=1),
            )
        case "removed":
            removed = event.removed
            return Removed(
                epoch,
                sequence,
                _decode_tier(removed.tier, f"{field}.removed.tier"),
                _decode_names(removed.fingerprints, f"{field}.removed.fingerprints", at_least=1),
            )
        case "cleared":
            if sequence:
                raise InvalidRequestError(f"{field}.cleared", f"begins an epoch, but is number {sequence}")
            return Cleared(epoch, sequence)
        case _:
            # To leave one out would be a gap that nobody sees.
            raise InvalidRequestError(field, "is of no kind that this version knows")


def _encode_report(report: WorkerReport) -> pb.WorkerReport:
    summary = report.summary
    tiers = [pb.TierReport(blocks=state.count, digest=state.digest) for state in summary.states]
    tiers[Tier.DEVICE].pool.CopyFrom(encode_pool(report.device_pool))
    if report.host_pool is not None:
        tiers[Tier.HOST].pool.CopyFrom(encode_pool(report.host_pool))
    return pb.WorkerReport(
        place=pb.CachePlace(epoch=summary.epoch, sequence=summary.sequence),
        tiers=tiers,
        running_requests=report.running_requests,
        queued_requests=report.queued_requests,
        uncached_tokens=report.uncached_tokens,
        uncached_squares=report.uncached_squares,
        answer_tokens=report.answer_tokens,
        token_interval_ms=report.token_interval_ms,
        prefill=pb.PrefillRate(
            linear_ms_per_token=report.prefill_ms_per_token,
            quadratic_ms_per_token2=report.prefill_ms_per_token2,
        ),
        decode_step_ms=report.decode_step_ms,
        load_back_ms_per_token=report.load_back_ms_per_token,
        copy_ms_per_token=report.copy_ms_per_token,
        pins_version=report.pins_version,
        rated_prefills=report.rated_prefills,
        adapter_load_ms=report.adapter_load_ms,
        resident_adapters=report.resident_adapters,
        draining=report.draining,
        unix_ms=report.unix_ms,
        accepted=report.accepted,
        prefilled=report.prefilled,
        ended=report.ended,
        own_requests=report.own_requests,
    )


def _decode_report(report: pb.WorkerReport) -> WorkerReport:
    if len(report.tiers) != len(Tier):
        raise InvalidRequestError("report.tiers", f"must be {len(Tier)}, got {len(report.tiers)}")
    states = tuple(
        TierState(_not_negative(tier.blocks, f"report.tiers[{index}].blocks"), tier.digest)
        for index, tier in enumerate(report.tiers)
    )
    device, host = report.tiers[Tier.DEVICE], report.tiers[Tier.HOST]
    return WorkerReport(
        summary=CacheSummary(
            Epoch(report.place.epoch), _not_negative(report.place.sequence, "report.place.sequence"), states
        ),
        device_pool=decode_pool(device.pool, "report.tiers[0].pool"),
        host_pool=decode_pool(host.pool, "report.tiers[1].pool") if host.HasField("pool") else None,
        running_requests=_not_negative(report.running_requests, "report.running_requests"),
        queued_requests=_not_negative(report.queued_requests, "report.queued_requests"),
        uncached_tokens=_not_negative(report.uncached_tokens, "report.uncached_tokens"),
        uncached_squares=_not_negative(report.uncached_squares, "report.uncached_squares"),
        answer_tokens=_not_negative(report.answer_tokens, "report.answer_tokens"),
        token_interval_ms=check_rate(report.token_interval_ms, "report.token_interval_ms"),
        prefill_ms_per_token=check_rate(
            report.prefill.linear_ms_per_token, "report.prefill.linear_ms_per_token"
        ),
        prefill_ms_per_token2=check_rate(
            report.prefill.quadratic_ms_per_token2, "report.prefill.quadratic_ms_per_token2"
        ),
        decode_step_ms=check_rate(report.decode_step_ms, "report.decode_step_ms"),
        load_back_ms_per_token=check_rate(report.load_back_ms_per_token, "report.load_back_ms_per_token"),
        copy_ms_per_token=check_rate(report.copy_ms_per_token, "report.copy_ms_per_token"),
        pins_version=report.pins_version,
        rated_prefills=_not_negative(report.rated_prefills, "report.rated_prefills"),
        adapter_load_ms=check_rate(report.adapter_load_ms, "report.adapter_load_ms"),
        resident_adapters=tuple(report.resident_adapters),
        draining=report.draining,
        unix_ms=report.unix_ms,
        accepted=tuple(report.accepted),
        prefilled=tuple(report.prefilled),
        ended=tuple(report.ended),
        own_requests=_not_negative(report.own_requests, "report.own_requests"),
    )


def encode_pool(pool: PagePool) -> pb.PoolState:
    """The wire form of a pool's pages."""
    return pb.PoolState(
        total_pages=pool.total_pages,
        free_pages=pool.free_pages,
        evictable_pages=pool.evictable_pages,
        protected_pages=pool.protected_pages,
    )


def decode_pool(pool: pb.PoolState, field: str) -> PagePool:
    """A pool's pages; raises InvalidRequestError for what no pool can be: who has some of more pages than there are would have room for
    ever, or less than none."""
    parts = {
        name: _not_negative(getattr(pool, name), f"{field}.{name}")
        for name in ("free_pages", "evictable_pages", "protected_pages")
    }
    total = _not_negative(pool.total_pages, f"{field}.total_pages")
    if sum(parts.values()) > total:
        raise InvalidRequestError(field, f"has {total} pages, and tells of {sum(parts.values())}")
    return PagePool(total_pages=total, **parts)


def _encode_tier(tier: Tier) -> pb.Tier:
    return pb.TIER_HOST if tier is Tier.HOST else pb.TIER_DEVICE


def _decode_tier(tier: int, field: str) -> Tier:
    try:
        return Tier(tier)
    except ValueError:
        raise InvalidRequestError(field, f"{tier} is no tier that this version knows") from None


def _decode_names(packed: bytes, field: str, *, at_least: int = 0) -> tuple[Fingerprint, ...]:
    if len(packed) % NAME_BYTES or len(packed) < at_least * NAME_BYTES:
        raise InvalidRequestError(
            field, f"must be whole names of {NAME_BYTES} bytes, at least {at_least}, got {len(packed)} bytes"
        )
    return unpack_names(packed)


def check_rate(value: float, field: str) -> float:
    """A measured rate as it is; raises InvalidRequestError. Costs are compared as they come, and means are kept as sums: one NaN would make
    every comparison false, and a number beyond all measure would leave nothing of the others in a sum."""
    if not 0.0 <= value <= MAX_RATE_MS:
        raise InvalidRequestError(field, f"must be 0 to {MAX_RATE_MS:g}, got {value}")
    return value


def _not_negative(number: int, field: str) -> int:
    if number < 0:
        raise InvalidRequestError(field, f"must not be negative, got {number}")
    return number
