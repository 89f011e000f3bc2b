"""What failed at which worker, why, and when it is tried again: quickly what may pass, slowly what a worker has refused. Pure.

Kept per worker's life, name and generation: an adapter that is put again begins anew everywhere.
"""

from prefixmesh.ids import Incarnation
from prefixmesh.router.adapters.config import AdapterControllerConfig
from prefixmesh.router.adapters.orders import Ended, Load, Order, WorkerSeen
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.pins.failures import Failure, Failures


class Troubles:
    """Not thread-safe. O(1) but for ``prune``."""

    def __init__(self, config: AdapterControllerConfig) -> None:
        self._failed = Failures(config.first_pause_s, config.longest_pause_s)
        self._refused = Failures(config.refused_pause_s, config.longest_refused_pause_s)

    def failed(self, order: Order, ended: Ended, now: float) -> None:
        """It did not work. What is told of it from now on is this failure."""
        kept, other = (self._refused, self._failed) if ended.is_refused else (self._failed, self._refused)
        kept.failed(order.endpoint, order.incarnation, _key_of(order), ended.problem, now)
        other.succeeded(order.endpoint, order.incarnation, _key_of(order))

    def worked(self, order: Order) -> None:
        """It was seen to have worked."""
        for kept in (self._failed, self._refused):
            kept.succeeded(order.endpoint, order.incarnation, _key_of(order))

    def is_paused(self, seen: WorkerSeen, name: str, generation: int, now: float, *, is_load: bool) -> bool:
        """Whether it must not be tried again yet."""
        return now < self.paused_until(seen, name, generation, is_load=is_load)

    def paused_until(self, seen: WorkerSeen, name: str, generation: int, *, is_load: bool) -> float:
        """Before when it must not be tried again; 0 where it has not failed."""
        key = _key(name, generation, is_load=is_load)
        return max(
            0.0 if (failure := kept.last(seen.endpoint, seen.incarnation, key)) is None else failure.until
            for kept in (self._failed, self._refused)
        )

    def failure(self, seen: WorkerSeen, name: str, generation: int, *, is_load: bool) -> Failure | None:
        """The last one, where that may pass; None since it worked."""
        return self._failed.last(seen.endpoint, seen.incarnation, _key(name, generation, is_load=is_load))

    def refusal(self, seen: WorkerSeen, name: str, generation: int, *, is_load: bool) -> Failure | None:
        """The last failure, where that was a refusal; None since it worked."""
        return self._refused.last(seen.endpoint, seen.incarnation, _key(name, generation, is_load=is_load))

    def prune(self, lives: dict[Endpoint, Incarnation], now: float) -> None:
        """Forget what is long ago, and lives that are over. O(failures)."""
        for kept in (self._failed, self._refused):
            kept.prune(lives, now)


def _key_of(order: Order) -> str:
    return _key(order.name, order.generation, is_load=isinstance(order, Load))


def _key(name: str, generation: int, *, is_load: bool) -> str:
    return f"{'load' if is_load else 'unload'} {name}@{generation}"
