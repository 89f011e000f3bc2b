"""What has been ordered and has not ended, what workers say they have done and do not tell of yet, and who is changing from one content to
another. Pure: time is passed in."""

import math
from collections.abc import Iterable, Mapping

from prefixmesh.errors import InvariantError
from prefixmesh.ids import Incarnation
from prefixmesh.router.adapters.orders import Load, Order, Unload, WorkerSeen
from prefixmesh.router.endpoint import Endpoint


class UnderWay:
    """Orders of one term. Not thread-safe. Everything is O(1) where nothing else is said."""

    def __init__(self) -> None:
        self.loads: dict[Endpoint, Load] = {}
        """One a worker at most."""

        self.unloads: dict[tuple[Endpoint, str], Unload] = {}
        self.done: dict[tuple[Endpoint, str], tuple[Order, float]] = {}
        """By worker and name: the last order that the worker says it has carried out, and when it said so."""

        self._changing: dict[str, dict[Endpoint, float]] = {}
        """By name, and until when they count as such."""

        self._last_load: dict[Endpoint, int] = {}
        self._number = 0

    def __repr__(self) -> str:
        return f"UnderWay({len(self.loads)} loads, {len(self.unloads)} unloads, {len(self.done)} done)"

    def next_number(self) -> int:
        """For an order."""
        self._number += 1
        return self._number

    def last_load(self, endpoint: Endpoint) -> int:
        """Number of the last load that a worker was ordered; 0 where it was none."""
        return self._last_load.get(endpoint, 0)

    def changing(self, name: str) -> int:
        """Workers that are changing to another content of a name."""
        return len(self._changing.get(name, ()))

    def begin_load(self, load: Load, *, is_change: bool) -> None:
        """It is ordered; ``is_change``: of a worker that has another content under the name."""
        self.loads[load.endpoint] = load
        self._last_load[load.endpoint] = load.number
        if is_change:
            self.begin_change(load)

    def begin_change(self, load: Load) -> None:
        """Its worker counts as changing until the load has ended, and a while longer."""
        self._changing.setdefault(load.name, {})[load.endpoint] = math.inf

    def begin_unload(self, unload: Unload) -> None:
        """It is ordered."""
        self.unloads[unload.endpoint, unload.name] = unload

    def end(self, order: Order) -> bool:
        """It has ended; False when it is not under way any more, and then nothing happens. A change goes on until ``end_change``."""
        key = (order.endpoint, order.name)
        if isinstance(order, Load):
            is_known = self.loads.get(order.endpoint) is order
            if is_known:
                del self.loads[order.endpoint]
        else:
            is_known = self.unloads.get(key) is order
            if is_known:
                del self.unloads[key]
        return is_known

    def end_change(self, load: Load, until: float) -> None:
        """A load has ended; where it was a change, its worker counts as changing up to ``until``."""
        changing = self._changing.get(load.name, {})
        if load.endpoint in changing:
            changing[load.endpoint] = until

    def forget_the_dead(self, lives: Mapping[Endpoint, Incarnation], now: float) -> None:
        """What was ordered from lives that are over, or said by them, and changes that are settled. O(orders + changes)."""
        for load in [one for one in self.loads.values() if lives.get(one.endpoint) != one.incarnation]:
            self.end(load)
            self.end_change(load, now)
        for unload in [one for one in self.unloads.values() if lives.get(one.endpoint) != one.incarnation]:
            self.end(unload)
        for key, (order, _) in list(self.done.items()):
            if lives.get(order.endpoint) != order.incarnation:
                del self.done[key]
        for name, changing in list(self._changing.items()):
            self._changing[name] = {
                one: until for one, until in changing.items() if until > now and one in lives
            }
            if not self._changing[name]:
                del self._changing[name]
        for gone in self._last_load.keys() - lives.keys() if len(self._last_load) > len(lives) else ():
            del self._last_load[gone]

    def end_seen(self, workers: Iterable[WorkerSeen]) -> None:
        """What workers have forgotten by now, be it that requests still run by it and the answer is yet to come. O(1) while nothing is being
        forgotten, else O(workers)."""
        if not self.unloads:
            return
        adapters = {seen.endpoint: seen.adapters for seen in workers}
        for unload in [one for one in self.unloads.values() if one.name not in adapters[one.endpoint]]:
            self.end(unload)

    def check_invariants(self, max_loads: int, max_unloads: int) -> None:
        """Raises InvariantError unless bounds are kept and every change that has not ended is a load's. O(orders)."""
        if len(self.loads) > max_loads or len(self.unloads) > max_unloads:
            raise InvariantError(f"more is under way than may be: {self!r}")
        for name, changing in self._changing.items():
            for endpoint, until in changing.items():
                load = self.loads.get(endpoint)
                if until == math.inf and (load is None or load.name != name):
                    raise InvariantError(f"{endpoint} changes {name} by no load of {self!r}")
