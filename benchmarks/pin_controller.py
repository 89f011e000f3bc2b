"""How long one step of the pin controller takes: 200 wishes, 64 workers.

    python benchmarks/pin_controller.py

Three states of a fleet: settled (nothing to do, which is nearly always), empty (everything is missing, moves are bounded), and full (a third of
the wishes has no room anywhere, and is looked for everywhere in each step). Medians of 50 steps each.
"""

import statistics
import time
from collections.abc import Sequence

from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Incarnation, Namespace
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.pins.controller import PinController
from prefixmesh.router.pins.wishes import PinSeen, PinVersion, Warm, Wish, WorkerSeen
from prefixmesh.tokens import TOKEN_BYTES

WISHES = 200
WORKERS = 64
REPLICAS = 3
SIZE = 512
STEPS = 50


def wish(number: int, size: int) -> Wish:
    """One of the wishes; every tenth is for all workers."""
    version = PinVersion(
        generation=1, namespace=Namespace(bytes(16)), tokens=bytes(size * TOKEN_BYTES), fingerprints=()
    )
    replicas = 0 if number % 10 == 0 else REPLICAS
    return Wish(
        source="pin",
        owner=f"tenant-{number % 8}",
        name=f"p{number}",
        tier=Tier.DEVICE,
        replicas=replicas,
        version=version,
    )


def worker(number: int, budget: int, pins: dict[str, PinSeen]) -> WorkerSeen:
    """One of the workers, four on a host."""
    return WorkerSeen(
        endpoint=Endpoint(f"w{number}:1"),
        worker_id=f"w{number}",
        incarnation=Incarnation(number),
        host=f"h{number // 4}",
        usable=True,
        draining=False,
        page_size=16,
        work_ms=10.0 * number,
        budget_tokens=budget,
        owner_budget_tokens=budget,
        pins=pins,
        pins_at=0.0,
        proven={pin_id: pin.held_tokens for pin_id, pin in pins.items()},
        kv_layout="L",
    )


def settled(wishes: Sequence[Wish], budget: int) -> list[WorkerSeen]:
    """Workers as they are once all that can be done is done."""
    pins: list[dict[str, PinSeen]] = [{} for _ in range(WORKERS)]
    controller = PinController()
    for now in range(10_000):
        seen = [worker(number, budget, dict(pins[number])) for number in range(WORKERS)]
        orders = controller.step(float(now), wishes, seen)
        if not orders:
            return seen
        for order in orders:
            assert isinstance(order, Warm)
            size = len(order.wish.version.tokens) // TOKEN_BYTES
            pins[int(order.endpoint[1:-2])][order.wish.pin_id] = PinSeen(
                owner=order.wish.owner, tier=Tier.DEVICE, size_tokens=size, held_tokens=size, missing_tokens=0
            )
            controller.ended(order.number, "", float(now))
    raise AssertionError("never settled")


def step_ms(wishes: Sequence[Wish], workers: Sequence[WorkerSeen]) -> float:
    """Median of a step, by a controller of its own each time."""
    times = []
    for _ in range(STEPS):
        controller = PinController()
        began = time.process_time()
        controller.step(1e6, wishes, workers)
        times.append(time.process_time() - began)
    return 1e3 * statistics.median(times)


def main() -> None:
    """Print the three."""
    wishes = [wish(number, SIZE) for number in range(WISHES)]
    rich, poor = WISHES * SIZE, WISHES * SIZE // 10
    everybody = settled(wishes, rich)
    print(f"{WISHES} wishes, {WORKERS} workers, {sum(len(w.pins) for w in everybody)} pins")
    print(f"settled  {step_ms(wishes, everybody):6.2f} ms")
    print(f"empty    {step_ms(wishes, [worker(n, rich, {}) for n in range(WORKERS)]):6.2f} ms")
    print(f"full     {step_ms(wishes, settled(wishes, poor)):6.2f} ms")


if __name__ == "__main__":
    main()
