"""The callers of a fault run that ask what a workload says: a piece of it, made small enough for a fleet in which much goes wrong at once.

Each seed takes another piece of some forty requests. They come in the workload's order and, squeezed into the run's few seconds, in its rhythm;
what shares blocks there shares tokens here, a few for each block. Turns and steps come after the answers that they follow, but their
prompts have the workload's tokens in the place of what was answered, which a trace does not know either.
"""

from collections.abc import Sequence
from random import Random
from typing import Final

from prefixmesh.ids import Namespace
from prefixmesh.sim.fault_traffic import MOST_TOKENS, Callers
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.simulated_client import SimulatedClient
from prefixmesh.sim.simulated_question import Question
from prefixmesh.sim.workload import Workload, WorkloadRequest
from prefixmesh.tokens import pack

REQUESTS: Final = 40
"""Of a run: as many as there are of conversations of our own."""

LONGEST_TOKENS: Final = 300
"""Of a prompt: with its answer it has room in the smallest pool that a run has."""

LONGEST_PAUSE_S: Final = 1.0
"""From an answer to what comes after it."""

_TENANT: Final = Namespace(b"one trace, 1 set")
_MS_PER_S: Final = 1e3


class TraceTraffic:
    """Requests of a workload. They begin by themselves."""

    def __init__(
        self,
        sim: Simulation,
        callers: Callers,
        rng: Random,
        workload: Workload,
        *,
        vocab_size: int,
        lasts_s: float,
    ) -> None:
        self._sim = sim
        self._callers = callers
        self._vocab_size = vocab_size
        self._piece = _piece(workload.requests, rng)
        self._block_size = workload.block_size
        longest = max(one.input_length for one in self._piece.values())
        self._scale = min(1.0, LONGEST_TOKENS / longest)
        self._rng = rng
        begins = [one.arrival_ms for one in self._piece.values() if one.arrival_ms is not None]
        first, span = min(begins), max(1, max(begins) - min(begins))
        for number, request in self._piece.items():
            if request.arrival_ms is not None:
                sim.call_later(lasts_s * (request.arrival_ms - first) / span, self._come, number)

    def question(self) -> Question:
        """Some question of the piece."""
        return self._question(self._rng.choice(list(self._piece)))

    def _come(self, number: int) -> None:
        def on_end(client: SimulatedClient) -> None:
            if client.error is not None:
                return
            for follower, request in self._piece.items():
                if request.after == number:
                    pause_s = min(request.pause_ms / _MS_PER_S, LONGEST_PAUSE_S)
                    self._sim.call_later(pause_s, self._come, follower)

        self._callers.come(self._question(number), on_end)

    def _question(self, number: int) -> Question:
        request, scale = self._piece[number], self._scale
        a_block = max(1, int(self._block_size * scale))
        whole = request.block_ids[: request.input_length // self._block_size][: LONGEST_TOKENS // a_block - 1]
        prompt = [token for one in whole for token in self._tokens(f"block {one}", a_block)]
        rest = max(1, int(request.input_length % self._block_size * scale))
        prompt += self._tokens(f"rest of {number}", rest)
        max_tokens = min(MOST_TOKENS, max(1, round(request.output_length * scale)))
        return Question(namespace=_TENANT, prompt=pack(prompt), max_tokens=max_tokens)

    def _tokens(self, name: str, count: int) -> list[int]:
        return Random(name).choices(range(self._vocab_size), k=count)  # noqa: S311  the same in every run


def _piece(requests: Sequence[WorkloadRequest], rng: Random) -> dict[int, WorkloadRequest]:
    """Some requests in a row from one that comes by itself, without those that come after one that is not among them."""
    firsts = [number for number, one in enumerate(requests) if one.arrival_ms is not None]
    begin = rng.choice(firsts[: max(1, len(firsts) - REQUESTS)])
    piece: dict[int, WorkloadRequest] = {}
    for number in range(begin, len(requests)):
        request = requests[number]
        if request.after is None or request.after in piece:
            piece[number] = request
        if len(piece) == REQUESTS:
            break
    return piece
