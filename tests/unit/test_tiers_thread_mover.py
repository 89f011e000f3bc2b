"""The thread that copies: in which order, how jobs end, and that nothing that goes wrong ends the thread."""

import threading

import numpy as np
import pytest

from prefixmesh.errors import LoadBackError
from prefixmesh.worker.tiers import row_copies
from prefixmesh.worker.tiers.copies import CANCELLED, CopyJob, CopyKind, Outcome
from prefixmesh.worker.tiers.layer_gate import CLOSED
from prefixmesh.worker.tiers.thread_mover import ThreadMover
from tests.support.movers import WAIT_S, Pools, SteppedCopies, outcomes, pages_of


class Setting:
    """A mover that copies one piece whenever the test says so."""

    def __init__(self, fails: dict[int, Exception] | None = None) -> None:
        self.pools = Pools()
        self.copies = SteppedCopies(self.pools.copies(), fails)
        self.nudged = threading.Semaphore(0)
        self.mover = ThreadMover(self.copies, self.nudged.release)

    def start(self, number: int, kind: CopyKind, page: int = 1) -> CopyJob:
        job = CopyJob(
            number=number,
            kind=kind,
            device_pages=pages_of(page, page + 1),
            host_pages=pages_of(page + 5, page),
        )
        self.mover.start(job)
        return job

    def order(self) -> list[str]:
        """Jobs as they began to be copied."""
        return list(dict.fromkeys(self.copies.asked))


@pytest.fixture
def stepped() -> "Setting":
    return Setting()


def test_load_backs_go_before_offloads_that_have_not_begun(stepped: Setting) -> None:
    """Somebody waits for the one, nobody for the other; each kind in the order in which it was started."""
    stepped.start(1, "offload")
    stepped.copies.wait_asked()
    for number, kind in ((2, "offload"), (3, "restore"), (4, "restore")):
        stepped.start(number, kind)  # type: ignore[arg-type]
    stepped.copies.let_all()
    outcomes(stepped.mover, 4)
    assert stepped.order() == ["offload 1", "bring 3", "bring 4", "offload 2"]
    stepped.mover.close()


def test_a_load_back_passes_an_offload_in_its_middle(
    stepped: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a piece, not for a job; both end with the right bytes."""
    monkeypatch.setattr(row_copies, "PIECE_BYTES", 1)
    monkeypatch.setattr(row_copies, "BLOCK_BYTES", 1)
    setting = Setting()  # its blocks hold one page
    expected = setting.pools.snapshot()
    expected.copy(setting.start(1, "offload"))
    setting.copies.wait_asked()
    setting.copies.let()
    setting.copies.wait_asked()  # its second page is next
    expected.copy(setting.start(2, "restore", page=20))
    setting.copies.let_all()
    assert [outcome.number for outcome in outcomes(setting.mover, 2)] == [2, 1]
    assert setting.copies.asked[0] == "offload 1"
    assert setting.copies.asked[-1] == "offload 1"
    expected.check(setting.pools)
    setting.mover.close()
    stepped.mover.close()


def test_layers_are_counted_as_they_come(stepped: Setting) -> None:
    """None before the job begins, all once it has ended, none when its outcome was taken."""
    stepped.start(7, "restore")
    stepped.copies.wait_asked()
    for layers in range(stepped.pools.layers):
        assert stepped.mover.layers_done(7) == layers
        stepped.copies.let()
        stepped.copies.wait_asked()
    stepped.copies.let()
    stepped.mover.wait_done(WAIT_S)
    assert stepped.mover.layers_done(7) == stepped.pools.layers
    assert [outcome.number for outcome in stepped.mover.take_done()] == [7]
    assert stepped.mover.layers_done(7) == stepped.mover.layers_done(99) == 0
    stepped.mover.close()


def test_a_step_waits_for_each_layer_it_reads(stepped: Setting) -> None:
    """It has the first layer while the last one is on its way."""
    stepped.start(1, "restore")
    stepped.start(2, "restore", page=9)
    stepped.mover.expect([1, 2], WAIT_S)
    passed: list[int] = []
    read = threading.Event()

    def step() -> None:
        for layer in range(stepped.pools.layers):
            stepped.mover.await_layer(layer)
            passed.append(layer)
        read.set()

    reader = threading.Thread(target=step)
    reader.start()
    stepped.copies.let(stepped.pools.layers + 1)  # all of the first job
    outcomes(stepped.mover, 1)
    assert passed == []  # nothing of the second has come
    stepped.copies.let_all()
    assert read.wait(WAIT_S)
    reader.join()
    assert passed == list(range(stepped.pools.layers))
    outcomes(stepped.mover, 1)
    stepped.mover.close()


def test_a_layer_that_does_not_come_in_time_fails_the_step_and_not_the_copy(stepped: Setting) -> None:
    """The next step, which expects nothing, is let through; the copy ends well."""
    stepped.start(1, "restore")
    stepped.mover.expect([1], 0.01)
    with pytest.raises(LoadBackError, match="layer 0 of load-back 1 did not come in time"):
        stepped.mover.await_layer(0)
    stepped.mover.expect([], 0.0)
    stepped.mover.await_layer(0)
    stepped.copies.let_all()
    assert [outcome.error for outcome in outcomes(stepped.mover, 1)] == [""]
    stepped.mover.close()


def test_a_job_that_has_not_begun_can_be_cancelled_and_no_other(stepped: Setting) -> None:
    """Its outcome is there at once; cancelling what is under way, ended or unknown changes nothing."""
    expected = stepped.pools.snapshot()
    expected.copy(stepped.start(1, "offload"))
    stepped.copies.wait_asked()
    stepped.start(2, "offload", page=9)
    stepped.start(3, "restore", page=20)
    for number in (1, 2, 3, 3, 99):
        stepped.mover.cancel(number)
    assert stepped.mover.take_done() == [Outcome(2, 0.0, CANCELLED), Outcome(3, 0.0, CANCELLED)]
    stepped.copies.let_all()
    assert [(outcome.number, outcome.error) for outcome in outcomes(stepped.mover, 1)] == [(1, "")]
    expected.check(stepped.pools)
    stepped.mover.close()


def test_a_cancelled_job_fails_the_step_that_expects_it(stepped: Setting) -> None:
    stepped.start(1, "offload")
    stepped.copies.wait_asked()
    stepped.start(2, "restore")
    stepped.mover.expect([2], WAIT_S)
    stepped.mover.cancel(2)
    with pytest.raises(LoadBackError, match=CANCELLED):
        stepped.mover.await_layer(0)
    stepped.copies.let_all()
    stepped.mover.close()


@pytest.mark.parametrize("kind", ["offload", "restore"])
def test_whatever_a_copy_raises_is_its_outcome_and_the_next_is_served(kind: CopyKind) -> None:
    setting = Setting({1: RuntimeError("an error of the bus"), 2: MemoryError()})
    setting.copies.let_all()
    for number in (1, 2):
        setting.start(number, kind)
    expected = setting.pools.snapshot()
    expected.copy(setting.start(3, kind))
    errors = {outcome.number: outcome.error for outcome in outcomes(setting.mover, 3)}
    assert errors == {1: "RuntimeError: an error of the bus", 2: "MemoryError", 3: ""}
    expected.check(setting.pools)
    setting.mover.close()


def test_a_failed_load_back_fails_the_step_that_waits_for_it() -> None:
    setting = Setting({1: RuntimeError("an error of the bus")})
    setting.start(1, "restore")
    setting.mover.expect([1], WAIT_S)
    setting.copies.let()
    with pytest.raises(LoadBackError, match="load-back 1 failed: RuntimeError: an error of the bus"):
        setting.mover.await_layer(0)
    assert setting.mover.layers_done(1) == 0
    setting.mover.close()


def test_pages_that_are_not_there_are_an_outcome(stepped: Setting) -> None:
    stepped.copies.let_all()
    stepped.start(1, "offload", page=1000)
    (outcome,) = outcomes(stepped.mover, 1)
    assert outcome.error == "ValueError: device pages 1000 to 1001 are not all of 40"
    stepped.mover.close()


def test_expecting_a_job_that_nobody_knows_fails_the_step(stepped: Setting) -> None:
    """Rather than letting it read what never comes."""
    stepped.mover.expect([5], WAIT_S)
    with pytest.raises(LoadBackError, match="the mover knows no such job"):
        stepped.mover.await_layer(0)
    stepped.mover.close()


def test_every_outcome_is_told_at_once_and_an_error_of_the_told_is_survived() -> None:
    """So that an idle loop comes and takes it (F54)."""
    setting = Setting()
    setting.copies.let_all()
    for number in range(3):
        setting.start(number, "offload")
        assert setting.nudged.acquire(timeout=WAIT_S)
    setting.mover.on_done = lambda: 1 / 0  # type: ignore[assignment]
    setting.start(3, "offload")
    assert [outcome.number for outcome in outcomes(setting.mover, 4)] == [0, 1, 2, 3]
    setting.start(4, "restore")
    assert len(outcomes(setting.mover, 1)) == 1
    setting.mover.close()


def test_closing_in_the_middle_ends_after_the_piece(stepped: Setting) -> None:
    """Whoever waits is let go; what has no outcome has none any more, and what is started later fails."""
    stepped.start(1, "restore")
    stepped.start(2, "offload")
    stepped.copies.wait_asked()
    stepped.mover.expect([1], WAIT_S)
    failed: list[str] = []

    def step() -> None:
        with pytest.raises(LoadBackError) as raised:
            stepped.mover.await_layer(1)
        failed.append(str(raised.value))

    reader, closer = threading.Thread(target=step), threading.Thread(target=stepped.mover.close)
    reader.start()
    closer.start()
    reader.join(WAIT_S)
    assert failed == [f"load-back 1 failed: {CLOSED}"]
    stepped.copies.let()
    closer.join(WAIT_S)
    assert stepped.copies.closed
    assert stepped.copies.asked == ["bring 1"]
    assert stepped.mover.take_done() == []
    stepped.mover.wait_done(WAIT_S)  # at once: nothing will come
    stepped.start(3, "offload")
    assert stepped.mover.take_done() == [Outcome(3, 0.0, CLOSED)]
    stepped.mover.close()


def test_ten_thousand_looks_at_nothing_expected_are_let_through(stepped: Setting) -> None:
    """A model that asks at every layer of every step waits for nobody then, also while load-backs are under way."""
    stepped.start(1, "restore")
    for layer in range(10_000):
        stepped.mover.await_layer(layer % 30)
    stepped.copies.let_all()
    stepped.mover.close()


def test_a_state_summary_tells_what_is_under_way(stepped: Setting) -> None:
    stepped.start(1, "offload")
    stepped.copies.wait_asked()
    stepped.start(2, "restore")
    assert repr(stepped.mover) == "ThreadMover(2 jobs, 1 not begun, 0 outcomes)"
    stepped.copies.let_all()
    stepped.mover.close()


@pytest.mark.parametrize("seed", [0, 1])
def test_random_jobs_on_pages_of_their_own_copy_what_a_naive_copy_does(seed: int) -> None:
    """Many at a time, all kinds, as the tree gives them out: no page is the destination of two copies, or a source of one and the
    destination of another."""
    rng = np.random.default_rng(seed)
    pools = Pools(pages=60, host_pages=60, page_size=1)
    mover = ThreadMover(pools.copies())
    number = 0
    for _ in range(60):
        expected = pools.snapshot()
        device, host = rng.permutation(60).astype(np.int32), rng.permutation(60).astype(np.int32)
        cuts = np.sort(rng.choice(np.arange(1, 60), size=5, replace=False))
        for mine, theirs in zip(np.split(device, cuts), np.split(host, cuts), strict=True):
            kind: CopyKind = ("offload", "restore", "fetch")[int(rng.integers(3))]
            buffer = pools.buffer(len(mine)) if kind == "fetch" else None
            host_pages = theirs if buffer is None else None
            job = CopyJob(number=number, kind=kind, device_pages=mine, host_pages=host_pages, buffer=buffer)
            expected.copy(job)
            mover.start(job)
            number += 1
        assert {outcome.error for outcome in outcomes(mover, 6)} == {""}
        expected.check(pools)
    mover.close()
