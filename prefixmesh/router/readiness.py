"""Which workers may be sent anything, kept so while one after the other changes. Pure.

A worker that has changed is looked at alone, and with it whom else that decides over::

    its id        of several workers with one id, the first that can be reached keeps it; the next has it once that is gone
    its failing   who fails is put out, but nobody while more than half of those that are otherwise ready do

So a fleet of thousands that comes, goes or fails costs what changes of it, and not a look at all of it for each. Those who act on it
(columns, calls, logs) look at what has changed too: each has ``ChangedWorkers`` of its own.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter
from typing import Final

from prefixmesh.ids import WorkerId
from prefixmesh.router.worker_entry import NOT_ASKED, WorkerEntry
from prefixmesh.router.worker_health import SUCCESSES_IN, may_be_put_out
from prefixmesh.router.worker_identity import Expected

_NO_HEALTH: Final = "has not said yet whether it is serving"
_DRAINING: Final = "is draining: it finishes what it has and takes nothing new"
_LEAVING: Final = "is leaving: it hands over what it holds, and gets nothing new"
_HEALTH_PROBLEMS: Final = {True: "", False: "says that it is not serving", None: _NO_HEALTH}
PASSING_PROBLEMS: Final = frozenset({NOT_ASKED, _NO_HEALTH})
"""Problems that every worker has for a moment while the router gets to know it."""

_number_of: Final = attrgetter("number")


class ChangedWorkers:
    """Those whose readiness was worked out anew since one reader looked last, be it that it came out the same."""

    def __init__(self) -> None:
        self._changed: set[WorkerEntry] = set()

    def note(self, entries: Iterable[WorkerEntry]) -> None:
        """They may be others now. O(entries)."""
        self._changed.update(entries)

    def forget(self, entry: WorkerEntry) -> None:
        """It is known no longer. O(1)."""
        self._changed.discard(entry)

    def take(self) -> list[WorkerEntry]:
        """All of them, once, in the order in which they were added. O(1) while there are none, else O(changed * log changed)."""
        if not self._changed:
            return []
        changed = sorted(self._changed, key=_number_of)
        self._changed.clear()
        return changed


class _Counted:
    """What is counted of a worker now."""

    __slots__ = ("context_length", "problem", "worker_id")

    def __init__(self) -> None:
        self.worker_id: WorkerId | None = None
        """Which it claims; None while it cannot be reached."""

        self.problem = NOT_ASKED
        """Why it is not ready, but for its failing."""

        self.context_length: int | None = None
        """Of a ready worker; None of any other."""


class Readiness:
    """Writes ``problem`` and ``ejected`` of the entries that it is told of. Not thread-safe."""

    def __init__(self, expected: Expected) -> None:
        self.ready: list[WorkerEntry] = []
        """In the order in which they were added. Another list after each change: who goes through one is not disturbed."""

        self.failing: set[WorkerEntry] = set()
        """Who fails, of those that are ready but for that."""

        self.otherwise_ready = 0
        """Those that are ready but for that."""

        self.context_length = 0
        """The longest that any ready worker has; 0 when none is ready."""

        self._expected = expected
        self._counted: dict[WorkerEntry, _Counted] = {}
        self._claims: dict[WorkerId, list[WorkerEntry]] = {}
        self._contexts: Counter[int] = Counter()
        self._puts_out = True
        self._readers: list[ChangedWorkers] = []

    def __repr__(self) -> str:
        return f"<Readiness {len(self.ready)}/{len(self._counted)} ready, {len(self.failing)} failing>"

    @property
    def spreads_over_all(self) -> bool:
        """Whether too many fail for any to be put out. O(1)."""
        return not may_be_put_out(len(self.failing), self.otherwise_ready)

    def follow(self) -> ChangedWorkers:
        """For one more reader, who stays: all that are known now, and what changes from then on."""
        reader = ChangedWorkers()
        reader.note(self._counted)
        self._readers.append(reader)
        return reader

    def add(self, entry: WorkerEntry) -> None:
        """It has said nothing yet. O(1)."""
        self._counted[entry] = _Counted()
        self._note([entry])

    def remove(self, entry: WorkerEntry) -> None:
        """It is known no longer, and its id is the next one's. What was said of it last stays said. Cost: see ``review``."""
        counted = self._counted.pop(entry)
        heirs = self._claim(entry, counted, None)
        self._weigh(entry, counted, NOT_ASKED)
        self._admit(entry, counted, None)
        for reader in self._readers:
            reader.forget(entry)
        self._weigh_again(heirs)

    def review(self, entry: WorkerEntry) -> None:
        """Something of a worker has changed. O(1), and where it becomes ready or is not any more a copy of the list of those that are, which
        takes microseconds for thousands; O(those with its id) where that is another's from now on, and O(failing) where it decides whether
        those are put out."""
        facts = entry.facts
        worker_id = None if entry.unreachable or facts is None else facts.worker_id
        heirs = self._claim(entry, self._counted[entry], worker_id)
        self._weigh_again([entry, *heirs])

    def _claim(self, entry: WorkerEntry, counted: _Counted, wanted: WorkerId | None) -> list[WorkerEntry]:
        """It claims this id and no other from now on. Returns the others for whom it matters that it does, or did."""
        before = counted.worker_id
        if before == wanted:
            return []
        counted.worker_id = wanted
        concerned = []
        if before is not None:
            claims = self._claims[before]
            was_owner = claims[0] is entry
            claims.remove(entry)
            concerned += claims if was_owner else []
            if not claims:
                del self._claims[before]
        if wanted is not None:
            claims = self._claims.setdefault(wanted, [])
            insort(claims, entry, key=_number_of)
            concerned += claims[1:] if claims[0] is entry else []
        return concerned

    def _weigh_again(self, entries: list[WorkerEntry]) -> None:
        for entry in entries:
            counted = self._counted[entry]
            self._weigh(entry, counted, entry.unreachable or self._problem_of(entry))
        puts_out = not self.spreads_over_all
        if puts_out != self._puts_out:
            self._puts_out = puts_out
            entries = list({*entries, *self.failing})
        for entry in entries:
            self._settle(entry, self._counted[entry])
        self._note(entries)

    def _weigh(self, entry: WorkerEntry, counted: _Counted, problem: str) -> None:
        """Count it among those that are ready, and among those of them that fail."""
        self.otherwise_ready += (not problem) - (not counted.problem)
        counted.problem = problem
        if entry.health.is_failing and not problem:
            self.failing.add(entry)
        else:
            self.failing.discard(entry)

    def _settle(self, entry: WorkerEntry, counted: _Counted) -> None:
        """Say what comes of it."""
        entry.ejected = self._puts_out and entry in self.failing
        entry.problem = _put_out(entry) if entry.ejected else counted.problem
        facts = entry.facts
        self._admit(entry, counted, None if entry.problem or facts is None else facts.context_length)

    def _admit(self, entry: WorkerEntry, counted: _Counted, context_length: int | None) -> None:
        """Have it in ``ready``, with so long a context; with None: not."""
        before, counted.context_length = counted.context_length, context_length
        if before == context_length:
            return
        contexts = self._contexts
        if before is not None:
            contexts[before] -= 1
            if not contexts[before]:
                del contexts[before]
        if context_length is not None:
            contexts[context_length] += 1
        self.context_length = max(contexts, default=0)
        if (before is None) != (context_length is None):
            self._list(entry, is_ready=before is None)

    def _list(self, entry: WorkerEntry, *, is_ready: bool) -> None:
        ready = self.ready.copy()
        place = bisect_left(ready, entry.number, key=_number_of)
        if is_ready:
            ready.insert(place, entry)
        else:
            del ready[place]
        self.ready = ready

    def _problem_of(self, entry: WorkerEntry) -> str:
        facts = entry.facts
        if facts is None:
            return NOT_ASKED
        owner = self._claims[facts.worker_id][0]
        if owner is not entry:
            return f"has the worker id {facts.worker_id!r} that {owner.endpoint} has already; give each worker its own"
        problem = self._expected.problem_of(facts)
        if not problem and (entry.draining or entry.leaving):
            problem = _DRAINING if entry.draining else _LEAVING
        return problem or _HEALTH_PROBLEMS[entry.serving]

    def _note(self, entries: Iterable[WorkerEntry]) -> None:
        for reader in self._readers:
            reader.note(entries)


def _put_out(entry: WorkerEntry) -> str:
    return f"was put out: {entry.health.why}; it is back once {SUCCESSES_IN} probes in a row are good"
