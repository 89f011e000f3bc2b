"""The callers of a fault run: conversations that share their beginnings, some of whose requests are cancelled or have little time.

A turn's prompt is the last turn's, its answer, and what is asked next; which is what prefix caches are for. Answers are known beforehand
(``fake_model.expected_answer``), whatever goes wrong in between.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Final, TypeAlias

from prefixmesh.client.direct import RouteMemory
from prefixmesh.ids import Namespace
from prefixmesh.sim.fake_model import expected_answer
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.network import Network
from prefixmesh.sim.simulated_client import SimulatedClient
from prefixmesh.sim.simulated_question import Question
from prefixmesh.sim.simulated_router import SimulatedRouter
from prefixmesh.tokens import pack, unpack

NAMESPACES: Final = (Namespace(b"a" * 16), Namespace(b"b" * 16))
SYSTEMS: Final = 3
"""Beginnings that conversations share, in either namespace."""

CONVERSATIONS: Final = 18
MOST_TURNS: Final = 3
MOST_TOKENS: Final = 32
"""Of an answer: some it takes a second to give."""

LONG_S: Final = 40.0
"""Time of a request that has enough: more than any one fault takes to be noticed and survived."""

HASTY: Final = 0.15
"""Share of requests that have next to no time."""

CANCELLED: Final = 0.12
"""Share of requests whose callers leave."""


OnClientEnd: TypeAlias = Callable[[SimulatedClient], object]


DIRECT: Final = 0.3
"""Share of requests whose callers stream from workers themselves."""


def system_prompt(system: int, vocab_size: int) -> list[int]:
    """One of the beginnings, the same in every run."""
    rng = Random(system)  # noqa: S311
    return rng.choices(range(vocab_size), k=64 + 30 * system)


class Callers:
    """Who asks the fleet of a fault run, and what has become of it. ``rng`` draws how each request goes."""

    def __init__(
        self,
        sim: Simulation,
        network: Network,
        routers: Sequence[SimulatedRouter],
        rng: Random,
        *,
        vocab_size: int,
    ) -> None:
        self.clients: list[SimulatedClient] = []
        """In the order in which they have asked."""

        self._sim = sim
        self._network = network
        self._routers = routers
        # What each router's direct callers share, as the calls of one client do.
        self._memories = [RouteMemory() for _ in routers]
        self._vocab_size = vocab_size
        self._rng = rng

    @property
    def open_requests(self) -> int:
        """That have not ended."""
        return sum(client.ended_at is None for client in self.clients)

    def ask(self, question: Question, timeout_s: float, router: int) -> SimulatedClient:
        """One request, which the router carries."""
        return self._ask(question, timeout_s, router, lambda _: None, is_direct=False)

    def come(self, question: Question, on_end: OnClientEnd) -> None:
        """One request, by any router or without: some have next to no time, and of some the caller leaves."""
        rng = self._rng
        timeout_s = rng.uniform(0.05, 2.0) if rng.random() < HASTY else LONG_S
        router, is_direct = rng.randrange(len(self._routers)), rng.random() < DIRECT
        client = self._ask(question, timeout_s, router, on_end, is_direct=is_direct)
        if rng.random() < CANCELLED:
            self._sim.call_later(rng.expovariate(5.0), client.cancel)

    def expected(self, client: SimulatedClient) -> list[int]:
        """Its undisturbed answer."""
        question = client.question
        prompt = unpack(question.prompt).tolist()
        return expected_answer(question.namespace, prompt, question.max_tokens, self._vocab_size)

    def _ask(
        self, question: Question, timeout_s: float, router: int, on_end: OnClientEnd, *, is_direct: bool
    ) -> SimulatedClient:
        client = SimulatedClient(
            self._sim,
            self._network,
            f"client-{len(self.clients)}",
            self._routers[router],
            question,
            timeout_s,
            on_end,
            memory=self._memories[router] if is_direct else None,
        )
        self.clients.append(client)
        client.begin()
        return client


class Traffic:
    """Conversations of our own. They begin by themselves."""

    def __init__(
        self, sim: Simulation, callers: Callers, rng: Random, *, vocab_size: int, lasts_s: float
    ) -> None:
        """``rng`` is that of the callers too."""
        self._sim = sim
        self._callers = callers
        self._vocab_size = vocab_size
        self._rng = rng
        for _ in range(CONVERSATIONS):
            namespace, prompt = self._beginning()
            turns = rng.randint(1, MOST_TURNS)
            sim.call_later(rng.uniform(0.0, lasts_s), self._turn, namespace, prompt, turns)

    def question(self) -> Question:
        """Some question."""
        namespace, prompt = self._beginning()
        return Question(
            namespace=namespace, prompt=pack(prompt), max_tokens=self._rng.randint(1, MOST_TOKENS)
        )

    def _turn(self, namespace: Namespace, prompt: list[int], turns_left: int) -> None:
        rng = self._rng
        prompt = [*prompt, *self._tokens(rng, rng.randint(3, 50))]
        question = Question(namespace=namespace, prompt=pack(prompt), max_tokens=rng.randint(1, MOST_TOKENS))

        def on_end(client: SimulatedClient) -> None:
            if turns_left > 1 and client.error is None:
                pause_s = rng.uniform(0.0, 1.0)
                self._sim.call_later(pause_s, self._turn, namespace, prompt + client.tokens, turns_left - 1)

        self._callers.come(question, on_end)

    def _beginning(self) -> tuple[Namespace, list[int]]:
        system = self._rng.randrange(SYSTEMS)
        return self._rng.choice(NAMESPACES), system_prompt(system, self._vocab_size)

    def _tokens(self, rng: Random, count: int) -> list[int]:
        return rng.choices(range(self._vocab_size), k=count)
