"""What goes wrong in one run of a whole fleet, and when: drawn from a seed, all of it over by a known time.

Workers die, stand still, are slow, lie, refuse, fall silent, have wrong clocks and copies that are slow or fail (``faults``); routers die; links are cut, loudly or
silently, and mended, single or many at once in one order and back in another (FoundationDB's "swizzling", which finds what depends on who
comes back first); and the network delays, loses, doubles and reorders.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from prefixmesh.sim.faults import REFUSALS, Fault, FaultKind, FaultScript

MOST_MISHAPS: Final = 8
"""In one run: few enough that a request often gets through between them, many enough that they meet."""

ALL_MET: Final = 1
"""Least mishaps of a run."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetScript:
    """All that goes wrong in a run; times are seconds since its start."""

    workers: dict[str, FaultScript]
    routers: tuple[RouterCrash, ...]
    links: tuple[LinkFault, ...]

    @property
    def over_s(self) -> float:
        """When nothing is wrong any more."""
        ends = [fault.until_s for script in self.workers.values() for fault in script.faults]
        ends += [one.at_s + one.for_s for one in self.routers]
        ends += [one.at_s + one.for_s for one in self.links]
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
        return [f"{at_s:8.3f} {line}" for at_s, line in sorted(told)]


_WORKER_FAULTS: Final[dict[FaultKind, tuple[float, float, float, float]]] = {
    # Seconds from and to, amount from and to.
    FaultKind.CRASH: (0.1, 3.0, 0.0, 0.0),
    FaultKind.STALL: (0.2, 12.0, 0.0, 0.0),
    FaultKind.DELAY: (0.5, 4.0, 20.0, 400.0),
    FaultKind.WRONG_CACHED: (1.0, 5.0, -150.0, 150.0),
    FaultKind.WRONG_SUMS: (0.5, 3.0, 0.0, 0.0),
    FaultKind.SILENCE: (0.5, 5.0, 0.0, 0.0),
    FaultKind.REFUSE: (0.2, 3.0, 0.0, 0.0),
    FaultKind.STALL_STREAM: (0.5, 9.0, 0.0, 8.0),
    FaultKind.CLOCK: (1.0, 10.0, -30.0, 30.0),
    FaultKind.COPY_DELAY: (1.0, 5.0, 20.0, 1500.0),
    FaultKind.COPY_FAIL: (1.0, 5.0, 0.0, 0.0),
}

AT_ONCE_S: Final = (0.001, 0.02)
"""How long a worker is down that is back before anybody knows that it was gone."""

_CHOICES: Final = (
    (FaultKind.CRASH, 4),
    ("crash at once", 3),
    ("crash unseen", 3),
    (FaultKind.STALL, 3),
    (FaultKind.DELAY, 1),
    (FaultKind.WRONG_CACHED, 1),
    (FaultKind.WRONG_SUMS, 1),
    (FaultKind.SILENCE, 1),
    (FaultKind.REFUSE, 2),
    (FaultKind.STALL_STREAM, 2),
    (FaultKind.CLOCK, 1),
    (FaultKind.COPY_DELAY, 1),
    (FaultKind.COPY_FAIL, 1),
    ("router", 2),
    (LinkFaultKind.CUT, 2),
    (LinkFaultKind.CUT_SILENTLY, 2),
    ("swizzle", 2),
    (LinkFaultKind.BAD, 2),
)
"""With how often each is drawn: most of what kills."""


def draw_script(rng: Random, workers: Sequence[str], routers: Sequence[str], lasts_s: float) -> FleetScript:
    """A script whose mishaps begin within ``lasts_s``. One source of chance gives one script."""
    faults: dict[str, list[Fault]] = {name: [] for name in workers}
    crashes: list[RouterCrash] = []
    links: list[LinkFault] = []
    kinds, weights = zip(*_CHOICES, strict=True)
    for kind in rng.choices(kinds, weights, k=rng.randint(ALL_MET, MOST_MISHAPS)):
        at_s = rng.uniform(0.0, lasts_s)
        match kind:
            case FaultKind():
                faults[rng.choice(workers)].append(_draw_fault(rng, kind, at_s))
            case LinkFaultKind.BAD:
                links.append(LinkFault(kind=kind, at_s=at_s, for_s=rng.uniform(0.5, 6.0)))
            case LinkFaultKind():
                ends = (rng.choice(routers), rng.choice(workers))
                links.append(LinkFault(kind=kind, at_s=at_s, for_s=rng.uniform(0.05, 9.0), ends=ends))
            case "crash at once":
                down_s = rng.uniform(*AT_ONCE_S)
                faults[rng.choice(workers)].append(Fault(kind=FaultKind.CRASH, at_s=at_s, for_s=down_s))
            case "crash unseen":
                # What is sent to the old life meanwhile reaches the new one.
                ends, cut_s = (rng.choice(routers), rng.choice(workers)), rng.uniform(0.5, 4.0)
                cut = LinkFault(kind=LinkFaultKind.CUT_SILENTLY, at_s=at_s, for_s=cut_s, ends=ends)
                links.append(cut)
                died_s, down_s = at_s + rng.uniform(0.3, 0.9) * cut_s, rng.uniform(*AT_ONCE_S)
                faults[ends[1]].append(Fault(kind=FaultKind.CRASH, at_s=died_s, for_s=down_s))
            case "router":
                crash = RouterCrash(name=rng.choice(routers), at_s=at_s, for_s=rng.uniform(0.05, 3.0))
                crashes.append(crash)
            case "swizzle":
                links += _swizzled(rng, workers, routers, at_s)
    scripts = {name: FaultScript(sorted(some, key=lambda one: one.at_s)) for name, some in faults.items()}
    return FleetScript(workers=scripts, routers=tuple(crashes), links=tuple(links))


def _draw_fault(rng: Random, kind: FaultKind, at_s: float) -> Fault:
    least_s, most_s, least, most = _WORKER_FAULTS[kind]
    return Fault(
        kind=kind,
        at_s=at_s,
        for_s=rng.uniform(least_s, most_s),
        amount=math.floor(rng.uniform(least, most)),
        status=rng.choice(REFUSALS) if kind is FaultKind.REFUSE else "",
    )


def _swizzled(rng: Random, workers: Sequence[str], routers: Sequence[str], at_s: float) -> list[LinkFault]:
    """Some of all links, cut one after the other, and mended in another order."""
    pairs = [(router, worker) for router in routers for worker in workers]
    some = rng.sample(pairs, rng.randint(2, len(pairs)) if len(pairs) > 1 else 1)
    cuts = sorted(at_s + rng.uniform(0.0, 2.0) for _ in some)
    mends = [cuts[-1] + rng.uniform(0.1, 3.0) for _ in some]
    kind = rng.choice((LinkFaultKind.CUT, LinkFaultKind.CUT_SILENTLY))
    return [
        LinkFault(kind=kind, at_s=cut, for_s=mend - cut, ends=ends)
        for ends, cut, mend in zip(some, cuts, mends, strict=True)
    ]


def _amount(fault: Fault) -> str:
    return f", {fault.amount:g}" if fault.amount else f", {fault.status}" if fault.status else ""
