"""Workloads as files: one JSON object a line, the first of which says what the file is.

::

    {"format":"prefixmesh-workload","version":1,"block_size":64,"name":"chat"}
    {"arrival_ms":0,"input_length":130,"output_length":70,"block_ids":[0,1],"answer_ids":[2]}
    {"after":0,"pause_ms":4000,"input_length":260,"output_length":20,"block_ids":[0,1,2,3],"tenant":"shop"}

Fields are those of ``WorkloadRequest``; those with a default may be left out, and fields that are not known are left alone, so that a
later version can add some. What an older reader would get wrong raises the version. A file holds lengths and numbers, never a prompt.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Final, Literal

import msgspec

from prefixmesh.errors import ConfigError
from prefixmesh.sim.traces import lines_of, requests_of
from prefixmesh.sim.workload import Workload, WorkloadRequest, check_block_size, from_trace, problem_of

FORMAT: Final = "prefixmesh-workload"
VERSION: Final = 1


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line."""

    format: Literal["prefixmesh-workload"]
    version: int
    block_size: int
    """Tokens that an id stands for."""

    name: str = ""


def read_workload(path: Path) -> Workload:
    """A file of this format, or a trace in the Mooncake format, told apart by the first line. O(its size).

    Raises ConfigError with the line's number and what is wrong there, and when the file cannot be read or has no request.
    """
    try:
        with path.open("rb") as file:
            lines = lines_of(file, str(path))
            first = next(lines, b"")
            whole = chain([first], lines)  # not read again from the beginning, which a pipe does not have
            if FORMAT.encode() in first:
                return parse_workload(whole, str(path))
            return from_trace(requests_of(whole, str(path)), path.name)
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror}") from error


def is_there(name: str) -> bool:
    """Whether there is a file of this name. Raises ConfigError where that cannot be told, as of a name that is too long for any."""
    try:
        return Path(name).exists()
    except OSError as error:
        raise ConfigError(f"trace {name!r:.80}: {error.strerror}") from error


def parse_workload(lines: Iterable[bytes], name: str) -> Workload:
    """The workload of such lines; empty lines are left out. Raises ConfigError naming ``name`` and the line."""
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    try:
        header = _parse_header(numbered)
        requests = list(_parse_requests(numbered, header.block_size))
        return Workload(name=header.name or name, block_size=header.block_size, requests=requests)
    except ConfigError as error:
        raise ConfigError(f"trace {name}, {error}") from error


def write_workload(workload: Workload, path: Path) -> None:
    """Write a file that ``read_workload`` reads as the same workload. O(its size). Raises ConfigError when it cannot be written."""
    encode = msgspec.json.Encoder().encode
    header = Header(format=FORMAT, version=VERSION, block_size=workload.block_size, name=workload.name)
    try:
        with path.open("wb") as file:
            file.write(encode(header) + b"\n")
            file.writelines(encode(request) + b"\n" for request in workload.requests)
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror}") from error


def _parse_header(numbered: Iterator[tuple[int, bytes]]) -> Header:
    number, line = next(numbered, (1, b""))
    try:
        header = msgspec.json.decode(line, type=Header)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"line {number}: not the first line of a workload: {error}") from error
    if header.version != VERSION:
        raise ConfigError(f"line {number}: version {header.version} is not known, only {VERSION}")
    try:
        check_block_size(header.block_size)
    except ConfigError as error:
        raise ConfigError(f"line {number}: {error}") from error
    return header


def _parse_requests(numbered: Iterator[tuple[int, bytes]], block_size: int) -> Iterator[WorkloadRequest]:
    decode = msgspec.json.Decoder(WorkloadRequest).decode
    for place, (number, line) in enumerate(numbered):
        try:
            request = decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"line {number}: {error}") from error
        problem = problem_of(request, place, block_size)
        if problem:
            raise ConfigError(f"line {number}: {problem}")
        yield request
