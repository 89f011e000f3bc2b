"""Fault scripts: when what is in effect, what is refused, and that a file is read again when it changes."""

import logging
import os
from pathlib import Path

import pytest

from prefixmesh.cache.events import CacheSummary, TierState
from prefixmesh.errors import ConfigError
from prefixmesh.ids import Epoch
from prefixmesh.sim.faults import NO_FAULTS, parse_faults
from prefixmesh.sim.faulty_worker import FaultFile

TRUE = CacheSummary(Epoch(1), 7, (TierState(3, 0b1000), TierState(0, 0)))


def test_faults_are_in_effect_from_their_beginning_to_their_end() -> None:
    script = parse_faults(b'[{"kind": "silence", "at_s": 2, "for_s": 3}, {"kind": "crash", "at_s": 4}]')
    seen = [(script.at(at).silent, script.at(at).crashed) for at in (1.9, 2.0, 4.0, 5.0, 1e9)]
    assert seen == [(False, False), (True, False), (True, True), (False, True), (False, True)]


def test_faults_of_one_kind_add_up() -> None:
    script = parse_faults(b'[{"kind": "delay", "amount": 5}, {"kind": "delay", "amount": 7, "for_s": 1}]')
    assert (script.at(0.5).delay_ms, script.at(1.5).delay_ms) == (12.0, 5.0)


def test_the_first_refusal_and_the_shortest_stream_hold() -> None:
    script = parse_faults(
        b"""[{"kind": "refuse"}, {"kind": "refuse", "status": "UNAVAILABLE", "at_s": 2},
        {"kind": "stall_stream", "amount": 4}, {"kind": "stall_stream", "amount": 2, "for_s": 1}]"""
    )
    assert [script.at(at).refusal for at in (0.5, 3.0)] == ["RESOURCE_EXHAUSTED"] * 2
    assert [script.at(at).stream_stops_at for at in (0.5, 3.0)] == [2.0, 4.0]


def test_copies_are_slow_and_fail_while_they_are_told_to() -> None:
    script = parse_faults(
        b"""[{"kind": "copy_delay", "amount": 5}, {"kind": "copy_delay", "amount": 7, "for_s": 1},
        {"kind": "copy_fail", "at_s": 1}]"""
    )
    seen = [(script.at(at).copy_delay_ms, script.at(at).copies_fail) for at in (0.5, 1.5)]
    assert seen == [(12.0, False), (5.0, True)]


def test_no_script_is_no_fault() -> None:
    assert parse_faults(b"").at(0.0) == parse_faults(b"[]").at(0.0) == NO_FAULTS


def test_cached_tokens_that_are_told_stay_within_the_prompt() -> None:
    more = parse_faults(b'[{"kind": "wrong_cached", "amount": 100}]').at(0.0)
    less = parse_faults(b'[{"kind": "wrong_cached", "amount": -100}]').at(0.0)
    assert [more.cached_tokens(10, 200), more.cached_tokens(150, 200)] == [110, 200]
    assert [less.cached_tokens(10, 200), less.cached_tokens(150, 200)] == [0, 50]


def test_wrong_sums_are_wrong_in_the_digest_alone() -> None:
    told = parse_faults(b'[{"kind": "wrong_sums"}]').at(0.0).summary(TRUE)
    assert told != TRUE
    assert (told.epoch, told.sequence, [s.count for s in told.states]) == (1, 7, [3, 0])
    assert NO_FAULTS.summary(TRUE) == TRUE


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"[", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"{}", "must be a list"),
        (b'["crash"]', r"faults\[0\]: must be an object"),
        (
            b'[{"kind": "crash"}, {"kind": "sulk"}]',
            r"faults\[1\].kind: must be one of delay, crash, .* got 'sulk'",
        ),
        (b'[{"kind": "delay", "ms": 5}]', "unknown field 'ms'"),
        (b'[{"kind": "delay", "amount": -1}]', r"amount: must be a number from 0.0 on, got -1"),
        (b'[{"kind": "delay", "at_s": true}]', "at_s: must be a number"),
        (b'[{"kind": "delay", "for_s": "1"}]', "for_s: must be a number"),
        (b'[{"kind": "refuse", "status": "OK"}]', "status: must be one of RESOURCE_EXHAUSTED, UNAVAILABLE"),
        (b'[{"kind": "delay", "status": "UNAVAILABLE"}]', "status: is for refuse alone"),
        (b'[{"kind": "stall"}]', "stall is for simulated workers; stop a process with SIGSTOP"),
    ],
)
def test_what_is_malformed_is_refused_with_its_place_and_field(text: bytes, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_faults(text)


def write(path: Path, text: str) -> None:
    """As a program that switches faults would: whole, never half."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def test_file_is_read_again_whenever_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "faults.json"
    faults = FaultFile(path, clock=lambda: 0.0)
    assert faults.now() == NO_FAULTS
    write(path, '[{"kind": "silence"}]')
    assert faults.now().silent
    with caplog.at_level(logging.ERROR):
        write(path, "[")
        assert [faults.now().silent, faults.now().silent] == [True, True]
    assert len(caplog.records) == 1
    write(path, "[]")
    assert faults.now() == NO_FAULTS
    write(path, '[{"kind": "crash"}]')
    assert faults.now().crashed
    path.unlink()
    assert faults.now() == NO_FAULTS


def test_file_that_is_malformed_at_the_start_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text("[")
    with pytest.raises(ConfigError, match="not JSON"):
        FaultFile(path)
