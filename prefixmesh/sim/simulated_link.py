"""A simulated router's link to one worker: who is there, whether it does, its news, and the calls that run there.

The turns of ``router.worker_link`` in simulated time: it asks who is there, then follows the worker's news, probes it and asks again; what
breaks ends the round, and the next begins after a pause that grows. What is learned goes to the core.
"""

import math
from collections.abc import Callable
from typing import Final, Protocol

from prefixmesh.cache.fingerprint import FINGERPRINT_VERSION
from prefixmesh.ids import Incarnation, WorkerId
from prefixmesh.proto.cache_news import News
from prefixmesh.proto.codec import PROTOCOL_VERSION
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.failure_kind import FailureKind, is_workers_fault
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.worker_health import PROBE_TIMEOUT_S
from prefixmesh.router.worker_identity import Rates, WorkerFacts
from prefixmesh.router.worker_view import Need
from prefixmesh.sim.kernel import Simulation, Timer
from prefixmesh.sim.network import Network, Stream
from prefixmesh.sim.simulated_calls import Watch, open_call
from prefixmesh.sim.simulated_news import Place
from prefixmesh.sim.simulated_worker import Description, SimulatedWorker
from prefixmesh.worker.worker_reports import host_pool_of

DESCRIBE_INTERVAL_S: Final = 1.0
DESCRIBE_TIMEOUT_S: Final = 3.0
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 1.0
"""All as of ``router.worker_link``, which runs on asyncio and so cannot be asked here."""

SILENT_S: Final = 3.0
"""A stream of news that says nothing for so long is begun anew."""


class Linking(Protocol):
    """The router that a link is of."""

    sim: Simulation
    network: Network
    name: str
    router_id: str
    core: RouterCore
    report_interval_s: float
    news_may_garble: Callable[[News], bool] | None

    def note_news(self) -> None:
        """Something was learned of a worker."""
        ...


class RunningCall(Protocol):
    """A call at the link's worker."""

    def given_up(self, why: str) -> None:
        """Nothing is expected of it any more."""
        ...


class SimulatedLink:
    """See the module. It begins at once; ``close`` ends it."""

    def __init__(self, router: Linking, endpoint: Endpoint, worker: SimulatedWorker) -> None:
        self.worker = worker
        self.calls: dict[RunningCall, None] = {}
        self._router = router
        self._endpoint = endpoint
        self._incarnation = Incarnation(0)
        self._watch: Watch | None = None
        self._round = 0
        self._pause_s = FIRST_PAUSE_S
        self._timers: list[Timer] = []
        self._heard_at = -math.inf
        router.core.add_worker(endpoint, router.sim.now)
        self._describe()

    def close(self) -> None:
        """End at once, and tell nobody."""
        self._end_round()
        if self._watch is not None:
            self._watch.close()

    def give_up_calls(self, why: str) -> None:
        """See ``router.worker_link``."""
        for call in list(self.calls):
            call.given_up(why)

    def note_failure(self, kind: FailureKind, why: str) -> None:
        """See ``router.worker_link``."""
        if is_workers_fault(kind):
            self._router.core.request_failed(self._endpoint, why, self._router.sim.now)
            self._router.note_news()

    def note_success(self) -> None:
        """See ``router.worker_link``."""
        self._router.core.request_succeeded(self._endpoint)

    def suspect(self, why: str) -> None:
        """A call found the worker gone: it is asked at once who is there."""
        self._break(why, calls_go_on=True)

    # What its news are for (``NewsTaker``).

    def opened(self, now: float) -> Place | None:
        """See ``NewsTaker.opened``."""
        opening = self._router.core.fleet.opened(self._endpoint, self._router.report_interval_s, now)
        self._incarnation = opening.incarnation
        return opening.resume_from

    def take(self, news: News, now: float) -> Need:
        """See ``NewsTaker.take``."""
        self._heard_at = now
        return self._router.core.stream_news(self._endpoint, self._incarnation, news, now)

    def ended(self, cause: str, now: float) -> None:
        """See ``NewsTaker.ended``."""
        self._router.core.view.ended(self._endpoint, cause, now)

    # How it goes.

    def _describe(self) -> None:
        """Ask who is there. Nobody: the round is over; no answer: nor is there a round where there was none."""
        number, router = self._round, self._router

        def on_told(told: Description) -> None:
            answer.close()
            if number == self._round:
                self._on_described(told)

        def give_up(why: str, *, is_late: bool = False) -> None:
            answer.leave()
            if number == self._round:
                self._break(why, calls_go_on=is_late)

        answer: Stream[Description] = open_call(
            router.network,
            router.name,
            self.worker.name,
            self.worker.describe,
            on_told,
            lambda: give_up("nobody answers"),
        )
        if self._watch is None or not self._watch.is_on:
            self._later(DESCRIBE_TIMEOUT_S, lambda: give_up("it did not say in time who it is", is_late=True))

    def _on_described(self, told: Description) -> None:
        router, now = self._router, self._router.sim.now
        self._heard_at, self._pause_s = now, FIRST_PAUSE_S
        router.core.described(self._endpoint, _facts(self.worker, told), now)
        entry = router.core.registry.get(self._endpoint)
        if entry is not None:
            entry.clock_ahead_ms = round(1e3 * (told.clock_s - now))
        router.core.health_changed(self._endpoint, serving=True)
        router.note_news()
        if self._watch is None or not self._watch.is_on:
            self._cancel_timers()
            self._follow()
            self._later(0.0, self._probe_later)
        self._later(DESCRIBE_INTERVAL_S, self._describe)

    def _follow(self) -> None:
        router = self._router
        if self._watch is not None:
            self._watch.open()
            return
        self._watch = Watch(
            router.sim,
            router.network,
            router.name,
            self.worker,
            self,
            router_id=router.router_id,
            report_interval_s=router.report_interval_s,
            silent_s=SILENT_S,
            on_lost=lambda: self._break("the connection broke"),
            may_garble=router.news_may_garble,
        )

    def _probe_later(self) -> None:
        entry = self._router.core.registry.get(self._endpoint)
        if entry is not None:
            self._later(entry.health.pause_s(self._router.sim.rng.random()), self._probe)

    def _probe(self) -> None:
        router, began, number = self._router, self._router.sim.now, self._round
        is_over = False

        def over(problem: str) -> None:
            nonlocal is_over
            if is_over or number != self._round:
                return
            is_over = True
            answer.leave() if problem else answer.close()
            # Busy is not dead: one that has said anything since is alive.
            if not (problem and self._heard_at > began):
                router.core.probe_ended(self._endpoint, problem, router.sim.now)
                router.note_news()
            self._probe_later()

        answer: Stream[bool] = open_call(
            router.network,
            router.name,
            self.worker.name,
            self.worker.check_health,
            lambda _: over(""),
            lambda: self._break("nobody is there") if number == self._round and not is_over else None,
        )
        self._later(PROBE_TIMEOUT_S, lambda: over(f"it did not answer within {PROBE_TIMEOUT_S:g} s"))

    def _break(self, why: str, *, calls_go_on: bool = False) -> None:
        """The connection is of no more use: the next round begins after a pause. Its calls are given up, unless they find out by themselves,
        or all that is known is that an answer was late."""
        self._end_round()
        if self._watch is not None:
            self._watch.stop("unavailable")
        self._router.core.unreachable(self._endpoint, why)
        self._router.note_news()
        if not calls_go_on:
            self.give_up_calls(f"worker {self.worker.name} cannot be reached: {why}")
        self._later(self._pause_s, self._describe)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _end_round(self) -> None:
        self._round += 1
        self._cancel_timers()

    def _later(self, delay_s: float, call: Callable[[], object]) -> None:
        """Do it then, unless the round is over."""
        self._timers = [timer for timer in self._timers if timer.is_due]
        self._timers.append(self._router.sim.call_later(delay_s, call))

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()


def _facts(worker: SimulatedWorker, told: Description) -> WorkerFacts:
    info, stats = told.info, told.stats
    return WorkerFacts(
        worker_id=WorkerId(worker.name),
        incarnation=told.incarnation,
        model=info.model,
        model_revision=info.model_revision,
        tokenizer_digest=info.model_revision,
        protocol_version=PROTOCOL_VERSION,
        fingerprint_version=FINGERPRINT_VERSION,
        context_length=info.context_length,
        max_running_requests=info.max_running_requests,
        match_unit=info.page_size,
        page_size=info.page_size,
        total_tokens=info.max_total_tokens,
        rates=Rates(
            stats.prefill_tokens_per_s,
            stats.decode_step_ms,
            load_back_ms_per_token=stats.load_back_ms_per_token,
        ),
        host_pool=host_pool_of(stats.tiers),
    )
