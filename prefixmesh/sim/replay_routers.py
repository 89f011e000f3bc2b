"""Who decides in a replay: rules of others over an exact view, or ceilings. Ours is in ``replay_core``.

A router is asked once for each request, when it comes, and hears what becomes of it.
"""

from collections.abc import Sequence
from random import Random
from typing import Protocol

from prefixmesh.sim.replay_cache import Change
from prefixmesh.sim.replay_job import Job, Listener
from prefixmesh.sim.replay_worker import ReplayWorker
from prefixmesh.sim.rivals.view import RivalView, Rule


class ReplayRouter(Listener, Protocol):
    """Sends requests to workers, by their places."""

    def route(self, job: Job) -> int:
        """Where it goes, now."""
        ...

    def decisions_s(self) -> list[float] | None:
        """Seconds of this machine's time that each decision took; None where that says nothing of our router."""
        ...


class RuleRouter(ReplayRouter):
    """A rule that sees all there is to see. It needs to hear nothing."""

    def __init__(self, rule: Rule, workers: Sequence[ReplayWorker], rng: Random, block_size: int) -> None:
        self._rule = rule
        self._workers = workers
        self._rng = rng
        self._block_size = block_size
        self._turn = -1

    def route(self, job: Job) -> int:
        """See ``ReplayRouter.route``. O(workers * held blocks)."""
        self._turn += 1
        return self._rule(self._view(job))

    def decisions_s(self) -> list[float] | None:
        """See ``ReplayRouter.decisions_s``: of an exact view, which no router has."""
        return None

    def begun(self, job: Job) -> None:
        """See ``Listener.begun``."""

    def first_token(self, job: Job) -> None:
        """See ``Listener.first_token``."""

    def ended(self, job: Job) -> None:
        """See ``Listener.ended``."""

    def changed(self, worker: int, changes: Sequence[Change]) -> None:
        """See ``Listener.changed``."""

    def _view(self, job: Job) -> RivalView:
        workers, block_size = self._workers, self._block_size
        held = [worker.held(job.names) for worker in workers]
        return RivalView(
            block_tokens=block_size,
            prompt_tokens=job.request.input_length,
            prompt_blocks=-(-job.request.input_length // block_size),
            device_blocks=[one.device for one in held],
            held_blocks=[one.total for one in held],
            in_flight=[worker.in_flight for worker in workers],
            queued=[worker.queued for worker in workers],
            kv_use=[worker.kv_use for worker in workers],
            prefill_blocks=[worker.waiting_tokens / block_size for worker in workers],
            active_blocks=[worker.active_tokens / block_size for worker in workers],
            turn=self._turn,
            chance=self._rng.random(),
        )
