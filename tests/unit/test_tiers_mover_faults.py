"""Injected faults: every job still ends in exactly one outcome, what is said to be well is well, and a seed repeats."""

import random

import numpy as np
import pytest

from prefixmesh.errors import ConfigError, LoadBackError
from prefixmesh.worker.tiers.copies import CANCELLED, CopyJob, CopyKind, Mover, Outcome
from prefixmesh.worker.tiers.mover_faults import INJECTED, FaultyMover, MoverFaults
from prefixmesh.worker.tiers.thread_mover import ThreadMover
from tests.support.movers import Pools, outcomes, pages_of


class AtOnce:
    """A mover in whose time everything has happened already."""

    page_bytes = 1

    def __init__(self) -> None:
        self.done: list[Outcome] = []
        self.known: set[int] = set()
        self.expected: list[int] = []

    def start(self, job: CopyJob) -> None:
        self.known.add(job.number)
        self.done.append(Outcome(job.number, 0.5))

    def cancel(self, number: int) -> None: ...

    def layers_done(self, number: int) -> int:
        return 2 if number in self.known else 0

    def take_done(self) -> list[Outcome]:
        done, self.done = self.done, []
        self.known -= {outcome.number for outcome in done}
        return done

    def wait_done(self, at_most_s: float) -> None: ...

    def expect(self, numbers: list[int], at_most_s: float) -> None:
        assert self.known.issuperset(numbers), "a job that nobody knows"
        self.expected = list(numbers)

    def await_layer(self, layer: int) -> None: ...

    def close(self) -> None: ...


def faulty(seed: int = 0, **faults: float) -> FaultyMover:
    return FaultyMover(AtOnce(), 2, MoverFaults(**faults), random.Random(seed))  # type: ignore[arg-type]


def start(mover: Mover, number: int, kind: CopyKind = "restore") -> None:
    mover.start(CopyJob(number=number, kind=kind, device_pages=pages_of(number), host_pages=pages_of(number)))


def course(seed: int) -> list[list[Outcome]]:
    """What each look finds."""
    mover = faulty(seed, fail=0.3, late_outcome=0.5, late_start=0.3)
    found = []
    for number in range(20):
        start(mover, number)
        found.append(mover.take_done())
    return found + [mover.take_done() for _ in range(2 * MoverFaults().most_looks)]


def test_a_seed_repeats_and_another_differs() -> None:
    assert course(1) == course(1) != course(2)


def test_each_job_has_one_outcome_some_late_some_failed_out_of_order() -> None:
    told = [outcome for look in course(3) for outcome in look]
    assert sorted(outcome.number for outcome in told) == list(range(20))
    assert [outcome.number for outcome in told] != list(range(20))
    assert {outcome.error for outcome in told} == {"", INJECTED}


def test_without_faults_it_is_the_mover_within() -> None:
    mover = faulty(reorder=False)
    for number in range(3):
        start(mover, number)
        assert mover.layers_done(number) == 2
    mover.expect([0, 2], 1.0)
    mover.await_layer(1)
    assert mover.take_done() == [Outcome(0, 0.5), Outcome(1, 0.5), Outcome(2, 0.5)]
    assert mover.layers_done(0) == 0
    assert mover.injected == 0


def test_a_job_that_will_fail_fails_the_step_that_reads_it_at_its_layer() -> None:
    """Layers before are there; those who expect others are let through."""
    mover = faulty(fail=1.0)
    for number in range(20):
        start(mover, number)
    layers = [mover.layers_done(number) for number in range(20)]
    assert set(layers) == {0, 1}
    mover.expect([layers.index(1)], 1.0)
    mover.await_layer(0)
    with pytest.raises(LoadBackError, match=INJECTED):
        mover.await_layer(1)
    mover.expect([layers.index(1), layers.index(0)], 1.0)
    with pytest.raises(LoadBackError, match=INJECTED):
        mover.await_layer(0)
    mover.expect([], 1.0)
    mover.await_layer(1)


def test_an_outcome_that_is_held_back_leaves_its_layers_readable() -> None:
    """The mover within has forgotten the job by then."""
    mover = faulty(late_outcome=1.0)
    start(mover, 4)
    assert mover.take_done() == []
    assert mover.layers_done(4) == 2
    mover.expect([4], 1.0)
    mover.await_layer(1)
    mover.wait_done(1.0)
    assert [outcome.number for outcome in mover.take_done()] == [4]


def test_a_step_may_find_a_layer_late_while_the_copy_ends_well() -> None:
    mover = faulty(late_layer=1.0)
    start(mover, 4)
    mover.expect([4], 1.0)
    with pytest.raises(LoadBackError):
        mover.await_layer(1)
    assert [outcome.error for outcome in mover.take_done()] == [""]
    mover.expect([], 1.0)
    mover.await_layer(1)


def test_what_has_not_begun_can_be_cancelled_and_begins_when_a_step_needs_it() -> None:
    mover = faulty(late_start=1.0)
    start(mover, 1)
    start(mover, 2)
    assert mover.layers_done(1) == mover.layers_done(2) == 0
    mover.cancel(1)
    mover.expect([2], 1.0)
    assert mover.layers_done(2) == 2
    assert sorted(mover.take_done()) == [Outcome(1, 0.0, CANCELLED), Outcome(2, 0.5)]


def test_an_idle_loop_is_called_until_nothing_is_held() -> None:
    """Whoever looks only when called would otherwise never see the last outcome."""
    calls: list[int] = []
    mover = faulty(late_outcome=1.0, late_start=1.0)
    mover.on_done = lambda: calls.append(1)
    start(mover, 1)
    told: list[Outcome] = []
    while calls:
        calls.pop()
        told += mover.take_done()
    assert [outcome.number for outcome in told] == [1]


@pytest.mark.parametrize("bad", [{"fail": 1.5}, {"late_start": -0.1}, {"most_looks": 0}])
def test_shares_that_are_none_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        MoverFaults(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
def test_around_a_thread_what_ended_well_has_the_right_bytes(seed: int) -> None:
    """A failed job's destination is spoiled once its copy is over, so that whoever reads it is found out."""
    pools, rng = Pools(pages=30, host_pages=30), np.random.default_rng(seed)
    expected = pools.snapshot()
    jobs: dict[int, CopyJob] = {}

    def spoil(job: CopyJob) -> None:
        assert job.kind == "restore"
        pools.device.storage[:, :, job.device_pages.tolist()] = -1.0

    faults = MoverFaults(fail=0.4, late_outcome=0.4, late_start=0.4)
    inner = ThreadMover(pools.copies())
    mover = FaultyMover(inner, pools.layers, faults, random.Random(seed), spoil=spoil)
    device, host = rng.permutation(30).astype(np.int32), rng.permutation(30).astype(np.int32)
    for number in range(10):
        part = slice(3 * number, 3 * number + 3)
        jobs[number] = CopyJob(
            number=number, kind="restore", device_pages=device[part], host_pages=host[part]
        )
        mover.start(jobs[number])
    for outcome in outcomes(mover, 10):
        if outcome.error:
            expected.device[:, :, jobs[outcome.number].device_pages.tolist()] = -1.0
        else:
            expected.copy(jobs[outcome.number])
    expected.check(pools)
    mover.wait_done(0.0)
    assert mover.take_done() == []
    mover.close()
    assert "FaultyMover(0 not begun, 0 held" in repr(mover)
