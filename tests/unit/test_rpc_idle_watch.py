"""When a worker's silence ends its call, on a clock of the test's own."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from prefixmesh.rpc.idle_watch import LATE_S, IdleWatch

TIMEOUT_S = 10.0


@dataclass
class Timer:
    """One of the loop's."""

    due: float
    call: Callable[[], object] | None

    def when(self) -> float:
        return self.due

    def cancel(self) -> None:
        self.call = None


@dataclass
class Loop:
    """An event loop's clock and timers; ``run_to`` lets it stand still until then if it has not come there by itself."""

    now: float = 100.0
    timers: list[Timer] = field(default_factory=list)

    def time(self) -> float:
        return self.now

    def call_at(self, due: float, call: Callable[[], object]) -> Timer:
        self.timers.append(Timer(due, call))
        return self.timers[-1]

    def run_due(self) -> None:
        """What is due by now is called once."""
        due = [timer for timer in self.timers if timer.due <= self.now]
        self.timers = [timer for timer in self.timers if timer.due > self.now]
        for timer in due:
            if timer.call is not None:
                timer.call()

    def run_to(self, now: float) -> None:
        """Time goes by, and every timer is called when it is due."""
        while due := sorted(timer.due for timer in self.timers if timer.due <= now):
            self.now = due[0]
            self.run_due()
        self.now = now


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    made = Loop()
    monkeypatch.setattr("prefixmesh.rpc.idle_watch.asyncio.get_running_loop", lambda: made)
    return made


def watch(since: Callable[[], float | None], timeout_s: float = TIMEOUT_S) -> IdleWatch:
    return IdleWatch(timeout_s, since, lambda: None)


def test_a_silence_ends_the_call_when_it_has_lasted_long_enough(loop: Loop) -> None:
    one = watch(lambda: 104.0)
    loop.run_to(113.9)
    assert not one.has_ended
    loop.run_to(114.0)
    assert one.has_ended


def test_who_owes_nothing_is_left_alone(loop: Loop) -> None:
    one = watch(lambda: None)
    loop.run_to(1000.0)
    assert not one.has_ended


def test_no_timeout_and_an_end_watch_nothing(loop: Loop) -> None:
    watch(lambda: 100.0, timeout_s=0.0)
    assert not loop.timers
    one = watch(lambda: 100.0)
    one.stop()
    loop.run_to(1000.0)
    assert not one.has_ended


def test_time_in_which_this_process_stood_still_is_no_workers_silence(loop: Loop) -> None:
    """What came meanwhile is read behind the timer, and counts."""
    since = 100.0
    one = watch(lambda: since)
    loop.now = 200.0
    loop.run_due()
    assert not one.has_ended
    since = 200.1
    loop.run_to(209.0)
    assert not one.has_ended
    loop.run_to(210.1)
    assert one.has_ended


def test_a_worker_that_is_silent_behind_a_standstill_too_is_ended(loop: Loop) -> None:
    one = watch(lambda: 100.0)
    loop.now = 200.0
    loop.run_due()
    loop.run_to(200.0 + LATE_S)
    assert one.has_ended
