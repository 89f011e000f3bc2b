"""What must be true of every order of a pin controller, and of a fleet that is left in peace: reckoned in the plainest way."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from prefixmesh.router.pins.config import PinControllerConfig
from prefixmesh.router.pins.sizes import proof_tokens, size_tokens
from prefixmesh.router.pins.wishes import Action, PinSeen, Unpin, Warm, Wish, WorkerSeen
from tests.support.pin_fleet import PinWorker


class Ended(NamedTuple):
    """How an action ended."""

    at: float
    kind: str
    """there, gone, or unsure."""

    size: int
    owner: str


EndedBy = Mapping[tuple[str, int, str], Ended]


def pin_of(action: Action) -> str:
    """Its pin's id."""
    return action.wish.pin_id if isinstance(action, Warm) else action.pin_id


def key_of(pin_id: str) -> str:
    """Of the wish whose version it is."""
    return pin_id.rpartition("@")[0]


def check_orders(
    orders: Sequence[Action],
    wishes: Sequence[Wish],
    workers: Sequence[WorkerSeen],
    under_way: Sequence[Action],
    ended: EndedBy,
    config: PinControllerConfig,
) -> None:
    """The orders of one step, given what was wished, seen, and under way before it."""
    seen = {worker.endpoint: worker for worker in workers}
    under_way = [a for a in under_way if a.endpoint in seen and seen[a.endpoint].incarnation == a.incarnation]
    _check_moves([*under_way, *orders], config)
    current = {wish.pin_id: wish for wish in wishes}
    for order in orders:
        worker = seen[order.endpoint]
        assert order.incarnation == worker.incarnation
        if isinstance(order, Warm):
            assert worker.usable, f"{order} to who cannot be used"
            assert current[order.wish.pin_id] is order.wish
        else:
            assert worker.usable or worker.draining, f"{order} to who cannot be called"
            assert order.pin_id.startswith(("pin/", "heat/")), f"{order} of what somebody else has made"
    for worker in workers:
        _check_budget(worker, orders, under_way, ended, current)
    for wish in wishes:
        if wish.source == "pin":
            _check_last_holder(wish, orders, workers, under_way, ended)


def _check_moves(under_way: Sequence[Action], config: PinControllerConfig) -> None:
    warms = [action for action in under_way if isinstance(action, Warm)]
    unpins = [action for action in under_way if isinstance(action, Unpin)]
    assert len(warms) <= config.max_moves
    assert len(unpins) <= config.max_releases
    for one in (warms, unpins):
        pairs = [(action.endpoint, pin_of(action)) for action in one]
        assert len(pairs) == len(set(pairs)), f"ordered twice: {pairs}"
    for endpoint in {action.endpoint for action in warms}:
        assert sum(action.endpoint == endpoint for action in warms) <= config.max_moves_per_worker


def _check_budget(
    worker: WorkerSeen,
    orders: Sequence[Action],
    under_way: Sequence[Action],
    ended: EndedBy,
    current: Mapping[str, Wish],
) -> None:
    def charge(wish: Wish) -> tuple[int, str]:
        return size_tokens(wish.version, worker.page_size), wish.owner

    taken = {i: (pin.size_tokens, pin.owner) for i, pin in worker.pins.items()}
    for pin_id, end in _news(worker, ended):
        if end.kind == "gone":
            taken.pop(pin_id, None)
        elif end.kind == "there":
            taken[pin_id] = (end.size, end.owner)
        elif end.size:
            taken.setdefault(pin_id, (end.size, end.owner))
    taken |= {i: charge(current[i]) for i in taken if i in current}
    for action in under_way:
        if isinstance(action, Warm) and action.endpoint == worker.endpoint:
            taken.setdefault(action.wish.pin_id, charge(action.wish))
    for order in orders:
        if isinstance(order, Warm) and order.endpoint == worker.endpoint and order.wish.pin_id not in taken:
            taken[order.wish.pin_id] = charge(order.wish)
            owners = sum(size for size, owner in taken.values() if owner == order.wish.owner)
            assert sum(size for size, _ in taken.values()) <= worker.budget_tokens, f"{order} of {taken}"
            assert owners <= worker.owner_budget_tokens, f"{order} of {taken}"


def _check_last_holder(
    wish: Wish,
    orders: Sequence[Action],
    workers: Sequence[WorkerSeen],
    under_way: Sequence[Action],
    ended: EndedBy,
) -> None:
    leaving = {
        (a.endpoint, a.pin_id) for a in orders if isinstance(a, Unpin) and key_of(a.pin_id) == wish.key
    }
    if not leaving:
        return
    gone = {(a.endpoint, a.pin_id) for a in under_way if isinstance(a, Unpin)}
    held = {
        (worker.endpoint, pin_id)
        for worker in workers
        if worker.usable
        for pin_id in _whole(wish, worker, ended)
        if (worker.endpoint, pin_id) not in gone
    }
    assert not held or held - leaving, f"the last holders of {wish.key} were let go: {leaving}"


def _whole(wish: Wish, worker: WorkerSeen, ended: EndedBy) -> set[str]:
    """Versions of the wish that a worker holds, by what was said."""
    pins = {i: pin.missing_tokens <= 0 for i, pin in worker.pins.items() if key_of(i) == wish.key}
    for pin_id, end in _news(worker, ended):
        if key_of(pin_id) == wish.key and (pin_id in pins or end.kind == "there"):
            pins[pin_id] = end.kind == "there"
    least = proof_tokens(wish.version, worker.page_size, 4)
    return {
        i
        for i, is_whole in pins.items()
        if is_whole and (i != wish.pin_id or worker.proven.get(i, 0) >= least)
    }


def _news(worker: WorkerSeen, ended: EndedBy) -> list[tuple[str, Ended]]:
    return [
        (pin_id, end)
        for (endpoint, incarnation, pin_id), end in ended.items()
        if endpoint == worker.endpoint and incarnation == worker.incarnation and end.at >= worker.pins_at
    ]


def check_calm(wishes: Sequence[Wish], workers: Sequence[PinWorker]) -> None:
    """Every wish is held by as many as it wants, or as can; nobody else has pins of the controller's."""
    usable = [worker for worker in workers if not worker.draining]
    current = {wish.pin_id: wish for wish in wishes}
    held = {wish.key: [worker for worker in usable if _holds(worker, wish)] for wish in wishes}
    stuck = {wish.key for wish in wishes if not held[wish.key]}
    for worker in workers:
        strays = [
            i
            for i in worker.pins
            if i not in current and i.startswith(("pin/", "heat/")) and key_of(i) not in stuck
        ]
        assert not strays, f"{worker.name} keeps what nobody wishes: {strays}"
    for wish in wishes:
        assert not wish.replicas or len(held[wish.key]) <= wish.replicas, f"too many hold {wish.key}"
        assert len({w.name for w in usable if wish.pin_id in w.pins}) == len(held[wish.key])
        if not wish.replicas or len(held[wish.key]) < wish.replicas:
            for worker in usable:
                if worker not in held[wish.key]:
                    assert not _could_take(wish, worker, wishes, usable), (
                        f"{worker.name} has room for {wish.pin_id}, which {held[wish.key]} hold"
                    )


def _holds(worker: PinWorker, wish: Wish) -> bool:
    pin: PinSeen | None = worker.pins.get(wish.pin_id)
    return pin is not None and pin.missing_tokens == 0


def _could_take(wish: Wish, worker: PinWorker, wishes: Iterable[Wish], usable: Sequence[PinWorker]) -> bool:
    """With what gives way to it gone: heat, and an older version that another worker holds as well."""
    if wish.version.adapter_digest and wish.version.adapter_digest not in worker.adapters:
        return False
    size = size_tokens(wish.version, worker.page_size)
    others_have_it = any(
        key_of(i) == wish.key and not pin.missing_tokens
        for other in usable
        if other is not worker
        for i, pin in other.pins.items()
    )
    stay = [
        pin
        for i, pin in worker.pins.items()
        if not (wish.source == "pin" and i.startswith("heat/"))
        and not (others_have_it and key_of(i) == wish.key)
    ]
    in_all = sum(pin.size_tokens for pin in stay)
    owners = sum(pin.size_tokens for pin in stay if pin.owner == wish.owner)
    return size > 0 and in_all + size <= worker.budget and owners + size <= worker.owner_budget
