"""Where a client's calls go and who they come from: address, credentials, deadline, and what a failed call means."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc

from prefixmesh import fleet_state
from prefixmesh.addresses import is_address
from prefixmesh.client.checks import check_real
from prefixmesh.client.ride import Broken, Failure
from prefixmesh.errors import DeadlineError, InvalidRequestError, PrefixmeshError, UnavailableError
from prefixmesh.rpc import status
from prefixmesh.rpc.identity import AUTHORIZATION_METADATA, TENANT_METADATA, check_tenant

MAX_TIMEOUT_S: Final = 365 * 24 * 3600.0
"""A longer deadline is a mistake in units, and gRPC's clock overflows at some 292 years."""

_STATUS_DETAILS: Final = "grpc-status-details-bin"
_NOT_REACHED: Final = ("failed to connect", "DNS resolution failed")
"""How gRPC's own words begin where no connection came about, so that nothing was sent."""

_NOT_READ: Final = "Exception deserializing response"
"""And where its blocking form met a message that it cannot read."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where calls go, who they come from, how long they may take."""

    address: str
    metadata: tuple[tuple[str, str], ...]
    default_timeout_s: float | None

    def __repr__(self) -> str:
        return f"Target({self.address})"  # the metadata holds the API key

    def timeout_s(self, given: float | None) -> float | None:
        """The deadline of a call: the one given, else the client's."""
        return self.default_timeout_s if given is None else _check_timeout(given)

    def error(self, failure: grpc.RpcError) -> PrefixmeshError:
        """What a failed call means, as an error of our tree."""
        error = status.from_rpc_error(failure)
        call: Any = failure
        sent_by_server = _is_sent_by_server(call)
        if isinstance(error, DeadlineError) and not sent_by_server:
            return DeadlineError(f"{self.address} did not answer in full within the timeout")
        if not isinstance(error, UnavailableError) or sent_by_server:
            return error
        details = str(error)
        if details.startswith(_NOT_REACHED):
            return UnavailableError(
                f"nobody answers at {self.address} ({_cause(details)}); start a fleet with: prefixmesh up"
            )
        return UnavailableError(f"the connection to {self.address} broke: {details}")

    def judge(self, failure: grpc.RpcError, worker: str = "") -> Broken:
        """What a failed call means for its request; ``worker`` is where it went, if not to this target."""
        target = dataclasses.replace(self, address=worker) if worker else self
        return Broken(target.error(failure), _failure(failure))


def _failure(failure: grpc.RpcError) -> Failure:
    call: Any = failure
    code, sent_by_server = call.code(), _is_sent_by_server(call)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Failure.CALLERS if sent_by_server else Failure.UNREACHED
    if sent_by_server:
        refusals = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)
        return Failure.REFUSED if code in refusals else Failure.CALLERS
    if code is grpc.StatusCode.INTERNAL and (call.details() or "").startswith(_NOT_READ):
        return Failure.CALLERS  # it came whole: another attempt's would be no better
    if code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL):
        # A server that is torn down, or a proxy between, resets streams. Whoever cancels here knows it.
        return Failure.DIED
    if code is not grpc.StatusCode.UNAVAILABLE:
        return Failure.CALLERS
    return Failure.UNREACHED if (call.details() or "").startswith(_NOT_REACHED) else Failure.DIED


def _is_sent_by_server(call: Any) -> bool:
    return any(key == _STATUS_DETAILS for key, _ in call.trailing_metadata() or ())


class TimeLeft:
    """What is left of the time that several calls have together."""

    def __init__(self, timeout_s: float | None, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends_at_s = None if timeout_s is None else clock() + timeout_s

    def __call__(self) -> float | None:
        """Seconds that the next call may take; None without a bound. Raises DeadlineError when none are left."""
        if self._ends_at_s is None:
            return None
        left_s = self._ends_at_s - self._clock()
        if left_s <= 0:
            raise DeadlineError("the timeout passed before all calls were sent")
        return left_s

    @property
    def left_s(self) -> float | None:
        """What is left, at least 0; None without a bound."""
        return None if self._ends_at_s is None else max(0.0, self._ends_at_s - self._clock())


def make_target(
    address: str | None, api_key: str | None, tenant: str | None, timeout_s: float | None
) -> Target:
    """Check a client's settings; without an address, the router of the fleet that ``prefixmesh up`` remembers.

    Raises InvalidRequestError, and NotFoundError when no address is given and no fleet is remembered.
    """
    metadata: list[tuple[str, str]] = []
    if api_key is not None:
        # Never quoted in the message: it is a secret. gRPC headers carry visible ASCII only.
        if not api_key or not api_key.isascii() or not api_key.isprintable() or " " in api_key:
            raise InvalidRequestError("api_key", "must be visible ASCII characters without spaces")
        metadata.append((AUTHORIZATION_METADATA, f"Bearer {api_key}"))
    if tenant is not None:
        if not check_tenant(tenant).isascii() or tenant != tenant.strip():
            raise InvalidRequestError("tenant", f"must be ASCII without outer spaces, got {tenant!r}")
        metadata.append((TENANT_METADATA, tenant))
    return Target(
        _check_address(address if address is not None else fleet_state.load().router),
        tuple(metadata),
        None if timeout_s is None else _check_timeout(timeout_s),
    )


def _check_timeout(timeout_s: float) -> float:
    value = check_real("timeout_s", timeout_s)
    if not 0.0 < value <= MAX_TIMEOUT_S:  # NaN fails it too
        raise InvalidRequestError(
            "timeout_s", f"must be above 0 and at most {MAX_TIMEOUT_S:.0f} seconds, got {value}"
        )
    return value


def _check_address(address: str) -> str:
    if not is_address(address):
        raise InvalidRequestError("address", f"must be host:port, got {address!r}")
    return address


def _cause(details: str) -> str:
    """The last part of gRPC's long story: ``connect: Connection refused (111)`` and the like."""
    return details.rsplit(": ", 1)[-1]
