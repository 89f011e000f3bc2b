"""A workload on its way: prompts put together from pieces, and names for the blocks that they fill. Pure.

A *piece* is a run of tokens that nobody else has: a system prompt, a question, an answer, a document. A prompt is pieces one after the
other. Blocks do not care where pieces end, so a block's name stands for the slices in it and, by the name before it, for all before
them: two prompts have a name in common exactly when they are equal up to there.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prefixmesh.sim.workload import Workload, WorkloadRequest, check_block_size


class Piece(NamedTuple):
    """A run of tokens of its own."""

    number: int
    tokens: int


class _Slice(NamedTuple):
    piece: int
    begin: int
    end: int


class Draft:
    """Requests as they are thought of, in the order of their numbers."""

    def __init__(self, name: str, block_size: int) -> None:
        """Raises ConfigError for what is no block's size."""
        check_block_size(block_size)
        self._name = name
        self._block_size = block_size
        self._pieces = 0
        self._names: dict[tuple[int | None, tuple[_Slice, ...]], int] = {}
        self._requests: list[WorkloadRequest] = []

    def __len__(self) -> int:
        """Requests so far."""
        return len(self._requests)

    def piece(self, tokens: int) -> Piece:
        """Tokens that nobody else has."""
        self._pieces += 1
        return Piece(self._pieces, tokens)

    def ask(
        self,
        prompt: Sequence[Piece],
        answer: Piece,
        *,
        arrival_ms: float | None = None,
        after: int | None = None,
        pause_ms: float = 0.0,
        tenant: str = "",
        adapter: str = "",
        pin_tokens: int = 0,
    ) -> int:
        """Add a request; its number. One of ``arrival_ms`` and ``after`` is given. O(its blocks)."""
        length = sum(piece.tokens for piece in prompt)
        names = self._name_blocks((*prompt, answer))
        whole = length // self._block_size
        request = WorkloadRequest(
            arrival_ms=None if arrival_ms is None else round(arrival_ms),
            after=after,
            pause_ms=round(pause_ms),
            input_length=length,
            output_length=answer.tokens,
            block_ids=names[:whole],
            answer_ids=names[whole:],
            tenant=tenant,
            adapter=adapter,
            pin_tokens=pin_tokens,
        )
        self._requests.append(request)
        return len(self._requests) - 1

    def done(self) -> Workload:
        """All of it."""
        return Workload(name=self._name, block_size=self._block_size, requests=self._requests)

    def _name_blocks(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        names: list[int] = []
        before: int | None = None
        for slices in self._blocks(pieces):
            before = self._names.setdefault((before, slices), len(self._names))
            names.append(before)
        return tuple(names)

    def _blocks(self, pieces: Sequence[Piece]) -> Iterator[tuple[_Slice, ...]]:
        """The slices of each whole block."""
        slices: list[_Slice] = []
        room = self._block_size
        for number, tokens in pieces:
            begin = 0
            while begin < tokens:
                end = min(tokens, begin + room)
                slices.append(_Slice(number, begin, end))
                room -= end - begin
                begin = end
                if not room:
                    yield tuple(slices)
                    slices, room = [], self._block_size
