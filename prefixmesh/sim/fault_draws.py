"""A fleet's mishaps, drawn from a seed: of all kinds, or of some.

Links are cut and mended single, or many at once in one order and back in another (FoundationDB's "swizzling", which finds what depends on who
comes back first). What happens to the store has a source of chance of its own, so that a seed which does not meet it draws what it drew
before there was one.
"""

import math
from collections.abc import Collection, Sequence
from random import Random
from typing import Final

from prefixmesh.sim.fault_script import (
    STORE,
    FleetScript,
    LinkFault,
    LinkFaultKind,
    RouterCrash,
    StoreFault,
    StoreFaultKind,
)
from prefixmesh.sim.faults import REFUSALS, Fault, FaultKind, FaultScript

MOST_MISHAPS: Final = 8
"""In one run: few enough that a request often gets through between them, many enough that they meet."""

ALL_MET: Final = 1
"""Least mishaps of a run."""

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
    (FaultKind.CRASH, 4, "crashes"),
    ("crash at once", 3, "crashes"),
    ("crash unseen", 3, "crashes"),
    (FaultKind.STALL, 3, "stalls"),
    (FaultKind.DELAY, 1, "stalls"),
    (FaultKind.WRONG_CACHED, 1, "lies"),
    (FaultKind.WRONG_SUMS, 1, "lies"),
    (FaultKind.SILENCE, 1, "lies"),
    (FaultKind.REFUSE, 2, "refusals"),
    (FaultKind.STALL_STREAM, 2, "stalls"),
    (FaultKind.CLOCK, 1, "lies"),
    (FaultKind.COPY_DELAY, 1, "copies"),
    (FaultKind.COPY_FAIL, 1, "copies"),
    ("router", 2, "crashes"),
    (LinkFaultKind.CUT, 2, "partitions"),
    (LinkFaultKind.CUT_SILENTLY, 2, "partitions"),
    ("swizzle", 2, "partitions"),
    (LinkFaultKind.BAD, 2, "network"),
)
"""With how often each is drawn, most of what kills, and of which kind it is. In this order: another would give every seed another script."""

KINDS: Final = (*dict.fromkeys(kind for _, _, kind in _CHOICES), STORE)
"""The names of all kinds."""

_STORE_KINDS: Final = (
    (StoreFaultKind.CRASH, 3),
    (StoreFaultKind.STALL, 3),
    (StoreFaultKind.DELAY, 2),
    (StoreFaultKind.LOSE, 2),
    (StoreFaultKind.FLUSH, 2),
    (LinkFaultKind.CUT, 2),
    (LinkFaultKind.CUT_SILENTLY, 3),
)
"""What happens to the store, and to a router's way to it."""

STORE_SHARE: Final = 0.25
"""Of seeds that mix all kinds: those in which the store is hit as well."""

MOST_OF_STORE: Final = 3
"""Mishaps of the store in one run."""


def draw_script(
    rng: Random,
    store_rng: Random,
    workers: Sequence[str],
    routers: Sequence[str],
    lasts_s: float,
    kinds: Collection[str] = KINDS,
) -> FleetScript:
    """A script of these kinds, whose mishaps begin within ``lasts_s``. The same sources of chance give the same script."""
    draw = _Draw(rng, workers, routers)
    choices = [choice for choice in _CHOICES if choice[2] in kinds]
    if choices:
        names, weights, _ = zip(*choices, strict=True)
        for name in rng.choices(names, weights, k=rng.randint(ALL_MET, MOST_MISHAPS)):
            draw.add(name, rng.uniform(0.0, lasts_s))
    store: list[StoreFault] = []
    if STORE in kinds and (not choices or store_rng.random() < STORE_SHARE):
        store = _draw_store(store_rng, routers, lasts_s, draw.links)
    faults = {name: FaultScript(sorted(some, key=_begin)) for name, some in draw.faults.items()}
    return FleetScript(
        workers=faults,
        routers=tuple(sorted(draw.crashes, key=_begin)),
        links=tuple(sorted(draw.links, key=_begin)),
        router_names=tuple(routers),
        store=tuple(sorted(store, key=_begin)),
    )


class _Draw:
    """What is drawn of one fleet, but for its store."""

    def __init__(self, rng: Random, workers: Sequence[str], routers: Sequence[str]) -> None:
        self._rng = rng
        self._workers = workers
        self._routers = routers
        self.faults: dict[str, list[Fault]] = {name: [] for name in workers}
        self.crashes: list[RouterCrash] = []
        self.links: list[LinkFault] = []

    def add(self, name: "FaultKind | LinkFaultKind | str", at_s: float) -> None:
        """One mishap more."""
        rng = self._rng
        match name:
            case FaultKind():
                self.faults[rng.choice(self._workers)].append(_draw_fault(rng, name, at_s))
            case LinkFaultKind.BAD:
                self.links.append(LinkFault(kind=name, at_s=at_s, for_s=rng.uniform(0.5, 6.0)))
            case LinkFaultKind():
                ends = (rng.choice(self._routers), rng.choice(self._workers))
                self.links.append(LinkFault(kind=name, at_s=at_s, for_s=rng.uniform(0.05, 9.0), ends=ends))
            case "crash at once":
                down_s = rng.uniform(*AT_ONCE_S)
                self.faults[rng.choice(self._workers)].append(_crash(at_s, down_s))
            case "crash unseen":
                self._crash_unseen(at_s)
            case "router":
                crash = RouterCrash(name=rng.choice(self._routers), at_s=at_s, for_s=rng.uniform(0.05, 3.0))
                self.crashes.append(crash)
            case "swizzle":
                self.links += _swizzled(rng, self._workers, self._routers, at_s)

    def _crash_unseen(self, at_s: float) -> None:
        """What is sent to the old life meanwhile reaches the new one."""
        rng = self._rng
        ends, cut_s = (rng.choice(self._routers), rng.choice(self._workers)), rng.uniform(0.5, 4.0)
        self.links.append(LinkFault(kind=LinkFaultKind.CUT_SILENTLY, at_s=at_s, for_s=cut_s, ends=ends))
        died_s, down_s = at_s + rng.uniform(0.3, 0.9) * cut_s, rng.uniform(*AT_ONCE_S)
        self.faults[ends[1]].append(_crash(died_s, down_s))


def _draw_store(
    rng: Random, routers: Sequence[str], lasts_s: float, links: list[LinkFault]
) -> list[StoreFault]:
    """What happens to the store; what happens to the ways there is added to ``links``."""
    faults: list[StoreFault] = []
    kinds, weights = zip(*_STORE_KINDS, strict=True)
    for kind in rng.choices(kinds, weights, k=rng.randint(1, MOST_OF_STORE)):
        at_s, for_s = rng.uniform(0.0, lasts_s), rng.uniform(0.05, 12.0)
        if isinstance(kind, LinkFaultKind):
            links.append(LinkFault(kind=kind, at_s=at_s, for_s=for_s, ends=(rng.choice(routers), STORE)))
            continue
        faults.append(
            StoreFault(
                kind=kind,
                at_s=at_s,
                for_s=0.0 if kind is StoreFaultKind.FLUSH else for_s,
                amount=math.floor(rng.uniform(50, 4000)) if kind is StoreFaultKind.DELAY else 0.0,
            )
        )
    return faults


def _crash(at_s: float, down_s: float) -> Fault:
    return Fault(kind=FaultKind.CRASH, at_s=at_s, for_s=down_s)


def _begin(one: Fault | RouterCrash | LinkFault | StoreFault) -> float:
    return one.at_s


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
