"""Which workers of a replay hold which of its workload's pins: chosen by the real pin controller before the first request comes. Pure.

A workload's requests name how many of their leading tokens their owner wants kept, and on how many workers. Each such prefix becomes a wish of
``router.pins``, whose controller takes one step over workers that are all new and idle: it spreads replicas, and stays within what an engine
lets be pinned unless told otherwise (``config``: three tenths of its device, half of that for one owner). What finds no room is short, and told.

What is simpler here than where pins are served: all are there at once and take no time to be made, they have no end, none is moved later,
and heat pins nothing. The router's core hears of them as of everything else, by the workers' events.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from prefixmesh.cache.tier import Tier
from prefixmesh.config import DEFAULT_PIN_OWNER_SHARE, DEFAULT_PIN_SHARE
from prefixmesh.ids import Fingerprint, Incarnation, Namespace
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.pins.config import PinControllerConfig
from prefixmesh.router.pins.controller import PinController
from prefixmesh.router.pins.wishes import PinVersion, Warm, Wish, WorkerSeen
from prefixmesh.sim.workload import WorkloadRequest
from prefixmesh.tokens import TOKEN_BYTES

_ANY_NUMBER: Final = 1 << 60
"""Of moves at once: in a replay they take no time."""


class PinWish(NamedTuple):
    """A prefix that is to stay cached."""

    owner: str
    block_ids: tuple[int, ...]
    """As the workload names them."""

    replicas: int
    """0: all workers."""


class PinPlan(NamedTuple):
    """Where pins are."""

    holders: Sequence[Sequence[int]]
    """By the place of a wish, the places of the workers that hold it."""

    wanted: int
    """Replicas, of all wishes together."""

    @property
    def held(self) -> int:
        """Those of them that found room."""
        return sum(map(len, self.holders))


NO_PINS: Final = PinPlan((), 0)


def pin_wishes(requests: Sequence[WorkloadRequest], block_size: int) -> list[PinWish]:
    """What requests want pinned, each prefix once and with the most replicas that any of them wants, in whole blocks. O(pinned blocks)."""
    wanted: dict[tuple[str, tuple[int, ...]], int] = {}
    for request in requests:
        key = (request.tenant, request.block_ids[: request.pin_tokens // block_size])
        if key[1]:
            before = wanted.get(key, request.pin_replicas)
            wanted[key] = before and request.pin_replicas and max(before, request.pin_replicas)
    return [PinWish(owner, ids, replicas) for (owner, ids), replicas in wanted.items()]


def place_pins(
    wishes: Sequence[PinWish],
    names: Sequence[Sequence[Fingerprint]],
    *,
    workers: int,
    device_tokens: int,
    block_size: int,
) -> PinPlan:
    """Where they are; ``names`` are those of each wish's blocks. O(replicas * workers)."""
    controller = PinController(
        PinControllerConfig(max_moves=_ANY_NUMBER, max_moves_per_worker=_ANY_NUMBER, block_size=block_size)
    )
    made = [
        _wish(number, wish, blocks, workers, block_size)
        for number, (wish, blocks) in enumerate(zip(wishes, names, strict=True))
    ]
    fleet = [_worker(place, device_tokens, block_size) for place in range(workers)]
    holders: list[list[int]] = [[] for _ in wishes]
    for action in controller.step(0.0, made, fleet):
        if isinstance(action, Warm):
            holders[int(action.wish.name)].append(action.incarnation - 1)
    return PinPlan(holders, sum(wish.replicas or workers for wish in made))


def _wish(number: int, wish: PinWish, names: Sequence[Fingerprint], workers: int, block_size: int) -> Wish:
    # Which tokens they are does not matter, how many does.
    tokens = bytes(TOKEN_BYTES * block_size * len(names))
    return Wish(
        source="pin",
        owner=wish.owner,
        name=str(number),
        tier=Tier.DEVICE,
        replicas=0 if wish.replicas >= workers else wish.replicas,
        version=PinVersion(generation=0, namespace=Namespace(b""), tokens=tokens, fingerprints=names),
    )


def _worker(place: int, device_tokens: int, block_size: int) -> WorkerSeen:
    """One that is new, idle, and alone on its host."""
    name = f"worker-{place:04}"
    return WorkerSeen(
        endpoint=Endpoint(name),
        worker_id=name,
        incarnation=Incarnation(place + 1),
        host=name,
        usable=True,
        draining=False,
        page_size=block_size,
        work_ms=0.0,
        budget_tokens=int(DEFAULT_PIN_SHARE * device_tokens),
        owner_budget_tokens=int(DEFAULT_PIN_OWNER_SHARE * device_tokens),
        pins={},
        pins_at=0.0,
        proven={},
    )
