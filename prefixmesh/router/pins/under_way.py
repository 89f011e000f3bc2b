"""What has been ordered and has not ended, and what has ended since a worker told its pins last. Pure: time is passed in.

An action ends by its outcome, by its time limit, or with the life of the worker it was meant for. A worker's list of pins is older than what ended
after it was asked for; until there is a newer one, the outcome stands:

* ``present``  the worker said that it has pinned and cached it;
* ``absent``   the worker said that it has let go;
* ``unsure``   it failed, or nothing was heard: the pin is charged as if it were there, and counted on by nobody.
"""

from typing import Literal, NamedTuple, TypeVar

from prefixmesh.ids import Incarnation
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.pins.config import PinControllerConfig
from prefixmesh.router.pins.wishes import Action, Unpin, Warm, Wish, WorkerSeen

T = TypeVar("T")

OutcomeKind = Literal["present", "absent", "unsure"]


class Outcome(NamedTuple):
    """How the last action for a pin on a worker ended."""

    kind: OutcomeKind
    at: float
    incarnation: Incarnation
    wish: Wish | None
    """Of a ``Warm``: what may be charged."""


class Pending(NamedTuple):
    """An action under way."""

    action: Action
    since: float
    deadline: float


class UnderWay:
    """Actions by number, and the latest outcomes by worker and pin. Not thread-safe."""

    def __init__(self, config: PinControllerConfig) -> None:
        self._config = config
        self._number = 0
        self._pending: dict[int, Pending] = {}
        self._warms: dict[Endpoint, dict[str, Warm]] = {}
        self._unpins: dict[Endpoint, dict[str, Unpin]] = {}
        self._outcomes: dict[Endpoint, dict[str, Outcome]] = {}
        self._warm_count = 0

    def __len__(self) -> int:
        return len(self._pending)

    # Ordered.

    @property
    def can_move(self) -> bool:
        """Whether another ``Warm`` may be ordered. O(1)."""
        return self._warm_count < self._config.max_moves

    @property
    def can_release(self) -> bool:
        """Whether another ``Unpin`` may be ordered. O(1)."""
        return len(self._pending) - self._warm_count < self._config.max_releases

    def can_move_at(self, endpoint: Endpoint) -> bool:
        """Whether another ``Warm`` may be ordered from this worker, as far as it alone is concerned. O(1)."""
        return len(self._warms.get(endpoint, ())) < self._config.max_moves_per_worker

    def next_number(self) -> int:
        """For an action. O(1)."""
        self._number += 1
        return self._number

    def begin(self, action: Action, now: float) -> None:
        """It is ordered. O(1)."""
        config = self._config
        if isinstance(action, Warm):
            self._warms.setdefault(action.endpoint, {})[action.wish.pin_id] = action
            self._warm_count += 1
            limit = config.warm_timeout_s
        else:
            self._unpins.setdefault(action.endpoint, {})[action.pin_id] = action
            limit = config.unpin_timeout_s
        self._pending[action.number] = Pending(action, now, now + limit)

    # Ended.

    def end(self, number: int, now: float, *, well: bool) -> Action | None:
        """It has ended; returns it. Nothing by that number is under way (any more): None, and nothing happens. O(1)."""
        pending = self._pending.pop(number, None)
        if pending is None:
            return None
        action = pending.action
        if isinstance(action, Warm):
            pin_id, wish = action.wish.pin_id, action.wish
            _drop(self._warms, action.endpoint, pin_id)
            self._warm_count -= 1
        else:
            pin_id, wish = action.pin_id, None
            _drop(self._unpins, action.endpoint, pin_id)
        kind: OutcomeKind = "unsure"
        if well:
            kind = "absent" if wish is None else "present"
        outcome = Outcome(kind, now, action.incarnation, wish)
        self._outcomes.setdefault(action.endpoint, {})[pin_id] = outcome
        return action

    def overdue(self, now: float) -> list[Action]:
        """What has had its time. O(actions under way)."""
        return [pending.action for pending in self._pending.values() if pending.deadline <= now]

    def observe(self, workers: dict[Endpoint, WorkerSeen]) -> None:
        """Forget what was meant for lives that are over, and outcomes that are in a worker's list by now. O(actions + outcomes)."""
        for number, pending in list(self._pending.items()):
            action = pending.action
            seen = workers.get(action.endpoint)
            if seen is None or seen.incarnation != action.incarnation:
                self.end(number, 0.0, well=False)
        for endpoint, outcomes in list(self._outcomes.items()):
            seen = workers.get(endpoint)
            kept = {} if seen is None else {i: o for i, o in outcomes.items() if _is_news(o, seen)}
            if kept:
                self._outcomes[endpoint] = kept
            else:
                del self._outcomes[endpoint]

    # Looked at. O(1) each.

    def since(self, action: Action) -> float:
        """When an action that is under way was ordered."""
        return self._pending[action.number].since

    def warms_at(self, endpoint: Endpoint) -> dict[str, Warm]:
        """Of one worker, by pin id."""
        return self._warms.get(endpoint, {})

    def unpins_at(self, endpoint: Endpoint) -> dict[str, Unpin]:
        """Of one worker, by pin id."""
        return self._unpins.get(endpoint, {})

    def outcomes_at(self, endpoint: Endpoint) -> dict[str, Outcome]:
        """Of one worker, by pin id: those that its list does not know yet."""
        return self._outcomes.get(endpoint, {})


def _is_news(outcome: Outcome, seen: WorkerSeen) -> bool:
    return outcome.incarnation == seen.incarnation and outcome.at >= seen.pins_at


def _drop(by_worker: dict[Endpoint, dict[str, T]], endpoint: Endpoint, pin_id: str) -> None:
    there = by_worker[endpoint]
    del there[pin_id]
    if not there:
        del by_worker[endpoint]
