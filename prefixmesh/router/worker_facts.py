"""What a worker's answer to ``Describe`` says, as the core reads it; refused where nothing can be reckoned with it. Pure.

A worker is of our own fleet, and still may be of another version, or lie. A figure that is negative, or larger than anything can be, would
go into every decision; it is named instead, and the worker is not used.
"""

import math
from typing import Final

from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE
from prefixmesh.cache.hash_cache import HASH_BLOCK_SIZE
from prefixmesh.cache.ledger import LedgerRow
from prefixmesh.errors import InvalidRequestError
from prefixmesh.ids import Incarnation, WorkerId
from prefixmesh.proto.cache_counts import decode_cache_counts
from prefixmesh.proto.cache_news import MAX_RATE_MS, check_rate, decode_pool
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.router.worker_identity import Rates, WorkerFacts

MAX_UNIX_MS: Final = 253_402_300_799_999
"""The end of the year 9999: tickets expire by a worker's clock, and theirs are 64 bits."""

LEAST_TOKENS_PER_S: Final = 1000.0 / MAX_RATE_MS
"""What a rate in milliseconds can still tell."""

MAX_TOKENS: Final = 2**40
"""Of a context or a pool: a thousand times what the largest fleet's memory holds."""

MAX_UNIT: Final = 2**16
"""Tokens of a page or a block: a page of more is no page."""

MAX_REQUESTS: Final = 2**24
MAX_VERSION: Final = 2**16

_MOST: Final = {
    "context_length": MAX_TOKENS,
    "page_size": MAX_UNIT,
    "max_total_tokens": MAX_TOKENS,
    "max_running_requests": MAX_REQUESTS,
    "protocol_version": MAX_VERSION,
    "fingerprint_version": MAX_VERSION,
    "block_size": MAX_UNIT,
    "unix_ms": MAX_UNIX_MS,
}
"""The largest that each whole number of an answer may be; the smallest is 0, which means that it is not told."""

MAX_LAYOUT_CHARS: Final = 128
"""Of the name of a layout of KV: a digest in hexadecimal, of whatever length a later version takes."""

MAX_COUNT: Final = 2**62
"""Of what a cache has counted since it began: the sums of a few workers' must be countable, too."""


def facts_of(answer: pb.DescribeResponse) -> WorkerFacts:
    """What a worker's answer says, as the core reads it. Raises InvalidRequestError for figures that nothing can be reckoned with."""
    for field, most in _MOST.items():
        _check(field, getattr(answer, field), most)
    match_units = {"radix": answer.page_size, "hash": HASH_BLOCK_SIZE}
    return WorkerFacts(
        worker_id=WorkerId(answer.worker_id),
        incarnation=Incarnation(answer.incarnation),
        model=answer.model,
        model_revision=answer.model_revision,
        tokenizer_digest=answer.tokenizer_digest,
        protocol_version=answer.protocol_version,
        fingerprint_version=answer.fingerprint_version,
        context_length=answer.context_length,
        max_running_requests=answer.max_running_requests,
        match_unit=match_units.get(answer.prefix_cache, 0),
        page_size=answer.page_size,
        block_size=answer.block_size or DEFAULT_BLOCK_SIZE,
        total_tokens=answer.max_total_tokens,
        draining=answer.draining,
        pinned_adapters=frozenset(adapter.name for adapter in answer.adapters if adapter.pinned),
        resident_adapters=frozenset(adapter.digest for adapter in answer.adapters if adapter.resident),
        rates=Rates(
            _tokens_per_s(answer.rates.prefill_tokens_per_s),
            check_rate(answer.rates.decode_step_ms, "rates.decode_step_ms"),
            check_rate(answer.rates.prefill.linear_ms_per_token, "rates.prefill.linear_ms_per_token"),
            check_rate(answer.rates.prefill.quadratic_ms_per_token2, "rates.prefill.quadratic_ms_per_token2"),
            check_rate(answer.rates.load_back_ms_per_token, "rates.load_back_ms_per_token"),
            check_rate(answer.rates.adapter_load_ms, "rates.adapter_load_ms"),
        ),
        host_pool=decode_pool(answer.host_pool, "host_pool") if answer.HasField("host_pool") else None,
        tiers=_counts_by_name(answer.tiers, "tiers") if answer.HasField("tiers") else {},
        kv_layout=_checked_layout(answer.kv_layout),
        copies=_counts_by_name(answer.copies, "copies") if answer.HasField("copies") else {},
        cache=_counts_of(answer.cache) if answer.HasField("cache") else None,
        adapters={adapter.name: adapter.digest for adapter in answer.adapters},
    )


def _tokens_per_s(rate: float) -> float:
    if rate and not LEAST_TOKENS_PER_S <= rate < math.inf:
        raise InvalidRequestError(
            "rates.prefill_tokens_per_s",
            f"must be 0, or at least {LEAST_TOKENS_PER_S:g} and finite, got {rate}",
        )
    return rate


def _counts_by_name(message: pb.TierCounts | pb.CopyCounts, of: str) -> dict[str, int]:
    counts: dict[str, int] = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    for name, count in counts.items():
        _check(f"{of}.{name}", count, MAX_COUNT)
    return counts


def _checked_layout(digest: str) -> str:
    if len(digest) > MAX_LAYOUT_CHARS:
        raise InvalidRequestError(
            "kv_layout", f"must have at most {MAX_LAYOUT_CHARS} characters, got {len(digest)}"
        )
    return digest


def _counts_of(message: pb.CacheCounts) -> LedgerRow:
    row = decode_cache_counts(message)
    flat = {
        "cache.requests": row.requests,
        "cache.prompt_tokens": row.prompt_tokens,
        **{f"cache.hit_tokens.{name}": count for name, count in row.hit_tokens._asdict().items()},
        **{f"cache.miss_tokens.{name}": count for name, count in row.miss_tokens._asdict().items()},
    }
    for field, count in flat.items():
        _check(field, count, MAX_COUNT)
    return row


def _check(field: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise InvalidRequestError(field, f"must be 0 to {most}, got {value}")
