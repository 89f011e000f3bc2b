"""The LoRA adapters of one worker in a replay: which are in its memory, and who waits for one that is not.

The table is the engine's own (``worker.adapters``): so many places, the least recently used without users makes room, who waits longest is
passed over by so many and no more. What is by arithmetic is the load: each takes ``TimingModel.adapter_load_ms``, one after the other as
one thread reads them, and nothing of it slows the steps. All are of one size and known to every worker; a worker reads one when the first
request asks for it.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from prefixmesh.errors import InvariantError
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.replay_job import Job
from prefixmesh.worker.adapter_records import Grant, Load, Refusal
from prefixmesh.worker.adapters import AdapterTable

MAX_WAITING: Final = 1 << 30
"""Nobody is refused: what is refused is not compared."""

LOAD_WEIGHT: Final = 0.3
"""Of the newest load in their mean, which workers tell routers: as the engine's (``worker.adapter_desk``)."""

_MS_PER_S: Final = 1e3


class ReplayAdapters:
    """See the module. ``granted`` is told of each request that may be computed: at once, or when its adapter has come."""

    def __init__(
        self, sim: Simulation, places: int, load_ms: float, granted: Callable[[Job], object]
    ) -> None:
        self._sim = sim
        self._each_ms = load_ms
        self._granted = granted
        self._table = AdapterTable(max_resident=places, budget_bytes=places, max_waiting=MAX_WAITING)
        self._jobs: dict[str, Job] = {}
        # The first is being read.
        self._loads: deque[str] = deque()
        self._wanted_at: dict[str, float] = {}
        self.waited = 0
        """Requests that came when theirs was not there, so far."""

        self.load_ms = 0.0
        """From a load's wish to its end, over the last ones; 0 before the first. Behind others it waits for them."""

    def __len__(self) -> int:
        """Requests that wait for one now."""
        return len(self._jobs)

    @property
    def resident(self) -> tuple[str, ...]:
        """Which are in memory, sorted. O(those that were ever asked for)."""
        return self._table.resident

    def take(self, job: Job) -> None:
        """A request that names one has come. O(those that were ever asked for)."""
        table, adapter, name = self._table, job.request.adapter, str(job.number)
        if not table.knows(adapter):
            table.learn(adapter, digest=adapter, path=adapter, rank=1, size_bytes=1, pinned=False)
        self._jobs[name] = job
        table.acquire(adapter, name)
        self._do()
        self.waited += name in self._jobs

    def release(self, job: Job) -> None:
        """A request has its answer: its adapter may go for another's. One without is passed over. O(as ``take``)."""
        if job.request.adapter:
            self._table.release(str(job.number))
            self._do()

    def _do(self) -> None:
        """What the table wants done, in its order."""
        for action in self._table.take_actions():
            if isinstance(action, Grant):
                self._granted(self._jobs.pop(action.request_id))
            elif isinstance(action, Load):
                self._wanted_at[action.digest] = self._sim.now
                self._loads.append(action.digest)
                if len(self._loads) == 1:
                    self._load_next()
            elif isinstance(action, Refusal):
                raise InvariantError(f"request {action.request_id} of a replay was refused: {action.problem}")

    def _load_next(self) -> None:
        self._sim.call_later(self._each_ms / _MS_PER_S, partial(self._loaded, self._loads[0]))

    def _loaded(self, adapter: str) -> None:
        self._loads.popleft()
        took_ms = _MS_PER_S * (self._sim.now - self._wanted_at.pop(adapter))
        share = LOAD_WEIGHT if self.load_ms else 1.0
        self.load_ms += share * (took_ms - self.load_ms)
        self._table.loaded(adapter)
        self._do()
        if self._loads:
            self._load_next()
