"""The workers a router knows, what each has told about itself, and whether it may be sent anything. Pure.

A worker is added by its address and is not ready until it has answered, says that it is serving, and serves what this
router serves: routing by tokens and fingerprints makes no sense between two tokenizers or two revisions of the weights.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from prefixmesh.cache.ledger import LedgerRow
from prefixmesh.errors import UnavailableError
from prefixmesh.ids import Incarnation, WorkerId
from prefixmesh.router.adapter_names import Told, choose_content, take_note
from prefixmesh.router.cost import Rates
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.load import WorkerLoad

_NOT_ASKED: Final = "has not answered yet"
_NO_HEALTH: Final = "has not said yet whether it is serving"
_HEALTH_PROBLEMS: Final = {True: "", False: "says that it is not serving", None: _NO_HEALTH}
PASSING_PROBLEMS: Final = frozenset({_NOT_ASKED, _NO_HEALTH})
"""Problems that every worker has for a moment while the router gets to know it."""

_SHOWN_PROBLEMS: Final = 4
"""Workers named in one error message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a worker tells about itself."""

    worker_id: WorkerId
    incarnation: Incarnation
    model: str
    model_revision: str
    tokenizer_digest: str
    protocol_version: int
    fingerprint_version: int
    context_length: int
    """Most tokens of prompt and answer together."""

    max_running_requests: int
    match_unit: int
    """Its cache matches whole multiples of so many tokens; 0 when it has no prefix cache."""

    rates: Rates
    cache: LedgerRow | None = None
    """What its cache was asked for and gave, by its own count; None when it does not tell."""

    adapters: Mapping[str, str] = field(default_factory=dict)
    """Content digests of the LoRA adapters that requests may name there, by name."""

    def expected_cached(self, held_tokens: int, prompt_tokens: int) -> int:
        """Tokens it will find cached of a prompt of which it holds ``held_tokens``: whole units, and never the last token, which is
        computed always so that there is something to sample from."""
        if not self.match_unit:
            return 0
        return min(held_tokens, prompt_tokens - 1) // self.match_unit * self.match_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What every worker must share with this router."""

    model_revision: str
    tokenizer_digest: str
    protocol_version: int
    fingerprint_version: int

    def problem_of(self, facts: WorkerFacts) -> str:
        """How ``facts`` differ from what is expected; empty when they do not."""
        if abs(facts.protocol_version - self.protocol_version) > 1:  # neighbours understand each other
            return f"speaks protocol {facts.protocol_version}, this router {self.protocol_version}"
        if facts.model_revision != self.model_revision:
            return (
                f"serves another revision of the model: {facts.model_revision[:12]} ({facts.model}), "
                f"this router {self.model_revision[:12]}"
            )
        if facts.tokenizer_digest != self.tokenizer_digest:
            return "uses another tokenizer or chat template than this router"
        if facts.fingerprint_version != self.fingerprint_version:
            return f"names blocks by fingerprint version {facts.fingerprint_version}, this router {self.fingerprint_version}"
        return ""


@dataclass(slots=True)
class WorkerTotals:
    """What was routed to a worker since it was added."""

    routed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class WorkerEntry:
    """One worker as the router sees it now."""

    __slots__ = ("adapters", "endpoint", "facts", "load", "problem", "serving", "totals", "unreachable")

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.facts: WorkerFacts | None = None
        """What it told last; None before its first answer. A ready worker has it."""

        self.serving: bool | None = None
        """What its health service says; None before it has said anything on this connection."""

        self.unreachable = _NOT_ASKED
        """Why it cannot be reached; empty when it can."""

        self.problem = _NOT_ASKED
        """Why it is not ready; empty when it is."""

        self.adapters: Mapping[str, Told] = {}
        """The adapters it told of last, by name."""

        self.load = WorkerLoad(Incarnation(0))
        self.totals = WorkerTotals()

    @property
    def ready(self) -> bool:
        """Whether it may be sent requests."""
        return not self.problem

    @property
    def name(self) -> str:
        """Its own id where it has told it, else its address."""
        return self.facts.worker_id if self.facts else self.endpoint

    def has_adapter(self, name: str, digest: str) -> bool:
        """Whether ``name`` means the content ``digest`` there; every worker has the base model, whose name is empty."""
        told = self.adapters.get(name)
        return not name or (told is not None and told.digest == digest)


class WorkerRegistry:
    """All workers by address. Not thread-safe: one loop owns it. A call about an unknown address is ignored: its news is late."""

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._entries: dict[Endpoint, WorkerEntry] = {}
        self._ready: list[WorkerEntry] = []
        self._answers = 0

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
        """The longest context any ready worker has; 0 when none is ready."""
        return max((entry.facts.context_length for entry in self._ready if entry.facts), default=0)

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
        """Take over what a worker told. True when it is another life than the one known before, whose caches and work are gone."""
        entry = self._entries.get(endpoint)
        if entry is None:
            return False
        is_new_life = entry.load.incarnation != facts.incarnation
        if is_new_life:
            entry.load = WorkerLoad(facts.incarnation)
        entry.facts = facts
        self._answers += 1
        entry.adapters = take_note(entry.adapters, facts.adapters, self._answers)
        entry.unreachable = ""
        self._review()
        return is_new_life

    def health_changed(self, endpoint: Endpoint, *, serving: bool) -> None:
        """A worker's health service said whether it is serving."""
        entry = self._entries.get(endpoint)
        if entry is not None:
            entry.serving = serving
            self._review()

    def unreachable(self, endpoint: Endpoint, why: str) -> None:
        """A worker did not answer: it is not ready from this moment until it is described again."""
        entry = self._entries.get(endpoint)
        if entry is not None:
            entry.serving = None
            entry.unreachable = f"cannot be reached: {why}"
            self._review()

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
        self._ready = [entry for entry in self if entry.ready]

    def _problem_of(self, entry: WorkerEntry, owners: dict[WorkerId, Endpoint]) -> str:
        facts = entry.facts
        if facts is None:
            return _NOT_ASKED
        owner = owners.setdefault(facts.worker_id, entry.endpoint)
        if owner != entry.endpoint:
            return f"has the worker id {facts.worker_id!r} that {owner} has already; give each worker its own"
        return self._expected.problem_of(facts) or _HEALTH_PROBLEMS[entry.serving]


def _problems_of(entries: Iterable[WorkerEntry]) -> str:
    """Why workers are not ready, up to a few of them."""
    problems = [f"{entry.name} {entry.problem}" for entry in entries if entry.problem]
    more = len(problems) - _SHOWN_PROBLEMS
    return "; ".join(problems[:_SHOWN_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
