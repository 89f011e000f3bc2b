"""Which LoRA adapters are known, whose weights are resident, and who waits for whose. A pure core; one loop owns it.

Three things are kept apart. A *name* is what people load and unload. A *content* is what a name means, told by its digest: requests
have a content, so a name that is loaded again with other weights changes nothing for those that run. A *slot* is room for one
content's weights in the device's memory, of which there are few::

    names                contents                     slots
    "law"  (pinned) ---> 3f..  users: r1 r2  ------->   0
    "law2" ------------> 3f..                           1  being loaded for 9a..
    "med"  ------------> 9a..  waiting: r3 r4 ------>
                         77..  users: r5  ---------->   2  (no name any more: it goes when r5 ends)

A request holds its content's slot from its grant to its end. Contents that want a slot stand in a line. The first in it gets a free
one, or that of the least recently used content without users that is not pinned. When there is none, it waits for one; and when
``MAX_PASSED_OVER`` later requests have been granted meanwhile, the least recently used content is *drained*: it gets no further
users, so its slot comes free when those it has are done, and the wait ends.

Every method changes the table and notes what must be done about it; the shell takes these actions in order (``take_actions``).
"""

from collections.abc import Iterable
from typing import Final

from prefixmesh.errors import BudgetError, InvariantError, NotFoundError
from prefixmesh.worker.adapter_places import AdapterPlaces
from prefixmesh.worker.adapter_records import (
    Action,
    AdapterContent,
    AdapterState,
    Drop,
    Grant,
    Load,
    Refusal,
    Unloaded,
)
from prefixmesh.worker.engine_stats import AdapterCounts
from prefixmesh.worker.messages import AdapterInfo

MAX_NAMES: Final = 1024
"""A name costs some hundred bytes, and every look at the list tells all of them."""

MAX_PASSED_OVER: Final = 32
"""So many later requests may be granted before the first in line; as many as overtake a request in the scheduler's queue."""

UNKNOWN: Final = "no adapter of this content is loaded here"


class AdapterTable:
    """See the module. Every method is O(contents) at most, none looks at a file."""

    def __init__(self, *, max_resident: int, budget_bytes: int, max_waiting: int) -> None:
        """At most ``max_resident`` contents and ``budget_bytes`` of weights are resident; at most ``max_waiting`` requests wait."""
        self._places = AdapterPlaces(max_resident, budget_bytes)
        self._max_waiting = max_waiting
        self._names: dict[str, AdapterContent] = {}
        self._contents: dict[str, AdapterContent] = {}
        self._requests: dict[str, AdapterContent] = {}
        self._waiting = 0
        self._line: dict[str, AdapterContent] = {}
        self._passed_over = 0
        """Requests granted since the first in line came to stand there."""

        self._draining: set[str] = set()
        self._unloads: dict[int, set[str]] = {}
        self._clock = 0
        self._loads = self._failed_loads = self._evictions = 0
        self._actions: list[Action] = []

    def __contains__(self, request_id: str) -> bool:
        """Whether the request holds a slot, or waits for one."""
        return request_id in self._requests

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return self._waiting

    @property
    def using(self) -> int:
        """Requests that have a slot."""
        return len(self._requests) - self._waiting

    def knows(self, digest: str) -> bool:
        """Whether some name means this content."""
        content = self._contents.get(digest)
        return content is not None and bool(content.names)

    def slots_of(self, request_ids: Iterable[str]) -> list[int]:
        """Each request's slot, -1 for those without an adapter; empty when none has one. O(requests)."""
        held = [self._requests.get(request_id) for request_id in request_ids]
        return [-1 if content is None else content.slot for content in held] if any(held) else []

    def take_actions(self) -> list[Action]:
        """What must be done since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    def learn(self, name: str, *, digest: str, path: str, rank: int, size_bytes: int, pinned: bool) -> None:
        """Let ``name`` mean this content from now on. Its weights become resident when there is room, or when it is pinned.

        Raises BudgetError, and changes nothing, when there are too many names, or the pinned would not fit.
        """
        if name not in self._names and len(self._names) >= MAX_NAMES:
            raise BudgetError(
                f"at most {MAX_NAMES} adapters can be loaded, and as many are: unload one first"
            )
        self._places.check_new(self._contents.values(), name, digest, size_bytes, pinned=pinned)
        old = self._names.get(name)
        content = self._contents.get(digest)
        if content is None:
            content = self._contents[digest] = AdapterContent(digest, path, rank, size_bytes)
        if old is not None and old is not content:
            _take_name(old, name)
        self._names[name] = content
        content.names[name] = pinned
        content.path = content.paths[name] = path
        if content.state is AdapterState.ABSENT:
            if pinned:
                self._line.setdefault(digest, content)
            elif not self._line and self._places.victims(content, ()) is not None:
                self._begin_load(content)
        self._settle()

    def forget(self, name: str, question: int) -> None:
        """Unload a name; ``Unloaded`` follows when the requests that have its content now have ended. Raises NotFoundError."""
        content = self._names.pop(name, None)
        if content is None:
            raise NotFoundError(f"no adapter has the name {name!r}")
        _take_name(content, name)
        if content.has_requests:
            self._unloads[question] = content.users | content.waiting.keys()
        else:
            self._actions.append(Unloaded(question))
        self._settle()

    def acquire(self, digest: str, request_id: str) -> None:
        """A request wants to run: ``Grant``, at once or later, or ``Refusal``."""
        content = self._contents.get(digest)
        refusal = self._refusal(content, request_id)
        if refusal is not None or content is None:
            self._actions.append(refusal or Refusal(request_id, UNKNOWN))
            return
        self._requests[request_id] = content
        if content.state is AdapterState.RESIDENT and digest not in self._draining:
            self._passed_over += bool(self._line)
            self._grant(content, request_id)
        else:
            content.waiting[request_id] = None
            self._waiting += 1
            if content.state is not AdapterState.LOADING:
                self._line.setdefault(digest, content)
        self._settle()

    def release(self, request_id: str) -> None:
        """The request has ended, or waits no longer. Those that have no adapter are ignored."""
        content = self._requests.pop(request_id, None)
        if content is None:
            return
        self._stamp(content)
        content.users.discard(request_id)
        if request_id in content.waiting:
            del content.waiting[request_id]
            self._waiting -= 1
        for question, pending in list(self._unloads.items()):
            pending.discard(request_id)
            if not pending:
                del self._unloads[question]
                self._actions.append(Unloaded(question))
        self._settle()

    def loaded(self, digest: str) -> None:
        """A ``Load`` is done."""
        content = self._contents[digest]
        content.state = AdapterState.RESIDENT
        self._loads += 1
        self._stamp(content)
        self._grant_waiting(content)
        self._settle()

    def load_failed(self, digest: str, problem: str) -> None:
        """A ``Load`` could not be done: who waited for it is refused. The next request tries again."""
        content = self._contents[digest]
        self._failed_loads += 1
        self._free(content)
        self._refuse_waiting(content, problem)
        self._settle()

    def counts(self) -> AdapterCounts:
        """Sums over all of them, and what happened since the start."""
        return AdapterCounts(
            names=len(self._names),
            resident=sum(x.state is AdapterState.RESIDENT for x in self._contents.values()),
            resident_bytes=self._places.used_bytes,
            waiting_requests=self._waiting,
            loads=self._loads,
            failed_loads=self._failed_loads,
            evictions=self._evictions,
        )

    @property
    def resident(self) -> tuple[str, ...]:
        """Digests of those whose weights are in memory, sorted. O(contents)."""
        return tuple(sorted(x.digest for x in self._contents.values() if x.state is AdapterState.RESIDENT))

    def infos(self) -> tuple[AdapterInfo, ...]:
        """All names, sorted."""
        return tuple(self.info(name) for name in sorted(self._names))

    def info(self, name: str) -> AdapterInfo:
        """One name's state."""
        content = self._names[name]
        return AdapterInfo(
            name=name,
            digest=content.digest,
            rank=content.rank,
            size_bytes=content.size_bytes,
            resident=content.state is AdapterState.RESIDENT,
            pinned=content.names[name],
            running_requests=len(content.users) + len(content.waiting),
        )

    def _refusal(self, content: AdapterContent | None, request_id: str) -> Refusal | None:
        if content is None or not content.names:
            return Refusal(request_id, UNKNOWN)
        if self._waiting >= self._max_waiting:
            return Refusal(
                request_id, f"{self._max_waiting} requests wait for adapters already", is_full=True
            )
        problem = self._places.never_fits(content, self._contents.values())
        return Refusal(request_id, problem, is_full=True) if problem else None

    def _settle(self) -> None:
        """Do for the line what can be done now, and let go of contents that nobody can ask for again."""
        self._drop_nameless()
        while self._line:
            content = next(iter(self._line.values()))
            if not (content.waiting or content.pinned):
                self._leave_line(content)
            elif problem := self._places.never_fits(content, self._contents.values()):
                self._leave_line(content)
                self._refuse_waiting(content, problem, is_full=True)
            elif self._make_room(content):
                self._leave_line(content)
                self._begin_load(content)
            else:
                if self._passed_over >= MAX_PASSED_OVER:
                    self._drain_for(content)
                break
        self._drop_nameless()

    def _leave_line(self, content: AdapterContent) -> None:
        """The first in line has what it stood for, or wants it no more: whoever is next has its own count and needs its own room."""
        del self._line[content.digest]
        self._passed_over = 0
        spared, self._draining = self._draining, set()
        for digest in spared:
            other = self._contents[digest]
            if other.waiting:
                del self._line[digest]
                self._grant_waiting(other)

    def _make_room(self, content: AdapterContent) -> bool:
        """Free as many of the least recently used as it takes; whether there is room then. Nobody is dropped in vain."""
        idle = sorted(
            (
                x
                for x in self._contents.values()
                if x.state is AdapterState.RESIDENT and not x.users and not x.pinned
            ),
            key=_age,
        )
        victims = self._places.victims(content, idle)
        if victims is None:
            return False
        self._evictions += len(victims)
        for victim in victims:
            self._drop(victim)
        return True

    def _drain_for(self, content: AdapterContent) -> None:
        """As many of the least recently used get no more users as will make room once those they have are done."""
        candidates = [x for x in self._contents.values() if x.state is AdapterState.RESIDENT and not x.pinned]
        # Those that are draining already first: as they end, others must not be drained in their stead.
        candidates.sort(key=lambda x: (x.digest not in self._draining, x.last_used))
        victims = self._places.victims(content, candidates)
        self._draining.update(x.digest for x in (candidates if victims is None else victims))

    def _begin_load(self, content: AdapterContent) -> None:
        content.state = AdapterState.LOADING
        self._places.take(content)
        self._actions.append(Load(content.digest, content.path, content.slot))

    def _drop(self, content: AdapterContent) -> None:
        self._actions.append(Drop(content.slot))
        self._free(content)

    def _free(self, content: AdapterContent) -> None:
        self._places.give_back(content)
        content.state = AdapterState.ABSENT
        self._draining.discard(content.digest)

    def _drop_nameless(self) -> None:
        gone = [x for x in self._contents.values() if not x.names and not x.has_requests]
        for content in gone:
            if content.state is AdapterState.LOADING:
                continue  # its thread still reads: it goes when that is done
            if content.state is AdapterState.RESIDENT:
                self._drop(content)
            if content.digest in self._line and next(iter(self._line)) == content.digest:
                self._leave_line(content)
            self._line.pop(content.digest, None)
            del self._contents[content.digest]

    def _grant(self, content: AdapterContent, request_id: str) -> None:
        content.users.add(request_id)
        self._stamp(content)
        self._actions.append(Grant(request_id, content.slot))

    def _grant_waiting(self, content: AdapterContent) -> None:
        for request_id in self._take_waiting(content):
            self._grant(content, request_id)

    def _refuse_waiting(self, content: AdapterContent, problem: str, *, is_full: bool = False) -> None:
        for request_id in self._take_waiting(content):
            del self._requests[request_id]
            self._actions.append(Refusal(request_id, problem, is_full))
            for pending in self._unloads.values():
                pending.discard(request_id)
        for question in [question for question, pending in self._unloads.items() if not pending]:
            del self._unloads[question]
            self._actions.append(Unloaded(question))

    def _take_waiting(self, content: AdapterContent) -> Iterable[str]:
        taken, content.waiting = content.waiting, {}
        self._waiting -= len(taken)
        return taken

    def _stamp(self, content: AdapterContent) -> None:
        self._clock += 1
        content.last_used = self._clock

    def check_invariants(self) -> None:
        """Recompute every sum; raises InvariantError with the state printed. O(everything)."""
        contents = list(self._contents.values())
        placed = [content for content in contents if content.state is not AdapterState.ABSENT]
        held = {request for content in contents for request in (*content.users, *content.waiting)}
        groups = {
            "slots and bytes are those of who has a place": self._places.agrees_with(placed),
            "names and contents agree": {name: x for x in contents for name in x.names} == self._names,
            "who has users is resident": all(x.state is AdapterState.RESIDENT for x in contents if x.users),
            "requests are in one place": held == self._requests.keys()
            and len(held) == sum(len(x.users) + len(x.waiting) for x in contents),
            "the count of the waiting is right": self._waiting == sum(len(x.waiting) for x in contents),
            "who waits is being loaded or in the line": all(
                x.state is AdapterState.LOADING or x.digest in self._line for x in contents if x.waiting
            ),
            "nobody is kept for nothing": all(
                x.names or x.has_requests or x.state is AdapterState.LOADING for x in contents
            ),
            "the draining make room for the first in line": not self._draining or bool(self._line),
            "an unload waits for somebody": all(
                pending and pending <= held for pending in self._unloads.values()
            ),
        }
        broken = [name for name, holds in groups.items() if not holds]
        if broken:
            raise InvariantError(f"broken: {'; '.join(broken)}; state: {self!r} {contents!r}")

    def __repr__(self) -> str:
        return (
            f"<AdapterTable {len(self._names)} names, {self._places!r} | {len(self._requests) - self._waiting} using, "
            f"{self._waiting} waiting>"
        )


def _age(content: AdapterContent) -> int:
    return content.last_used


def _take_name(content: AdapterContent, name: str) -> None:
    """The name means it no longer; it is read from where a name that is left found it."""
    del content.names[name], content.paths[name]
    content.path = next(reversed(content.paths.values()), content.path)
