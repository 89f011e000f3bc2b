"""What becomes of a fleet's parts that die: which is started again, when, as which life, and when it is given up.

A part is a worker or a router. It has one life at a time, numbered from 1; a router may have a standby beside it, whose process has
loaded everything and waits to become the next life. Pure: this hears what happened and answers what to do; it starts nothing
(``prefixmesh.fleet.fleet`` does), and it does not choose nodes (Ray does, and a dead node is none of its choices).

The rules are those of the field: a limit on restarts in a row, after which a part is given up with its reason (Erlang/OTP's supervisors);
pauses that double, half of each by chance, so that parts that died together do not load together for ever (the "equal jitter" of AWS's
architecture blog); and a life that lasted clears the count (Kubernetes' CrashLoopBackOff).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from prefixmesh.errors import ConfigError

PartKind = Literal["worker", "router"]
Phase = Literal["starting", "serving", "waiting", "given_up"]
"""``waiting``: dead, and to be started again at a known time."""

DEFAULT_MAX_RESTARTS: Final = 5
"""With the pauses below a part is tried for some ten seconds beside the time of its loading: chance has passed by then."""

NEVER: Final = math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """How patient a supervisor is."""

    max_restarts: int = DEFAULT_MAX_RESTARTS
    """Restarts in a row after which a part is given up; 0 restarts nothing."""

    steady_s: float = 60.0
    """A life that served for so long has lasted: what ends it is no sequel of what ended the one before."""

    first_pause_s: float = 0.5
    """Before the second restart in a row. The first comes at once: what kills by chance rarely does so twice."""

    longest_pause_s: float = 30.0
    """Pauses double up to this; a machine that comes back is used again within half a minute."""

    standby_routers: bool = True
    """Keep a process ready beside each router, which costs its memory and saves a restart its imports and its model's text side."""

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts must not be negative, got {self.max_restarts}")
        for name in ("steady_s", "first_pause_s", "longest_pause_s"):
            if not 0 <= getattr(self, name) < NEVER:
                raise ConfigError(f"{name} must be seconds from 0 on, got {getattr(self, name)}")

    def pause_s(self, restart: int, draw: float) -> float:
        """Seconds before the ``restart``-th restart in a row (from 1); ``draw`` is chance, from 0 to 1."""
        if restart <= 1:
            return 0.0
        # The exponent is bounded because a part may be restarted more often than floats can be doubled.
        whole = min(self.longest_pause_s, self.first_pause_s * 2.0 ** min(restart - 2, 64))
        return whole * (1 + draw) / 2


@dataclass(slots=True)
class Part:
    """One part as its supervisor sees it. Times are seconds of the supervisor's clock."""

    name: str
    kind: PartKind
    phase: Phase = "serving"
    life: int = 1
    """The number of the life that serves, starts, or ended last."""

    address: str = ""
    """Where it serves; empty while it does not."""

    since: float = 0.0
    """When ``phase`` began."""

    due: float = NEVER
    """``waiting``: when it is started again."""

    restarts: int = 0
    """All of them, since the fleet came up."""

    in_a_row: int = 0
    """Lives that ended since the last that had lasted."""

    reason: str = ""
    """Why the last life ended, or why the part was given up."""

    standby: int = 0
    """The life that stands by; 0 for none."""

    standby_due: float = NEVER
    """When the next standby is started."""

    standby_losses: int = 0
    """In a row, since a standby was last taken into service."""

    newest: int = 1
    """The highest number that any life has had."""


@dataclass(frozen=True, slots=True)
class Start:
    """Make ``life`` of a part serve. A standby's process is there already."""

    part: str
    life: int
    from_standby: bool = False


@dataclass(frozen=True, slots=True)
class Prepare:
    """Start the process of a life that stands by."""

    part: str
    life: int


@dataclass(frozen=True, slots=True)
class End:
    """See that nothing is left of a life that counts as dead."""

    part: str
    life: int


@dataclass(frozen=True, slots=True)
class RouteTo:
    """Tell the routers which of the fleet's workers serve now. The whole list, so that one that is told late misses nothing."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """Tell people: a life has ended, and the next is started in ``restart_in_s`` seconds."""

    part: str
    life: int
    reason: str
    restart_in_s: float


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Tell people: a part is not started again until somebody asks."""

    part: str
    reason: str


Action = Start | Prepare | End | RouteTo | Lost | GivenUp


@dataclass(slots=True)
class Supervision:
    """All parts of one fleet. Every method that hears something returns what to do, in order; each costs O(parts)."""

    policy: RestartPolicy
    parts: dict[str, Part] = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            ", ".join(f"{part.name}#{part.life} {part.phase}" for part in self.parts.values()) or "no parts"
        )

    @property
    def is_over(self) -> bool:
        """Everything has been given up."""
        return all(part.phase == "given_up" for part in self.parts.values())

    @property
    def due(self) -> float:
        """When ``tick`` has something to do next; ``NEVER`` when nothing waits."""
        return min((min(part.due, part.standby_due) for part in self.parts.values()), default=NEVER)

    def worker_addresses(self) -> tuple[str, ...]:
        """Where workers serve now."""
        return tuple(part.address for part in self._serving("worker"))

    def adopt(self, parts: Iterable[Part], now: float) -> list[Action]:
        """Look after these from now on, as they are."""
        self.parts.update((part.name, part) for part in parts)
        for part in self.parts.values():
            self._want_standby(part, now)
        return [RouteTo(self.worker_addresses()), *self.tick(now)]

    def served(self, name: str, life: int, address: str, now: float) -> list[Action]:
        """A life that was to start serves. News of a life that has been lost meanwhile changes nothing."""
        part = self.parts[name]
        if part.life != life or part.phase != "starting":
            return []
        part.phase, part.address, part.since = "serving", address, now
        self._want_standby(part, now)
        return [RouteTo(self.worker_addresses()), *self.tick(now)]

    def lost(self, name: str, life: int, reason: str, now: float, draw: float) -> list[Action]:
        """A life has ended, could not start, or cannot be told from one that has. ``draw`` is chance, from 0 to 1.

        News of a life that has been lost already changes nothing.
        """
        part = self.parts[name]
        if life == part.standby:
            return self._lost_standby(part, now, draw)
        if life != part.life or part.phase not in ("starting", "serving"):
            return []
        if part.phase == "serving" and now - part.since >= self.policy.steady_s:
            part.in_a_row = 0
        part.in_a_row += 1
        was_routed_to = part.kind == "worker" and part.phase == "serving"
        part.phase, part.address, part.reason, part.since = "waiting", "", reason, now
        actions: list[Action] = [End(name, life)]
        if was_routed_to:
            actions.append(RouteTo(self.worker_addresses()))
        if part.in_a_row > self.policy.max_restarts:
            return actions + self._give_up(part)
        pause_s = self.policy.pause_s(part.in_a_row, draw)
        part.due = now + pause_s
        return [*actions, Lost(name, life, reason, pause_s), *self.tick(now)]

    def revive(self, now: float) -> list[Action]:
        """Try everything that was given up once more, as if it had never failed."""
        for part in self.parts.values():
            if part.phase == "given_up":
                part.phase, part.due, part.in_a_row, part.standby_losses = "waiting", now, 0, 0
                part.since = now
        return self.tick(now)

    def tick(self, now: float) -> list[Action]:
        """What has become due."""
        actions: list[Action] = []
        for part in self.parts.values():
            if part.due <= now:
                actions.append(self._start(part, now))
            if part.standby_due <= now:
                part.standby_due, part.newest = NEVER, part.newest + 1
                part.standby = part.newest
                actions.append(Prepare(part.name, part.standby))
        return actions

    def check_invariants(self) -> None:
        """Raise AssertionError when a part is neither looked after nor given up."""
        for part in self.parts.values():
            assert (part.due < NEVER) == (part.phase == "waiting"), (part, "waits for a time, or not at all")
            assert bool(part.address) == (part.phase == "serving"), (part, "has an address while it serves")
            assert part.newest >= max(part.life, part.standby), (part, "numbers grow")
            assert part.standby == 0 or part.standby > part.life, (part, "a standby comes after its router")
            assert not (part.standby and part.standby_due < NEVER), (part, "one standby is enough")
            assert part.phase != "given_up" or (part.standby == 0 and part.standby_due == NEVER), part

    def _start(self, part: Part, now: float) -> Start:
        from_standby = part.standby > 0
        if not from_standby:
            part.newest += 1
        part.life = part.standby if from_standby else part.newest
        part.standby, part.standby_due, part.standby_losses = 0, NEVER, 0
        part.phase, part.since, part.due = "starting", now, NEVER
        part.restarts += 1
        return Start(part.name, part.life, from_standby)

    def _give_up(self, part: Part) -> list[Action]:
        cause, part.due = part.reason, NEVER
        allowed = self.policy.max_restarts
        part.phase = "given_up"
        part.reason = f"given up after {allowed} restarts in a row: {cause}" if allowed else cause
        standby, part.standby, part.standby_due = part.standby, 0, NEVER
        ended: list[Action] = [End(part.name, standby)] if standby else []
        return [*ended, GivenUp(part.name, part.reason)]

    def _want_standby(self, part: Part, now: float) -> None:
        if (
            self.policy.standby_routers
            and part.kind == "router"
            and part.phase == "serving"
            and not part.standby
        ):
            part.standby_due = now

    def _lost_standby(self, part: Part, now: float, draw: float) -> list[Action]:
        """The router serves on; beyond the limit it does so without a standby."""
        ended: list[Action] = [End(part.name, part.standby)]
        part.standby, part.standby_losses = 0, part.standby_losses + 1
        if part.standby_losses <= self.policy.max_restarts:
            # Never at once: nobody waits for it, and what kills it may be the memory that it takes.
            part.standby_due = now + self.policy.pause_s(part.standby_losses + 1, draw)
        return ended + self.tick(now)

    def _serving(self, kind: PartKind) -> list[Part]:
        return [part for part in self.parts.values() if part.kind == kind and part.phase == "serving"]
