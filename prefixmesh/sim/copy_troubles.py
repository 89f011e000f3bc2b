"""What goes wrong with the copies of a fake mover: slow ones, failed ones, and ends that are told late, which is how they overtake each other. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple, TypeAlias

from prefixmesh.sim.faults import FaultsNow
from prefixmesh.worker.tiers.copies import CopyJob

TOLD_TO_FAIL: Final = "told to fail"


class CopyTrouble(NamedTuple):
    """What becomes of one copy."""

    slow_s: float = 0.0
    """So much longer it takes."""

    error: str = ""
    """Not empty: it fails with this."""

    fails_after: float = 1.0
    """Share of the copy that is done by then; of no meaning for one that does not fail."""

    told_late_s: float = 0.0
    """So long after its end it is told that it has ended: others are told of first."""


NO_TROUBLE: Final = CopyTrouble()

Troubles: TypeAlias = Callable[[CopyJob], CopyTrouble]
"""Asked when a copy begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TroubleOdds:
    """How often a copy has which trouble, and at most how much of it."""

    slow: float = 0.0
    most_slow_s: float = 0.0
    fail: float = 0.0
    told_late: float = 0.0
    most_late_s: float = 0.0


def drawn_troubles(rng: Random, odds: TroubleOdds) -> Troubles:
    """Troubles by chance: one source of it gives one run of them."""

    def draw(_: CopyJob) -> CopyTrouble:
        slow, fails, is_late = (rng.random() < share for share in (odds.slow, odds.fail, odds.told_late))
        return CopyTrouble(
            slow_s=rng.uniform(0.0, odds.most_slow_s) if slow else 0.0,
            error=TOLD_TO_FAIL if fails else "",
            fails_after=rng.random(),
            told_late_s=rng.uniform(0.0, odds.most_late_s) if is_late else 0.0,
        )

    return draw


def scripted_troubles(faults_now: Callable[[], FaultsNow]) -> Troubles:
    """Troubles as a worker's fault script has them at the time."""

    def look(_: CopyJob) -> CopyTrouble:
        now = faults_now()
        return CopyTrouble(slow_s=now.copy_delay_ms / 1e3, error=TOLD_TO_FAIL if now.copies_fail else "")

    return look


def no_troubles(_: CopyJob) -> CopyTrouble:
    """Every copy goes well."""
    return NO_TROUBLE
