"""What a ``Warm`` call asks for, read from its message and checked: every field, with its limit, before anything is begun. Pure."""

from dataclasses import dataclass
from typing import Final

from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE
from prefixmesh.cache.namespace import NAMESPACE_BYTES
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import InvalidRequestError, UnsupportedError
from prefixmesh.ids import Incarnation
from prefixmesh.kv_source import KvSource
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.tokens import TOKEN_BYTES, unpack
from prefixmesh.worker.messages import EngineInfo
from prefixmesh.worker.prefix_messages import PrefixName

MAX_PIN_ID_BYTES: Final = 512
"""As a pin's owner and name, percent-encoded, may take; a worker keeps thousands of them."""

MAX_OWNER_CHARS: Final = 128
"""As a tenant's name may have, and some more for owners that are no tenants."""

MAX_TTL_MS: Final = 100 * 366 * 24 * 3_600_000
"""A century: what is left of it can be told in milliseconds at any time, which is not so of all that the field can say."""

MAX_SOURCES: Final = 16
"""More workers than are worth being tried for one prefix: each that has gone costs a connection."""

MAX_ADDRESS_CHARS: Final = 256
_MS_PER_S: Final = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class PinOrder:
    """What is to be kept, by which name, and for how long."""

    pin_id: str
    owner: str
    tier: Tier
    ttl_s: float
    """0: until it is let go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmOrder:
    """What is to be made warm."""

    prefix: PrefixName
    """Whole pages. Without tokens, only the adapter is to be resident."""

    adapter_digest: str
    pin: PinOrder | None
    sources: tuple[KvSource, ...]
    copy_only: bool


def read_order(message: pb.WarmRequest, info: EngineInfo) -> WarmOrder:
    """The order in ``message``, for the engine that ``info`` describes. O(tokens). Raises InvalidRequestError with the field and its limit,
    and UnsupportedError where this engine keeps no prefixes."""
    adapter_digest = message.prefix.adapter_digest
    pin = read_pin(message.pin) if message.HasField("pin") else None
    if not message.prefix.token_ids:
        if not adapter_digest:
            raise InvalidRequestError("prefix.token_ids", "must not be empty, unless an adapter is named")
        if pin is not None:
            raise InvalidRequestError("pin", "takes tokens: an adapter is pinned by LoadAdapter")
        prefix = PrefixName(b"", b"")
    else:
        if info.prefix_cache != "radix":
            raise UnsupportedError(
                f"prefix_cache={info.prefix_cache} keeps no prefixes; start the worker with radix"
            )
        prefix = read_prefix(message.prefix, info)
    if len(message.sources) > MAX_SOURCES:
        raise InvalidRequestError("sources", f"at most {MAX_SOURCES} allowed, got {len(message.sources)}")
    sources = tuple(_source(source, f"sources[{index}]") for index, source in enumerate(message.sources))
    return WarmOrder(
        prefix=prefix, adapter_digest=adapter_digest, pin=pin, sources=sources, copy_only=message.copy_only
    )


def read_prefix(message: pb.Prefix, info: EngineInfo) -> PrefixName:
    """The prefix in ``message``, cut to whole pages. O(tokens). Raises InvalidRequestError."""
    page_size, context = info.page_size, info.context_length
    if len(message.namespace) != NAMESPACE_BYTES:
        raise InvalidRequestError(
            "prefix.namespace", f"must be {NAMESPACE_BYTES} bytes, got {len(message.namespace)}"
        )
    packed = message.token_ids
    if len(packed) % TOKEN_BYTES:
        raise InvalidRequestError(
            "prefix.token_ids",
            f"must be packed uint32, got {len(packed)} bytes, which is no multiple of {TOKEN_BYTES}",
        )
    tokens = len(packed) // TOKEN_BYTES
    if not page_size <= tokens <= context:
        raise InvalidRequestError(
            "prefix.token_ids", f"must be from a page of {page_size} to {context} tokens, got {tokens}"
        )
    if int(unpack(packed).max()) >= info.vocab_size:
        raise InvalidRequestError(
            "prefix.token_ids", f"ids must be below the vocabulary's size, {info.vocab_size}"
        )
    whole = tokens // page_size * page_size
    boundary, tail = _boundary(message, whole, page_size)
    return PrefixName(message.namespace, packed[: whole * TOKEN_BYTES], boundary, tail)


def read_pin(message: pb.WorkerPin) -> PinOrder:
    """The pin in ``message``. Raises InvalidRequestError."""
    check_pin_id("pin.pin_id", message.pin_id)
    if not 1 <= len(message.owner) <= MAX_OWNER_CHARS:
        raise InvalidRequestError(
            "pin.owner", f"must be 1 to {MAX_OWNER_CHARS} characters, got {len(message.owner)}"
        )
    tiers = [int(tier) for tier in Tier]
    if message.tier not in tiers:
        raise InvalidRequestError("pin.tier", f"must be one of {tiers}, got {message.tier}")
    if not 0 <= message.ttl_ms <= MAX_TTL_MS:
        raise InvalidRequestError("pin.ttl_ms", f"must be from 0 to {MAX_TTL_MS}, got {message.ttl_ms}")
    return PinOrder(
        pin_id=message.pin_id,
        owner=message.owner,
        tier=Tier(message.tier),
        ttl_s=message.ttl_ms / _MS_PER_S,
    )


def check_pin_id(field: str, pin_id: str) -> None:
    """Raise InvalidRequestError for what cannot be a pin's id."""
    size = len(pin_id.encode())
    if not 1 <= size <= MAX_PIN_ID_BYTES:
        raise InvalidRequestError(field, f"must be 1 to {MAX_PIN_ID_BYTES} bytes, got {size}")


def _boundary(message: pb.Prefix, whole: int, page_size: int) -> tuple[int, bytes]:
    """Where the public part ends, and the namespace behind it; 0 where all of what is kept is in one."""
    boundary, tail = message.boundary_tokens, message.tail_namespace
    if boundary < 0 or boundary % page_size or boundary % DEFAULT_BLOCK_SIZE:
        raise InvalidRequestError(
            "prefix.boundary_tokens",
            f"must be whole pages of {page_size} and blocks of {DEFAULT_BLOCK_SIZE}, got {boundary}",
        )
    if len(tail) != (NAMESPACE_BYTES if boundary else 0):
        raise InvalidRequestError(
            "prefix.tail_namespace",
            f"must be {NAMESPACE_BYTES} bytes behind a boundary and empty without one, got {len(tail)}",
        )
    return (boundary, tail) if boundary < whole else (0, b"")


def _source(message: pb.KvSource, field: str) -> KvSource:
    if not 1 <= len(message.address) <= MAX_ADDRESS_CHARS:
        raise InvalidRequestError(
            f"{field}.address", f"must be 1 to {MAX_ADDRESS_CHARS} characters, got {len(message.address)}"
        )
    for name in ("tokens", "boundary_tokens"):
        if (value := getattr(message, name)) < 0:
            raise InvalidRequestError(f"{field}.{name}", f"must not be negative, got {value}")
    return KvSource(
        address=message.address,
        incarnation=Incarnation(message.incarnation),
        tokens=message.tokens,
        boundary_tokens=message.boundary_tokens,
    )
