"""The workers a router knows, what each has told about itself, and whether it may be sent anything. Pure.

A worker is added by its address and is not ready until it has answered, says that it is serving, and serves what this
router serves: routing by tokens and fingerprints makes no sense between two tokenizers or two revisions of the weights.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prefixmesh.errors import UnavailableError
from prefixmesh.ids import Incarnation, WorkerId
from prefixmesh.router.adapter_names import Told, choose_content, take_note
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.forecast_error import ForecastError
from prefixmesh.router.load import WorkerLoad
from prefixmesh.router.worker_health import SUCCESSES_IN, WorkerHealth, may_be_put_out
from prefixmesh.router.worker_identity import Expected, WorkerFacts
from prefixmesh.worker_report import WorkerReport

_NOT_ASKED: Final = "has not answered yet"
_NO_HEALTH: Final = "has not said yet whether it is serving"
_DRAINING: Final = "is draining: it finishes what it has and takes nothing new"
_LEAVING: Final = "is leaving: it hands over what it holds, and gets nothing new"
_HEALTH_PROBLEMS: Final = {True: "", False: "says that it is not serving", None: _NO_HEALTH}
PASSING_PROBLEMS: Final = frozenset({_NOT_ASKED, _NO_HEALTH})
"""Problems that every worker has for a moment while the router gets to know it."""

_SHOWN_PROBLEMS: Final = 4
"""Workers named in one error message."""


@dataclass(slots=True)
class WorkerTotals:
    """What was routed to a worker since it was added."""

    routed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class WorkerErrors:
    """How far decisions for a worker were from what came true."""

    __slots__ = ("cached_tokens", "first_token_ms")

    def __init__(self) -> None:
        self.cached_tokens = ForecastError()
        self.first_token_ms = ForecastError()


class WorkerEntry:
    """One worker as the router sees it now."""

    __slots__ = (
        "adapters",
        "awaits_first_report",
        "clock_ahead_ms",
        "draining",
        "ejected",
        "endpoint",
        "errors",
        "facts",
        "health",
        "leaving",
        "load",
        "problem",
        "report",
        "row",
        "serving",
        "spell",
        "totals",
        "unreachable",
    )

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.row = -1
        """Its place in ``FleetColumns``."""

        self.facts: WorkerFacts | None = None
        """What it told last; None before its first answer. A ready worker has it."""

        self.serving: bool | None = None
        """What its health service says; None before it has said anything on this connection."""

        self.unreachable = _NOT_ASKED
        """Why it cannot be reached; empty when it can."""

        self.problem = _NOT_ASKED
        """Why it is not ready; empty when it is."""

        self.health = WorkerHealth()
        self.ejected = False
        """Whether it is put out for failing, although its connection stands."""

        self.spell = 0
        """How often it has come or come back: another life, another connection, or well again after it was failing. What befalls a request
        says something of the worker only in the spell in which it was sent."""

        self.adapters: Mapping[str, Told] = {}
        """The adapters it told of last, by name."""

        self.draining = False
        """Whether it has said that it takes nothing new."""

        self.leaving = False
        """Whether an operator has this life of it hand over what it holds before it drains."""

        self.load = WorkerLoad(Incarnation(0))
        self.report: WorkerReport | None = None
        """What it told of its load last; None before that, and when it is too old."""

        self.awaits_first_report = False
        """Whether its stream has not brought a report yet: the first names everything of ours that runs there."""

        self.clock_ahead_ms = 0
        """By how much its wall clock is ahead of this router's, less what its answer took: tickets expire by the worker's."""

        self.totals = WorkerTotals()
        self.errors = WorkerErrors()

    @property
    def ready(self) -> bool:
        """Whether it may be sent requests."""
        return not self.problem

    @property
    def gives(self) -> bool:
        """Whether KV may be copied from it: also while it finishes what it has, and takes nothing new."""
        return self.ready or (
            (self.ends or (self.leaving and not self.unreachable))
            and not self.ejected
            and self.facts is not None
        )

    @property
    def ends(self) -> bool:
        """Whether it says itself that it takes nothing new, and can be reached: it drains, or was told to stop."""
        return (self.draining or self.serving is False) and not self.unreachable

    @property
    def name(self) -> str:
        """Its own id where it has told it, else its address."""
        return self.facts.worker_id if self.facts else self.endpoint

    def has_adapter(self, name: str, digest: str) -> bool:
        """Whether ``name`` means the content ``digest`` there; every worker has the base model, whose name is empty."""
        told = self.adapters.get(name)
        return not name or (told is not None and told.digest == digest)

    def has_resident(self, digest: str) -> bool:
        """Whether the weights of this content were in its device's memory when it told last."""
        if self.report is not None:
            return digest in self.report.resident_adapters
        return self.facts is not None and digest in self.facts.resident_adapters


class WorkerRegistry:
    """All workers by address. Not thread-safe: one loop owns it. A call about an unknown address is ignored: its news is late."""

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._entries: dict[Endpoint, WorkerEntry] = {}
        self._ready: list[WorkerEntry] = []
        self._answers = 0
        self._context_length = 0
        self.reviews = 0
        """How often it was worked out anew who is ready."""

        self.failing = 0
        """Workers that fail, of those that are ready but for that."""

        self.otherwise_ready = 0
        """Those that are ready but for that."""

    def __iter__(self) -> Iterator[WorkerEntry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        states = ", ".join(f"{e.endpoint} {e.problem or 'ready'}" for e in self)
        return f"WorkerRegistry({len(self._ready)}/{len(self)} ready | {states or 'empty'})"

    @property
    def ready(self) -> list[WorkerEntry]:
        """The workers that may be sent requests; O(1). Not to be changed by the caller."""
        return self._ready

    @property
    def context_length(self) -> int:
        """The longest context any ready worker has; 0 when none is ready. O(1)."""
        return self._context_length

    def get(self, endpoint: Endpoint) -> WorkerEntry | None:
        """The worker at an address; None when it is not known."""
        return self._entries.get(endpoint)

    def add(self, endpoint: Endpoint) -> bool:
        """Know a worker from now on; False when it was known already, and then nothing changes."""
        if endpoint in self._entries:
            return False
        self._entries[endpoint] = WorkerEntry(endpoint)
        return True

    def remove(self, endpoint: Endpoint) -> bool:
        """Know it no longer; False when it was not known. Its open reservations settle against a load that nobody reads."""
        known = self._entries.pop(endpoint, None) is not None
        self._review()
        return known

    def described(self, endpoint: Endpoint, facts: WorkerFacts) -> bool:
        """Take over what a worker told. True when it is another life than the one known before, whose caches and work are gone.

        O(1) while it tells what it told before, else O(workers).
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
            self._review()
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
        self._review()
        return True

    def leaving_changed(self, endpoint: Endpoint, *, leaving: bool) -> bool:
        """A worker is to hand over what it holds, and gets nothing new until it has drained; or not any more. True when that is news."""
        entry = self._entries.get(endpoint)
        if entry is None or entry.leaving == leaving:
            return False
        entry.leaving = leaving
        self._review()
        return True

    def health_changed(self, endpoint: Endpoint, *, serving: bool) -> None:
        """A worker's health service said whether it is serving."""
        entry = self._entries.get(endpoint)
        if entry is not None and entry.serving != serving:
            entry.serving = serving
            self._review()

    def unreachable(self, endpoint: Endpoint, why: str) -> None:
        """A worker did not answer: it is not ready from this moment until it is described again."""
        entry = self._entries.get(endpoint)
        if entry is not None:
            entry.serving = None
            entry.unreachable = f"cannot be reached: {why}"
            self._review()

    def probe_ended(self, endpoint: Endpoint, problem: str, now: float) -> bool:
        """A probe of a connected worker found ``problem``, or none when that is empty. True when it was put out and now is well again.

        O(1) while it goes on as before, else O(workers).
        """
        entry = self._entries.get(endpoint)
        if entry is None or not entry.health.probe_ended(problem, now):
            return False
        was_out, is_well = entry.ejected, not entry.health.is_failing
        entry.spell += is_well
        self._review()
        return was_out and is_well

    def request_failed(self, endpoint: Endpoint, why: str, now: float) -> None:
        """A request ended by a worker's fault. O(1) while the worker goes on as before, else O(workers)."""
        entry = self._entries.get(endpoint)
        if entry is not None and entry.health.request_failed(why, now, is_connected=not entry.unreachable):
            self._review()

    def request_succeeded(self, endpoint: Endpoint) -> None:
        """A request ended well. O(1)."""
        entry = self._entries.get(endpoint)
        if entry is not None:
            entry.health.request_succeeded()

    @property
    def spreads_over_all(self) -> bool:
        """Whether more than half fail of the workers that are otherwise ready, so that none of them is put out. O(1)."""
        return not may_be_put_out(self.failing, self.otherwise_ready)

    def no_worker_error(self) -> UnavailableError:
        """The error of a request that found no worker ready; says why of each, up to a few."""
        return UnavailableError(f"no worker is ready: {_problems_of(self) or 'none is known'}")

    def adapter_digest(self, name: str) -> str | None:
        """The content that an adapter's name means now, as far as ready workers have told; None when none has it. O(workers)."""
        return choose_content(entry.adapters[name] for entry in self._ready if name in entry.adapters)

    def adapter_names(self) -> list[str]:
        """Names of the adapters that ready workers have, sorted. O(workers * adapters)."""
        return sorted({name for entry in self._ready for name in entry.adapters})

    def away_with_adapter(self, name: str) -> str:
        """Workers that had an adapter when they answered last, and why each is not ready; empty when there are none."""
        return _problems_of(entry for entry in self if name in entry.adapters)

    def _review(self) -> None:
        """Work out anew who is ready. Of several workers with one id, the first that can be reached keeps it."""
        owners: dict[WorkerId, Endpoint] = {}
        for entry in self:
            entry.problem = entry.unreachable or self._problem_of(entry, owners)
        self._put_out()
        self._ready = [entry for entry in self if entry.ready]
        self._context_length = max(
            (entry.facts.context_length for entry in self._ready if entry.facts), default=0
        )
        self.reviews += 1

    def _put_out(self) -> None:
        """Leave out those that fail, unless they are too many."""
        sound = [entry for entry in self if not entry.problem]
        failing = [entry for entry in sound if entry.health.is_failing]
        self.failing, self.otherwise_ready = len(failing), len(sound)
        for entry in self:
            entry.ejected = False
        for entry in () if self.spreads_over_all else failing:
            entry.ejected = True
            entry.problem = (
                f"was put out: {entry.health.why}; it is back once {SUCCESSES_IN} probes in a row are good"
            )

    def _problem_of(self, entry: WorkerEntry, owners: dict[WorkerId, Endpoint]) -> str:
        facts = entry.facts
        if facts is None:
            return _NOT_ASKED
        owner = owners.setdefault(facts.worker_id, entry.endpoint)
        if owner != entry.endpoint:
            return f"has the worker id {facts.worker_id!r} that {owner} has already; give each worker its own"
        problem = self._expected.problem_of(facts)
        if not problem and (entry.draining or entry.leaving):
            problem = _DRAINING if entry.draining else _LEAVING
        return problem or _HEALTH_PROBLEMS[entry.serving]


def _problems_of(entries: Iterable[WorkerEntry]) -> str:
    """Why workers are not ready, up to a few of them."""
    problems = [f"{entry.name} {entry.problem}" for entry in entries if entry.problem]
    more = len(problems) - _SHOWN_PROBLEMS
    return "; ".join(problems[:_SHOWN_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
