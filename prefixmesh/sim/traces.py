"""Traces in the public Mooncake format, and prompts that share what the trace says they share.

A line is one request::

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ..., 59]}

``timestamp`` is milliseconds since the trace's beginning and never falls, lengths are tokens, and ``hash_ids`` name the prompt's blocks of
512 tokens, the last one perhaps shorter: equal ids at the front of two prompts mean that they begin alike. A trace has no prompts, so
``prompt_tokens`` makes them up: each id is its own 512 tokens, always the same. That is all a cache of prefixes can tell prompts by.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np

from prefixmesh.errors import ConfigError
from prefixmesh.tokens import pack

TRACE_BLOCK_TOKENS: Final = 512
"""What the format counts ``hash_ids`` in."""

MAX_INPUT_TOKENS: Final = 1 << 22
"""A longer prompt than any model takes: a length that is not one."""

MAX_HASH_ID: Final = 1 << 53
"""Numbers beyond are not whole in every reader of JSON."""

MAX_LINE_BYTES: Final = 1 << 27
"""Of a request: more than the longest prompt has with blocks of one token. What has no line's end, such as a device, is not read for ever."""

_COUNTS: Final = {
    "timestamp": (0, MAX_HASH_ID),
    "input_length": (1, MAX_INPUT_TOKENS),
    "output_length": (0, MAX_INPUT_TOKENS),
}
"""Each field's smallest and largest value."""

_MS_PER_S: Final = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One line of a trace."""

    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    @property
    def arrival_s(self) -> float:
        """Seconds since the trace's beginning."""
        return self.timestamp_ms / _MS_PER_S


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The requests of a file in their order, the first ``limit`` of them. O(its size).

    Raises ConfigError with the line's number and what is wrong there, and when the file cannot be read or has no request.
    """
    try:
        with path.open("rb") as file:
            return requests_of(lines_of(file, str(path)), str(path), limit)
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror}") from error


def lines_of(file: BinaryIO, name: str) -> Iterator[bytes]:
    """The lines of a file, read once from its beginning to its end, as a pipe can be. Raises ConfigError for one that is too long."""
    for number in count(1):
        line = file.readline(MAX_LINE_BYTES + 1)
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(f"trace {name}, line {number}: must be at most {MAX_LINE_BYTES:,} bytes")
        if not line:
            return
        yield line


def requests_of(lines: Iterable[bytes], name: str, limit: int | None = None) -> list[TraceRequest]:
    """As ``parse_trace``; raises ConfigError where there is none."""
    requests = list(parse_trace(lines, name, limit))
    if not requests:
        raise ConfigError(f"trace {name} has no requests")
    return requests


def parse_trace(lines: Iterable[bytes], name: str, limit: int | None = None) -> Iterator[TraceRequest]:
    """The requests of such lines, one at a time; empty lines are left out. Raises ConfigError naming ``name`` and the line."""
    taken, latest_ms = 0, 0
    for number, line in enumerate(lines, 1):
        if limit is not None and taken >= limit:
            return
        if not line.strip():
            continue
        try:
            request = _parse_line(line)
            if request.timestamp_ms < latest_ms:
                raise ConfigError(f"timestamp must not fall, {request.timestamp_ms} is before {latest_ms}")
        except ConfigError as error:
            raise ConfigError(f"trace {name}, line {number}: {error}") from error
        latest_ms = request.timestamp_ms
        taken += 1
        yield request


def prompt_tokens(request: TraceRequest, vocab_size: int) -> bytes:
    """A packed prompt for a request: ``input_length`` ids below ``vocab_size``, each block made from its id alone. O(input_length)."""
    ids = np.array(request.hash_ids, dtype=np.uint64)
    places = np.arange(TRACE_BLOCK_TOKENS, dtype=np.uint64)
    numbers = (ids[:, None] * np.uint64(TRACE_BLOCK_TOKENS) + places).ravel()[: request.input_length]
    return pack(_scramble(numbers) % np.uint64(vocab_size))


def _parse_line(line: bytes) -> TraceRequest:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError("not a JSON object")
    timestamp_ms, input_length, output_length = (
        _count(value, field, *bounds) for field, bounds in _COUNTS.items()
    )
    hash_ids = value.get("hash_ids")
    if not isinstance(hash_ids, list):
        raise ConfigError("hash_ids must be a list")
    for one in hash_ids:
        _check_number("hash_ids", one, 0, MAX_HASH_ID)
    blocks = -(-input_length // TRACE_BLOCK_TOKENS)
    if len(hash_ids) != blocks:
        raise ConfigError(
            f"hash_ids must name the {blocks} blocks of {TRACE_BLOCK_TOKENS} tokens that input_length {input_length} has, "
            f"got {len(hash_ids)}"
        )
    return TraceRequest(
        timestamp_ms=timestamp_ms,
        input_length=input_length,
        output_length=output_length,
        hash_ids=tuple(hash_ids),
    )


def _count(value: dict[str, Any], field: str, least: int, most: int) -> int:
    if field not in value:
        raise ConfigError(f"{field} is missing")
    return _check_number(field, value[field], least, most)


def _check_number(field: str, value: object, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{field} must be a whole number from {least} to {most}, got {value!r:.40}")
    return value


def _scramble(numbers: "np.typing.NDArray[np.uint64]") -> "np.typing.NDArray[np.uint64]":
    """The finaliser of splitmix64: neighbours become numbers that have nothing to do with each other, the same on every machine."""
    mixed = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
