"""What a fake worker is told to do wrong, and when: a list of faults, each in effect for a while. Pure.

As JSON::

    [{"kind": "delay", "at_s": 5, "for_s": 10, "amount": 200}, {"kind": "crash", "at_s": 20}]

| kind | while it is in effect |
| --- | --- |
| `delay` | every step takes ``amount`` milliseconds more |
| `crash` | the worker is dead: its process ends at once, in simulated time it is back, with nothing cached, when the fault is over |
| `wrong_cached` | answers say ``amount`` cached tokens more than were found (less where it is negative) |
| `wrong_sums` | reports carry a digest that is not the cache's |
| `silence` | nothing is told of the cache and the load; requests are served |
| `refuse` | the worker lives, and no request is taken in: each ends in ``status``, ``RESOURCE_EXHAUSTED`` or ``UNAVAILABLE``, at once |
| `stall_stream` | requests are taken in and told of up to ``amount`` tokens (0: of ``Started`` alone); what comes after waits until it is over |
| `copy_delay` | every copy between the device and the host that begins takes ``amount`` milliseconds more |
| `copy_fail` | every copy between the device and the host that begins fails |
| `stall` | the worker stands still, as after SIGSTOP: it does and answers nothing, and loses nothing. Simulated only |
| `clock` | the worker's clock is ``amount`` seconds ahead (behind where it is negative). Simulated only |

A process is stopped by a signal, and its clock is the machine's.
"""

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from prefixmesh.cache.events import CacheSummary, TierState
from prefixmesh.errors import ConfigError
from prefixmesh.worker.messages import Admitted, Ended, Refused, TokensOut

MAX_FAULTS: Final = 1000
"""A script is looked through at every step."""

WRONG_DIGEST_BITS: Final = 1
"""By which a digest that lies differs: one bit is enough to be found out, or nothing is."""


class FaultKind(enum.Enum):
    """See the module."""

    DELAY = "delay"
    CRASH = "crash"
    WRONG_CACHED = "wrong_cached"
    WRONG_SUMS = "wrong_sums"
    SILENCE = "silence"
    REFUSE = "refuse"
    STALL_STREAM = "stall_stream"
    COPY_DELAY = "copy_delay"
    COPY_FAIL = "copy_fail"
    STALL = "stall"
    CLOCK = "clock"


SIMULATED_ONLY: Final = frozenset({FaultKind.STALL, FaultKind.CLOCK})

REFUSALS: Final = ("RESOURCE_EXHAUSTED", "UNAVAILABLE")
"""By which status a live worker says no: it is full, or it takes nothing new. The first of them where none is given."""

MAY_BE_NEGATIVE: Final = frozenset({FaultKind.WRONG_CACHED, FaultKind.CLOCK})


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that goes wrong from ``at_s`` on, for ``for_s``."""

    kind: FaultKind
    at_s: float = 0.0
    """Seconds since the worker's start."""

    for_s: float = math.inf
    amount: float = 0.0
    status: str = ""
    """Of ``refuse`` alone."""

    @property
    def until_s(self) -> float:
        """When it is over."""
        return self.at_s + self.for_s


class FaultsNow(NamedTuple):
    """What is in effect at one moment; faults of one kind add up."""

    delay_ms: float = 0.0
    crashed: bool = False
    wrong_cached: int = 0
    wrong_sums: bool = False
    silent: bool = False
    refusal: str = ""
    """The status that requests are refused with; empty where they are taken in."""

    stream_stops_at: float = math.inf
    """No more tokens of an answer than this are told of for now."""

    copy_delay_ms: float = 0.0
    copies_fail: bool = False
    stalled: bool = False
    """Known to the worker alone: one that is restarted stands still no longer."""

    clock_ahead_s: float = 0.0

    def cached_tokens(self, found: int, prompt_tokens: int) -> int:
        """What is told of a prompt in which ``found`` tokens were cached."""
        return max(0, min(found + self.wrong_cached, prompt_tokens))

    def admitted(self, event: Admitted, prompt_tokens: int) -> Admitted:
        """What is told of an admission: a lie about all tiers together leaves to the host what it can."""
        found = self.cached_tokens(event.cached_tokens, prompt_tokens)
        return msgspec.structs.replace(event, cached_tokens=found, host_tokens=min(event.host_tokens, found))

    def summary(self, true: CacheSummary) -> CacheSummary:
        """What is told of the cache's sums."""
        if not self.wrong_sums:
            return true
        states = (
            TierState(state.count, state.digest ^ WRONG_DIGEST_BITS if not tier else state.digest)
            for tier, state in enumerate(true.states)
        )
        return CacheSummary(true.epoch, true.sequence, tuple(states))


NO_FAULTS: Final = FaultsNow()


class FaultScript:
    """The faults of one worker."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults = tuple(faults)

    def at(self, now_s: float) -> FaultsNow:
        """What is in effect ``now_s`` seconds after the worker's start. O(faults)."""
        active = [fault for fault in self.faults if fault.at_s <= now_s < fault.until_s]
        if not active:
            return NO_FAULTS
        kinds = {fault.kind for fault in active}
        return FaultsNow(
            delay_ms=_total(active, FaultKind.DELAY),
            crashed=FaultKind.CRASH in kinds,
            wrong_cached=round(_total(active, FaultKind.WRONG_CACHED)),
            wrong_sums=FaultKind.WRONG_SUMS in kinds,
            silent=FaultKind.SILENCE in kinds,
            refusal=next((fault.status for fault in active if fault.kind is FaultKind.REFUSE), ""),
            stream_stops_at=min(
                (fault.amount for fault in active if fault.kind is FaultKind.STALL_STREAM), default=math.inf
            ),
            copy_delay_ms=_total(active, FaultKind.COPY_DELAY),
            copies_fail=FaultKind.COPY_FAIL in kinds,
            clock_ahead_s=_total(active, FaultKind.CLOCK),
        )

    def __repr__(self) -> str:
        return f"FaultScript({', '.join(f'{f.kind.value} at {f.at_s} s' for f in self.faults) or 'none'})"


def parse_faults(text: bytes) -> FaultScript:
    """A script for a process, from its JSON. Raises ConfigError naming the fault by its place, the field and the limit."""
    try:
        value = msgspec.json.decode(text) if text.strip() else []
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"faults: not JSON: {error}") from error
    if not isinstance(value, list) or len(value) > MAX_FAULTS:
        raise ConfigError(f"faults: must be a list of at most {MAX_FAULTS}")
    return FaultScript(_parse_fault(one, f"faults[{place}]") for place, one in enumerate(value))


def told_tokens(event: Admitted | TokensOut | Ended | Refused, resumed_tokens: int) -> float:
    """How many tokens of an answer would have been told with this event: an end is past all of them."""
    match event:
        case TokensOut():
            return event.position + len(event.token_ids) - resumed_tokens
        case Ended():
            return math.inf if event.reason in ("stop", "length") else 0
        case _:
            return 0


def _parse_fault(value: Any, where: str) -> Fault:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: must be an object")
    unknown = value.keys() - {"kind", "at_s", "for_s", "amount", "status"}
    if unknown:
        raise ConfigError(f"{where}: unknown field {min(unknown)!r}")
    try:
        kind = FaultKind(value.get("kind"))
    except ValueError as error:
        kinds = ", ".join(kind.value for kind in FaultKind if kind not in SIMULATED_ONLY)
        raise ConfigError(f"{where}.kind: must be one of {kinds}, got {value.get('kind')!r:.40}") from error
    if kind in SIMULATED_ONLY:
        raise ConfigError(f"{where}.kind: {kind.value} is for simulated workers; stop a process with SIGSTOP")
    least_amount = -math.inf if kind in MAY_BE_NEGATIVE else 0.0
    return Fault(
        kind=kind,
        at_s=_number(value, "at_s", 0.0, where, least=0.0),
        for_s=_number(value, "for_s", math.inf, where, least=0.0),
        amount=_number(value, "amount", 0.0, where, least=least_amount),
        status=_status(value, kind, where),
    )


def _status(value: dict[str, Any], kind: FaultKind, where: str) -> str:
    if kind is not FaultKind.REFUSE:
        if "status" in value:
            raise ConfigError(f"{where}.status: is for refuse alone")
        return ""
    status = value.get("status", REFUSALS[0])
    if status not in REFUSALS:
        raise ConfigError(f"{where}.status: must be one of {', '.join(REFUSALS)}, got {status!r:.40}")
    return str(status)


def _number(value: dict[str, Any], field: str, default: float, where: str, *, least: float) -> float:
    given = value.get(field, default)
    if not isinstance(given, int | float) or isinstance(given, bool) or not given >= least:
        raise ConfigError(f"{where}.{field}: must be a number from {least} on, got {given!r:.40}")
    return float(given)


def _total(active: list[Fault], kind: FaultKind) -> float:
    return sum(fault.amount for fault in active if fault.kind is kind)
