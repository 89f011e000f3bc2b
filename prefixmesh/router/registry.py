"""The workers a router knows, what each has told about itself, and whether it may be sent anything. Pure.

A worker is added by its address and is not ready until it has answered, says that it is serving, and serves what this
router serves: routing by tokens and fingerprints makes no sense between two tokenizers or two revisions of the weights. Who is ready
by what has been told is kept in ``readiness``; here is who changes what, and upon which news.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from prefixmesh.errors import UnavailableError
from prefixmesh.router.adapter_names import choose_content, take_note
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.load import WorkerLoad
from prefixmesh.router.readiness import ChangedWorkers, Readiness
from prefixmesh.router.worker_entry import WorkerEntry
from prefixmesh.router.worker_health import WorkerHealth
from prefixmesh.router.worker_identity import Expected, WorkerFacts

_SHOWN_PROBLEMS: Final = 4
"""Workers named in one error message."""


class WorkerRegistry:
    """All workers by address. Not thread-safe: one loop owns it. A call about an unknown address is ignored: its news is late."""

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._entries: dict[Endpoint, WorkerEntry] = {}
        self._readiness = Readiness(expected)
        self._added = 0
        self._answers = 0

    def __iter__(self) -> Iterator[WorkerEntry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        states = ", ".join(f"{e.endpoint} {e.problem or 'ready'}" for e in self)
        return f"WorkerRegistry({len(self.ready)}/{len(self)} ready | {states or 'empty'})"

    @property
    def ready(self) -> list[WorkerEntry]:
        """The workers that may be sent requests, in the order in which they were added; O(1). Not to be changed by the caller."""
        return self._readiness.ready

    @property
    def context_length(self) -> int:
        """The longest context any ready worker has; 0 when none is ready. O(1)."""
        return self._readiness.context_length

    @property
    def failing(self) -> int:
        """Workers that fail, of those that are ready but for that. O(1)."""
        return len(self._readiness.failing)

    @property
    def otherwise_ready(self) -> int:
        """Those that are ready but for that. O(1)."""
        return self._readiness.otherwise_ready

    def follow(self) -> ChangedWorkers:
        """For a reader that acts on who is ready, and why others are not: all who are known now, and what changes from then on."""
        return self._readiness.follow()

    def get(self, endpoint: Endpoint) -> WorkerEntry | None:
        """The worker at an address; None when it is not known."""
        return self._entries.get(endpoint)

    def add(self, endpoint: Endpoint) -> bool:
        """Know a worker from now on; False when it was known already, and then nothing changes."""
        if endpoint in self._entries:
            return False
        entry = self._entries[endpoint] = WorkerEntry(endpoint, self._added)
        self._added += 1
        self._readiness.add(entry)
        return True

    def remove(self, endpoint: Endpoint) -> bool:
        """Know it no longer; False when it was not known. Its open reservations settle against a load that nobody reads."""
        entry = self._entries.pop(endpoint, None)
        if entry is None:
            return False
        self._readiness.remove(entry)
        return True

    def described(self, endpoint: Endpoint, facts: WorkerFacts) -> bool:
        """Take over what a worker told. True when it is another life than the one known before, whose caches and work are gone.

        O(1) while it tells what it told before; else see ``Readiness.review``.
        """
        entry = self._entries.get(endpoint)
        if entry is None:
            return False
        is_new_life = entry.load.incarnation != facts.incarnation
        if is_new_life:
            entry.load = WorkerLoad(facts.incarnation)
            entry.health = WorkerHealth()
            entry.report = None
            entry.leaving = False
        entry.spell += is_new_life or bool(entry.unreachable)
        is_news = (
            entry.facts is None
            or entry.facts.standing != facts.standing
            or entry.draining != facts.draining
            or bool(entry.unreachable)
            or is_new_life
        )
        entry.facts = facts
        entry.draining = facts.draining
        entry.leaving &= not facts.draining
        self._answers += 1
        entry.adapters = take_note(entry.adapters, facts.adapters, self._answers)
        if entry.unreachable:
            entry.unreachable = ""
            entry.health.connected()
        if is_news:
            self._readiness.review(entry)
        return is_new_life

    def is_like_us(self, endpoint: Endpoint) -> bool:
        """Whether a worker has answered and serves what this router serves, ready or not."""
        entry = self._entries.get(endpoint)
        return entry is not None and entry.facts is not None and not self._expected.problem_of(entry.facts)

    def draining_changed(self, endpoint: Endpoint, *, draining: bool) -> bool:
        """A worker said whether it takes anything new; True when that is news."""
        entry = self._entries.get(endpoint)
        if entry is None or entry.draining == draining:
            return False
        entry.draining = draining
        entry.leaving &= not draining  # it says so itself from now on
        self._readiness.review(entry)
        return True

    def leaving_changed(self, endpoint: Endpoint, *, leaving: bool) -> bool:
        """A worker is to hand over what it holds, and gets nothing new until it has drained; or not any more. True when that is news."""
        entry = self._entries.get(endpoint)
        if entry is None or entry.leaving == leaving:
            return False
        entry.leaving = leaving
        self._readiness.review(entry)
        return True

    def health_changed(self, endpoint: Endpoint, *, serving: bool) -> None:
        """A worker's health service said whether it is serving."""
        entry = self._entries.get(endpoint)
        if entry is not None and entry.serving != serving:
            entry.serving = serving
            self._readiness.review(entry)

    def unreachable(self, endpoint: Endpoint, why: str) -> None:
        """A worker did not answer: it is not ready from this moment until it is described again."""
        entry = self._entries.get(endpoint)
        if entry is not None:
            entry.serving = None
            entry.unreachable = f"cannot be reached: {why}"
            self._readiness.review(entry)

    def probe_ended(self, endpoint: Endpoint, problem: str, now: float) -> bool:
        """A probe of a connected worker found ``problem``, or none when that is empty. True when it was put out and now is well again.

        O(1) while it goes on as before; else see ``Readiness.review``.
        """
        entry = self._entries.get(endpoint)
        if entry is None or not entry.health.probe_ended(problem, now):
            return False
        was_out, is_well = entry.ejected, not entry.health.is_failing
        entry.spell += is_well
        self._readiness.review(entry)
        return was_out and is_well

    def request_failed(self, endpoint: Endpoint, why: str, now: float) -> None:
        """A request ended by a worker's fault. O(1) while the worker goes on as before; else see ``Readiness.review``."""
        entry = self._entries.get(endpoint)
        if entry is not None and entry.health.request_failed(why, now, is_connected=not entry.unreachable):
            self._readiness.review(entry)

    def request_succeeded(self, endpoint: Endpoint) -> None:
        """A request ended well. O(1)."""
        entry = self._entries.get(endpoint)
        if entry is not None:
            entry.health.request_succeeded()

    @property
    def spreads_over_all(self) -> bool:
        """Whether more than half fail of the workers that are otherwise ready, so that none of them is put out. O(1)."""
        return self._readiness.spreads_over_all

    def no_worker_error(self) -> UnavailableError:
        """The error of a request that found no worker ready; says why of each, up to a few."""
        return UnavailableError(f"no worker is ready: {_problems_of(self) or 'none is known'}")

    def adapter_digest(self, name: str, wished: str = "") -> str | None:
        """The content that an adapter's name means now, as far as ready workers have told, ``wished`` being what it is to mean; None when none
        has it. O(workers)."""
        return choose_content(
            (entry.adapters[name] for entry in self.ready if name in entry.adapters), wished
        )

    def adapter_names(self) -> list[str]:
        """Names of the adapters that ready workers have, sorted. O(workers * adapters)."""
        return sorted({name for entry in self.ready for name in entry.adapters})

    def away_with_adapter(self, name: str) -> str:
        """Workers that had an adapter when they answered last, and why each is not ready; empty when there are none."""
        return _problems_of(entry for entry in self if name in entry.adapters)


def _problems_of(entries: Iterable[WorkerEntry]) -> str:
    """Why workers are not ready, up to a few of them."""
    problems = [f"{entry.name} {entry.problem}" for entry in entries if entry.problem]
    more = len(problems) - _SHOWN_PROBLEMS
    return "; ".join(problems[:_SHOWN_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
