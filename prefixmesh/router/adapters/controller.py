"""Decides which worker loads which adapter next, and which forgets one, from what is wished and what workers have told. Pure.

Nothing is ordered because of what was ordered before, only because of what is seen: whoever takes over goes on from there. What a name
means is found out by loading it: of each generation one worker is the first, and the content that it found is what the others are to have.
A worker that finds another in its folder has a problem that is told. A name that means an older content changes over on a few workers at a
time, and goes on meaning the older one on all others; a worker itself changes from one to the other without a moment between.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from prefixmesh.errors import InvariantError
from prefixmesh.ids import Incarnation
from prefixmesh.router.adapters.config import AdapterControllerConfig
from prefixmesh.router.adapters.gaps import NO_GAPS, GapFinder, Gaps, Wish
from prefixmesh.router.adapters.orders import Ended, Load, Order, Standing, Unload, WorkerSeen
from prefixmesh.router.adapters.records import AdapterRecord
from prefixmesh.router.adapters.troubles import Troubles
from prefixmesh.router.endpoint import Endpoint

BELIEVED_S: Final = 3.0
"""So long a worker that says an order is done is believed, although it does not tell so: three answers to ``Describe``. After that it has
failed, and is asked again ever more seldom: else one that lies were asked without end."""

_IN_VAIN: Final = "it says that it has done so, and does not tell of it"


class _Found(NamedTuple):
    """What a generation turned out to be, before the store says so."""

    generation: int
    path: str
    digest: str


class AdapterController:
    """One term's decisions. Not thread-safe."""

    def __init__(self, config: AdapterControllerConfig | None = None) -> None:
        self._config = config or AdapterControllerConfig()
        self._troubles = Troubles(self._config)
        self._gaps = GapFinder()
        self._number = 0
        self._records: Mapping[str, AdapterRecord] = {}
        self._wishes: Mapping[str, Wish] = {}
        self._found: dict[str, _Found] = {}
        self._loading: dict[Endpoint, Load] = {}
        """One a worker at most."""

        self._unloading: dict[tuple[Endpoint, str], Unload] = {}
        self._done: dict[tuple[Endpoint, str], tuple[Order, float]] = {}
        """What workers say they have done, and do not tell of yet; and since when."""

        self._changing: dict[str, dict[Endpoint, float]] = {}
        """By name: workers that change from an older content, and until when they count as such."""

        self._last_served: dict[Endpoint, int] = {}
        """Number of each worker's last load: who waits longest is next."""

    def __repr__(self) -> str:
        return f"AdapterController({len(self._wishes)} names, {len(self._loading)} loads, {len(self._unloading)} unloads)"

    def step(
        self,
        now: float,
        records: Mapping[str, AdapterRecord] | None,
        workers: Sequence[WorkerSeen],
        *,
        acts: bool = True,
    ) -> list[Order]:
        """What is to be done now. ``records`` by name, another mapping whenever one is another; None while the store was not read: nothing is
        ordered then. O(workers) while nothing changes; O(names) for each worker that does."""
        by_endpoint = {seen.endpoint: seen for seen in workers}
        self._forget_the_dead({seen.endpoint: seen.incarnation for seen in workers}, now)
        if records is None:
            return []
        self.take_over(records)
        gaps = self._gaps.find(self._wishes, workers)
        self._look_at_what_is_done(gaps, now)
        if not acts:
            return []
        loads = self._loads(gaps, by_endpoint, now)
        return [*loads, *self._unloads(gaps, by_endpoint, now)]

    def take_over(self, records: Mapping[str, AdapterRecord]) -> None:
        """Go by these records from now on: what is told is told of them. O(1) while they are the same ones, else O(names)."""
        if records is self._records:
            return
        self._records = records
        self._found = {
            name: found
            for name, found in self._found.items()
            if (record := records.get(name)) is not None
            and (record.generation, record.spec.path, record.digest) == (found.generation, found.path, "")
        }
        for key, unload in list(self._unloading.items()):
            record = records.get(unload.name)
            if record is None or record.generation != unload.generation or not record.is_removed:
                del self._unloading[
                    key
                ]  # it is wished again: nothing waits for the last request by the old one
        self._make_wishes()

    def ended(self, order: Order, ended: Ended, now: float) -> None:
        """An order has ended; of one that is not under way any more, nothing is believed. O(1)."""
        if isinstance(order, Unload):
            if self._unloading.get((order.endpoint, order.name)) is order:
                del self._unloading[order.endpoint, order.name]
                self._note_end(order, ended, now)
            return
        if self._loading.get(order.endpoint) is not order:
            return
        del self._loading[order.endpoint]
        wish = self._wishes.get(order.name)
        if wish is None or wish.record.is_removed or wish.record.generation != order.generation:
            self._end_change(order, None if ended.problem else now + self._config.settle_s)
            return  # another is wished by now, and what was loaded is seen
        if not ended.problem and not wish.digest:
            self._find(wish.record, ended.digest)
        elif not ended.problem and ended.digest != wish.digest:
            ended = Ended(_differs(order, ended.digest, wish.digest), is_refused=True)
        self._end_change(order, None if ended.problem else now + self._config.settle_s)
        self._note_end(order, ended, now)

    def found(self) -> list[AdapterRecord]:
        """Records with the digest that they turned out to have, and that the store does not know yet. O(names found)."""
        return [
            wish.record._replace(digest=wish.digest)
            for name in self._found
            if (wish := self._wishes.get(name)) is not None and not wish.record.digest
        ]

    def digest_of(self, record: AdapterRecord) -> str:
        """The content that a name of the store is to mean everywhere; empty while that is not known."""
        wish = self._wishes.get(record.name)
        is_it = wish is not None and wish.record.generation == record.generation
        return record.digest or (wish.digest if wish is not None and is_it else "")

    def standing(self, seen: WorkerSeen, name: str) -> Standing:
        """How far a worker is with a name, as of the last step. O(1)."""
        wish = self._wishes.get(name)
        if wish is None:
            return Standing("none")
        where = (seen.endpoint, seen.incarnation, name, wish.record.generation)
        if wish.record.is_removed:
            return Standing("leaving", self._troubles.failure(*where, is_load=False))
        if not seen.is_ready:
            return Standing("away")
        if wish.is_held(seen):
            return Standing("held")
        load = self._loading.get(seen.endpoint)
        if (load is not None and load.name == name) or (seen.endpoint, name) in self._done:
            return Standing("loading")
        if refusal := self._troubles.refusal(*where, is_load=True):
            return Standing("refused", refusal)
        failure = self._troubles.failure(*where, is_load=True)
        return Standing("failed", failure) if failure else Standing("waiting")

    def check_invariants(self) -> None:
        """Raises InvariantError unless bounds are kept and everything under way is known once. O(orders)."""
        under_way = len(self._loading), len(self._unloading)
        if under_way[0] > self._config.max_loads or under_way[1] > self._config.max_unloads:
            raise InvariantError(f"more is under way than may be: {under_way} of {self!r}")
        for name, changing in self._changing.items():
            for endpoint, until in changing.items():
                load = self._loading.get(endpoint)
                if until == math.inf and (load is None or load.name != name):
                    raise InvariantError(f"{endpoint} changes {name} by no load of {self!r}")

    def _forget_the_dead(self, lives: dict[Endpoint, Incarnation], now: float) -> None:
        """What was ordered from lives that are over, or said by them, and changes that are settled. O(workers)."""
        for load in [one for one in self._loading.values() if lives.get(one.endpoint) != one.incarnation]:
            del self._loading[load.endpoint]
            self._end_change(load, None)
        for unload in [one for one in self._unloading.values() if lives.get(one.endpoint) != one.incarnation]:
            del self._unloading[unload.endpoint, unload.name]
        for key, (order, _) in list(self._done.items()):
            if lives.get(order.endpoint) != order.incarnation:
                del self._done[key]
        for name, changing in list(self._changing.items()):
            left = {one: until for one, until in changing.items() if until > now and one in lives}
            if left:
                self._changing[name] = left
            else:
                del self._changing[name]
        if len(self._last_served) > len(lives):
            self._last_served = {one: number for one, number in self._last_served.items() if one in lives}
        self._troubles.prune(lives, now)

    def _make_wishes(self) -> None:
        self._wishes = {
            name: Wish(record, record.digest or (self._found[name].digest if name in self._found else ""))
            for name, record in self._records.items()
        }

    def _find(self, record: AdapterRecord, digest: str) -> None:
        self._found[record.name] = _Found(record.generation, record.spec.path, digest)
        self._make_wishes()

    def _look_at_what_is_done(self, gaps: Mapping[Endpoint, Gaps], now: float) -> None:
        """Believe what workers tell; what they only say is believed for a while. O(orders lately done)."""
        for key, (order, at) in list(self._done.items()):
            wish = self._wishes.get(order.name)
            there = gaps.get(order.endpoint, NO_GAPS)
            if wish is None or wish.record.generation != order.generation:
                del self._done[key]
            elif order.name not in (there.lacks if isinstance(order, Load) else there.leaves):
                del self._done[key]
                self._troubles.worked(order)
            elif now - at >= BELIEVED_S:
                del self._done[key]
                self._troubles.failed(order, Ended(_IN_VAIN), now)

    def _loads(
        self, gaps: Mapping[Endpoint, Gaps], workers: Mapping[Endpoint, WorkerSeen], now: float
    ) -> list[Load]:
        free = self._config.max_loads - len(self._loading)
        lacking = [one for one, there in gaps.items() if there.lacks and one not in self._loading]
        if free <= 0 or not lacking:
            return []
        lacking.sort(key=lambda one: (self._last_served.get(one, 0), one))
        ready = sum(seen.is_ready for seen in workers.values())
        most_changing = max(1, int(ready * self._config.roll_share))
        loading_names = {load.name for load in self._loading.values()}
        loads: list[Load] = []
        for endpoint in lacking:
            if len(loads) == free:
                break
            seen = workers[endpoint]
            name = self._next_name(gaps[endpoint].lacks, seen, loading_names, most_changing, now)
            if name is not None:
                loading_names.add(name)
                loads.append(self._begin_load(seen, self._wishes[name].record))
        return loads

    def _next_name(
        self, lacks: Sequence[str], seen: WorkerSeen, loading: set[str], most_changing: int, now: float
    ) -> str | None:
        """What this worker loads next; None when it has to wait for everything that it lacks. O(what it lacks)."""
        for name in lacks:
            wish = self._wishes[name]
            if not wish.digest and name in loading:
                continue  # one worker finds out what it is
            if (seen.endpoint, name) in self._done:
                continue
            if self._is_change(wish, seen) and len(self._changing.get(name, ())) >= most_changing:
                continue
            generation = wish.record.generation
            if not self._troubles.is_paused(
                seen.endpoint, seen.incarnation, name, generation, now, is_load=True
            ):
                return name
        return None

    def _is_change(self, wish: Wish, seen: WorkerSeen) -> bool:
        """Whether the worker answers by another content meanwhile, or may."""
        there = seen.adapters.get(wish.record.name)
        return there is not None and there != wish.digest

    def _begin_load(self, seen: WorkerSeen, record: AdapterRecord) -> Load:
        self._number += 1
        load = Load(
            self._number,
            seen.endpoint,
            seen.incarnation,
            record.name,
            record.spec.path,
            record.spec.pinned,
            record.generation,
        )
        self._loading[seen.endpoint] = load
        self._last_served[seen.endpoint] = load.number
        if self._is_change(self._wishes[record.name], seen):
            self._changing.setdefault(record.name, {})[seen.endpoint] = math.inf
        return load

    def _unloads(
        self, gaps: Mapping[Endpoint, Gaps], workers: Mapping[Endpoint, WorkerSeen], now: float
    ) -> list[Unload]:
        unloads: list[Unload] = []
        for endpoint, there in gaps.items():
            for name in there.leaves:
                if len(self._unloading) >= self._config.max_unloads:
                    return unloads
                seen, record = workers[endpoint], self._wishes[name].record
                if (endpoint, name) in self._unloading or (endpoint, name) in self._done:
                    continue
                load = self._loading.get(endpoint)
                if load is not None and load.name == name:
                    continue  # after that
                if self._troubles.is_paused(
                    endpoint, seen.incarnation, name, record.generation, now, is_load=False
                ):
                    continue
                self._number += 1
                unload = Unload(self._number, endpoint, seen.incarnation, name, record.generation)
                self._unloading[endpoint, name] = unload
                unloads.append(unload)
        return unloads

    def _note_end(self, order: Order, ended: Ended, now: float) -> None:
        if ended.problem:
            self._troubles.failed(order, ended, now)
        else:
            self._done[order.endpoint, order.name] = (order, now)

    def _end_change(self, load: Load, until: float | None) -> None:
        """A load has ended; where the worker has changed, it counts as changing for a while yet."""
        changing = self._changing.get(load.name)
        if changing is None or load.endpoint not in changing:
            return
        if until is None:
            del changing[load.endpoint]
        else:
            changing[load.endpoint] = until


def _differs(load: Load, digest: str, wanted: str) -> str:
    return (
        f"its folder {load.path!r} holds other weights ({digest[:12]}) than that of the worker which was the first "
        f"to load them ({wanted[:12]})"
    )
