"""The fake worker's mover: bytes move in virtual time and within their copy, layers come one after the other, and troubles are told."""

import random
import threading
import time

import numpy as np
import pytest

from prefixmesh.errors import InternalError, LoadBackError
from prefixmesh.sim.copy_alarm import CopyAlarm
from prefixmesh.sim.copy_troubles import CopyTrouble, TroubleOdds, drawn_troubles
from prefixmesh.sim.fake_engine import VirtualTime
from prefixmesh.sim.fake_model import LAYERS
from prefixmesh.sim.fake_mover import FakeMover
from prefixmesh.worker.tiers.copies import CANCELLED, CopyJob, CopyKind, Outcome

PAGE = 2
PAGES = 8
MS_PER_TOKEN = 1.0
COPY_S = 2 * PAGE * MS_PER_TOKEN / 1e3
"""Of two pages, as all copies here."""


class NotedAlarm:
    def __init__(self) -> None:
        self.times: list[float | None] = []
        self.is_closed = False

    def set(self, when: float | None) -> None:
        self.times.append(when)

    def close(self) -> None:
        self.is_closed = True


class Bench:
    """A mover between eight pages of the device, which hold numbers, and eight of the host."""

    def __init__(self, seed: int = 0) -> None:
        self.time = VirtualTime()
        self.kv = np.arange(1, PAGES * PAGE + 1, dtype=np.uint64) << np.uint64(40) | np.uint64(7)
        self.alarm = NotedAlarm()
        self.mover = FakeMover(
            self.kv,
            page_size=PAGE,
            host_pages=PAGES,
            page_bytes=100,
            ms_per_token=lambda _: MS_PER_TOKEN,
            time=self.time,
            rng=random.Random(seed),
            alarm=self.alarm,
        )

    def start(self, number: int, kind: CopyKind, device: tuple[int, int], host: tuple[int, int]) -> None:
        device_pages, host_pages = np.array(device, dtype=np.int32), np.array(host, dtype=np.int32)
        self.mover.start(CopyJob(number=number, kind=kind, device_pages=device_pages, host_pages=host_pages))

    def pages(self, *pages: int) -> list[list[int]]:
        return self.kv.reshape(PAGES, PAGE)[list(pages)].tolist()  # type: ignore[no-any-return]

    def finish(self) -> list[Outcome]:
        """Let all that was started end."""
        outcomes: list[Outcome] = []
        while (due := self.mover.next_due()) is not None:
            self.time.pass_until(due)
            outcomes += self.mover.take_done()
        return outcomes


def test_what_was_offloaded_comes_back_after_the_device_has_forgotten_it() -> None:
    bench = Bench()
    before = bench.pages(3, 5)
    bench.start(1, "offload", (3, 5), (6, 0))
    assert bench.finish() == [Outcome(1, COPY_S)]
    bench.kv[:] = 0
    bench.start(2, "restore", (1, 2), (6, 0))
    assert bench.finish() == [Outcome(2, COPY_S)]
    assert bench.pages(1, 2) == before
    assert bench.pages(3, 5) == [[0, 0], [0, 0]]


def test_fetch_brings_pages_from_a_buffer() -> None:
    bench = Bench()
    buffer = np.array([[11, 12], [13, 14]], dtype=np.uint64)
    pages = np.array([4, 2], dtype=np.int32)
    bench.mover.start(CopyJob(number=1, kind="fetch", device_pages=pages, buffer=buffer))
    assert bench.finish() == [Outcome(1, COPY_S)]
    assert bench.pages(4, 2) == buffer.tolist()


def test_nothing_is_told_before_its_time() -> None:
    bench = Bench()
    bench.start(1, "offload", (0, 1), (0, 1))
    assert bench.mover.next_due() == pytest.approx(COPY_S)
    bench.time.pass_until(0.99 * COPY_S)
    assert bench.mover.take_done() == []
    bench.time.pass_until(1.01 * COPY_S)
    assert bench.mover.take_done() == [Outcome(1, COPY_S)]
    assert bench.mover.next_due() is None


def test_source_that_is_written_over_during_its_copy_is_copied_in_part() -> None:
    """Else a lock that was released too early would not be noticed."""
    bench = Bench()
    before = bench.pages(0, 1)
    bench.start(1, "offload", (0, 1), (0, 1))
    bench.time.pass_until(COPY_S / 2)
    bench.mover.catch_up()
    bench.kv[: 2 * PAGE] = np.uint64(0x1234_5678_9ABC_DEF0)
    bench.finish()
    bench.start(2, "restore", (0, 1), (0, 1))
    bench.finish()
    assert bench.pages(0, 1) != before


def test_layers_come_one_after_the_other() -> None:
    bench = Bench()
    bench.start(1, "restore", (0, 1), (0, 1))
    seen = []
    for part in range(2 * LAYERS):
        bench.time.pass_until(part * COPY_S / LAYERS / 2 + 1e-9)
        seen.append(bench.mover.layers_done(1))
    assert seen == [0, 0, 1, 1, 2, 2, 3, 3]
    bench.time.pass_until(2 * COPY_S)
    assert bench.mover.layers_done(1) == LAYERS
    bench.mover.take_done()
    assert bench.mover.layers_done(1) == 0


def test_a_step_waits_for_each_layer_and_no_longer() -> None:
    bench = Bench()
    bench.start(1, "restore", (0, 1), (0, 1))
    bench.mover.expect([1], 1.0)
    came = []
    for layer in range(LAYERS):
        bench.mover.await_layer(layer)
        came.append(bench.time.now())
    assert came == pytest.approx([COPY_S / 4, COPY_S / 2, 3 * COPY_S / 4, COPY_S])
    bench.mover.expect([], 0.0)
    bench.mover.await_layer(0)
    assert bench.time.now() == came[-1]


def test_the_bound_of_a_wait_is_of_all_layers_together() -> None:
    bench = Bench()
    bench.start(1, "restore", (0, 1), (0, 1))
    bench.mover.expect([1], 0.6 * COPY_S)
    bench.mover.await_layer(0)
    bench.mover.await_layer(1)
    with pytest.raises(LoadBackError, match="layer 2 did not come in time"):
        bench.mover.await_layer(2)
    assert bench.time.now() == pytest.approx(0.6 * COPY_S)


def test_what_is_expected_of_a_copy_that_fails_is_an_error() -> None:
    bench = Bench()
    bench.mover.troubles = lambda _: CopyTrouble(error="broken", fails_after=0.5)
    bench.start(1, "restore", (0, 1), (0, 1))
    bench.mover.expect([1], 1.0)
    bench.mover.await_layer(0)
    with pytest.raises(LoadBackError, match="broken"):
        bench.mover.await_layer(2)
    assert bench.mover.layers_done(1) == 0
    assert bench.finish() == [Outcome(1, COPY_S / 2, "broken")]


@pytest.mark.parametrize("kind", ["offload", "restore"])
def test_destination_of_a_copy_that_fails_holds_anything(kind: CopyKind) -> None:
    bench = Bench()
    bench.mover._host[:] = np.uint16(1)
    before = bench.pages(0, 1), bench.mover._host[:2].tolist()
    bench.mover.troubles = lambda _: CopyTrouble(error="broken", fails_after=0.1)
    bench.start(1, kind, (0, 1), (0, 1))
    bench.finish()
    after = bench.pages(0, 1), bench.mover._host[:2].tolist()
    kept, spoilt = (0, 1) if kind == "offload" else (1, 0)
    assert before[kept] == after[kept]
    assert before[spoilt] != after[spoilt]


def test_one_copy_goes_after_the_other_and_what_comes_to_the_device_goes_first() -> None:
    bench = Bench()
    bench.start(1, "offload", (0, 1), (0, 1))
    bench.start(2, "offload", (2, 3), (2, 3))
    bench.start(3, "restore", (4, 5), (4, 5))
    told = []
    for part in (1, 2, 3):
        bench.time.pass_until(part * COPY_S + 1e-9)
        told += [outcome.number for outcome in bench.mover.take_done()]
    assert told == [1, 3, 2]


def test_only_what_has_not_begun_is_cancelled() -> None:
    bench = Bench()
    for number in (1, 2, 3):
        bench.start(number, "restore", (2 * number, 2 * number + 1), (0, 1))
    before = bench.pages(4, 5)
    bench.mover.cancel(1)
    bench.mover.cancel(2)
    bench.mover.cancel(2)
    bench.mover.cancel(9)
    assert bench.mover.take_done() == [Outcome(2, 0.0, CANCELLED)]
    assert bench.finish() == [Outcome(1, COPY_S), Outcome(3, COPY_S)]
    assert bench.time.now() == pytest.approx(2 * COPY_S)
    assert bench.pages(4, 5) == before


def test_ends_that_are_told_late_are_overtaken() -> None:
    bench = Bench()
    late = {1: 10.0, 2: 0.0}
    bench.mover.troubles = lambda job: CopyTrouble(told_late_s=late[job.number])
    bench.start(1, "offload", (0, 1), (0, 1))
    bench.start(2, "offload", (2, 3), (2, 3))
    assert [outcome.number for outcome in bench.finish()] == [2, 1]


def test_waiting_for_an_outcome_lasts_until_there_is_one_or_the_time_is_up() -> None:
    bench = Bench()
    bench.mover.wait_done(0.001)
    assert bench.time.now() == pytest.approx(0.001)
    bench.start(1, "offload", (0, 1), (0, 1))
    bench.mover.wait_done(0.001)
    assert bench.mover.take_done() == []
    bench.mover.wait_done(1.0)
    assert bench.time.now() == pytest.approx(0.001 + COPY_S)
    bench.mover.wait_done(1.0)
    assert bench.mover.take_done() == [Outcome(1, COPY_S)]
    assert bench.time.now() == pytest.approx(0.001 + COPY_S)


def test_alarm_is_told_of_what_is_due_next() -> None:
    bench = Bench()
    bench.start(1, "offload", (0, 1), (0, 1))
    bench.finish()
    assert bench.alarm.times == [pytest.approx(COPY_S), None]


def test_closed_mover_tells_nothing_more() -> None:
    bench = Bench()
    bench.start(1, "offload", (0, 1), (0, 1))
    bench.mover.close()
    bench.time.pass_until(1.0)
    assert (bench.mover.take_done(), bench.mover.next_due(), bench.alarm.is_closed) == ([], None, True)


def test_number_that_is_in_use_is_refused() -> None:
    bench = Bench()
    bench.start(1, "offload", (0, 1), (0, 1))
    with pytest.raises(InternalError, match="copy 1 was started twice"):
        bench.start(1, "restore", (2, 3), (0, 1))


def test_drawn_troubles_are_the_same_for_one_seed_and_as_often_as_asked() -> None:
    odds = TroubleOdds(slow=0.5, most_slow_s=2.0, fail=0.2, told_late=0.1, most_late_s=1.0)
    job = CopyJob(number=1, kind="offload", device_pages=np.zeros(1, dtype=np.int32))

    def drawn(seed: int) -> list[CopyTrouble]:
        troubles = drawn_troubles(random.Random(seed), odds)
        return [troubles(job) for _ in range(1000)]

    some = drawn(1)
    assert some == drawn(1) != drawn(2)
    assert 400 < sum(one.slow_s > 0.0 for one in some) < 600
    assert 100 < sum(bool(one.error) for one in some) < 300
    assert 50 < sum(one.told_late_s > 0.0 for one in some) < 150
    assert max(one.slow_s for one in some) <= 2.0


def test_alarm_rings_once_at_the_last_time_that_was_set_and_ends_its_thread() -> None:
    rung: list[float] = []
    rings = threading.Semaphore(0)

    def ring() -> None:
        rung.append(time.monotonic())
        rings.release()

    alarm, threads = CopyAlarm(ring), threading.active_count()
    alarm.set(time.monotonic() + 3600.0)
    alarm.set(when := time.monotonic() + 0.01)
    assert rings.acquire(timeout=60.0)
    alarm.set(0.0)
    assert rings.acquire(timeout=60.0)
    alarm.set(None)
    alarm.close()
    alarm.set(0.0)
    assert len(rung) == 2
    assert rung[0] >= when
    assert threading.active_count() == threads
