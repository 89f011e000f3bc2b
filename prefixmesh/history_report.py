"""What can be wrong with a history, and what it comes to: the words in which ``history_check`` answers. Pure."""

import enum
from dataclasses import dataclass, field
from typing import Final, NamedTuple

MAX_VIOLATIONS: Final = 1000
"""That are told one by one; more are only counted: one bug may break every request."""


class Rule(enum.Enum):
    """What was broken."""

    ASKED_ONCE = "asked once"
    ENDS_ONCE = "ends once"
    NOTHING_AFTER_END = "nothing after the end"
    POSITIONS = "each position once, in order"
    COUNTED = "the end counts what was passed on"
    ATTEMPTS = "one attempt after the other"
    NEVER_ANEW = "no attempt from the beginning after tokens"
    RESUMED_FITS = "goes on where it stopped"
    SETTLED_ONCE = "every reservation is settled once"
    TAKEN_ONCE = "taken in once, and released once"
    SAME_LIFE = "taken in by the life it was placed on"


class Place(NamedTuple):
    """A line of a history."""

    source: str
    number: int

    def __str__(self) -> str:
        return f"{self.source}:{self.number}"


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that must not be."""

    rule: Rule
    request_id: str
    problem: str
    places: tuple[Place, ...]
    """The lines that show it, the first in time first."""

    def __str__(self) -> str:
        where = ", ".join(map(str, self.places))
        return f"{self.request_id}: {self.rule.value}: {self.problem} ({where})"


@dataclass(slots=True)
class HistoryReport:
    """What histories say."""

    lives: int = 0
    requests: int = 0
    """Taken in by routers."""

    outcomes: dict[str, int] = field(default_factory=dict)
    """How many ended how."""

    open_requests: int = 0
    """Without an end, in lives that were cut off or go on."""

    attempts: int = 0
    resumed: int = 0
    tokens: int = 0
    reservations: int = 0
    open_reservations: int = 0
    """Not settled, in such lives, or of tickets."""

    lost: int = 0
    """Records that their writer could not keep: what is missing because of them looks like a violation."""

    unread: int = 0
    """Lines that are torn, or of a later version."""

    violations: list[Violation] = field(default_factory=list)
    violations_in_all: int = 0

    def add(self, violation: Violation) -> None:
        """Count a violation, and keep it while there are not too many."""
        self.violations_in_all += 1
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(violation)
