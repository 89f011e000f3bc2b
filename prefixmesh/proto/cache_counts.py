"""A ledger's counts on the wire: from a worker to its router, and from there to operators."""

from prefixmesh.cache.ledger import Hits, LedgerRow, Misses
from prefixmesh.proto.v1 import inference_pb2, worker_control_pb2


def encode_cache_counts(row: LedgerRow) -> worker_control_pb2.CacheCounts:
    """The wire form of a row."""
    return worker_control_pb2.CacheCounts(
        requests=row.requests,
        prompt_tokens=row.prompt_tokens,
        hit_tokens=inference_pb2.CachedTokens(**row.hit_tokens._asdict()),
        miss_tokens=worker_control_pb2.MissTokens(**row.miss_tokens._asdict()),
    )


def decode_cache_counts(message: worker_control_pb2.CacheCounts) -> LedgerRow:
    """The row of a message; what another version counts beside it is left out."""
    hits, misses = message.hit_tokens, message.miss_tokens
    return LedgerRow(
        message.requests,
        message.prompt_tokens,
        Hits(*(getattr(hits, tier) for tier in Hits._fields)),
        Misses(misses.never_seen, misses.evicted, misses.other_namespace, misses.tail),
    )
