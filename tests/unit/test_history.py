"""The history of requests: what the checker sees of each kind of violation, what is in the file, and what the command says."""

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from prefixmesh.cli.main import main
from prefixmesh.errors import ConfigError
from prefixmesh.history import (
    FINISHED,
    NO_HISTORY,
    Admitted,
    Asked,
    Began,
    Closed,
    Ended,
    Failed,
    HistoryList,
    Lost,
    Placed,
    Record,
    Released,
    Resumed,
    Settled,
    Taken,
    Tokens,
)
from prefixmesh.history_check import HistoryChecker, check_records
from prefixmesh.history_file import HistoryFile, read_history
from prefixmesh.history_report import MAX_VIOLATIONS, Rule


def good_life() -> list[Record]:
    """A router's life in which one request was carried on by another worker, and one went by a ticket."""
    history = HistoryList(lambda: 1.0)
    note = history.note
    note(Began, "router")
    note(Asked, "r", branches=2, resumed=(0, 3))
    note(Placed, "r", attempt=1, worker="a", incarnation=7, reservation="r")
    note(Admitted, "r", attempt=1, cached=0)
    note(Tokens, "r", position=0, count=2)
    note(Tokens, "r", branch=1, position=3, count=1)
    note(Failed, "r", attempt=1, kind="died", reason="it was killed")
    note(Settled, "r", reservation="r")
    note(Placed, "r", attempt=2, worker="b", incarnation=8, reservation="r.2")
    note(Resumed, "r", attempt=2, positions=(2, 4))
    note(Admitted, "r", attempt=2, cached=4)
    note(Tokens, "r", position=2, count=1)
    note(Settled, "r.2", reservation="r.2")
    note(Ended, "r", outcome=FINISHED, completion_tokens=4)
    note(Placed, "t", attempt=1, worker="b", incarnation=8, reservation="t", by_ticket=True)
    note(Settled, "t", reservation="t")
    note(Closed, "router")
    return history.records


def worker_life(incarnation: int = 8) -> list[Record]:
    history = HistoryList(lambda: 1.0)
    history.note(Began, "b")
    history.note(Taken, "r.2", worker="b", incarnation=incarnation)
    history.note(Released, "r.2", incarnation=incarnation)
    history.note(Closed, "b")
    return history.records


def rules(records: list[Record]) -> set[Rule]:
    return {one.rule for one in check_records(records).violations}


def at(records: list[Record], kind: type[Record], nth: int = 0) -> int:
    return [place for place, one in enumerate(records) if isinstance(one, kind)][nth]


def without(kind: type[Record], nth: int = 0) -> Callable[[list[Record]], None]:
    def drop(records: list[Record]) -> None:
        records.pop(at(records, kind, nth))

    return drop


def doubled(kind: type[Record], nth: int = 0) -> Callable[[list[Record]], None]:
    def double(records: list[Record]) -> None:
        place = at(records, kind, nth)
        records.insert(place, records[place])

    return double


def swapped(kind: type[Record], nth: int, other: int) -> Callable[[list[Record]], None]:
    def swap(records: list[Record]) -> None:
        one, two = at(records, kind, nth), at(records, kind, other)
        records[one], records[two] = records[two], records[one]

    return swap


def late_token(records: list[Record]) -> None:
    records.insert(at(records, Ended) + 1, Tokens(1.0, "r", position=3, count=1))


def anew(records: list[Record]) -> None:
    """The second attempt begins from the first token again."""
    records.pop(at(records, Resumed))
    records[at(records, Tokens, 2)] = Tokens(1.0, "r", position=0, count=3)


def resumed_elsewhere(records: list[Record]) -> None:
    records[at(records, Resumed)] = Resumed(1.0, "r", attempt=2, positions=(1, 4))


def test_a_life_in_which_all_went_well_breaks_no_rule() -> None:
    report = check_records(good_life())
    assert not report.violations
    assert (report.lives, report.requests, report.attempts, report.resumed) == (1, 1, 3, 1)
    assert (report.tokens, report.outcomes, report.reservations) == (4, {FINISHED: 1}, 3)
    assert report.open_requests == report.open_reservations == 0


@pytest.mark.parametrize(
    ("break_it", "broken"),
    [
        (doubled(Asked), Rule.ASKED_ONCE),
        (without(Asked), Rule.ASKED_ONCE),
        (without(Ended), Rule.ENDS_ONCE),
        (doubled(Ended), Rule.ENDS_ONCE),
        (late_token, Rule.NOTHING_AFTER_END),
        (doubled(Tokens, 0), Rule.POSITIONS),
        (swapped(Tokens, 0, 2), Rule.POSITIONS),
        (without(Tokens, 2), Rule.COUNTED),
        (without(Failed), Rule.ATTEMPTS),
        (without(Placed, 1), Rule.ATTEMPTS),
        (without(Resumed), Rule.NEVER_ANEW),
        (anew, Rule.NEVER_ANEW),
        (anew, Rule.POSITIONS),
        (resumed_elsewhere, Rule.RESUMED_FITS),
        (without(Settled, 0), Rule.SETTLED_ONCE),
        (doubled(Settled, 1), Rule.SETTLED_ONCE),
        (without(Placed, 2), Rule.SETTLED_ONCE),
    ],
)
def test_each_kind_of_violation_is_seen(break_it: Callable[[list[Record]], None], broken: Rule) -> None:
    records = good_life()
    break_it(records)
    assert broken in rules(records)


@pytest.mark.parametrize("kind", [Taken, Released])
def test_a_worker_must_take_in_once_and_release_once(kind: type[Record]) -> None:
    assert not rules(worker_life())
    for break_it in (doubled(kind), without(kind)):
        records = worker_life()
        break_it(records)
        assert rules(records) == {Rule.TAKEN_ONCE}


@pytest.mark.parametrize("first", ["router", "worker"])
def test_only_the_life_that_was_meant_may_take_in(first: str) -> None:
    """Whichever history is read first."""
    lives = {"router": good_life(), "worker": worker_life(incarnation=9)}
    checker = HistoryChecker()
    for source in (first, *(lives.keys() - {first})):
        for number, record in enumerate(lives[source], 1):
            checker.take(source, number, record)
    (violation,) = checker.finish().violations
    assert violation.rule is Rule.SAME_LIFE
    assert [str(place) for place in violation.places] == ["router:9", "worker:2"]


def test_what_a_killed_life_left_open_is_counted_and_no_violation() -> None:
    cut = good_life()[:6]
    cut[2] = Placed(1.0, "r", attempt=1, worker="a", incarnation=7, reservation="an earlier life's")
    report = check_records([*cut, *good_life()])
    assert not report.violations
    assert (report.lives, report.open_requests, report.open_reservations) == (2, 1, 1)


def test_a_violation_names_the_request_and_the_lines() -> None:
    records = good_life()
    doubled(Tokens, 0)(records)
    assert str(check_records(records, "h.jsonl").violations[0]) == (
        "r: each position once, in order: branch 0 goes on at token 0, 2 was next (h.jsonl:5, h.jsonl:6)"
    )


def test_one_bug_in_every_request_does_not_flood_the_report() -> None:
    records: list[Record] = [Settled(0.0, "x", reservation="x")] * (MAX_VIOLATIONS + 5)
    report = check_records(records)
    assert (len(report.violations), report.violations_in_all) == (MAX_VIOLATIONS, MAX_VIOLATIONS + 5)


def test_a_file_tells_what_was_noted(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with pytest.raises(ConfigError, match="cannot write"):
        HistoryFile(tmp_path / "none" / "history.jsonl", "router")
    history = HistoryFile(path, "router", clock=lambda: 1.0)
    for record in good_life()[1:-1]:
        history.put(record)
    history.close()
    history.close()
    assert [line.record for line in read_history(path)] == good_life()
    assert json.loads(path.read_bytes().splitlines()[4]) == {
        "event": "tokens",
        "at": 1.0,
        "request_id": "r",
        "position": 0,
        "count": 2,
    }


def test_a_second_life_goes_on_in_the_file_also_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    HistoryFile(path, "first").close()
    path.write_bytes(path.read_bytes() + b'{"event":"asked","at":1.0,"req')
    HistoryFile(path, "second").close()
    kinds = [type(line.record) for line in read_history(path)]
    assert kinds == [Began, Closed, type(None), Began, Closed]


def test_a_line_that_nests_without_end_is_one_that_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(b'{"event":' + b"[" * 100_000)
    assert [line.record for line in read_history(path)] == [None]


def test_a_full_disk_stops_nobody_and_what_is_missing_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    history = HistoryFile(tmp_path / "history.jsonl", "router", max_waiting=3, flush_s=3600.0)

    class FullDisk:
        def write(self, _: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    disk = history._file
    monkeypatch.setattr(history, "_file", FullDisk())
    history.note(Settled, "a", reservation="a")
    history._write_waiting()  # with the beginning, two lines
    history._write_waiting()
    for _ in range(5):
        history.note(Settled, "b", reservation="b")
    monkeypatch.setattr(history, "_file", disk)
    history._write_waiting()
    history.close()
    records = [line.record for line in read_history(tmp_path / "history.jsonl")]
    assert [one.count for one in records if isinstance(one, Lost)] == [4]
    assert caplog.text.count("history_not_written") == 1
    assert "No space left on device" in caplog.text


def test_no_history_keeps_nothing() -> None:
    assert not NO_HISTORY.is_on
    NO_HISTORY.note(Settled, "a", reservation="a")


def test_the_command_sums_up_and_fails_for_a_violation(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = HistoryFile(path, "router")
    for record in good_life()[1:-1]:
        history.put(record)
    history.close()
    told = CliRunner().invoke(main, ["history", str(path)])
    assert (told.exit_code, told.output.splitlines()[0]) == (
        0,
        "1 requests in 1 lives: 1 finished; 0 open",
    )
    assert told.output.endswith("no violations\n")
    path.write_bytes(
        path.read_bytes() + b'{"event":"settled","at":2,"request_id":"x","reservation":"x"}\n?\n'
    )
    told = CliRunner().invoke(main, ["history", "--json", str(path)])
    report = json.loads(told.output)
    assert (told.exit_code, report["unread_lines"], report["violations_in_all"]) == (1, 1, 1)
    assert report["violations"][0]["lines"] == [f"{path}:18"]
    assert "violation: x: every reservation" in CliRunner().invoke(main, ["history", str(path)]).output


@pytest.mark.parametrize("text", ["", "{}\nrequest_ended id=1\n"], ids=["empty", "another log"])
def test_what_is_no_history_is_not_found_without_fault(tmp_path: Path, text: str) -> None:
    """A wrong name in a script must not look like a proof."""
    path = tmp_path / "router.log"
    path.write_text(text)
    told = CliRunner().invoke(main, ["history", str(path)])
    assert told.exit_code != 0
    assert "no violations" not in told.output
