"""Settings of every gRPC hop, in one place, so that both ends of a connection always agree.

Client keepalive must not be more eager than what servers permit, and a message that one hop accepts must fit the next; a
module of its own makes a disagreement impossible.
"""

from typing import Final, TypeAlias

import grpc
import grpc.aio

ChannelOptions: TypeAlias = tuple[tuple[str, int], ...]

MAX_MESSAGE_BYTES: Final = 64 * 2**20
"""Largest message any hop carries. A 16M-token packed prompt fits; a larger one is refused by gRPC before it is parsed."""

METADATA_BYTES: Final = 64 * 1024
"""Largest metadata: tickets travel there."""

KEEPALIVE_TIME_MS: Final = 30_000
"""A silent connection is probed this often, also while a long prefill sends nothing."""

KEEPALIVE_TIMEOUT_MS: Final = 10_000
MIN_PING_INTERVAL_MS: Final = 10_000
"""What a server tolerates: a third of the interval at which clients probe."""

MAX_PENDING_CALLS: Final = 65_536
"""Calls that have arrived and not begun. By default gRPC drops calls at random beyond 1,000, with a bare CANCELLED that nobody retries;
room for more than any server of ours answers at once leaves the refusal to its own limit, in words."""

FIRST_RECONNECT_MS: Final = 100
LONGEST_RECONNECT_MS: Final = 1_000
"""gRPC's own pause between attempts to connect grows to two minutes; a server that comes back must be noticed within seconds."""

CONNECT_TIMEOUT_MS: Final = 2_000
"""How long a caller that has another way waits for a connection to a worker; gRPC's own 20 s would be a request's whole patience."""

_COMMON: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", METADATA_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
)
CLIENT_OPTIONS: Final = (
    *_COMMON,
    ("grpc.enable_http_proxy", 0),  # a fleet's own addresses are never reached through a web proxy
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", FIRST_RECONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", LONGEST_RECONNECT_MS),
)
WORKER_OPTIONS: Final = (
    *CLIENT_OPTIONS,
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),  # which is how long an attempt to connect may take
)
"""Of a caller outside the fleet that streams from workers itself."""

SERVER_OPTIONS: Final = (
    *_COMMON,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    ("grpc.so_reuseport", 0),  # a second server on a port in use must fail, not share it
)


def open_channel(address: str, options: ChannelOptions = CLIENT_OPTIONS) -> grpc.aio.Channel:
    """An asyncio channel to ``host:port`` with this fleet's settings; connects on first use."""
    return grpc.aio.insecure_channel(address, options=options)


def open_sync_channel(address: str, options: ChannelOptions = CLIENT_OPTIONS) -> grpc.Channel:
    """A blocking channel to ``host:port`` with this fleet's settings; connects on first use."""
    return grpc.insecure_channel(address, options=options)


def join_address(host: str, port: int) -> str:
    """``host:port`` as gRPC takes it; IPv6 hosts get their brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
