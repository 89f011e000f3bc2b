"""Who need not be looked at before when, since all that could be done there has failed lately. Pure: time is passed in.

A worker whose adapter root is gone lacks all that is wished, and a name that nobody can load is lacked by all: to look at every worker and
name again in each step would hold up the router's requests.
"""

from collections.abc import Collection, Hashable
from typing import NamedTuple


class _Known(NamedTuple):
    by: tuple[object, ...]
    until: float


class Patience:
    """Not thread-safe. O(1) but for ``prune``."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def holds(self, whose: Hashable, now: float, *by: object) -> bool:
        """Whether there is nothing to be done yet, by these very objects."""
        known = self._known.get(whose)
        return (
            known is not None
            and now < known.until
            and all(one is other for one, other in zip(known.by, by, strict=True))
        )

    def note(self, whose: Hashable, until: float, *by: object) -> None:
        """There is nothing to be done before ``until``, as long as these very objects say what there is."""
        self._known[whose] = _Known(by, until)

    def prune(self, wanted: Collection[Hashable]) -> None:
        """Forget all others. O(1) while there are no more than these, else O(all)."""
        if len(self._known) > len(wanted):
            self._known = {whose: known for whose, known in self._known.items() if whose in wanted}
