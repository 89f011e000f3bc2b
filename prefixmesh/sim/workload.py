"""Requests as a replay sees them: when each comes, how long it is, and which blocks it shares. Pure.

A workload has no prompts. It names the blocks of them: equal ids at the front of two prompts mean that they begin alike, and an id is
given once for all that stands before its end, so it also says what comes before it. Two ways to come::

    open loop      arrival_ms                        whatever becomes of the others
    closed loop    after another, and pause_ms       when that one's answer has ended: the next turn, the next step of an agent

The public Mooncake traces (``traces``) become workloads by ``from_trace``; ours are read and written by ``workload_file``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from prefixmesh.errors import ConfigError
from prefixmesh.sim.traces import MAX_HASH_ID, MAX_INPUT_TOKENS, TRACE_BLOCK_TOKENS, TraceRequest

MAX_BLOCK_TOKENS: Final = 1 << 16
"""A larger block is a whole prompt."""

MAX_PIN_REPLICAS: Final = 4096
"""As many workers as a router knows."""


MAX_REQUESTS: Final = 4_000_000
"""A request takes a kilobyte of memory while it is replayed."""


class WorkloadRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One request. Its number is its place in the workload, from 0 on."""

    arrival_ms: int | None = None
    """Since the workload's beginning; None for one that comes ``after`` another."""

    after: int | None = None
    """Number of an earlier request whose end brings this one."""

    pause_ms: int = 0
    """From that end to this one's arrival: reading, thinking, a tool that runs."""

    input_length: int
    output_length: int
    """Tokens of prompt and answer."""

    block_ids: tuple[int, ...]
    """Of the prompt's whole blocks, in order; one more names the rest that fills no block, if it is to be matched as well."""

    answer_ids: tuple[int, ...] = ()
    """Of the whole blocks that prompt and answer fill together beyond those of the prompt: what the next turn can find. Empty: the answer
    leaves nothing."""

    tenant: str = ""
    adapter: str = ""
    """Name of a LoRA adapter; empty for the base model. Blocks under two tenants or adapters have different ids."""

    pin_tokens: int = 0
    """So many leading tokens its owner wants kept cached; 0: none."""

    pin_replicas: int = 1
    """On so many workers; 0: on all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests with blocks of one size. Checked when it is made: O(requests); raises ConfigError naming the request and the field."""

    name: str
    block_size: int
    requests: Sequence[WorkloadRequest] = field(repr=False)

    def __post_init__(self) -> None:
        check_block_size(self.block_size)
        if not self.requests:
            raise ConfigError("a workload has at least one request")
        if len(self.requests) > MAX_REQUESTS:
            raise ConfigError(f"a workload has at most {MAX_REQUESTS} requests, got {len(self.requests)}")
        for number, request in enumerate(self.requests):
            problem = problem_of(request, number, self.block_size)
            if problem:
                raise ConfigError(f"request {number}: {problem}")

    @property
    def prompt_tokens(self) -> int:
        """Of all requests. O(requests)."""
        return sum(request.input_length for request in self.requests)


def from_trace(requests: Sequence[TraceRequest], name: str) -> Workload:
    """A trace in the Mooncake format: open loop, and its answers leave nothing, because it does not name their blocks. O(requests)."""
    first_ms = requests[0].timestamp_ms if requests else 0
    return Workload(
        name=name,
        block_size=TRACE_BLOCK_TOKENS,
        requests=[
            WorkloadRequest(
                arrival_ms=one.timestamp_ms - first_ms,
                input_length=one.input_length,
                output_length=one.output_length,
                block_ids=one.hash_ids,
            )
            for one in requests
        ],
    )


def check_block_size(block_size: int) -> None:
    """Raises ConfigError for what is no block's size."""
    if not 1 <= block_size <= MAX_BLOCK_TOKENS:
        raise ConfigError(f"block_size must be from 1 to {MAX_BLOCK_TOKENS}, got {block_size}")


def problem_of(request: WorkloadRequest, number: int, block_size: int) -> str:
    """What is wrong with request ``number``; empty when nothing is. O(blocks)."""
    return _problem_of_time(request, number) or _problem_of_sizes(request, block_size)


def _problem_of_time(request: WorkloadRequest, number: int) -> str:
    if (request.arrival_ms is None) == (request.after is None):
        return "must have either arrival_ms or after"
    if request.after is not None and not number:
        return f"after must name an earlier request, and this is the first, got {request.after}"
    if request.after is not None and not 0 <= request.after < number:
        return f"after must be the number of an earlier request, 0 to {number - 1}, got {request.after}"
    return ""


def _problem_of_sizes(request: WorkloadRequest, block_size: int) -> str:
    """Bounds first: what follows counts by them."""
    for name, least, most in (
        ("input_length", 1, MAX_INPUT_TOKENS),
        ("output_length", 0, MAX_INPUT_TOKENS),
        ("pause_ms", 0, MAX_HASH_ID),
        ("pin_tokens", 0, request.input_length),
        ("pin_replicas", 0, MAX_PIN_REPLICAS),
    ):
        value = getattr(request, name)
        if not least <= value <= most:
            return f"{name} must be from {least} to {most}, got {value}"
    if request.arrival_ms is not None and not 0 <= request.arrival_ms <= MAX_HASH_ID:
        return f"arrival_ms must be from 0 to {MAX_HASH_ID}, got {request.arrival_ms}"
    whole, rest = divmod(request.input_length, block_size)
    if len(request.block_ids) not in {whole, whole + (rest > 0)}:
        return (
            f"block_ids must name the {whole} whole blocks of {block_size} tokens that input_length "
            f"{request.input_length} has, or the rest as well, got {len(request.block_ids)}"
        )
    filled = (request.input_length + request.output_length) // block_size - whole
    if request.answer_ids and len(request.answer_ids) != filled:
        return f"answer_ids must name the {filled} blocks that prompt and answer fill beyond the prompt's, got {len(request.answer_ids)}"
    if not all(0 <= one <= MAX_HASH_ID for one in (*request.block_ids, *request.answer_ids)):
        return f"block_ids and answer_ids must be from 0 to {MAX_HASH_ID}"
    return ""
