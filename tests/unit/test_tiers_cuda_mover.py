"""Copies on a GPU, with the GPU's part played by a stand-in that does everything as late as it may: no read before its bytes, no write before
the reads of what was there, no outcome before the last byte."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch

from prefixmesh.errors import ConfigError
from prefixmesh.worker.tiers import cuda_mover
from prefixmesh.worker.tiers.copies import CopyJob, CopyKind
from prefixmesh.worker.tiers.cuda_mover import CudaCopies, seen_by_gpu
from tests.support.lazy_cuda import LazyCuda
from tests.support.movers import Bytes, Pools, pages_of


class Setting:
    """Copies over two pools of a CPU, and what is computed beside them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int = 0, staging_pages: int = 3) -> None:
        self.pools = Pools(page_size=1)
        monkeypatch.setattr(cuda_mover, "STAGING_BYTES", staging_pages * self.pools.host.page_bytes)
        monkeypatch.setattr(
            cuda_mover, "seen_by_gpu", lambda pinned, device: pinned.view(-1).view(torch.uint8)
        )
        self.cuda = LazyCuda(monkeypatch, seed)
        self.copies = CudaCopies(self.pools.device, self.pools.host)

    def pieces(self, job: CopyJob) -> Iterator[object]:
        return self.copies.offload(job) if job.kind == "offload" else self.copies.bring(job)

    def run(self, job: CopyJob) -> None:
        """As the mover's thread does."""
        self.copies.pass_fence(self.copies.fence())
        with self.cuda:
            for _ in self.pieces(job):
                pass


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["offload", "restore", "fetch"])
def test_when_a_job_has_ended_all_its_bytes_are_there(
    monkeypatch: pytest.MonkeyPatch, kind: CopyKind, seed: int
) -> None:
    """And no other was touched; staging holds a few of its pages at a time."""
    setting = Setting(monkeypatch, seed)
    job = setting.pools.job(0, kind, np.random.default_rng(seed))
    expected = setting.pools.snapshot()
    expected.copy(job)
    setting.run(job)
    expected.check(setting.pools)


@pytest.mark.parametrize("seed", range(12))
def test_an_offload_copies_what_was_computed_before_it_was_started(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The step that computes the KV is still to be done by the GPU when the copy of it is asked for."""
    setting = Setting(monkeypatch, seed)
    storage = setting.pools.device.storage
    computed = torch.full_like(storage, 3.0)
    setting.cuda.launch(lambda: storage.copy_(computed))
    setting.run(CopyJob(number=0, kind="offload", device_pages=pages_of(4, 7), host_pages=pages_of(1, 2)))
    assert (setting.pools.host.storage[1:3] == 3).all()


@pytest.mark.parametrize("seed", range(12))
def test_a_load_back_writes_to_no_page_that_is_still_to_be_read(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Its pages were another's until just now, whose step the GPU has not come to."""
    setting = Setting(monkeypatch, seed)
    storage, before = setting.pools.device.storage, setting.pools.device.storage.clone()
    read: list[torch.Tensor] = []
    setting.cuda.launch(lambda: read.append(storage.clone()))
    setting.run(CopyJob(number=0, kind="restore", device_pages=pages_of(4, 7), host_pages=pages_of(1, 2)))
    setting.cuda.compute.synchronize()
    assert torch.equal(read[0], before)


@pytest.mark.parametrize("seed", range(12))
def test_a_step_reads_each_layer_after_its_bytes_though_the_loop_never_waits(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The loop has launched its whole step before the GPU has copied anything."""
    setting = Setting(monkeypatch, seed)
    pools = setting.pools
    job = CopyJob(number=0, kind="restore", device_pages=pages_of(4, 7, 9), host_pages=pages_of(1, 2, 50))
    expected = pools.snapshot()
    expected.copy(job)
    read: list[torch.Tensor] = []

    def read_layer(layer: int) -> None:
        read.append(pools.device.storage[layer].clone())

    pieces = setting.pieces(job)
    for layer in range(pools.layers):
        with setting.cuda:
            mark = next(pieces)
        setting.copies.join(mark)
        setting.cuda.launch(partial(read_layer, layer))
    assert read == []
    assert not setting.copies.reached(mark)
    setting.cuda.compute.synchronize()
    assert setting.copies.reached(mark)
    for layer, found in enumerate(read):
        assert torch.equal(found, expected.device[layer])
    assert len(read) == pools.layers
    pieces.close()  # type: ignore[attr-defined]


def test_a_job_that_fails_has_ended_when_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was launched before the error is over, so that its pages may be given to others."""
    setting = Setting(monkeypatch)
    job = CopyJob(number=0, kind="restore", device_pages=pages_of(4, 7), host_pages=pages_of(1, 2))
    pieces = setting.pieces(job)
    with setting.cuda:
        next(pieces)
        setting.cuda.fails = [RuntimeError("an illegal address")]
        with pytest.raises(RuntimeError, match="an illegal address"):
            next(pieces)
    assert all(stream.done == stream.launched for stream in setting.cuda.streams)


def test_closing_waits_for_a_job_that_was_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch)
    unpinned: list[int] = []
    monkeypatch.setattr(setting.pools.host, "unpin", lambda: unpinned.append(1))
    job = CopyJob(number=0, kind="restore", device_pages=pages_of(4, 7), host_pages=pages_of(1, 2))
    with setting.cuda:
        pieces = setting.pieces(job)
        next(pieces)
        setting.copies.close()
    assert setting.cuda.streams[1].done == setting.cuda.streams[1].launched > 0
    assert unpinned == [1]


def test_pages_that_are_not_there_are_refused_before_anything_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that reads beyond its tensor ends the process's use of the GPU."""
    setting = Setting(monkeypatch)
    for kind, device, host in (("offload", 40, 1), ("restore", 1, 60)):
        job = CopyJob(number=0, kind=kind, device_pages=pages_of(device), host_pages=pages_of(host))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="not all of"):
            setting.run(job)
    assert setting.cuda.streams[1].launched == 0


def test_memory_that_the_gpu_cannot_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy on the device instead would be written and never reach the host."""
    monkeypatch.setattr(torch, "as_tensor", lambda address, device: torch.zeros(8))
    with pytest.raises(ConfigError, match="cannot read the host's pinned memory"):
        seen_by_gpu(torch.zeros(8), torch.device("cuda", 0))


def test_the_stand_in_finds_a_copy_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests above would hold anything to be right."""
    setting = Setting(monkeypatch)
    monkeypatch.setattr(CudaCopies, "_settle", lambda self: None)
    job = CopyJob(number=0, kind="restore", device_pages=pages_of(4, 7), host_pages=pages_of(1, 2))
    expected = Bytes(setting.pools.device.storage.clone(), setting.pools.host.storage.clone())
    expected.copy(job)
    setting.run(job)
    with pytest.raises(AssertionError):
        expected.check(setting.pools)
