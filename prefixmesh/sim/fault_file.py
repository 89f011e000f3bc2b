"""Scripts of a fleet's mishaps as JSON: written by a person, or as a seed has drawn them. Pure.

::

    {"workers": 3, "routers": 2, "faults": [
      {"of": "worker-0", "kind": "crash", "at_s": 2, "for_s": 0.5},
      {"of": "worker-1", "kind": "delay", "at_s": 1, "for_s": 4, "amount": 200},
      {"of": "worker-1", "kind": "refuse", "at_s": 3, "for_s": 1, "status": "UNAVAILABLE"},
      {"of": "router-0", "kind": "crash", "at_s": 4, "for_s": 1},
      {"of": ["router-0", "worker-2"], "kind": "cut_silently", "at_s": 1, "for_s": 5},
      {"of": "network", "kind": "bad", "at_s": 0, "for_s": 3},
      {"of": "store", "kind": "crash", "at_s": 2, "for_s": 10},
      {"of": ["router-1", "store"], "kind": "cut", "at_s": 2, "for_s": 10}]}

What a worker's kinds mean says ``faults``, what the others mean ``fault_script``. ``workers`` and ``routers`` may be left out: then the seed says how
many there are, and there are at least as many as are named. All the rest of a run is the seed's. Crashes, stalls and
cuts of one worker, router or link that overlap are over when the first is; of the store, when the last is.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from prefixmesh.errors import ConfigError
from prefixmesh.sim.fault_script import (
    STORE,
    FleetScript,
    LinkFault,
    LinkFaultKind,
    RouterCrash,
    StoreFault,
    StoreFaultKind,
)
from prefixmesh.sim.faults import MAX_FAULTS, MAY_BE_NEGATIVE, REFUSALS, Fault, FaultKind, FaultScript

NETWORK: Final = "network"

MOST_WORKERS: Final = 16
MOST_ROUTERS: Final = 4
"""Of a run's forty requests some are to come to each."""

LONGEST_S: Final = 120.0
"""By then all is over: requests come in the first seconds and wait for forty, so that whatever is later meets nobody."""

MOST_DIGITS: Final = 4
"""Of a name's number: more than there is a worker of."""

LARGEST: Final = 1e6
"""Of amounts: ten minutes a step, all tokens of a prompt, a clock that is days off."""

_FIELDS: Final = frozenset({"of", "kind", "at_s", "for_s", "amount", "status"})
_WITH_AMOUNT: Final = frozenset({"delay", "wrong_cached", "stall_stream", "copy_delay", "clock"})
_LINK_KINDS: Final = (LinkFaultKind.CUT.value, LinkFaultKind.CUT_SILENTLY.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenScript:
    """A file's mishaps, before it is known of how large a fleet."""

    workers: int | None
    routers: int | None
    """None: as many as the seed says, and at least as many as are named."""

    faults: tuple[tuple[str | tuple[str, str], Fault | RouterCrash | LinkFault | StoreFault], ...]
    """Each with whom it is of, in the file's order."""

    def names(self, workers: int, routers: int) -> tuple[list[str], list[str]]:
        """Of workers and routers, where a seed has drawn that there are so many."""
        return (
            _names("worker", self.workers or max(workers, self._most("worker"))),
            _names("router", self.routers or max(routers, self._most("router"))),
        )

    def of_fleet(self, workers: list[str], routers: list[str]) -> FleetScript:
        """The script for a fleet of these, which has all that it names."""
        of_workers: dict[str, list[Fault]] = {name: [] for name in workers}
        for whose, one in self.faults:
            if isinstance(one, Fault) and isinstance(whose, str):
                of_workers[whose].append(one)
        rest = [one for _, one in self.faults]
        return FleetScript(
            workers={name: FaultScript(some) for name, some in of_workers.items()},
            routers=tuple(one for one in rest if isinstance(one, RouterCrash)),
            links=tuple(one for one in rest if isinstance(one, LinkFault)),
            router_names=tuple(routers),
            store=tuple(one for one in rest if isinstance(one, StoreFault)),
        )

    def _most(self, kind: str) -> int:
        named = [name for whose, _ in self.faults for name in ([whose] if isinstance(whose, str) else whose)]
        return max((_number_of(name, kind) + 1 for name in named), default=0)


def as_object(script: FleetScript) -> dict[str, Any]:
    """A script as the JSON that gives it again, the first mishap first."""
    faults = [
        {"of": name, **_times(one), **_more(one)}
        for name, of_worker in script.workers.items()
        for one in of_worker.faults
    ]
    faults += [
        {"of": one.name, "kind": "crash", "at_s": one.at_s, "for_s": one.for_s} for one in script.routers
    ]
    faults += [
        {"of": NETWORK if one.kind is LinkFaultKind.BAD else list(one.ends), **_times(one)}
        for one in script.links
    ]
    faults += [{"of": STORE, **_times(one), **_more(one)} for one in script.store]
    return {
        "workers": len(script.workers),
        "routers": len(script.router_names),
        "faults": sorted(faults, key=lambda one: one["at_s"]),
    }


def parse_script(text: str, name: str) -> WrittenScript:
    """A script from its JSON. Raises ConfigError with ``name`` and the line of what is no JSON, or the place of a mishap, its field and the limit."""
    where = f"faults {name}"
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}, line {error.lineno}: not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: must be an object with a list of faults")
    _refuse_unknown(value, frozenset({"workers", "routers", "faults"}), where)
    faults = value.get("faults")
    if not isinstance(faults, list) or not 1 <= len(faults) <= MAX_FAULTS:
        raise ConfigError(f"{where}: faults must be a list of 1 to {MAX_FAULTS}")
    counts = {
        "worker": _count(value, "workers", MOST_WORKERS, where),
        "router": _count(value, "routers", MOST_ROUTERS, where),
    }
    read = tuple(_parse(one, f"{where}: faults[{place}]", counts) for place, one in enumerate(faults))
    return WrittenScript(workers=counts["worker"], routers=counts["router"], faults=read)


Counts = Mapping[str, int | None]


def _parse(
    value: Any, where: str, counts: Counts
) -> tuple[str | tuple[str, str], Fault | RouterCrash | LinkFault | StoreFault]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: must be an object")
    _refuse_unknown(value, _FIELDS, where)
    whose = _whose(value.get("of"), f"{where}.of", counts)
    kind = _kind(value.get("kind"), whose, f"{where}.kind")
    at_s = _number(value, "at_s", where, 0.0, LONGEST_S)
    is_at_once = kind is StoreFaultKind.FLUSH
    if is_at_once and value.get("for_s", 0) != 0:
        raise ConfigError(f"{where}.for_s: a flush is done at once, leave it out")
    for_s = 0.0 if is_at_once else _number(value, "for_s", where, 0.0, LONGEST_S - at_s)
    if "status" in value and kind is not FaultKind.REFUSE:
        raise ConfigError(f"{where}.status: is for refuse alone")
    if "amount" in value and str(kind.value) not in _WITH_AMOUNT:
        raise ConfigError(f"{where}.amount: is for {', '.join(sorted(_WITH_AMOUNT))} alone")
    match kind:
        case LinkFaultKind():
            ends = ("", "") if isinstance(whose, str) else whose
            return whose, LinkFault(kind=kind, at_s=at_s, for_s=for_s, ends=ends)
        case StoreFaultKind():
            return whose, StoreFault(kind=kind, at_s=at_s, for_s=for_s, amount=_amount(value, where, 0.0))
        case FaultKind() if str(whose).startswith("router"):
            return whose, RouterCrash(name=str(whose), at_s=at_s, for_s=for_s)
    least = -LARGEST if kind in MAY_BE_NEGATIVE else 0.0
    amount, status = _amount(value, where, least), _status(value, kind, where)
    return whose, Fault(kind=kind, at_s=at_s, for_s=for_s, amount=amount, status=status)


def _whose(value: Any, where: str, counts: Counts) -> str | tuple[str, str]:
    """A name, or the two ends of a link."""
    if value in (NETWORK, STORE):
        return str(value)
    if isinstance(value, list):
        if len(value) != 2 or not isinstance(value[0], str) or not value[0].startswith("router"):
            raise ConfigError(f"{where}: a link is of a router and a worker, or a router and the store")
        router = _member(value[0], where, counts)
        if value[1] == STORE:
            return router, STORE
        return router, _member(value[1], where, counts, "worker")
    return _member(value, where, counts)


def _member(value: Any, where: str, counts: Counts, only: str = "") -> str:
    """A worker's or router's name, of whom there may be so many."""
    for kind, most in (("worker", MOST_WORKERS), ("router", MOST_ROUTERS)):
        number = _number_of(value, kind)
        if number < 0 or only not in ("", kind):
            continue
        limit = counts[kind] or most
        if number >= limit:
            raise ConfigError(f"{where}: must be {kind}-0 to {kind}-{limit - 1}, got {value!r:.40}")
        return f"{kind}-{number}"
    wanted = (
        f"{only}-N" if only else f"worker-N, router-N, [router-N, worker-N or {STORE}], {NETWORK} or {STORE}"
    )
    raise ConfigError(f"{where}: must be {wanted}, got {value!r:.40}")


def _kind(value: Any, whose: str | tuple[str, str], where: str) -> FaultKind | LinkFaultKind | StoreFaultKind:
    """What can happen to whom."""
    make: Callable[[Any], FaultKind | LinkFaultKind | StoreFaultKind]
    if isinstance(whose, tuple):
        make, names = LinkFaultKind, list(_LINK_KINDS)
    elif whose == NETWORK:
        make, names = LinkFaultKind, [LinkFaultKind.BAD.value]
    elif whose == STORE:
        make, names = StoreFaultKind, [kind.value for kind in StoreFaultKind]
    elif whose.startswith("router"):
        make, names = FaultKind, [FaultKind.CRASH.value]
    else:
        make, names = FaultKind, [kind.value for kind in FaultKind]
    if value not in names:
        raise ConfigError(f"{where}: must be one of {', '.join(names)}, got {value!r:.40}")
    return make(value)


def _number(value: Mapping[str, Any], field: str, where: str, least: float, most: float) -> float:
    given = value.get(field)
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not least <= given <= most:  # type: ignore[operator]
        raise ConfigError(f"{where}.{field}: must be a number from {least:g} to {most:g}, got {given!r:.40}")
    return float(given)  # type: ignore[arg-type]


def _amount(value: Mapping[str, Any], where: str, least: float) -> float:
    return _number({"amount": 0.0, **value}, "amount", where, least, LARGEST)


def _status(value: Mapping[str, Any], kind: FaultKind, where: str) -> str:
    if kind is not FaultKind.REFUSE:
        return ""
    status = value.get("status", REFUSALS[0])
    if status not in REFUSALS:
        raise ConfigError(f"{where}.status: must be one of {', '.join(REFUSALS)}, got {status!r:.40}")
    return str(status)


def _count(value: Mapping[str, Any], field: str, most: int, where: str) -> int | None:
    given = value.get(field)
    if given is None:
        return None
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= most:
        raise ConfigError(f"{where}: {field} must be from 1 to {most}, got {given!r:.40}")
    return given


def _refuse_unknown(value: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    unknown = value.keys() - known
    if unknown:
        raise ConfigError(f"{where}: unknown field {min(unknown)!r:.40}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _number_of(name: Any, kind: str) -> int:
    """Which worker or router of its kind a name is; -1 where it is none."""
    number = name.removeprefix(f"{kind}-") if isinstance(name, str) else ""
    is_one = number.isascii() and number.isdigit() and len(number) <= MOST_DIGITS
    return int(number) if is_one and str(int(number)) == number else -1


def _names(kind: str, count: int) -> list[str]:
    return [f"{kind}-{number}" for number in range(count)]


def _times(one: Fault | LinkFault | StoreFault) -> dict[str, Any]:
    return {"kind": one.kind.value, "at_s": one.at_s, "for_s": one.for_s}


def _more(one: Fault | StoreFault) -> dict[str, Any]:
    amount = int(one.amount) if float(one.amount).is_integer() else one.amount
    told: dict[str, Any] = {"amount": amount} if amount else {}
    return told | ({"status": one.status} if isinstance(one, Fault) and one.status else {})
