"""Many seeds of a fault run, one after the other or by several processes; what they come to does not depend on by how many.

Reports come in the seeds' order, also where a later seed is through before an earlier one. Processes are spawned, not forked, and each reads the workload
itself: it is smaller on disk than what it becomes in memory.
"""

import multiprocessing
import signal
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import torch
import xxhash

from prefixmesh.errors import InternalError
from prefixmesh.sim.fault_plan import FaultPlan
from prefixmesh.sim.fault_run import FaultReport, run_seed
from prefixmesh.sim.workload import Workload

AHEAD: Final = 4
"""Seeds given to each process ahead: a seed takes from a tenth of a second to some seconds, and none is to wait for work."""

_COUNTED: Final = ("requests", "finished", "attempts", "resumed")


@dataclass(slots=True)
class Tally:
    """What seeds came to, in their order."""

    counts: Counter[str] = field(default_factory=Counter)
    """``seeds``, ``requests``, ``finished``, ``attempts``, ``resumed``, and the ``faults`` that they met."""

    _digest: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)

    @property
    def log_digest(self) -> str:
        """Of all logs: equal for equal seeds in one order."""
        return self._digest.hexdigest()

    def add(self, report: FaultReport) -> None:
        """The next seed's."""
        self.counts.update({name: getattr(report, name) for name in _COUNTED})
        self.counts.update(seeds=1, faults=len(report.script.lines()))
        self._digest.update(report.log_digest.encode())


def run_seeds(
    load: Callable[[], Workload], seeds: range, plan: FaultPlan, *, jobs: int = 1
) -> Generator[FaultReport]:
    """The report of each seed, in order, by so many processes. ``load`` gives the workload; with several it is pickled, and called in each.

    Close it early and what is under way is given up. Raises as ``load``, and InternalError where a process dies.
    """
    if jobs == 1:
        return _run_here(load(), seeds, plan)
    return _run_in_processes(load, seeds, plan, jobs)


def _run_here(workload: Workload, seeds: range, plan: FaultPlan) -> Generator[FaultReport]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the fake model's steps are too small to share
    try:
        for seed in seeds:
            yield run_seed(seed, workload, plan=plan)
    finally:
        torch.set_num_threads(threads)


def _run_in_processes(
    load: Callable[[], Workload], seeds: range, plan: FaultPlan, jobs: int
) -> Generator[FaultReport]:
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_begin, initargs=(load, plan))
    under_way: deque[Future[FaultReport]] = deque()
    try:
        for seed in seeds:
            with _deaf_to_interrupts():  # the first begins the processes
                under_way.append(pool.submit(_run_there, seed))
            if len(under_way) > AHEAD * jobs:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool as error:
        raise InternalError("a process that ran seeds has died; fewer --jobs take less memory") from error
    finally:
        pool.shutdown(wait=not under_way, cancel_futures=True)  # whoever has closed it early hears at once


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes that are begun within hear no Ctrl-C: it comes to all of a terminal, and whoever has begun them ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_here: list[tuple[Workload, FaultPlan]] = []
"""Of a process that runs seeds for another: what they are of."""


def _begin(load: Callable[[], Workload], plan: FaultPlan) -> None:
    torch.set_num_threads(1)
    _here.append((load(), plan))


def _run_there(seed: int) -> FaultReport:
    workload, plan = _here[0]
    return run_seed(seed, workload, plan=plan)
