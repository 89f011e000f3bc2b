"""Workloads as files: what was written is read again, and what is malformed is refused with its line and field."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prefixmesh.errors import ConfigError
from prefixmesh.sim import traces
from prefixmesh.sim.traces import read_trace
from prefixmesh.sim.workload import Workload, WorkloadRequest, from_trace
from prefixmesh.sim.workload_file import is_there, parse_workload, read_workload, write_workload

SAMPLE = Path(__file__).parents[1] / "golden" / "trace_sample.jsonl"
HEADER = b'{"format":"prefixmesh-workload","version":1,"block_size":64,"name":"made up"}\n'
FIRST = b'{"arrival_ms":5,"input_length":130,"output_length":70,"block_ids":[3,4],"answer_ids":[5],"tenant":"a"}\n'
TRACE_LINE = b'{"timestamp":0,"input_length":600,"output_length":5,"hash_ids":[1,2]}\n'
NEXT = b'{"after":0,"pause_ms":9,"input_length":200,"output_length":0,"block_ids":[3,4,5],"pin_tokens":64}\n'


def parse(*lines: bytes) -> Workload:
    return parse_workload(lines, "file")


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    workload = parse(HEADER, FIRST, NEXT)
    path = tmp_path / "made-up.jsonl"
    write_workload(workload, path)
    assert read_workload(path) == workload
    assert path.read_bytes() == HEADER + FIRST + NEXT


def test_fields_are_those_of_the_lines() -> None:
    first, following = parse(HEADER, b"\n", FIRST, NEXT.replace(b"{", b'{"note":1,', 1)).requests
    assert (first.arrival_ms, first.after, first.answer_ids, first.tenant) == (5, None, (5,), "a")
    assert (following.arrival_ms, following.after, following.pause_ms) == (None, 0, 9)
    assert (following.pin_tokens, following.pin_replicas, following.adapter) == (64, 1, "")


def test_first_request_comes_after_no_other() -> None:
    with pytest.raises(
        ConfigError, match="line 2: after must name an earlier request, and this is the first"
    ):
        parse(HEADER, NEXT)


def test_rest_of_a_prompt_may_have_an_id() -> None:
    assert parse(HEADER, FIRST.replace(b"[3,4]", b"[3,4,7]")).requests[0].block_ids == (3, 4, 7)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b"{", b"[", "Expected `object`, got `array`"),
        (b"{", b'{"x":' + b"[" * 100_000, "recursion"),
        (b'"input_length":200,', b"", "input_length"),
        (b":200", b':"200"', "Expected `int`.*input_length"),
        (b":200", b":0", "input_length must be from 1 to"),
        (b'"output_length":0', b'"output_length":-1', "output_length must be from 0"),
        (b'"after":0', b'"after":1', "after must be the number of an earlier request, 0 to 0, got 1"),
        (b'"after":0', b'"after":0,"arrival_ms":4', "either arrival_ms or after"),
        (b'"after":0,', b"", "either arrival_ms or after"),
        (b'"pause_ms":9', b'"pause_ms":-9', "pause_ms must be from 0"),
        (b"[3,4,5]", b"[3,4]", "the 3 whole blocks of 64 tokens that input_length 200 has.* got 2"),
        (b"[3,4,5]", b"[3,4,-5]", "must be from 0 to"),
        (b"[3,4,5]", b'[3,4,5],"answer_ids":[6]', "answer_ids must name the 0 blocks .* got 1"),
        (b":64}", b":201}", "pin_tokens must be from 0 to 200, got 201"),
        (b":64}", b':64,"pin_replicas":-1}', "pin_replicas must be from 0"),
    ],
)
def test_what_is_malformed_is_refused_with_its_line_and_field(old: bytes, new: bytes, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"trace file, line 4: .*({problem})"):
        parse(HEADER, FIRST, b"\n", NEXT.replace(old, new, 1))


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"{}", "line 1: not the first line of a workload"),
        (b'{"x":' + b"[" * 100_000, "line 1: not the first line of a workload"),
        (FIRST, "line 1: not the first line of a workload"),
        (HEADER.replace(b":1,", b":2,"), "line 1: version 2 is not known, only 1"),
        (HEADER.replace(b":64", b":0"), "line 1: block_size must be from 1 to"),
    ],
)
def test_first_line_that_is_no_header_is_refused(header: bytes, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"trace file, {problem}"):
        parse(header, FIRST)


def test_file_that_is_not_there_or_has_no_request_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl: No such file"):
        read_workload(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_bytes(HEADER)
    with pytest.raises(ConfigError, match=r"empty\.jsonl, .*at least one request"):
        read_workload(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match="No such file"):
        write_workload(parse(HEADER, FIRST), tmp_path / "nowhere" / "file.jsonl")


def test_mooncake_traces_are_told_by_their_first_line_and_become_open_loops() -> None:
    workload, trace = read_workload(SAMPLE), read_trace(SAMPLE)
    assert workload == from_trace(trace, SAMPLE.name)
    assert workload.block_size == 512
    assert [one.arrival_ms for one in workload.requests] == [0, 40, 40, 1500, 2600]
    assert [one.block_ids for one in workload.requests] == [one.hash_ids for one in trace]
    assert workload.prompt_tokens == sum(one.input_length for one in trace)


@pytest.mark.parametrize("requests", [1, 3000], ids=["in a buffer", "in several"])
@pytest.mark.parametrize("lines", [(HEADER, FIRST), (b"", TRACE_LINE)], ids=["ours", "Mooncake"])
def test_pipe_is_read_as_a_file_is(lines: tuple[bytes, bytes], requests: int) -> None:
    """From its beginning to its end, once: what was read of it to tell its format does not come again."""
    reader, writer = os.pipe()

    def write() -> None:
        with open(writer, "wb") as file:
            file.write(lines[0] + requests * lines[1])

    try:
        with ThreadPoolExecutor(1) as writing:
            written = writing.submit(write)
            assert len(read_workload(Path(f"/dev/fd/{reader}")).requests) == requests
            written.result()
    finally:
        os.close(reader)


def test_line_without_an_end_is_not_read_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_LINE_BYTES", len(FIRST))
    (tmp_path / "fits.jsonl").write_bytes(TRACE_LINE)
    assert len(read_workload(tmp_path / "fits.jsonl").requests) == 1
    (tmp_path / "long.jsonl").write_bytes(TRACE_LINE + FIRST.strip() + b"  ")
    for read in (read_workload, read_trace):
        with pytest.raises(ConfigError, match=rf"long\.jsonl, line 2: must be at most {len(FIRST)} bytes"):
            read(tmp_path / "long.jsonl")


def test_name_that_no_file_can_have_is_told_so() -> None:
    assert not is_there("nowhere.jsonl")
    assert is_there(str(SAMPLE))
    with pytest.raises(ConfigError, match="File name too long"):
        is_there("x" * 300)


def test_workload_made_by_hand_is_checked_too() -> None:
    request = WorkloadRequest(arrival_ms=0, input_length=10, output_length=1, block_ids=(1, 2, 3))
    with pytest.raises(ConfigError, match="request 0: block_ids"):
        Workload(name="", block_size=8, requests=[request])


def test_workload_without_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one request"):
        Workload(name="", block_size=8, requests=[])
