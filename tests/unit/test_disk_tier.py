"""The disk tier as a whole: what a worker stored, a worker that starts later finds, whatever became of the disk meanwhile."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from prefixmesh.errors import ConfigError
from prefixmesh.worker.tiers import disk_files, disk_tier, disk_work
from prefixmesh.worker.tiers.disk_files import SUFFIX
from prefixmesh.worker.tiers.disk_jobs import ReadDone, WriteDone
from prefixmesh.worker.tiers.disk_runs import DiskIdentity, KvLayout
from prefixmesh.worker.tiers.disk_tier import DiskTier
from tests.support.disk_kit import (
    IDENTITY,
    LAYOUT,
    OTHER_NAMESPACE,
    WAIT_S,
    FakeHost,
    await_outcome,
    found,
    long_key,
    open_tier,
    page_numbers,
    pages_from,
    read,
    store,
)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = open_tier(tmp_path)
    yield tier
    tier.close()


def reopen(tier: DiskTier, folder: Path, identity: DiskIdentity = IDENTITY) -> DiskTier:
    tier.close()
    return open_tier(folder, identity=identity)


def test_a_prefix_is_read_back_page_by_page_from_any_page_on(tier: DiskTier) -> None:
    key = long_key(72)
    store(tier, key, first_page=10)
    prefix = found(tier, key)
    assert prefix is not None
    assert (prefix.start_tokens, prefix.end_tokens, len(prefix.parts)) == (0, 72, 3)
    done = read(tier, prefix)
    assert (done.size_tokens, page_numbers(done)) == (72, list(range(10, 46)))
    rest = found(tier, key, from_tokens=30)
    assert rest is not None
    assert page_numbers(read(tier, rest)) == list(range(25, 46))
    part = rest.cut(40)
    assert part is not None
    assert page_numbers(read(tier, part)) == list(range(25, 30))
    assert rest.cut(30) is None


def test_a_worker_that_starts_again_finds_what_it_had(tmp_path: Path) -> None:
    key = long_key(2001)
    tier = open_tier(tmp_path, host=FakeHost(1024))
    store(tier, key)
    second = reopen(tier, tmp_path)
    prefix = found(second, key)
    assert prefix is not None
    assert prefix.size_tokens >= 0.9 * 2001
    assert page_numbers(read(second, prefix)) == list(range(1000))
    assert second.counts().stored_tokens == 2000
    second.close()


@pytest.mark.parametrize(
    "identity",
    [
        DiskIdentity(revision="r2", layout=LAYOUT),
        DiskIdentity(revision="r1", layout=msgspec.structs.replace(LAYOUT, dtype="bfloat16")),
        DiskIdentity(revision="r1", layout=msgspec.structs.replace(LAYOUT, page_size=4)),
        DiskIdentity(revision="r1", layout=msgspec.structs.replace(LAYOUT, num_layers=2)),
    ],
    ids=["revision", "dtype", "page size", "layers"],
)
def test_another_models_worker_finds_nothing_and_nothing_is_lost_by_it(
    tier: DiskTier, tmp_path: Path, identity: DiskIdentity
) -> None:
    """F33."""
    key = long_key(40)
    store(tier, key)
    size = tier.counts().stored_bytes
    other = reopen(tier, tmp_path, identity)
    assert found(other, key) is None
    assert (other.counts().stored_tokens, other.counts().bad_files) == (0, 0)
    assert other.counts().stored_bytes == size
    store(other, key)  # under the same names, and beside them
    again = reopen(other, tmp_path)
    prefix = found(again, key)
    assert prefix is not None
    assert page_numbers(read(again, prefix)) == list(range(20))
    again.close()


def test_another_namespace_finds_nothing(tier: DiskTier) -> None:
    """Another tenant's, or that of a fleet with another secret."""
    store(tier, long_key(40))
    assert found(tier, long_key(40, namespace=OTHER_NAMESPACE)) is None


def test_a_bad_file_gives_what_is_before_it_and_is_never_asked_again(tier: DiskTier, tmp_path: Path) -> None:
    key = long_key(72)
    store(tier, key)
    prefix = found(tier, key)
    assert prefix is not None
    path = tmp_path / prefix.parts[1].file.name
    raw = bytearray(path.read_bytes())
    raw[-400] ^= 4
    path.write_bytes(raw)
    done = read(tier, prefix)
    assert page_numbers(done) == list(range(16))
    assert tier.counts().bad_files == 1
    shorter = found(tier, key)
    assert shorter is not None
    assert shorter.end_tokens == 32
    assert path.with_name(path.name + ".bad").exists()
    store(tier, key)  # it is stored again
    again = found(tier, key)
    assert again is not None
    assert page_numbers(read(tier, again)) == list(range(36))


def test_a_file_that_somebody_removed_is_a_miss_and_no_bad_file(tier: DiskTier, tmp_path: Path) -> None:
    key = long_key(72)
    store(tier, key)
    prefix = found(tier, key)
    assert prefix is not None
    (tmp_path / prefix.parts[0].file.name).unlink()
    done = read(tier, prefix)
    assert (done.size_tokens, done.buffer) == (0, None)
    assert tier.counts().bad_files == 0
    assert found(tier, key) is None
    rest = found(tier, key, from_tokens=32)  # for whoever has the beginning elsewhere
    assert rest is not None


def test_the_folder_stays_within_its_bound(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, max_bytes=40_000)
    for first in range(100, 5000, 100):
        store(tier, long_key(32, first=first))
    files = list(tmp_path.glob(f"*{SUFFIX}"))
    assert 2 <= len(files) == len(tier._index)
    assert sum(file.stat().st_size for file in files) == tier.counts().stored_bytes <= 40_000
    assert found(tier, long_key(32, first=4900)) is not None
    assert found(tier, long_key(32, first=100)) is None
    tier.close()


def test_what_was_used_last_is_kept_over_a_restart(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for first in (100, 200, 300):
        store(tier, long_key(32, first=first))
    tier.use(tier.units(long_key(32, first=100)))
    store(tier, long_key(32, first=400))
    size = tier.counts().stored_bytes
    tier.close()
    smaller = open_tier(tmp_path, max_bytes=size // 2)
    kept = [first for first in (100, 200, 300, 400) if found(smaller, long_key(32, first=first))]
    assert kept == [100, 400]
    smaller.close()


def test_of_a_conversation_that_grows_the_end_goes_first(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, max_bytes=40_000)
    for size in (32, 64, 96):
        store(tier, long_key(size))
    for first in (1000, 2000, 3000):
        store(tier, long_key(32, first=first))
    left = found(tier, long_key(96))
    assert left is not None
    assert left.end_tokens == 64
    tier.close()


def full_disk(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_told_once_and_what_is_there_is_served(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store(tier, long_key(32))
    monkeypatch.setattr(disk_work, "write_run", full_disk)
    store(tier, long_key(32, first=500))
    store(tier, long_key(32, first=600))
    assert [record.message for record in caplog.records if "takes_no_more" in record.message] == [
        f"disk.takes_no_more folder={tier._folder} error=[Errno 28] No space left on device"
    ]
    counts = tier.counts()
    assert (counts.failed_writes, counts.dropped_tokens, counts.written_tokens) == (1, 64, 32)
    assert found(tier, long_key(32, first=500)) is None
    prefix = found(tier, long_key(32))
    assert prefix is not None
    assert page_numbers(read(tier, prefix)) == list(range(16))


def test_a_folder_that_vanishes_costs_what_was_in_it_and_no_more(tier: DiskTier, tmp_path: Path) -> None:
    store(tier, long_key(32))
    shutil.rmtree(tmp_path)
    store(tier, long_key(32, first=500))
    assert tier.counts().failed_writes == 1
    prefix = found(tier, long_key(32))
    assert prefix is not None
    assert read(tier, prefix).size_tokens == 0
    assert found(tier, long_key(32)) is None


def test_a_file_that_cannot_be_read_now_is_served_when_it_can(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of a descriptor, say: that is a miss, and no fault of the file."""
    store(tier, long_key(32))
    prefix = found(tier, long_key(32))
    assert prefix is not None
    with monkeypatch.context() as troubled:
        troubled.setattr(disk_work, "read_pages", no_descriptor)
        assert read(tier, prefix).size_tokens == 0
    assert tier.counts().bad_files == 0
    again = found(tier, long_key(32))
    assert again is not None
    assert page_numbers(read(tier, again)) == list(range(16))


def no_descriptor(*_: object) -> None:
    raise OSError(24, "Too many open files")


def test_two_tiers_on_one_folder_are_one_too_many(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "LOCK_WAIT_S", 0.0)
    with pytest.raises(ConfigError, match="in use by process"):
        open_tier(tmp_path)


def test_who_comes_while_the_last_one_is_ending_waits_for_it(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "LOCK_WAIT_S", WAIT_S)
    threading.Timer(0.1, tier.close).start()
    open_tier(tmp_path).close()


class Gate:
    """Holds whoever calls it until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(WAIT_S)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """No write ends before the gate is open."""
    gate, write = Gate(), disk_files.write_run

    def slow(*arguments: object) -> int:
        gate()
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(disk_work, "write_run", slow)
    return gate


def test_no_more_waits_than_may_and_a_prefix_is_written_from_its_beginning(
    tmp_path: Path, slow_disk: Gate
) -> None:
    tier = open_tier(tmp_path, host=FakeHost(128))  # an eighth of it may wait, which one file is beyond
    key = long_key(100)
    number = tier.write(key, pages_from(0, 50))
    assert number is not None
    assert not tier.has_room()
    assert tier.write(long_key(32, first=900), pages_from(0, 16)) is None
    slow_disk.opened.set()
    assert await_outcome(tier) == WriteDone(number, 32)
    assert tier.has_room()
    prefix = found(tier, key)
    assert prefix is not None
    assert prefix.end_tokens == 32
    store(tier, key)  # asked again, it goes on where it ended
    longer = found(tier, key)
    assert longer is not None
    assert page_numbers(read(tier, longer)) == list(range(50))
    assert tier.counts().dropped_tokens == 0
    tier.close()


def test_what_is_larger_than_the_whole_bound_is_dropped_and_counted(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, max_bytes=1000)
    store(tier, long_key(32))
    assert tier.counts().dropped_tokens == 32
    assert tier.counts().stored_bytes == 0
    tier.close()


def test_a_closed_tier_has_written_what_waited(tmp_path: Path, slow_disk: Gate) -> None:
    tier = open_tier(tmp_path, host=FakeHost(2048))
    numbers = [tier.write(long_key(8, first=first), pages_from(0, 4)) for first in (100, 200, 300)]
    assert None not in numbers
    threading.Timer(0.05, slow_disk.opened.set).start()
    tier.close()
    again = open_tier(tmp_path)
    assert again.counts().stored_tokens == 24
    again.close()


def test_host_pages_are_read_before_the_outcome_and_never_after(tmp_path: Path, slow_disk: Gate) -> None:
    host = FakeHost(2048)
    tier = open_tier(tmp_path, host=host)
    key = long_key(32)
    number = tier.write(key, pages_from(5, 16))
    assert slow_disk.reached.wait(WAIT_S)
    assert tier.take_done() == []
    slow_disk.opened.set()
    assert await_outcome(tier) == WriteDone(number or 0, 32)
    host.storage.zero_()  # the pages are another's now
    prefix = found(tier, key)
    assert prefix is not None
    assert page_numbers(read(tier, prefix)) == list(range(5, 21))
    tier.close()


def test_a_cancelled_read_that_has_not_begun_reads_nothing(tmp_path: Path) -> None:
    gate, host = Gate(), FakeHost()
    buffer = host.buffer

    def slow(num_pages: int):  # type: ignore[no-untyped-def]
        gate()
        return buffer(num_pages)

    host.buffer = slow  # type: ignore[method-assign]
    tier = open_tier(tmp_path, host=host)
    store(tier, long_key(32))
    prefix = found(tier, long_key(32))
    assert prefix is not None
    first, second = tier.read(prefix), tier.read(prefix)
    assert first is not None
    assert second is not None
    tier.cancel(second)
    gate.opened.set()
    outcomes: list[ReadDone | WriteDone] = []
    while len(outcomes) < 2:
        tier.wait_done(WAIT_S)
        outcomes += tier.take_done()
    sizes = {done.number: done.size_tokens for done in outcomes if isinstance(done, ReadDone)}
    assert sizes == {first: 32, second: 0}
    tier.cancel(first)  # too late, and forgotten
    assert tier._cancelled == set()
    tier.close()


def test_every_outcome_is_told_of(tmp_path: Path) -> None:
    told = threading.Semaphore(0)
    tier = open_tier(tmp_path)
    tier.on_done = told.release
    store(tier, long_key(32))
    prefix = found(tier, long_key(32))
    assert prefix is not None
    read(tier, prefix)
    assert told.acquire(timeout=WAIT_S)
    assert told.acquire(timeout=WAIT_S)
    tier.close()


def test_half_precision_and_large_pages_come_back_as_they_went(tmp_path: Path) -> None:
    layout = KvLayout(dtype="bfloat16", num_layers=2, num_kv_heads=1, head_dim=4, page_size=256)
    tier = open_tier(tmp_path, identity=DiskIdentity(revision="r1", layout=layout), max_bytes=2**24)
    key = long_key(2000)
    store(tier, key, first_page=3)
    prefix = found(tier, key)
    assert prefix is not None
    done = read(tier, prefix)
    assert done.size_tokens == 1792
    assert done.buffer.shape == (7, 2, 2, 256, 1, 4)
    assert [int(page.max()) for page in done.buffer] == list(range(3, 10))
    tier.close()
