"""The callers of a fault run that ask what a workload says: a piece of it, made small enough for a fleet in which much goes wrong at once.

Each seed takes another piece of some forty requests. They come in the workload's order and, squeezed into the run's few seconds, in its rhythm, but for
pauses that are long beside the others; what shares blocks there shares tokens here, a few for each block. Tenants and adapters are namespaces, and
what a request wants pinned is pinned. Turns and steps come after the answers that they follow, but their prompts have the workload's tokens in
the place of what was answered, which a trace does not know either.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from random import Random
from statistics import median
from typing import Final

from prefixmesh.ids import Namespace
from prefixmesh.sim.fault_pins import Pinned
from prefixmesh.sim.fault_traffic import MOST_TOKENS, Callers
from prefixmesh.sim.kernel import Simulation
from prefixmesh.sim.simulated_client import SimulatedClient
from prefixmesh.sim.simulated_question import Question
from prefixmesh.sim.workload import Workload, WorkloadRequest
from prefixmesh.tokens import pack

REQUESTS: Final = 40
"""Of a run: as many as there are of conversations of our own."""

LONGEST_TOKENS: Final = 190
"""Of a prompt: with its answer it has room in the smallest pool that a run has, beside all that may be pinned there."""

LONGEST_PAUSE_S: Final = 1.0
"""From an answer to what comes after it."""

LONG_GAPS: Final = 20.0
"""Gaps between arrivals count as so many usual ones at most: after an hour's pause the run would else have two moments, and nothing between."""

MOST_PINS: Final = 2
"""Of a run: small pools have room for so many."""

_MS_PER_S: Final = 1e3
_NAMESPACE_BYTES: Final = 16


class TracePiece:
    """Some requests of a workload, made small. The same ``rng`` draws the same."""

    def __init__(self, workload: Workload, rng: Random, vocab_size: int) -> None:
        self.requests = _draw_piece(workload.requests, rng)
        """By their numbers in the workload."""

        self._vocab_size = vocab_size
        self._block_size = workload.block_size
        longest = max(one.input_length for one in self.requests.values())
        self._scale = min(1.0, LONGEST_TOKENS / longest)

    def arrivals(self, lasts_s: float) -> dict[int, float]:
        """When each comes that comes by itself, in seconds from 0 to ``lasts_s``. O(requests log requests)."""
        at_ms = sorted(
            (one.arrival_ms, number) for number, one in self.requests.items() if one.arrival_ms is not None
        )
        gaps = [float(later[0] - earlier[0]) for earlier, later in pairwise(at_ms)]
        usual = median([gap for gap in gaps if gap] or [1.0])
        gaps = [min(gap, LONG_GAPS * usual) for gap in gaps]
        squeezed = lasts_s / max(1.0, sum(gaps))
        came, found = 0.0, {}
        for (_, number), gap in zip(at_ms, [*gaps, 0.0], strict=True):
            found[number] = came * squeezed
            came += gap
        return found

    def question(self, number: int) -> Question:
        """What a request asks."""
        request = self.requests[number]
        return Question(
            namespace=_namespace(request),
            prompt=pack(self._prompt(number)),
            max_tokens=min(MOST_TOKENS, max(1, round(request.output_length * self._scale))),
        )

    def pins(self) -> list[Pinned]:
        """What its requests want pinned, the first of them. O(requests)."""
        found: dict[tuple[Namespace, bytes], int] = {}
        for number, request in self.requests.items():
            if request.pin_tokens:
                tokens = self._prompt(number)[: max(1, int(request.pin_tokens * self._scale))]
                found.setdefault((_namespace(request), pack(tokens)), request.pin_replicas)
        return _numbered(found)

    def beginnings(self) -> list[Pinned]:
        """Half of each of the longest prompts: what is pinned where the workload itself pins nothing. O(requests log requests)."""
        found: dict[tuple[Namespace, bytes], int] = {}
        longest = sorted(self.requests, key=lambda number: -self.requests[number].input_length)
        for number in longest[:MOST_PINS]:
            tokens = self._prompt(number)
            beginning = _namespace(self.requests[number]), pack(tokens[: (len(tokens) + 1) // 2])
            found[beginning] = 2 if found else 0
        return _numbered(found)

    def _prompt(self, number: int) -> list[int]:
        request, scale = self.requests[number], self._scale
        a_block = max(1, int(self._block_size * scale))
        rest = max(1, int(request.input_length % self._block_size * scale))
        whole = request.block_ids[: request.input_length // self._block_size]
        whole = whole[: max(0, LONGEST_TOKENS - rest) // a_block]
        prompt = [token for one in whole for token in self._tokens(f"block {one}", a_block)]
        return prompt + self._tokens(f"rest of {number}", rest)

    def _tokens(self, name: str, count: int) -> list[int]:
        return Random(name).choices(range(self._vocab_size), k=count)  # noqa: S311  the same in every run


class TraceTraffic:
    """Requests of a workload. They begin by themselves."""

    def __init__(
        self, sim: Simulation, callers: Callers, rng: Random, piece: TracePiece, *, lasts_s: float
    ) -> None:
        """``rng`` is that of the callers too."""
        self._sim = sim
        self._callers = callers
        self._piece = piece
        self._rng = rng
        for number, at_s in piece.arrivals(lasts_s).items():
            sim.call_later(at_s, self._come, number)

    def question(self) -> Question:
        """Some question of the piece."""
        return self._piece.question(self._rng.choice(list(self._piece.requests)))

    def _come(self, number: int) -> None:
        def on_end(client: SimulatedClient) -> None:
            if client.error is not None:
                return
            for follower, request in self._piece.requests.items():
                if request.after == number:
                    pause_s = min(request.pause_ms / _MS_PER_S, LONGEST_PAUSE_S)
                    self._sim.call_later(pause_s, self._come, follower)

        self._callers.come(self._piece.question(number), on_end)


def _draw_piece(requests: Sequence[WorkloadRequest], rng: Random) -> dict[int, WorkloadRequest]:
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


def _namespace(request: WorkloadRequest) -> Namespace:
    name = f"{len(request.tenant)}/{request.tenant}/{request.adapter}"
    return Namespace(blake2b(name.encode(), digest_size=_NAMESPACE_BYTES).digest())


def _numbered(found: Mapping[tuple[Namespace, bytes], int]) -> list[Pinned]:
    first = list(found.items())[:MOST_PINS]
    return [Pinned(f"pin-{n}", *prefix, replicas) for n, (prefix, replicas) in enumerate(first)]
