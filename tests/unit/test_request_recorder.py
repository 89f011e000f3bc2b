"""Recordings of a router's requests: what a replay reads again, and what nobody can."""

import os
import stat
from pathlib import Path

import pytest

from prefixmesh.errors import ConfigError
from prefixmesh.ids import Fingerprint
from prefixmesh.router.request_numbers import Answered, RequestNumbers, SeenRequest
from prefixmesh.router.request_recorder import RequestRecorder
from prefixmesh.sim.workload_file import parse_workload, read_workload
from tests.support.servers import eventually

BLOCK = 4
SECRET_NAMES = (2**63 + 11, 2**62 + 7, 2**61 + 5)


def answered(tokens: int, *names: int) -> Answered:
    return Answered(tokens, [Fingerprint(name) for name in names])


def seen(
    names: tuple[int, ...] = SECRET_NAMES, *, tokens: int = 5, prompt: int = 10, arrived_s: float = 2.5
) -> SeenRequest:
    return SeenRequest(arrived_s, "acme", "legal", prompt, [answered(tokens, *names)])


def test_equal_blocks_have_equal_numbers_and_no_name_is_told() -> None:
    numbers = RequestNumbers(BLOCK, began_s=1.0)
    text = numbers.header() + numbers.lines(seen()) + numbers.lines(seen((*SECRET_NAMES[:1], 3, 4)))
    first, second = parse_workload(text.splitlines(), "x").requests
    assert (first.arrival_ms, first.input_length, first.output_length) == (1500, 10, 5)
    assert (first.block_ids, first.answer_ids) == ((0, 1), (2,))
    assert (second.block_ids, second.answer_ids) == ((0, 3), (4,))
    assert (first.tenant, first.adapter) == ("t0", "a0")
    for name in ("acme", "legal", *map(str, SECRET_NAMES)):
        assert name.encode() not in text


def test_branches_are_requests_of_one_moment_with_one_prompt() -> None:
    numbers = RequestNumbers(BLOCK, began_s=0.0)
    both = SeenRequest(1.0, "", "", 10, [answered(2, 7, 8, 9), answered(6, 7, 8, 10, 11)])
    first, second = parse_workload((numbers.header() + numbers.lines(both)).splitlines(), "x").requests
    assert first.arrival_ms == second.arrival_ms == 1000
    assert first.block_ids == second.block_ids
    assert set(first.answer_ids).isdisjoint(second.answer_ids)
    assert (first.tenant, first.adapter) == ("", "")


def test_blocks_without_a_name_are_like_no_other() -> None:
    """Of a prompt longer than what is named, and of an answer whose last token fills a block."""
    numbers = RequestNumbers(BLOCK, began_s=0.0)
    text = numbers.header() + 2 * numbers.lines(seen((5,), prompt=9, tokens=3))
    again = numbers.lines(seen((5,), prompt=9, tokens=3))
    first, _, third = parse_workload((text + again).splitlines(), "x").requests
    assert first.block_ids[0] == third.block_ids[0]
    assert {first.block_ids[1], *first.answer_ids}.isdisjoint({third.block_ids[1], *third.answer_ids})


def test_only_its_owner_may_read_a_recording_and_none_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    before = os.umask(0)
    try:
        lives = [RequestRecorder(path, BLOCK, clock=lambda: 0.0) for _ in range(2)]
    finally:
        os.umask(before)
    for life in lives:
        life.ended(seen())
        life.close()
    assert [life.path.name for life in lives] == ["load.jsonl", "load-1.jsonl"]
    for life in lives:
        assert stat.S_IMODE(life.path.stat().st_mode) == 0o600
        assert len(read_workload(life.path).requests) == 1


async def test_a_recording_ends_at_its_bounds_and_stays_readable(tmp_path: Path) -> None:
    by_count = RequestRecorder(tmp_path / "a", BLOCK, clock=lambda: 0.0, most_requests=2, flush_s=0.001)
    by_bytes = RequestRecorder(tmp_path / "b", BLOCK, clock=lambda: 0.0, most_bytes=300, flush_s=0.001)
    for recorder in (by_count, by_bytes):
        for _ in range(9):
            recorder.ended(seen())
        await eventually(lambda recorder=recorder: not recorder.is_on)
        recorder.ended(seen())
        recorder.close()
    assert len(read_workload(by_count.path).requests) == 2
    assert 0 < len(read_workload(by_bytes.path).requests) < 9
    assert by_bytes.path.stat().st_size <= 300


def test_numbers_are_bounded() -> None:
    numbers = RequestNumbers(BLOCK, began_s=0.0, most=4)
    assert not numbers.is_full
    numbers.lines(seen())
    assert numbers.is_full


def test_a_folder_that_is_none_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="record: cannot write"):
        RequestRecorder(tmp_path / "none" / "load.jsonl", BLOCK)
