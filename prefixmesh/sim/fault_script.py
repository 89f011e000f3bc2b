"""What goes wrong in one run of a whole fleet, and when; all of it is over by a known time. Pure data.

Workers die, stand still, are slow, lie, refuse, fall silent, have wrong clocks and copies that are slow or fail (``faults``); routers die; links are
cut, loudly or silently; the network delays, loses, doubles and reorders; and the store that routers share is gone, slow or emptied. Scripts are
drawn from a seed (``fault_draws``), or written by a person (``fault_file``).
"""

import enum
from dataclasses import dataclass
from typing import Final

from prefixmesh.sim.faults import Fault, FaultScript

STORE: Final = "store"
"""The store's name on its network, beside those of routers."""


class LinkFaultKind(enum.Enum):
    """What happens to a link, or to all of them."""

    CUT = "cut"
    """Its streams break, and both ends know."""

    CUT_SILENTLY = "cut_silently"
    """Nothing passes, and nobody is told: a partition."""

    BAD = "bad"
    """Every link: messages are late, and of those that may be, some are lost, doubled and overtaken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFault:
    """One thing that happens to the network."""

    kind: LinkFaultKind
    at_s: float
    for_s: float
    ends: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCrash:
    """A router dies, and is back with nothing known."""

    name: str
    at_s: float
    for_s: float


class StoreFaultKind(enum.Enum):
    """What happens to the store that routers share."""

    CRASH = "crash"
    """It is dead, and back with what it held, as a Redis that keeps its data."""

    STALL = "stall"
    """It stands still, as after SIGSTOP: nothing is answered, and nothing of what comes is lost."""

    DELAY = "delay"
    """Each of its answers takes ``amount`` milliseconds more."""

    LOSE = "lose"
    """It is dead, and back with nothing: another one in its place."""

    FLUSH = "flush"
    """At once it holds nothing, and nobody is told: no connection breaks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFault:
    """One thing that happens to the store."""

    kind: StoreFaultKind
    at_s: float
    for_s: float
    """0 where it is emptied, which is done at once."""

    amount: float = 0.0
    """Milliseconds, of a delay alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetScript:
    """All that goes wrong in a run; times are seconds since its start."""

    workers: dict[str, FaultScript]
    """Of every worker of the fleet."""

    routers: tuple[RouterCrash, ...]
    links: tuple[LinkFault, ...]
    router_names: tuple[str, ...]
    """Of every router of the fleet."""

    store: tuple[StoreFault, ...] = ()

    @property
    def has_store(self) -> bool:
        """Whether anything happens to a store, or to a router's way to it: then the fleet has one, and pins to keep."""
        return bool(self.store) or any(STORE in one.ends for one in self.links)

    @property
    def over_s(self) -> float:
        """When nothing is wrong any more."""
        ends = [fault.until_s for script in self.workers.values() for fault in script.faults]
        ends += [one.at_s + one.for_s for one in self.routers]
        ends += [one.at_s + one.for_s for one in self.links]
        ends += [one.at_s + one.for_s for one in self.store]
        return max(ends, default=0.0)

    def lines(self) -> list[str]:
        """What happens, for people, the first first."""
        told = [
            (fault.at_s, f"{name}: {fault.kind.value} for {fault.for_s:.3f} s{_amount(fault)}")
            for name, script in self.workers.items()
            for fault in script.faults
        ]
        told += [(one.at_s, f"{one.name}: crash for {one.for_s:.3f} s") for one in self.routers]
        told += [
            (one.at_s, f"link {' - '.join(one.ends)}: {one.kind.value} for {one.for_s:.3f} s")
            for one in self.links
        ]
        told += [
            (one.at_s, f"{STORE}: {one.kind.value} for {one.for_s:.3f} s{_amount(one)}") for one in self.store
        ]
        return [f"{at_s:8.3f} {line}" for at_s, line in sorted(told)]


def _amount(fault: Fault | StoreFault) -> str:
    if fault.amount:
        return f", {fault.amount:g}"
    return f", {fault.status}" if isinstance(fault, Fault) and fault.status else ""
