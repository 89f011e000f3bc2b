"""A fleet that knows adapters, beside a controller that sees to them: orders are carried out late, fail or are lost, workers restart and leave,
folders change, names are put and taken back, and another router takes over.

What must hold at every step is checked with each, and what must come about once it is calm by ``calm``.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from prefixmesh.ids import Incarnation
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.router.adapters.config import AdapterControllerConfig
from prefixmesh.router.adapters.controller import AdapterController
from prefixmesh.router.adapters.orders import Ended, Load, Order, WorkerSeen
from prefixmesh.router.adapters.records import AdapterRecord, decode, encode, found, put_again, removed
from prefixmesh.router.endpoint import Endpoint

NAMES = ("n0", "n1", "n2")
PATHS = ("a", "b", "c")
OWN = "own"
"""A name that no store ever knew."""

CONFIG = AdapterControllerConfig(
    max_loads=3,
    max_unloads=2,
    roll_share=0.5,
    settle_s=1.0,
    longest_pause_s=8.0,
    refused_pause_s=4.0,
    longest_refused_pause_s=16.0,
)
KINDS = (
    *("step", "finish") * 6,
    *("put", "put", "remove", "write", "restart", "away", "back", "join", "leave", "retrain", "take_over"),
    *("refuse", "break", "lose", "mend", "vanish"),
)
"""What happens, the common things more than once."""


@dataclass
class ModelWorker:
    """A worker as it is: what it has, and how it goes wrong."""

    name: str
    life: int = 1
    is_ready: bool = True
    adapters: dict[str, str] = field(default_factory=lambda: {OWN: "own content"})
    pinned: set[str] = field(default_factory=set)
    trouble: str = ""

    def seen(self) -> WorkerSeen:
        return WorkerSeen(
            Endpoint(self.name),
            Incarnation(self.life),
            self.is_ready,
            self.is_ready,
            dict(self.adapters),
            frozenset(self.pinned),
        )


class TroubledAdapters:
    """See the module. ``do`` one thing after another, then ``calm``."""

    def __init__(self) -> None:
        self.now = 100.0
        self.workers = {name: ModelWorker(name) for name in ("w0", "w1", "w2", "w3")}
        self.folders = {path: f"weights of {path}" for path in PATHS}
        self.lost: dict[str, str] = {}
        self.records: dict[str, AdapterRecord] = {}
        self.controller = AdapterController(CONFIG)
        self.under_way: list[Order] = []
        self._ordered: dict[int, tuple[Order, str | None]] = {}
        """By this term's controller (another's may be equal), and the content that the worker had under the name."""

        self.happened: Counter[str] = Counter()
        self._joined = len(self.workers)

    def do(self, kind: str, x: int, y: int) -> None:
        """One thing happens; ``x`` and ``y`` choose to whom."""
        self.happened[kind] += 1
        getattr(self, f"_{kind}")(x, y)
        self.controller.check_invariants()

    def calm(self) -> None:
        """Workers are well from now on: soon no name that can be had is missing anywhere. When folders are back, too, all is as it is wished."""
        self.happened["calm"] += 1
        for worker in self.workers.values():
            worker.trouble, worker.is_ready = "", True
        self._until(self._means_something, "a name is missing")
        self.folders |= self.lost
        self.lost.clear()
        self._until(self._is_as_wished, "it is not as it is wished")

    def _until(self, is_so: Callable[[], bool], otherwise: str) -> None:
        for _ in range(400):
            self._step(9, 0)
            while self.under_way:
                self._finish(0, 0)
            self._write(0, 0)
            if is_so():
                return
        raise AssertionError(f"{otherwise}: {self.controller!r} {self._held()} {self.records} {self.folders}")

    # What happens.

    def _step(self, x: int, _: int) -> None:
        self.now += 0.1 + x % 10 / 4.0
        seen = [worker.seen() for worker in self.workers.values()]
        orders = self.controller.step(self.now, self.records, seen)
        self.under_way += orders
        for order in orders:
            has = self.workers[order.endpoint].adapters.get(order.name)
            self._ordered[id(order)] = (order, has)
        self.happened["loads"] += sum(isinstance(one, Load) for one in orders)
        self.happened["unloads"] += sum(not isinstance(one, Load) for one in orders)
        self._check_orders(orders)

    def _finish(self, x: int, _: int) -> None:
        if self.under_way:
            order = self.under_way.pop(x % len(self.under_way))
            self.controller.ended(order, self._carry_out(order), self.now)

    def _put(self, x: int, y: int) -> None:
        spec = pb.AdapterSpec(name=NAMES[x % 3], path=PATHS[y % 3], pinned=y % 2 == 1)
        self._write_record(put_again(self.records.get(spec.name), spec))

    def _remove(self, x: int, _: int) -> None:
        record = self.records.get(NAMES[x % 3])
        if record is not None:
            self._write_record(removed(record, 1))

    def _write(self, *_: int) -> None:
        """The store takes what was found out."""
        for record in self.controller.found():
            if found(self.records[record.name], record.digest) == record:
                self._write_record(record)

    def _restart(self, x: int, _: int) -> None:
        worker = self._some(x)
        worker.life += 1
        worker.adapters, worker.pinned = {OWN: "own content"}, set()

    def _away(self, x: int, _: int) -> None:
        self._some(x).is_ready = False

    def _back(self, x: int, _: int) -> None:
        self._some(x).is_ready = True

    def _join(self, *_: int) -> None:
        if len(self.workers) < 8:
            name = f"w{self._joined}"
            self._joined += 1
            self.workers[name] = ModelWorker(name)

    def _leave(self, x: int, _: int) -> None:
        if len(self.workers) > 2:
            del self.workers[self._some(x).name]

    def _vanish(self, x: int, _: int) -> None:
        """A folder is not there for a while."""
        path = PATHS[x % 3]
        if path in self.folders:
            self.lost[path] = self.folders.pop(path)

    def _retrain(self, x: int, y: int) -> None:
        """A folder has other weights, and its names are put again, as one does."""
        path = PATHS[x % 3]
        self.lost.pop(path, None)
        self.folders[path] = f"weights of {path}, {y}"
        for record in list(self.records.values()):
            if record.spec.path == path and not record.is_removed:
                self._write_record(put_again(record, record.spec))

    def _take_over(self, *_: int) -> None:
        """Another router acts from now on; what the last one had ordered is carried out all the same, and it hears of no end."""
        self.controller = AdapterController(CONFIG)
        self._ordered.clear()

    def _refuse(self, x: int, _: int) -> None:
        self._some(x).trouble = "refuse"

    def _break(self, x: int, _: int) -> None:
        self._some(x).trouble = "break"

    def _lose(self, x: int, _: int) -> None:
        """It says that it has done it, and has not."""
        self._some(x).trouble = "lose"

    def _mend(self, x: int, _: int) -> None:
        self._some(x).trouble = ""

    # What workers do.

    def _carry_out(self, order: Order) -> Ended:
        worker = self.workers.get(order.endpoint)
        if worker is None or worker.life != order.incarnation:
            return Ended("it is gone")
        if worker.trouble in ("refuse", "break"):
            return Ended(worker.trouble, is_refused=worker.trouble == "refuse")
        if isinstance(order, Load):
            if order.path not in self.folders:
                return Ended("no such folder", is_refused=True)
            digest = self.folders[order.path]
            if worker.trouble != "lose":
                worker.adapters[order.name] = digest
                (worker.pinned.add if order.pinned else worker.pinned.discard)(order.name)
            return Ended(digest=digest)
        if worker.trouble != "lose":
            worker.adapters.pop(order.name, None)
            worker.pinned.discard(order.name)
        return Ended()

    # What must hold.

    def _check_orders(self, orders: list[Order]) -> None:
        ready = sum(worker.is_ready for worker in self.workers.values())
        for order in orders:
            assert order.name != OWN, "a name that the store never knew is nobody's business"
            record = self.records[order.name]
            is_kept = record.kept is not None and order.generation == record.kept.generation
            assert order.generation == record.generation or is_kept
            assert record.is_removed != isinstance(order, Load)
        for name in {order.name for order in orders if isinstance(order, Load)}:
            record = self.records[name]
            newest = self.controller.digest_of(record)
            loads = [one for one in self._alive() if isinstance(one, Load) and one.name == name]
            first = [one for one in loads if one.generation == record.generation]
            assert newest or len(first) <= 1, "one worker finds out what it is"
            content = newest or (record.kept.digest if record.kept else "")
            changing = [one for one in loads if self._ordered[id(one)][1] not in (None, content)]
            is_new = any(one is order for one in changing for order in orders)
            most = max(1, int(ready * CONFIG.roll_share))
            assert not is_new or len(changing) <= most, "too many change at once"
        at_once = Counter(one.endpoint for one in self._alive() if isinstance(one, Load))
        assert all(count == 1 for count in at_once.values()), "one load a worker at a time"
        told = Counter((one.endpoint, one.name, one.generation) for one in self._alive())
        assert all(count == 1 for count in told.values()), "nobody is told twice what it is at"

    def _alive(self) -> list[Order]:
        """What is under way by this term's controller, at lives that are not over."""
        return [
            one
            for one in self.under_way
            if id(one) in self._ordered
            and (worker := self.workers.get(one.endpoint)) is not None
            and worker.life == one.incarnation
        ]

    def _means_something(self) -> bool:
        """Whether every worker has some content of each name that can be had, also where its newest cannot."""
        for record in self.records.values():
            paths = [record.spec.path, *([record.kept.spec.path] if record.kept else [])]
            can_be_had = not record.is_removed and any(path in self.folders for path in paths)
            if can_be_had and not all(record.name in one.adapters for one in self.workers.values()):
                return False
        return True

    def _is_as_wished(self) -> bool:
        for record in self.records.values():
            content = self.controller.digest_of(record)
            for worker in self.workers.values():
                has = worker.adapters.get(record.name)
                if record.is_removed:
                    if has is not None:
                        return False
                elif not has or has != content or (record.name in worker.pinned) != record.spec.pinned:
                    return False
        assert all(worker.adapters[OWN] == "own content" for worker in self.workers.values())
        return True

    def _held(self) -> dict[str, dict[str, str]]:
        return {worker.name: worker.adapters for worker in self.workers.values()}

    def _some(self, x: int) -> ModelWorker:
        names = sorted(self.workers)
        return self.workers[names[x % len(names)]]

    def _write_record(self, record: AdapterRecord) -> None:
        """As the store does it, in another mapping each time."""
        self.records = self.records | {record.name: decode(encode(record))}
