"""A router in simulated time: the real cores, and around them what the real shell does, by messages over a simulated network.

One ``SimulatedRouter`` is an address; behind it lives one ``RouterLife`` after the other, each of which knows nothing of the last. It asks
each worker who it is and follows it (``simulated_link``), and carries requests (``simulated_request``).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE, FINGERPRINT_VERSION
from prefixmesh.errors import InvalidRequestError, PrefixmeshError
from prefixmesh.history import NO_HISTORY, Began, Closed, History
from prefixmesh.ids import Namespace, RequestId
from prefixmesh.proto.cache_news import News
from prefixmesh.proto.codec import PROTOCOL_VERSION
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import router_pb2
from prefixmesh.router.direct import TICKET_VALID_S
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.heat.config import HeatConfig
from prefixmesh.router.heat.watch import HeatWatch
from prefixmesh.router.pins.config import PinControllerConfig
from prefixmesh.router.pins.records import PINS
from prefixmesh.router.pins.wishes import Action, Wish
from prefixmesh.router.policy import PolicyConfig
from prefixmesh.router.public_prefixes import PublicPrefixes
from prefixmesh.router.retry_budget import RetryBudget
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.state_store import Change, Entry
from prefixmesh.router.worker_identity import Expected
from prefixmesh.router.worker_roster import WORKERS
from prefixmesh.sim.fake_engine import ModelIdentity
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.network import Network, Stream
from prefixmesh.sim.simulated_life import SIMULATED_SECRET
from prefixmesh.sim.simulated_link import SimulatedLink
from prefixmesh.sim.simulated_pins import SimulatedPins, Wishes
from prefixmesh.sim.simulated_question import Question, as_route_request
from prefixmesh.sim.simulated_request import TENANT, Answered, SimulatedRequest
from prefixmesh.sim.simulated_state import SimulatedState
from prefixmesh.sim.simulated_store import SimulatedStore
from prefixmesh.sim.simulated_worker import SimulatedWorker
from prefixmesh.ticket import Ticket, sign

__all__ = ["AnswerEnd", "Answered", "Question", "RouterLife", "SimulatedRouter"]

REVIEW_S: Final = 0.25
"""How often time alone is looked at, as the real shell does."""

STREAM_IDLE_S: Final = 60.0
"""As ``RouterConfig.stream_idle_timeout_s``."""

PIN_CONFIG: Final = PinControllerConfig(longest_pause_s=8.0, warm_timeout_s=30.0)
"""Less patient than the real one, so that a run is at rest soon."""

MAX_INDEX_BLOCKS: Final = 4_000_000
"""More than any fleet that is simulated holds: what a bound costs is another question."""


class AnswerEnd(NamedTuple):
    """The last message of an answer to a caller over the network."""

    error: PrefixmeshError | None
    """None where the answer is whole."""


class SharedState(NamedTuple):
    """What a router shares with others, and how it reads it."""

    store: SimulatedStore
    wish_of: Callable[[Entry], Wish]
    """Of an entry under ``pins/``."""

    on_order: Callable[[str, Action], object]
    """Told of whatever a router, by its name of this life, orders for pins."""


class SimulatedRouter:
    """One router, which may be one of several before the same workers. ``crash`` and ``start`` may be called at any time."""

    def __init__(
        self,
        sim: Simulation,
        network: Network,
        name: str,
        workers: Mapping[Endpoint, SimulatedWorker],
        policy: PolicyConfig,
        *,
        report_interval_s: float = 0.1,
        stream_idle_s: float = STREAM_IDLE_S,
        history: History = NO_HISTORY,
        news_may_garble: Callable[[News], bool] | None = None,
        wishes: Wishes | None = None,
        heat: HeatConfig | None = None,
        shared: SharedState | None = None,
    ) -> None:
        """With ``wishes`` it keeps the fleet's pins, with ``heat`` what is hot besides; with ``shared`` it shares a store with others, which says
        what is wished and which workers there are, but for the first. ``news_may_garble`` is of ``Network.open_stream``, for the workers' news."""
        self.sim = sim
        self.network = network
        self.name = name
        self.workers = workers
        self.policy = policy
        self.report_interval_s = report_interval_s
        self.stream_idle_s = stream_idle_s
        self.public = PublicPrefixes(DEFAULT_BLOCK_SIZE)
        """The fleet's public prefixes: known to every life, as from a store."""

        self.history = history
        self.news_may_garble = news_may_garble
        self.wishes = wishes
        self.heat = heat
        self.shared = shared
        self.rng = sim.fork_rng(f"router {name}")
        self.life: RouterLife | None = None
        """None while it is down."""

        self.start()

    @property
    def core(self) -> RouterCore:
        """Of the life that goes on."""
        assert self.life is not None, self
        return self.life.core

    def start(self) -> None:
        """Begin a life; alive already, nothing happens."""
        if self.life is None:
            self.life = RouterLife(self)

    def crash(self) -> None:
        """End the life: its connections break, and all that it knew is gone."""
        life, self.life = self.life, None
        if life is not None:
            life.end()

    def ask(self, question: Question, on_end: Callable[[Answered], Any]) -> Answered:
        """Route a question that is asked here, and send it. ``on_end`` is called with what has become of it, however it ends."""
        assert self.life is not None, self
        return self.life.ask(question, lambda answered, _: on_end(answered)).answered

    def serve(
        self, question: Question, timeout_s: float, answer: "Stream[pb.GenerateResponse | AnswerEnd]"
    ) -> None:
        """A caller's question has arrived over the network. Nobody there: its answer breaks."""
        life = self.life
        if life is None:
            answer.reset()
            return

        def on_end(_: Answered, error: PrefixmeshError | None) -> None:
            life.answers.pop(answer, None)
            answer.send(AnswerEnd(error))

        life.answers[answer] = None
        request = life.ask(question, on_end, tell=answer.send, deadline=self.sim.now + timeout_s)
        answer.on_gone = request.stop

    def route(
        self,
        question: router_pb2.RouteRequest,
        namespace: Namespace,
        answer: "Stream[router_pb2.RouteResponse | AnswerEnd]",
    ) -> None:
        """A caller that streams from workers itself asks where to. Nobody there: its answer breaks."""
        if self.life is None:
            answer.reset()
            return
        try:
            answer.send(self.life.route(question, namespace))
        except PrefixmeshError as error:
            answer.send(AnswerEnd(error))

    def close(self) -> None:
        """Say in the history that the life which goes on has nothing open."""
        if self.life is not None and self.history.is_on:
            self.history.note(Closed, self.life.router_id)

    def __repr__(self) -> str:
        return f"<SimulatedRouter {self.name}: {self.life!r}>"


class RouterLife:
    """One life of a router: its cores, its links and its requests."""

    def __init__(self, router: SimulatedRouter) -> None:
        self.sim = router.sim
        self.network = router.network
        self.name = router.name
        self.report_interval_s = router.report_interval_s
        self.stream_idle_s = router.stream_idle_s
        self.public = router.public
        self.history = router.history
        self.news_may_garble = router.news_may_garble
        self._rng = router.rng
        self.router_id = f"{router.name}/{self._draw():016x}"
        if self.history.is_on:
            self.history.note(Began, self.router_id)
        self.core = RouterCore(
            _expected(next(iter(router.workers.values())).identity),
            router.policy,
            block_size=DEFAULT_BLOCK_SIZE,
            max_tree_blocks=MAX_INDEX_BLOCKS,
            draw=self._draw,
            history=router.history,
        )
        self.budget = RetryBudget()
        self.requests: dict[SimulatedRequest, None] = {}
        """Those that have not ended."""

        self.answers: dict[Stream[pb.GenerateResponse | AnswerEnd], None] = {}
        """On their way to callers over the network."""

        self._problems: dict[Endpoint, str] = {}
        self._news = self.core.registry.follow()
        self._is_over = False
        self.links: dict[Endpoint, SimulatedLink] = {}
        self.forgotten: list[str] = []
        """Workers that the store was believed to know no more; nobody removes any."""

        self._workers, self._shared = router.workers, router.shared
        given = list(router.workers) if self._shared is None else list(router.workers)[:1]
        for endpoint in given:
            self._add_worker(endpoint)
        self.heat = None if router.heat is None else HeatWatch(self.core, router.heat, DEFAULT_BLOCK_SIZE)
        self.state: SimulatedState | None = None
        if self._shared is not None:
            self.state = SimulatedState(self._shared.store, self.name, self.router_id, self._take_over)
        self.pins = self._keep_pins(router.wishes)
        self._review()

    def ask(
        self,
        question: Question,
        on_end: Callable[[Answered, PrefixmeshError | None], object],
        *,
        tell: Callable[[pb.GenerateResponse], object] | None = None,
        deadline: float | None = None,
    ) -> SimulatedRequest:
        """A question has come; see ``SimulatedRequest``."""
        request = SimulatedRequest(self, question, self._new_id(), on_end, tell=tell, deadline=deadline)
        request.begin()
        return request

    def route(self, question: router_pb2.RouteRequest, namespace: Namespace) -> router_pb2.RouteResponse:
        """Decide, reserve and sign, as ``router.direct`` does. Raises as ``RouterCore.route``."""
        now, request = self.sim.now, question.request
        if question.unused_request_id:
            self.core.withdraw(question.unused_request_id, now)
        if not request.tokens.ids:
            raise InvalidRequestError("request", "there is none: a reservation was given back")
        prompt = request.tokens.ids
        asked = Question(namespace=namespace, prompt=prompt, max_tokens=request.sampling.max_tokens)
        routed = as_route_request(asked, self.public)
        exclude = {Endpoint(address) for address in question.exclude}
        placement = self.core.route(routed, now, exclude, request_id=self._new_id(), valid_s=TICKET_VALID_S)
        ticket = Ticket(
            request_id=placement.request_id,
            tenant=TENANT,
            namespace=namespace,
            incarnation=placement.incarnation,
            router_id=self.router_id,
            expires_unix_ms=round(1e3 * (now + TICKET_VALID_S)) + placement.entry.clock_ahead_ms,
            prompt_tokens=routed.prompt_tokens,
            max_tokens=request.sampling.max_tokens,
            branches=1,
            public=routed.candidates,
        )
        return router_pb2.RouteResponse(
            address=placement.endpoint,
            ticket=sign(ticket, SIMULATED_SECRET),
            request_id=placement.request_id,
        )

    def end(self) -> None:
        """Die."""
        self._is_over = True
        if self.pins is not None:
            self.pins.end()
        if self.state is not None:
            self.state.end()
        for request in list(self.requests):
            request.vanish()
        for link in self.links.values():
            link.close()
        for answer in self.answers:
            answer.reset()

    def worker_at(self, endpoint: Endpoint) -> SimulatedWorker | None:
        """Whose address it is."""
        link = self.links.get(endpoint)
        return None if link is None else link.worker

    def note_news(self) -> None:
        """Something was learned of a worker: the calls of one that was put out are given up."""
        for entry in self._news.take():
            if self._problems.get(entry.endpoint) == entry.problem:
                continue
            self._problems[entry.endpoint] = entry.problem
            link = self.links.get(entry.endpoint)
            if entry.ejected and link is not None:
                link.give_up_calls(f"worker {entry.name} {entry.problem}")

    def _add_worker(self, endpoint: Endpoint) -> None:
        if endpoint not in self.links:
            self.links[endpoint] = SimulatedLink(self, endpoint, self._workers[endpoint])

    def _take_over(self, change: Change) -> None:
        """What the store says of a worker, as ``router.worker_roster`` does."""
        if not change.key.startswith(WORKERS):
            return
        address = change.key.removeprefix(WORKERS)
        if change.value is None:
            self.forgotten.append(address)
        else:
            self._add_worker(Endpoint(address))

    def _keep_pins(self, pinned: Wishes | None) -> SimulatedPins | None:
        shared, state = self._shared, self.state
        if shared is not None and state is not None:
            return SimulatedPins(
                self,
                lambda: self._shared_wishes(shared, state),
                PIN_CONFIG,
                may_act=lambda: state.lease.is_held,
                on_order=partial(shared.on_order, self.router_id),
            )
        if pinned is None and self.heat is None:
            return None
        return SimulatedPins(self, lambda: self._wishes(pinned), PIN_CONFIG)

    def _shared_wishes(self, shared: SharedState, state: SimulatedState) -> Sequence[Wish] | None:
        if not state.is_known:
            return None
        return [shared.wish_of(entry) for entry in state.mirror.entries(PINS)]

    def _wishes(self, pinned: Wishes | None) -> Sequence[Wish] | None:
        hot = () if self.heat is None else self.heat.wishes(self.sim.now, ())
        wished: Sequence[Wish] | None = () if pinned is None else pinned()
        return None if wished is None else [*wished, *hot]

    def _draw(self) -> int:
        return self._rng.getrandbits(64)

    def _new_id(self) -> RequestId:
        return RequestId(f"{self._draw():016x}{self._draw():016x}")

    def _review(self) -> None:
        if not self._is_over:
            self.core.tick(self.sim.now)
            self.core.view.take_changes()
            self.note_news()
            self.sim.call_later(REVIEW_S, self._review)

    def __repr__(self) -> str:
        return f"<RouterLife {self.router_id}: {len(self.requests)} requests, {self.core!r}>"


def _expected(identity: ModelIdentity) -> Expected:
    return Expected(
        model_revision=identity.revision,
        tokenizer_digest=identity.revision,
        protocol_version=PROTOCOL_VERSION,
        fingerprint_version=FINGERPRINT_VERSION,
    )
