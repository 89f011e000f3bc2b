"""Decides which worker loads which adapter next, and which forgets one, from what is wished and what workers have told. Pure.

Nothing is ordered because of what was ordered before, only because of what is seen: whoever takes over goes on from there. What a name
means is found out by loading it: of each generation one worker is the first, and the content that it found is what the others are to have.
A worker that finds another in its folder has a problem that is told. A name that means an older content changes over on a few workers at a
time, and goes on meaning the older one on all others; a worker itself changes from one to the other without a moment between.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from prefixmesh.router.adapters.config import AdapterControllerConfig
from prefixmesh.router.adapters.gaps import NO_GAPS, GapFinder, Gaps
from prefixmesh.router.adapters.orders import Ended, Load, Order, Standing, Unload, WorkerSeen
from prefixmesh.router.adapters.patience import Patience
from prefixmesh.router.adapters.records import AdapterRecord, Version
from prefixmesh.router.adapters.troubles import Troubles
from prefixmesh.router.adapters.under_way import UnderWay
from prefixmesh.router.adapters.wishes import Wishes
from prefixmesh.router.endpoint import Endpoint

BELIEVED_S: Final = 3.0
"""So long a worker that says an order is done is believed, although it does not tell so: three answers to ``Describe``. After that it has
failed, and is asked again ever more seldom: else one that lies were asked without end."""

SEEKING_SHARE: Final = 0.5
"""Of the loads, for names of which it is to be found out what they are: where many are put that no worker can load, what is known goes on."""

_SAYS_NOTHING: Final = "it does not say what it has loaded"
_IN_VAIN: Final = "it says that it has done so, and does not tell of it"


class AdapterController:
    """One term's decisions. Not thread-safe."""

    def __init__(self, config: AdapterControllerConfig | None = None) -> None:
        self._config = config or AdapterControllerConfig()
        self._wishes = Wishes()
        self._gaps = GapFinder()
        self._troubles = Troubles(self._config)
        self._under_way = UnderWay()
        self._of_workers = Patience()
        self._of_names = Patience()
        self._ready_lives: tuple[object, ...] = ()
        """Of the workers that were ready in the last step; another object when they are others."""

        self._last_sought: dict[str, int] = {}
        """By name that is sought: number of the last load that was to find it out, so that each has its turn."""

    def __repr__(self) -> str:
        return f"AdapterController({len(self._wishes)} names, {self._under_way!r})"

    def look(self, records: Mapping[str, AdapterRecord], workers: Sequence[WorkerSeen]) -> None:
        """Look at some of the workers ahead of a step, which then has the less to do: with many names, all of them at once are a pause. O(names) for
        each that has changed, and O(1) for each wish that has."""
        self.take_over(records)
        self._gaps.look(self._wishes.by_name, workers)

    def step(
        self,
        now: float,
        records: Mapping[str, AdapterRecord] | None,
        workers: Sequence[WorkerSeen],
        *,
        acts: bool = True,
    ) -> list[Order]:
        """What is to be done now. ``records`` by name, another mapping whenever one is another; None while the store was not read: nothing is
        ordered then. O(workers), and ``look`` at those that have changed since that was done."""
        lives = {seen.endpoint: seen.incarnation for seen in workers}
        self._under_way.forget_the_dead(lives, now)
        self._under_way.end_seen(workers)
        self._troubles.prune(lives, now)
        if records is None:
            return []
        self.take_over(records)
        gaps = self._gaps.find(self._wishes.by_name, workers)
        self._look_at_what_is_done(gaps, now)
        if not acts:
            return []
        by_endpoint = {seen.endpoint: seen for seen in workers}
        return [*self._loads(gaps, by_endpoint, now), *self._unloads(gaps, by_endpoint, now)]

    def take_over(self, records: Mapping[str, AdapterRecord]) -> None:
        """Go by these records from now on: what is told is told of them. O(1) while they are the same ones, else O(names)."""
        if not self._wishes.take_over(records):
            return
        for unload in list(self._under_way.unloads.values()):
            record = records.get(unload.name)
            if record is None or record.generation != unload.generation or not record.is_removed:
                self._under_way.end(unload)  # wished again: nothing waits for the last request by the old one
        for load in self._under_way.loads.values():
            record = records.get(load.name)
            if record is not None and not record.has_version(load.generation):
                self._under_way.begin_change(load)  # its folder may hold what nobody wishes any more

    def ended(self, order: Order, ended: Ended, now: float) -> None:
        """An order has ended; of one that is not under way any more, nothing is believed. O(1), or O(names) where something was found."""
        if not self._under_way.end(order):
            return
        if isinstance(order, Load):
            self._under_way.end_change(order, now if ended.problem else now + self._config.settle_s)
            ended = self._judged(order, ended)
        if ended.problem:
            self._troubles.failed(order, ended, now)
        else:
            self._under_way.done[order.endpoint, order.name] = (order, now)

    def found(self) -> list[AdapterRecord]:
        """Records with the digest that they turned out to have, and that the store does not know yet."""
        return self._wishes.found()

    def digest_of(self, record: AdapterRecord) -> str:
        """The content of a record's generation; empty while that is not known."""
        wish = self._wishes.get(record.name)
        if wish is None or wish.version is None or wish.version.generation != record.generation:
            return record.digest
        return wish.version.digest

    def standing(self, seen: WorkerSeen, name: str) -> Standing:
        """How far a worker is with a name's newest generation, as of the last step. O(1)."""
        wish = self._wishes.get(name)
        if wish is None:
            return Standing("none")
        generation = wish.record.generation
        if wish.is_removed:
            return Standing("leaving", self._troubles.failure(seen, name, generation, is_load=False))
        if not seen.is_ready:
            return Standing("away")
        if not (wish.is_sought or wish.is_lacking(seen)):
            return Standing("held")
        done, _ = self._under_way.done.get((seen.endpoint, name), (None, 0.0))
        for order in (self._under_way.loads.get(seen.endpoint), done):
            if order is not None and (order.name, order.generation) == (name, generation):
                return Standing("loading")
        if refusal := self._troubles.refusal(seen, name, generation, is_load=True):
            return Standing("refused", refusal)
        failure = self._troubles.failure(seen, name, generation, is_load=True)
        return Standing("failed", failure) if failure else Standing("waiting")

    def check_invariants(self) -> None:
        """Raises InvariantError unless bounds are kept and everything under way is known once. O(orders)."""
        self._under_way.check_invariants(self._config.max_loads, self._config.max_unloads)

    def _judged(self, load: Load, ended: Ended) -> Ended:
        """What became of a load, by the content that it was to bring; the first of a generation says what that is."""
        wish = self._wishes.get(load.name)
        if ended.problem or wish is None or wish.is_removed:
            return ended
        if wish.is_sought and load.generation == wish.record.generation:
            if not ended.digest:
                return Ended(_SAYS_NOTHING)
            self._wishes.find(wish.record, ended.digest)
            return ended
        version = wish.version
        if version is None or version.generation != load.generation or version.digest == ended.digest:
            return ended
        return Ended(
            f"its folder {load.path!r} holds other weights ({ended.digest[:12]}) than that of the worker which was the first "
            f"to load them ({version.digest[:12]})",
            is_refused=True,
        )

    def _look_at_what_is_done(self, gaps: Mapping[Endpoint, Gaps], now: float) -> None:
        """Believe what workers tell; what they only say is believed for a while. O(orders lately done)."""
        for key, (order, at) in list(self._under_way.done.items()):
            its = gaps.get(order.endpoint, NO_GAPS)
            if order.name not in (its.lacks if isinstance(order, Load) else its.leaves):
                del self._under_way.done[key]
                self._troubles.worked(order)
            elif self._is_superseded(order):
                del self._under_way.done[key]
            elif now - at >= BELIEVED_S:
                del self._under_way.done[key]
                self._troubles.failed(order, Ended(_IN_VAIN), now)

    def _is_superseded(self, order: Order) -> bool:
        """Whether something else is wished than what was ordered."""
        wish = self._wishes.get(order.name)
        if wish is None or isinstance(order, Unload):
            return wish is None or wish.record.generation != order.generation
        return wish.version is None or wish.version.generation != order.generation

    def _loads(
        self, gaps: Mapping[Endpoint, Gaps], workers: Mapping[Endpoint, WorkerSeen], now: float
    ) -> list[Load]:
        """Who finds out what was put, and who fills a gap, whoever waits longest first."""
        free = self._config.max_loads - len(self._under_way.loads)
        if free <= 0 or not (gaps or self._wishes.sought):
            return []
        ready = [seen for seen in workers.values() if seen.is_ready]
        most_changing = max(1, int(len(ready) * self._config.roll_share))
        idle = [seen for seen in ready if seen.endpoint not in self._under_way.loads]
        idle.sort(key=lambda seen: (self._under_way.last_load(seen.endpoint), seen.endpoint))
        seekers = min(free, max(1, int(self._config.max_loads * SEEKING_SHARE)) - self._seeking())
        loads: list[Load] = []
        self._know_ready(ready)
        self._of_workers.prune(workers)
        self._of_names.prune(self._wishes.by_name)
        self._last_sought = {name: self._last_sought.get(name, 0) for name in self._wishes.sought}
        for name in sorted(self._last_sought, key=lambda name: (self._last_sought[name], name)):
            if len(loads) < seekers and (load := self._first_load(name, idle, ready, most_changing, now)):
                loads.append(load)
                self._last_sought[name] = load.number
                idle = [seen for seen in idle if seen.endpoint != load.endpoint]
        for seen in idle:
            if len(loads) == free:
                break
            name_and_version = self._next_gap(gaps.get(seen.endpoint, NO_GAPS), seen, most_changing, now)
            if name_and_version is not None:
                loads.append(self._begin_load(seen, *name_and_version))
        return loads

    def _know_ready(self, ready: Sequence[WorkerSeen]) -> None:
        lives = tuple((seen.endpoint, seen.incarnation) for seen in ready)
        if lives != self._ready_lives:
            self._ready_lives = lives

    def _seeking(self) -> int:
        """Loads under way that are to find out what a generation is. O(loads)."""
        wishes = [(self._wishes.get(load.name), load) for load in self._under_way.loads.values()]
        return sum(
            wish is not None and wish.is_sought and load.generation == wish.record.generation
            for wish, load in wishes
        )

    def _first_load(
        self,
        name: str,
        idle: Sequence[WorkerSeen],
        ready: Sequence[WorkerSeen],
        most_changing: int,
        now: float,
    ) -> Load | None:
        """Have one worker find out what a name's newest generation is, unless one is at it. O(workers), and O(1) where all have failed."""
        wish = self._wishes.by_name[name]
        record = wish.record
        if self._of_names.holds(name, now, wish, self._ready_lives):
            return None
        if any(
            (load.name, load.generation) == (name, record.generation)
            for load in self._under_way.loads.values()
        ):
            return None
        for seen in idle:
            if self._may_load(seen, name, record.generation, "", most_changing, now):
                return self._begin_load(seen, name, Version(record.spec, record.generation, ""))
        until = [self._troubles.paused_until(seen, name, record.generation, is_load=True) for seen in ready]
        self._of_names.note(name, min(until, default=0.0), wish, self._ready_lives)
        return None

    def _next_gap(
        self, gaps: Gaps, seen: WorkerSeen, most_changing: int, now: float
    ) -> tuple[str, Version] | None:
        """What a worker loads next of what it lacks; None when it has to wait for all of it. O(what it lacks), and O(1) where all of it has
        failed."""
        if not gaps.lacks or self._of_workers.holds(seen.endpoint, now, gaps):
            return None
        until = math.inf
        for name in gaps.lacks:
            version = self._wishes.by_name[name].version
            if version is None:
                continue
            if self._may_load(seen, name, version.generation, version.digest, most_changing, now):
                return name, version
            paused_until = self._troubles.paused_until(seen, name, version.generation, is_load=True)
            until = min(until, paused_until)
        self._of_workers.note(seen.endpoint, until, gaps)
        return None

    def _may_load(
        self, seen: WorkerSeen, name: str, generation: int, digest: str, most_changing: int, now: float
    ) -> bool:
        done, _ = self._under_way.done.get((seen.endpoint, name), (None, 0.0))
        if done is not None and done.generation == generation:
            return False
        if _is_change(seen, name, digest) and self._under_way.changing(name) >= most_changing:
            return False
        return not self._troubles.is_paused(seen, name, generation, now, is_load=True)

    def _begin_load(self, seen: WorkerSeen, name: str, version: Version) -> Load:
        spec = version.spec
        load = Load(
            self._under_way.next_number(),
            seen.endpoint,
            seen.incarnation,
            name,
            spec.path,
            spec.pinned,
            version.generation,
        )
        self._under_way.begin_load(load, is_change=_is_change(seen, name, version.digest))
        return load

    def _unloads(
        self, gaps: Mapping[Endpoint, Gaps], workers: Mapping[Endpoint, WorkerSeen], now: float
    ) -> list[Unload]:
        unloads: list[Unload] = []
        for endpoint, its in gaps.items():
            for name in its.leaves:
                if len(self._under_way.unloads) >= self._config.max_unloads:
                    return unloads
                if (unload := self._unload(workers[endpoint], name, now)) is not None:
                    self._under_way.begin_unload(unload)
                    unloads.append(unload)
        return unloads

    def _unload(self, seen: WorkerSeen, name: str, now: float) -> Unload | None:
        """Have a worker forget a name, unless it is at it, or is still loading it, or has just failed."""
        generation = self._wishes.by_name[name].record.generation
        load = self._under_way.loads.get(seen.endpoint)
        done, _ = self._under_way.done.get((seen.endpoint, name), (None, 0.0))
        if (seen.endpoint, name) in self._under_way.unloads or (load is not None and load.name == name):
            return None
        if isinstance(done, Unload) or self._troubles.is_paused(seen, name, generation, now, is_load=False):
            return None
        return Unload(self._under_way.next_number(), seen.endpoint, seen.incarnation, name, generation)


def _is_change(seen: WorkerSeen, name: str, digest: str) -> bool:
    """Whether a worker answers by another content meanwhile, or may."""
    has = seen.adapters.get(name)
    return has is not None and has != digest
