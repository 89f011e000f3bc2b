"""The state that the routers of a fault run share: its workers, its pins, the lease to act for them; who writes there, and what must hold of it.

An operator has put all workers and pins there before, and changes his mind about one pin while things go wrong; he tries again until it is written.
A store that was emptied gets back what routers know of it. Only where none of them lives that knew all before, what it held is lost, as with a
Redis that keeps nothing; then nothing is asked of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Final

import msgspec

from prefixmesh.errors import PrefixmeshError
from prefixmesh.router.pins.acting_lease import LEASE, LEASE_S
from prefixmesh.router.pins.records import PINS
from prefixmesh.router.pins.wishes import Action, Wish
from prefixmesh.router.state_store import Entry
from prefixmesh.router.worker_roster import WORKERS
from prefixmesh.sim.fault_pins import Pinned, wish_of
from prefixmesh.sim.fault_script import STORE, StoreFault, StoreFaultKind
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.network import LinkQuality
from prefixmesh.sim.simulated_router import RouterLife, SharedState, SimulatedRouter
from prefixmesh.sim.simulated_state import StoreCalls
from prefixmesh.sim.simulated_store import CLOCK_AHEAD_S, SimulatedStore
from prefixmesh.sim.simulated_tasks import Task, pause

OPERATOR: Final = "operator"

AGAIN_S: Final = 0.5
"""Before the operator tries again."""

MOST_REPLICAS: Final = 3
"""That he may want: 0 is on all workers."""

_MS_PER_S: Final = 1e3


class _Lease(msgspec.Struct, frozen=True):
    """What a lease's entry says, as ``state_lease`` writes it."""

    owner: str
    expires_at: float


class FleetState:
    """See the module. Made before routers are; ``plan`` what happens to it."""

    def __init__(
        self, sim: Simulation, quality: LinkQuality, workers: Sequence[str], pins: Sequence[Pinned]
    ) -> None:
        self.sim = sim
        self.store = SimulatedStore(sim, quality)
        self.shared = SharedState(self.store, self._wish_of, self._note_order)
        self._pins = {f"{PINS}{OPERATOR}/{pinned.name}": pinned for pinned in pins}
        self._wishes: dict[tuple[str, bytes], Wish] = {}
        self._orders: list[tuple[float, str]] = []
        self._written: dict[str, bytes] = {WORKERS + name: b"" for name in workers}
        self._written |= {key: b"%d" % pinned.replicas for key, pinned in self._pins.items()}
        self._changing: Task | None = None
        for key, value in self._written.items():
            self.store.change(key, value, None, OPERATOR)

    @property
    def log(self) -> list[tuple[float, str]]:
        """What happened there, with the time."""
        return self.store.log

    def plan(self, faults: Sequence[StoreFault], rng: Random, lasts_s: float) -> None:
        """Have this happen to the store, and the operator change his mind some time."""
        for fault in faults:
            self._plan(fault)
        if self._pins:
            key, value = rng.choice(sorted(self._pins)), b"%d" % rng.randint(0, MOST_REPLICAS)
            self.sim.call_at(rng.uniform(0.0, lasts_s), self._begin_change, key, value)

    def wishes(self) -> list[Wish]:
        """What is wished by the store's own entries. O(entries)."""
        return [
            self._wish_of(entry) for key, entry in self.store.reading().entries.items() if key in self._pins
        ]

    def is_quiet(self, lives: Sequence[RouterLife]) -> bool:
        """Whether all routers know what the store holds, one holds the lease, and the operator is through."""
        newest = self.store.newest()
        if self._changing is not None and not self._changing.is_over:
            return False
        states = [life.state for life in lives if life.state is not None]
        # A lease is renewed every second: a mirror may be behind by a write that is on its way.
        return sum(state.lease.is_held for state in states) == 1 and all(
            state.is_known and state.mirror.identity == newest.identity for state in states
        )

    def broken(self, routers: Sequence[SimulatedRouter]) -> Iterator[str]:
        """What does not hold. O(entries * routers + orders * leases)."""
        entries = self.store.reading().entries
        lives = [router.life for router in routers if router.life is not None]
        if not self._may_be_lost(lives):
            yield from (f"{STORE}: {key} is lost" for key in self._written if key not in entries)
        if not self.store.emptied_at:  # else nobody may have heard of the last write
            held = {key: entries[key].value for key in self._written if key in entries}
            yield from (
                f"{STORE}: {key} is {value!r}, written was {self._written[key]!r}"
                for key, value in held.items()
                if value != self._written[key]
            )
        for life in lives:
            yield from self._of_router(life, entries)
        holders = [life.router_id for life in lives if life.state is not None and life.state.lease.is_held]
        if len(holders) != 1:
            yield f"{STORE}: {holders} hold the lease"
        yield from self._of_orders()

    def _of_router(self, life: RouterLife, entries: Mapping[str, Entry]) -> Iterator[str]:
        state = life.state
        assert state is not None
        known = {entry.key: entry.value for entry in state.mirror.entries("") if entry.key != LEASE}
        true = {key: entry.value for key, entry in entries.items() if key != LEASE}
        if known != true:
            yield f"{life.name}: it believes that the store holds {known}; it holds {true}"
        yield from (f"{life.name}: it forgot {name}, which nobody removed" for name in life.forgotten)
        missing = {key.removeprefix(WORKERS) for key in true if key.startswith(WORKERS)} - set(life.links)
        yield from (
            f"{life.name}: it does not follow {name}, which the store knows" for name in sorted(missing)
        )

    def _of_orders(self) -> Iterator[str]:
        """Each is by the router that the store had last given the lease to, and in its time; or the store was emptied, and with it the lease."""
        leases = [
            (at, msgspec.json.decode(change.value, type=_Lease))
            for at, change in self.store.wrote
            if change.key == LEASE and change.value is not None
        ]
        for at, owner in self._orders:
            if any(0.0 <= at - emptied_at <= LEASE_S for emptied_at in self.store.emptied_at):
                continue
            given = next((lease for given_at, lease in reversed(leases) if given_at <= at), None)
            if given is None or given.owner != owner or given.expires_at < at + CLOCK_AHEAD_S:
                yield f"{owner} ordered something for pins at {at:.3f} s, when the lease was {given}"

    def _may_be_lost(self, lives: Sequence[RouterLife]) -> bool:
        """Whether the store was emptied, and nobody lives that knew all before and still can say so."""
        states = [life.state for life in lives if life.state is not None]
        return any(all(state.known_at >= at for state in states) for at in self.store.emptied_at)

    def _begin_change(self, key: str, value: bytes) -> None:
        self._changing = Task(self._change(key, value))

    async def _change(self, key: str, value: bytes) -> None:
        calls = StoreCalls(self.store, OPERATOR, OPERATOR)
        self._written[key] = value
        while True:
            try:
                await calls.put(key, value)
            except PrefixmeshError:
                await pause(self.sim, AGAIN_S)
            else:
                break

    def _plan(self, fault: StoreFault) -> None:
        store, call_at = self.store, self.sim.call_at
        end_s = fault.at_s + fault.for_s
        match fault.kind:
            case StoreFaultKind.FLUSH:
                call_at(fault.at_s, store.empty)
            case StoreFaultKind.STALL:
                call_at(fault.at_s, store.stall)
                call_at(end_s, store.go_on)
            case StoreFaultKind.DELAY:
                call_at(fault.at_s, store.slow_down, fault.amount / _MS_PER_S)
                call_at(end_s, store.slow_down, -fault.amount / _MS_PER_S)
            case StoreFaultKind.CRASH | StoreFaultKind.LOSE:
                call_at(fault.at_s, store.crash)
                if fault.kind is StoreFaultKind.LOSE:
                    call_at(fault.at_s, store.empty)
                call_at(end_s, store.start)

    def _wish_of(self, entry: Entry) -> Wish:
        """Equal ones are the same objects."""
        found = self._wishes.get((entry.key, entry.value))
        if found is None:
            pinned = self._pins[entry.key]._replace(replicas=int(entry.value))
            found = self._wishes[entry.key, entry.value] = wish_of(pinned)
        return found

    def _note_order(self, router_id: str, action: Action) -> None:
        self._orders.append((self.sim.now, router_id))
        kind = type(action).__name__.lower()
        self.store.log.append((self.sim.now, f"{STORE:10} {router_id} orders {kind} on {action.endpoint}"))
