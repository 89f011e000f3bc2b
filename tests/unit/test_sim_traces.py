"""Traces in the Mooncake format: what is read, what is refused and where, and which prompts share what."""

import os
from pathlib import Path

import pytest

from prefixmesh.cache.fingerprint import block_fingerprints
from prefixmesh.errors import ConfigError
from prefixmesh.sim.traces import (
    TRACE_BLOCK_TOKENS,
    TraceRequest,
    parse_trace,
    prompt_tokens,
    read_trace,
)
from prefixmesh.tokens import count, unpack

SAMPLE = Path(__file__).parents[1] / "golden" / "trace_sample.jsonl"
GOOD = b'{"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [3, 4]}\n'


def parse(*lines: bytes, limit: int | None = None) -> list[TraceRequest]:
    return list(parse_trace(lines, "made up", limit))


def test_requests_come_in_the_files_order_with_their_times_in_seconds() -> None:
    requests = read_trace(SAMPLE)
    assert [request.arrival_s for request in requests] == [0.0, 0.04, 0.04, 1.5, 2.6]
    assert requests[2] == TraceRequest(
        timestamp_ms=40, input_length=1700, output_length=90, hash_ids=(0, 1, 2, 4)
    )


def test_limit_reads_no_further() -> None:
    assert len(parse(GOOD, GOOD, b"not read", limit=2)) == 2
    assert parse(b"not read", limit=0) == []


def test_empty_lines_and_fields_not_known_are_left_out() -> None:
    assert len(parse(b"\n", GOOD, b"  \n", GOOD.replace(b"{", b'{"note": "x", '))) == 2


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b"{", b"[", "not JSON"),
        (b"{", b"[" * 100_000, "not JSON"),
        (GOOD.strip(), b"[1]", "not a JSON object"),
        (b'"timestamp": 5, ', b"", "timestamp is missing"),
        (b": 5", b": -1", "timestamp must be a whole number from 0"),
        (b": 5", b": 5.5", "timestamp must be a whole number"),
        (b": 5", b": true", "timestamp must be a whole number"),
        (b": 600", b": 0", "input_length must be a whole number from 1"),
        (b": 600", b": 99999999", "input_length must be .* to 4194304"),
        (b": 7", b': "7"', "output_length must be a whole number"),
        (b"[3, 4]", b"3", "hash_ids must be a list"),
        (b"[3, 4]", b"[3, null]", "hash_ids must be a whole number"),
        (b"[3, 4]", b"[3]", "the 2 blocks of 512 tokens that input_length 600 has, got 1"),
        (b": 600", b": 512", "the 1 blocks .* got 2"),
    ],
)
def test_what_is_malformed_is_refused_with_its_line_and_field(old: bytes, new: bytes, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"trace made up, line 3: .*{problem}"):
        parse(GOOD, GOOD, GOOD.replace(old, new, 1))


def test_time_that_falls_is_refused() -> None:
    with pytest.raises(ConfigError, match="line 2: timestamp must not fall, 4 is before 5"):
        parse(GOOD, GOOD.replace(b": 5", b": 4"))


def test_file_that_is_not_there_or_empty_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl: No such file"):
        read_trace(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    with pytest.raises(ConfigError, match="has no requests"):
        read_trace(tmp_path / "empty.jsonl")


def test_prompts_begin_alike_exactly_as_far_as_their_ids_do() -> None:
    requests = read_trace(SAMPLE)
    names = [block_fingerprints(b"n" * 16, prompt_tokens(request, 1000), 64) for request in requests]

    def shared(one: int, other: int) -> int:
        equal = [a == b for a, b in zip(names[one], names[other], strict=False)]
        return equal.index(False) if False in equal else len(equal)

    assert names[0] == names[4]
    assert shared(0, 1) == TRACE_BLOCK_TOKENS // 64
    assert shared(0, 2) == 1200 // 64
    assert shared(0, 3) == 0


def test_prompts_have_their_length_and_the_vocabularys_ids() -> None:
    for request in read_trace(SAMPLE):
        packed = prompt_tokens(request, 50)
        assert count(packed) == request.input_length
        assert int(unpack(packed).max()) < 50


def test_prompts_are_the_same_on_every_machine() -> None:
    first = read_trace(SAMPLE)[0]
    assert unpack(prompt_tokens(first, 32_000))[510:515].tolist() == [1581, 1633, 20922, 26249, 26449]


@pytest.mark.skipif(
    "PREFIXMESH_TRACE" not in os.environ, reason="PREFIXMESH_TRACE names no trace in the Mooncake format"
)
def test_whole_published_trace_is_read() -> None:
    requests = read_trace(Path(os.environ["PREFIXMESH_TRACE"]))
    assert all(len(r.hash_ids) == -(-r.input_length // TRACE_BLOCK_TOKENS) for r in requests)
    assert sum(r.input_length for r in requests) > 0
