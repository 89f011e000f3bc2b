"""The store that simulated routers share: entries with numbers, and whoever follows is told of each write. What it does wrong it is told to do.

It stands for Redis as ``router.state_redis`` uses it: every call is done whole or not at all, writes are counted from the clock on, an identity is made
with the first write, and telling may lose messages. It is thin: what its readers make of that is the real mirror's, and the real lease's.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from prefixmesh.router.state_store import Change, Entry
from prefixmesh.router.state_table import StateTable
from prefixmesh.sim.fault_script import STORE
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.network import LinkQuality, Network, Stream

CLOCK_AHEAD_S: Final = 1_000.0
"""Of the simulation's: whoever took one for the other would be found out."""

_US_PER_S: Final = 1e6


class Told(NamedTuple):
    """A write, as followers are told of it."""

    version: int
    key: str


class Reading(NamedTuple):
    """Everything, of one moment."""

    identity: bytes
    version: int
    entries: Mapping[str, Entry]


class Newest(NamedTuple):
    """What tells whether anything was missed."""

    identity: bytes
    version: int


class SimulatedStore:
    """See the module. Its network is its own, so that a fleet without a store draws what one with it does."""

    def __init__(self, sim: Simulation, quality: LinkQuality) -> None:
        self.sim = sim
        self.network = Network(sim, quality, name="store network")
        self.log: list[tuple[float, str]] = []
        """What was written and what happened to it, with the time."""

        self.emptied_at: list[float] = []
        self.wrote: list[tuple[float, Change]] = []
        """Every write since it was made, with its time: also of what is not there any more."""

        self._table = StateTable()
        self._identity = b""
        self._identities = 0
        self._followers: dict[Stream[Told], None] = {}  # in order, as a set would not be
        self._open: dict[Stream[Any], None] = {}
        self._held: list[Callable[[], object]] = []
        self._deaths = 0
        self._stalls = 0
        # That are not over: two of a kind may overlap.
        self._delay_s = 0.0

    @property
    def now(self) -> float:
        """Its clock."""
        return self.sim.now + CLOCK_AHEAD_S

    @property
    def is_there(self) -> bool:
        """Whether it is alive, though it may stand still."""
        return not self._deaths

    # What is asked of it, each by a call that arrives.

    def serve(self, answer: "Stream[Any]", do: Callable[["SimulatedStore"], object]) -> None:
        """Do this and answer. Nobody there: the answer breaks."""

        def act() -> None:
            if not self.is_there:
                answer.reset()
                return
            value = do(self)
            if self._delay_s:
                self._open[answer] = None
                self.sim.call_later(self._delay_s, self._answer_late, answer, value)
            elif answer.is_open:
                answer.send(value)

        self._when_awake(act)

    def follow(self, stream: Stream[Told]) -> None:
        """Tell of each write from now on. Nobody there: it breaks."""

        def act() -> None:
            if self.is_there:
                self._followers[stream] = None
                stream.on_gone = lambda: self._followers.pop(stream, None)
            else:
                stream.reset()

        self._when_awake(act)

    def newest(self) -> Newest:
        """The store it is, and its last write."""
        return Newest(self._identity, self._table.version)

    def reading(self) -> Reading:
        """All of it."""
        return Reading(
            self._identity, self._table.version, {entry.key: entry for entry in self._table.entries("")}
        )

    def get(self, key: str) -> Entry | None:
        """See ``StateStore``."""
        return self._table.get(key)

    def change(self, key: str, value: bytes | None, expect: int | None, writer: str) -> int | None:
        """Write, or remove where there is no value; the write's number, None where another version is there."""
        if not self._identity:
            # An empty table counts from the clock on, so that no number is given twice.
            self._table = StateTable(version=round(_US_PER_S * self.now))
        change = self._table.delete(key, expect) if value is None else self._table.put(key, value, expect)
        if change is None:
            return None
        if not self._identity:
            self._identities += 1
            self._identity = b"store %d" % self._identities
        self._note(f"{'removed' if value is None else 'wrote'} {key} by {writer}")
        self.wrote.append((self.sim.now, change))
        self._tell(change)
        return change.version

    # What happens to it.

    def crash(self) -> None:
        """Die: connections break."""
        self._deaths += 1
        self._note("is dead")
        for stream in (*self._followers, *self._open):
            stream.reset()
        self._followers.clear()
        self._open.clear()
        self._do_held()  # finds nobody

    def start(self) -> None:
        """Be there again, with what it holds."""
        self._deaths -= 1
        if self.is_there:
            self._note("is back")

    def empty(self) -> None:
        """Hold nothing, and say nothing."""
        self._table, self._identity = StateTable(), b""
        self.emptied_at.append(self.sim.now)
        self._note("holds nothing")

    def stall(self) -> None:
        """Stand still."""
        self._stalls += 1
        self._note("stands still")

    def go_on(self) -> None:
        """Do first what has come meanwhile."""
        self._stalls -= 1
        if not self._stalls:
            self._note("goes on")
            self._do_held()

    def slow_down(self, delay_s: float) -> None:
        """Each answer takes so much longer; less with a negative one."""
        self._delay_s = max(0.0, self._delay_s + delay_s)

    def _answer_late(self, answer: "Stream[Any]", value: object) -> None:
        self._open.pop(answer, None)
        self._when_awake(lambda: answer.send(value) if answer.is_open else None)

    def _tell(self, change: Change) -> None:
        self._followers = {one: None for one in self._followers if one.is_open}
        for stream in self._followers:
            stream.send(Told(change.version, change.key))

    def _when_awake(self, act: Callable[[], object]) -> None:
        if self._stalls and self.is_there:
            self._held.append(act)
        else:
            act()

    def _do_held(self) -> None:
        held, self._held = self._held, []
        for act in held:
            act()

    def _note(self, what: str) -> None:
        self.log.append((self.sim.now, f"{STORE:10} {what}"))

    def __repr__(self) -> str:
        state = "there" if self.is_there else "gone"
        return f"<SimulatedStore {state}: {self._table!r}, {len(self._followers)} followers>"
