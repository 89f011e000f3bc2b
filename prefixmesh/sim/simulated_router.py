"""A router in simulated time: the real core, and around it what the real shell does, by messages over a simulated network.

It asks each worker who it is, follows its news, sends requests and takes in what comes of them. A request is made, routed, answered and its
end is told to whoever asked; one that fails is not sent again here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE, FINGERPRINT_VERSION, block_fingerprints
from prefixmesh.ids import Incarnation, Namespace, WorkerId
from prefixmesh.proto.cache_news import News
from prefixmesh.proto.codec import PROTOCOL_VERSION
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.placement import Placement, RouteRequest
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.router.registry import Expected, Rates, WorkerFacts
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.worker_view import Need
from prefixmesh.sim.fake_engine import ModelIdentity
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.network import Network, Stream
from prefixmesh.sim.simulated_calls import Watch, open_call
from prefixmesh.sim.simulated_news import Place
from prefixmesh.sim.simulated_worker import Call, SimulatedWorker
from prefixmesh.tokens import count
from prefixmesh.worker.engine_client import RequestEvent
from prefixmesh.worker.messages import Admitted, Ended, EngineSampling, Refused, Submit, TokensOut

REVIEW_S: Final = 0.25
"""How often time alone is looked at, as the real shell does."""

ASK_AGAIN_S: Final = 0.2
"""After a worker was not there."""

SILENT_S: Final = 3.0
"""A stream of news that says nothing for so long is begun anew."""

MAX_INDEX_BLOCKS: Final = 4_000_000
"""More than any fleet that is simulated holds: what a bound costs is another question."""

ANSWER_BUFFER: Final = 1 << 20
"""Messages of one answer that wait for a slow reader, as many as it may have tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request as a client asks it."""

    namespace: Namespace
    prompt: bytes
    """Packed."""

    max_tokens: int


@dataclass(slots=True, kw_only=True)
class Answered:
    """What has become of a question; times are seconds of simulated time. Its prompt is not kept: a trace has gigabytes of them."""

    prompt_tokens: int
    asked_at: float
    worker: str = ""
    cached_tokens: int = 0
    first_token_at: float | None = None
    ended_at: float | None = None
    tokens: int = 0
    error: str = ""
    """Empty where it ended well."""


class SimulatedRouter:
    """One router, which may be one of several before the same workers."""

    def __init__(
        self,
        sim: Simulation,
        network: Network,
        name: str,
        workers: Mapping[Endpoint, SimulatedWorker],
        policy: PolicyConfig,
        *,
        report_interval_s: float = 0.1,
    ) -> None:
        self.sim = sim
        self.network = network
        self.name = name
        self.core = RouterCore(
            _expected(next(iter(workers.values())).identity),
            policy,
            block_size=DEFAULT_BLOCK_SIZE,
            max_tree_blocks=MAX_INDEX_BLOCKS,
            draw=_drawing(sim, name),
        )
        self.report_interval_s = report_interval_s
        self._links = {endpoint: _Link(self, endpoint, worker) for endpoint, worker in workers.items()}
        self._review()

    def ask(self, question: Question, on_end: Callable[[Answered], Any]) -> Answered:
        """Route a question and send it. ``on_end`` is called with what has become of it, however it ends. Raises as ``RouterCore.route``."""
        request = RouteRequest(
            fingerprints=block_fingerprints(question.namespace, question.prompt),
            prompt_tokens=count(question.prompt),
            max_tokens=question.max_tokens,
        )
        placement = self.core.route(request, self.sim.now)
        answered = Answered(
            prompt_tokens=request.prompt_tokens, asked_at=self.sim.now, worker=placement.endpoint
        )
        _Request(self, self._links[placement.endpoint].worker, placement, answered, on_end).send(question)
        return answered

    def _review(self) -> None:
        self.core.tick(self.sim.now)
        self.core.view.take_changes()
        self.sim.call_later(REVIEW_S, self._review)

    def __repr__(self) -> str:
        return f"<SimulatedRouter {self.name}: {self.core!r}>"


class _Request:
    """One that is under way."""

    __slots__ = ("_answered", "_on_end", "_placement", "_router", "_worker")

    def __init__(
        self,
        router: SimulatedRouter,
        worker: SimulatedWorker,
        placement: Placement,
        answered: Answered,
        on_end: Callable[[Answered], Any],
    ) -> None:
        self._router = router
        self._worker = worker
        self._placement = placement
        self._answered = answered
        self._on_end = on_end

    def send(self, question: Question) -> None:
        router = self._router
        submit = Submit(
            request_id=self._placement.request_id,
            namespace=question.namespace,
            tokens=question.prompt,
            sampling=_greedy(question.max_tokens),
        )

        def begin(answer: "Stream[RequestEvent]") -> None:
            self._worker.generate(
                Call(submit=submit, router_id=router.name, answer=answer, every_token=False)
            )

        open_call(
            router.network,
            router.name,
            self._worker.name,
            begin,
            self._on_event,
            self._on_broken,
            buffer=ANSWER_BUFFER,
        )

    def _on_event(self, event: RequestEvent) -> None:
        core, now, answered = self._router.core, self._router.sim.now, self._answered
        match event:
            case Admitted():
                answered.cached_tokens = event.cached_tokens
                core.accepted(self._placement, event.cached_tokens, now)
            case TokensOut():
                if answered.first_token_at is None:
                    answered.first_token_at = now
                    core.first_token(self._placement, now)
            case Ended():
                answered.tokens = event.completion_tokens
                if event.reason in ("stop", "length"):
                    core.finished(self._placement, now)
                    self._end("")
                else:
                    core.failed(self._placement, now)
                    self._end(event.reason)
            case Refused():
                core.failed(self._placement, now)
                self._end(event.problem)

    def _on_broken(self) -> None:
        self._worker.abort(self._placement.request_id)  # the worker's end of the stream has broken as well
        self._router.core.failed(self._placement, self._router.sim.now)
        self._end("broken")

    def _end(self, error: str) -> None:
        self._answered.error = error
        self._answered.ended_at = self._router.sim.now
        self._on_end(self._answered)


class _Link:
    """What a router does about one worker: it asks who is there, and follows its news until they break."""

    def __init__(self, router: SimulatedRouter, endpoint: Endpoint, worker: SimulatedWorker) -> None:
        self.worker = worker
        self._router = router
        self._endpoint = endpoint
        self._incarnation = Incarnation(0)
        self._watch: Watch | None = None
        router.core.add_worker(endpoint, router.sim.now)
        self._describe()

    def opened(self, now: float) -> Place | None:
        opening = self._router.core.fleet.opened(self._endpoint, self._router.report_interval_s, now)
        self._incarnation = opening.incarnation
        return opening.resume_from

    def take(self, news: News, now: float) -> Need:
        return self._router.core.stream_news(self._endpoint, self._incarnation, news, now)

    def ended(self, cause: str, now: float) -> None:
        self._router.core.view.ended(self._endpoint, cause, now)

    def _describe(self) -> None:
        def tell(answer: "Stream[WorkerFacts]") -> None:
            if self.worker.life is None:
                answer.break_off()
            else:
                answer.send(_facts(self.worker, self.worker.life.incarnation))

        router = self._router
        open_call(router.network, router.name, self.worker.name, tell, self._on_facts, self._on_lost)

    def _on_facts(self, facts: WorkerFacts) -> None:
        router = self._router
        router.core.described(self._endpoint, facts, router.sim.now)
        router.core.health_changed(self._endpoint, serving=True)
        if self._watch is not None:
            self._watch.open()
            return
        self._watch = Watch(
            router.sim,
            router.network,
            router.name,
            self.worker,
            self,
            router_id=router.name,
            report_interval_s=router.report_interval_s,
            silent_s=SILENT_S,
            on_lost=self._on_lost,
        )

    def _on_lost(self) -> None:
        self._router.core.unreachable(self._endpoint, "the connection broke")
        self._router.sim.call_later(ASK_AGAIN_S, self._describe)


def _facts(worker: SimulatedWorker, incarnation: Incarnation) -> WorkerFacts:
    life = worker.life
    assert life is not None
    info, stats = life.engine.core.info, life.engine.core.stats()
    return WorkerFacts(
        worker_id=WorkerId(worker.name),
        incarnation=incarnation,
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
            stats.prefill_ms_per_token,
            stats.prefill_ms_per_token2,
        ),
    )


def _expected(identity: ModelIdentity) -> Expected:
    return Expected(
        model_revision=identity.revision,
        tokenizer_digest=identity.revision,
        protocol_version=PROTOCOL_VERSION,
        fingerprint_version=FINGERPRINT_VERSION,
    )


def _drawing(sim: Simulation, name: str) -> Callable[[], int]:
    rng = sim.fork_rng(f"router {name}")
    return lambda: rng.getrandbits(64)


def _greedy(max_tokens: int) -> EngineSampling:
    return EngineSampling(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=max_tokens, stop_token_ids=()
    )
