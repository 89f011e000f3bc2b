"""What a pin may be, and who may have it. Pure.

A tenant has pins of its own, for its own prompts. An administrator has everybody's, and public ones, which every tenant matches. Whoever
may not name somebody is told so whether that somebody has any pins or not.
"""

from typing import Final

from prefixmesh.adapter_names import NAME_RULE, is_adapter_name
from prefixmesh.errors import AccessDeniedError, InvalidRequestError, NotFoundError
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2
from prefixmesh.requests import MAX_EXTRA_KEY_BYTES
from prefixmesh.router.pins.records import PinName
from prefixmesh.rpc.identity import Caller, check_tenant

MAX_PINS_PER_OWNER: Final = 256
"""A tenant has some system prompts, not hundreds: its budget is used up long before."""

MAX_PINS: Final = 1024
"""In all. Each is looked up in every worker's blocks, and judged, some times a second: 20 ms a round for so many of 2,000 tokens and four
workers."""

MAX_REPLICAS: Final = 4096
"""More workers than any fleet has: whoever means all says 0."""

MAX_TTL_MS: Final = 10 * 366 * 24 * 3_600_000
"""Ten years; a larger number is a mistake in units."""

RESERVED: Final = "@"
"""Owners that begin so are the fleet's own (heat)."""

EVERYBODY: Final = "*"


def named(caller: Caller, owner: str, name: str) -> PinName:
    """The pin that a caller means. Raises InvalidRequestError for a name that is none; NotFoundError for somebody else's, be it there or
    not, unless the caller is an administrator."""
    _check_name(name)
    pin = PinName(owner or caller.tenant, name)
    if pin.owner != caller.tenant and not caller.is_admin:
        raise not_found(pin)
    return pin


def not_found(pin: PinName) -> NotFoundError:
    """There is none of this name, or none that the caller may know of."""
    return NotFoundError(f"no pin {pin.name!r} of this owner")


def listed_owner(caller: Caller, owner: str) -> str | None:
    """Whose pins a caller wants listed; None: everybody's. Raises AccessDeniedError for any but its own, unless it is an administrator."""
    wanted = owner or caller.tenant
    if wanted != caller.tenant and not caller.is_admin:
        raise AccessDeniedError("only an administrator's key may list others' pins")
    # A tenant may be called so, too: its keys list what is its own.
    return None if wanted == EVERYBODY and caller.is_admin else wanted


def checked(caller: Caller, spec: pb.PinSpec) -> pb.PinSpec:
    """What a caller wishes, with owner and tenant as they are meant. O(prompt).

    Raises InvalidRequestError naming the field and the limit, AccessDeniedError for what only administrators may.
    """
    _check_name(spec.name)
    meant = pb.PinSpec()
    meant.CopyFrom(spec)
    meant.owner = spec.owner or caller.tenant
    if not spec.public:
        meant.tenant = spec.tenant or meant.owner
    _check_rights(caller, meant)
    _check_parties(meant)
    _check_bound("replicas", spec.replicas, MAX_REPLICAS)
    _check_bound("ttl_ms", spec.ttl_ms, MAX_TTL_MS)
    if spec.tier not in worker_control_pb2.Tier.values():
        raise InvalidRequestError("tier", f"must be device or host, got {spec.tier}")
    if spec.WhichOneof("prompt") is None:
        raise InvalidRequestError("prompt", "one of text, chat or tokens is required")
    return meant


def _check_rights(caller: Caller, spec: pb.PinSpec) -> None:
    if caller.is_admin:
        return
    if spec.public:
        raise AccessDeniedError("only an administrator's key may pin for everybody")
    if spec.owner != caller.tenant or spec.tenant != caller.tenant:
        raise AccessDeniedError("only an administrator's key may pin for another tenant")


def _check_parties(spec: pb.PinSpec) -> None:
    for field, who in (("owner", spec.owner), ("tenant", spec.tenant)):
        if not who and spec.public:
            continue
        try:
            check_tenant(who)
        except InvalidRequestError as error:
            raise InvalidRequestError(field, error.problem) from None
    if spec.owner.startswith(RESERVED) or spec.owner == EVERYBODY:
        raise InvalidRequestError(
            "owner", f"must not be {EVERYBODY!r} or begin with {RESERVED!r}, got {spec.owner!r}"
        )
    for field in ("tenant", "extra_key"):
        if spec.public and getattr(spec, field):
            raise InvalidRequestError(field, "a public pin is for everybody: it has none")
    size = len(spec.extra_key.encode())
    if size > MAX_EXTRA_KEY_BYTES:
        raise InvalidRequestError("extra_key", f"at most {MAX_EXTRA_KEY_BYTES} bytes allowed, got {size}")
    if spec.adapter and not is_adapter_name(spec.adapter):
        raise InvalidRequestError("adapter", f"must be {NAME_RULE}")


def _check_name(name: str) -> None:
    if not is_adapter_name(name):  # one rule for the names that operators give
        raise InvalidRequestError("name", f"must be {NAME_RULE}, got {name[:80]!r}")


def _check_bound(field: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise InvalidRequestError(field, f"must be 0 to {most}, got {value}")
