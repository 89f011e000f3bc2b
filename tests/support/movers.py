"""Pools to copy between, copies written out page by page, and copies that a test lets on piece by piece."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from prefixmesh.cache.base import PageIndices
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.tiers.copies import CopyJob, CopyKind, Mover, Outcome
from prefixmesh.worker.tiers.host_pool import HostPool
from prefixmesh.worker.tiers.page_copies import PageCopies
from prefixmesh.worker.tiers.row_copies import RowCopies
from tests.support.paged_attention import config_of

WAIT_S = 30.0
"""For what happens at once on an idle machine."""


class Pools:
    """A device pool and a host pool of different random bytes in every place."""

    def __init__(
        self, pages: int = 40, host_pages: int = 60, page_size: int = 2, dtype: torch.dtype = torch.float32
    ) -> None:
        self.device = KVPool(config_of(4, 2), pages, page_size, dtype, torch.device("cpu"), scratch_pages=1)
        self.host = HostPool(self.device, host_pages)
        self.layers = self.device.num_layers
        self._numbers = torch.Generator().manual_seed(0)
        for storage in (self.device.storage, self.host.storage):
            storage.copy_(self._random(storage.shape))

    def copies(self) -> RowCopies:
        return RowCopies(self.device, self.host)

    def buffer(self, pages: int) -> torch.Tensor:
        return self.host.buffer(pages).copy_(self._random((pages, *self.device.page_shape)))

    def snapshot(self) -> "Bytes":
        return Bytes(self.device.storage.clone(), self.host.storage.clone())

    def job(self, number: int, kind: CopyKind, rng: np.random.Generator) -> CopyJob:
        """Of random pages: scattered, or as neighbours, on either side."""
        count = int(rng.integers(0, min(self.device.num_pages, self.host.num_pages) + 1))
        device = some_pages(rng, self.device.num_pages, count)
        if kind == "fetch":
            return CopyJob(number=number, kind=kind, device_pages=device, buffer=self.buffer(count))
        host = some_pages(rng, self.host.num_pages, count)
        return CopyJob(number=number, kind=kind, device_pages=device, host_pages=host)

    def _random(self, shape: Any) -> torch.Tensor:
        return torch.randn(shape, generator=self._numbers)


class Bytes:
    """What both pools should hold."""

    def __init__(self, device: torch.Tensor, host: torch.Tensor) -> None:
        self.device, self.host = device, host

    def copy(self, job: CopyJob) -> None:
        """The same as a mover, page by page."""
        if job.host_pages is None:
            for index, page in enumerate(job.device_pages.tolist()):
                self.device[:, :, page] = job.buffer[index]
            return
        for page, host_page in zip(job.device_pages.tolist(), job.host_pages.tolist(), strict=True):
            if job.kind == "offload":
                self.host[host_page] = self.device[:, :, page]
            else:
                self.device[:, :, page] = self.host[host_page]

    def check(self, pools: Pools) -> None:
        """All bytes of both pools, also those that no job named."""
        assert torch.equal(pools.device.storage, self.device)
        assert torch.equal(pools.host.storage, self.host)


def some_pages(rng: np.random.Generator, of: int, count: int) -> PageIndices:
    way = rng.integers(3)
    if way == 0:
        first = int(rng.integers(0, of - count + 1))
        return np.arange(first, first + count, dtype=np.int32)
    pages = rng.permutation(of)[:count].astype(np.int32)
    return np.sort(pages) if way == 1 else pages


def pages_of(*pages: int) -> PageIndices:
    return np.array(pages, dtype=np.int32)


def outcomes(mover: Mover, count: int) -> list[Outcome]:
    """The next so many, waited for."""
    found: list[Outcome] = []
    while len(found) < count:
        mover.wait_done(WAIT_S)
        more = mover.take_done()
        assert more, f"{len(found)} of {count} outcomes came"
        found += more
    return found


class SteppedCopies:
    """``PageCopies`` whose thread waits before each piece until the test lets it on, and which remembers what it was asked."""

    def __init__(self, inner: PageCopies, fails: dict[int, Exception] | None = None) -> None:
        self._inner = inner
        self.page_bytes, self.num_layers = inner.page_bytes, inner.num_layers
        self.asked: list[str] = []
        """``offload 3`` or ``bring 4``, as each piece begins."""

        self._fails = {} if fails is None else fails
        self._may = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)
        self.closed = False

    def let(self, pieces: int = 1) -> None:
        """Let so many pieces begin, now or later."""
        self._may.release(pieces)

    def let_all(self) -> None:
        self.let(1000)

    def wait_asked(self) -> None:
        """Until the thread stands before a piece that was not seen before."""
        assert self._arrived.acquire(timeout=WAIT_S)

    def fence(self) -> Any:
        return self._inner.fence()

    def pass_fence(self, fence: Any) -> None:
        self._inner.pass_fence(fence)

    def reached(self, mark: Any) -> bool:
        return self._inner.reached(mark)

    def join(self, mark: Any) -> None:
        self._inner.join(mark)

    def close(self) -> None:
        self.closed = True
        self._inner.close()

    def offload(self, job: CopyJob) -> Iterator[None]:
        yield from self._stepped("offload", job, self._inner.offload(job))
        yield  # so that others may pass after the last piece, however short a job is

    def bring(self, job: CopyJob) -> Iterator[Any]:
        yield from self._stepped("bring", job, self._inner.bring(job))

    def _stepped(self, word: str, job: CopyJob, pieces: Iterator[Any]) -> Iterator[Any]:
        while True:
            self.asked.append(f"{word} {job.number}")
            self._arrived.release()
            assert self._may.acquire(timeout=WAIT_S)
            if job.number in self._fails:
                raise self._fails[job.number]
            try:
                mark = next(pieces)
            except StopIteration:
                return
            yield mark
