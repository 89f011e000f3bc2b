"""How often workers are asked to report, so that a router of thousands does not drown in what they tell. Pure."""

from typing import Final

REPORT_INTERVAL_S: Final = 0.1
"""How often a worker is asked to report while there are few: other routers' requests are seen within one of these."""

REPORTS_PER_INTERVAL: Final = 2
"""Of a worker whose load changes all the time (``worker.worker_reports``)."""

MAX_REPORTS_PER_S: Final = 2_000
"""Of all workers together: some 50 µs each, a tenth of a router's time."""


def report_interval_s(workers: int) -> float:
    """How often each of so many workers is to report."""
    return max(REPORT_INTERVAL_S, REPORTS_PER_INTERVAL * workers / MAX_REPORTS_PER_S)
