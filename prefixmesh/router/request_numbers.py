"""Requests as a recording tells them: how long, how they share, and nothing else. Pure.

Names of blocks, tenants and adapters are told as numbers in the order in which they were first seen: whatever a name was made from, its number
was not. Equal blocks have equal numbers, so that a replay finds cached what was shared. The format is that of ``prefixmesh replay``
(``sim/workload_file``, which a test reads this with).
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from prefixmesh.ids import Fingerprint

FORMAT: Final = "prefixmesh-workload"
VERSION: Final = 1

MAX_NUMBERS: Final = 1 << 20
"""Different blocks, tenants and adapters that are numbered, some 100 MB of memory: then a recording is over, for a block that was forgotten
would seem a new one."""

MAX_RECORDED: Final = 1_000_000
"""Requests in a recording: a replay of so many takes some ten minutes, and the file has some hundred MB."""

_MS_PER_S: Final = 1000.0


class Answered(NamedTuple):
    """One answer of a request."""

    tokens: int
    names: Sequence[Fingerprint]
    """Of the whole blocks of prompt and answer, as far as they are known."""


class SeenRequest(NamedTuple):
    """A request that is over, as its router knew it."""

    arrived_s: float
    """By any clock: the recording counts from its own beginning."""

    tenant: str
    adapter: str
    prompt_tokens: int
    answers: Sequence[Answered]

    @property
    def named_blocks(self) -> int:
        """Names that it carries."""
        return sum(len(answer.names) for answer in self.answers)


class _Header(msgspec.Struct, frozen=True):
    format: str
    version: int
    block_size: int
    name: str


class _Line(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Fields are those of ``sim.workload.WorkloadRequest``."""

    arrival_ms: int
    input_length: int
    output_length: int
    block_ids: Sequence[int]
    answer_ids: Sequence[int] = ()
    tenant: str = ""
    adapter: str = ""


class RequestNumbers:
    """Numbers what it is shown; one for each recording."""

    def __init__(self, block_size: int, began_s: float, *, most: int = MAX_NUMBERS) -> None:
        self._block_size = block_size
        self._began_s = began_s
        self._most = most
        self._blocks: dict[Hashable, int] = {}
        self._tenants: dict[Hashable, int] = {}
        self._adapters: dict[Hashable, int] = {}
        self._next_block = 0

    @property
    def is_full(self) -> bool:
        """Whether no more can be numbered."""
        return len(self._blocks) + len(self._tenants) + len(self._adapters) >= self._most

    def header(self) -> bytes:
        """The first line of a recording."""
        return msgspec.json.encode(_Header(FORMAT, VERSION, self._block_size, "recorded")) + b"\n"

    def lines(self, seen: SeenRequest) -> bytes:
        """A line for each answer; those of one request share its prompt and its moment. O(blocks)."""
        return b"".join(msgspec.json.encode(line) + b"\n" for line in self._lines(seen))

    def _lines(self, seen: SeenRequest) -> Iterator[_Line]:
        whole = seen.prompt_tokens // self._block_size
        tenant, adapter = _called("t", self._tenants, seen.tenant), _called("a", self._adapters, seen.adapter)
        shared: list[int] | None = None
        for answer in seen.answers:
            filled = (seen.prompt_tokens + answer.tokens) // self._block_size
            numbers = [self._number(name) for name in answer.names[:filled]]
            # What has no name is like nothing else: blocks beyond those that are named, the answer's last token, which was never computed.
            numbers += [self._new_number() for _ in range(filled - len(numbers))]
            shared = shared or numbers[:whole]
            yield _Line(
                arrival_ms=max(0, round(_MS_PER_S * (seen.arrived_s - self._began_s))),
                input_length=seen.prompt_tokens,
                output_length=answer.tokens,
                block_ids=shared,
                answer_ids=numbers[whole:],
                tenant=tenant,
                adapter=adapter,
            )

    def _number(self, name: Fingerprint) -> int:
        number = self._blocks.get(name)
        if number is None:
            number = self._blocks[name] = self._new_number()
        return number

    def _new_number(self) -> int:
        number = self._next_block
        self._next_block += 1
        return number


def _called(letter: str, numbers: dict[Hashable, int], name: str) -> str:
    """``name``'s new one; the empty one, of who has none, stays."""
    return f"{letter}{numbers.setdefault(name, len(numbers))}" if name else ""
