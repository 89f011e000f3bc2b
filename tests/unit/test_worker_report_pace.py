"""When a reader is due a report: at its interval, and soon after news, never more often than a bundle's time."""

import pytest

from prefixmesh.worker.worker_reports import (
    BUNDLES_PER_INTERVAL,
    LEAST_REPORT_INTERVAL_S,
    MOST_REPORT_INTERVAL_S,
    REPORT_INTERVAL_S,
    ReportPace,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def pace_of(interval_s: float) -> tuple[ReportPace, Clock]:
    clock = Clock()
    return ReportPace(interval_s, clock), clock


def test_first_report_is_due_at_once_and_the_next_at_the_interval() -> None:
    pace, clock = pace_of(2.0)
    assert pace.take_turn()
    assert not pace.take_turn()
    assert pace.due_in_s() == 2.0
    clock.now = 2.0
    assert pace.take_turn()


def test_news_after_a_quiet_time_are_told_at_once() -> None:
    pace, clock = pace_of(2.0)
    pace.take_turn()
    clock.now = 1.0
    assert not pace.take_turn()
    pace.has_news = True
    assert pace.due_in_s() == 0.0
    assert pace.take_turn()
    assert not pace.has_news
    assert pace.due_in_s() == 2.0, "the interval is counted from the last report, whatever caused it"


def test_constant_news_are_told_in_bundles() -> None:
    pace, clock = pace_of(2.5)
    reports = 0
    for tick in range(2561):
        clock.now = tick / 1024
        pace.has_news = True
        reports += pace.take_turn()
    assert reports == 1 + BUNDLES_PER_INTERVAL


@pytest.mark.parametrize(
    ("asked_s", "interval_s"),
    [
        (0.0, REPORT_INTERVAL_S),
        (1e-9, LEAST_REPORT_INTERVAL_S),
        (1e9, MOST_REPORT_INTERVAL_S),
        (3.0, 3.0),
    ],
)
def test_interval_is_cut_to_its_bounds(asked_s: float, interval_s: float) -> None:
    pace, _ = pace_of(asked_s)
    pace.take_turn()
    assert pace.due_in_s() == interval_s
    pace.has_news = True
    assert LEAST_REPORT_INTERVAL_S <= pace.due_in_s() <= interval_s
