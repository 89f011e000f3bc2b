"""Copies of KV pages between a GPU's memory and the host's: ``PageCopies`` by kernels on a stream of their own.

The host pool is pinned, so that a GPU's kernels may read and write it where it lies, over the bus. A layer of a load-back is one kernel that
gathers its rows out of host pages into staging, and two that put keys and values in their places; no row is a call of its own, however
small pages are, and no core of the host copies anything. (SGLang's HiCache came to kernels for the same reason. These are torch's.)

What is ordered, and how:

===================================================================  ============================================================
a copy begins after all that the loop had asked of the GPU before    ``fence``: an event on the loop's stream, waited for by the
                                                                     mover's thread, which then launches
a step reads a layer after its bytes have come                       ``join``: the loop's stream waits for the layer's event, on
                                                                     the GPU; the loop only waits until it was recorded
an outcome comes after all bytes, also of a copy that failed         the mover's thread waits for the stream
===================================================================  ============================================================

Nothing here was run on a GPU yet (docs/gpu.md); its order is proved on a stand-in.
"""

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any, Final

import numpy as np
import torch

from prefixmesh.cache.base import PageIndices
from prefixmesh.errors import ConfigError
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.tiers.copies import CopyJob
from prefixmesh.worker.tiers.host_pool import HostPool
from prefixmesh.worker.tiers.page_checks import check_buffer, check_pages

STAGING_BYTES: Final = 64 * 2**20
"""On the GPU. Large enough that launching is a small part of copying what fits in it (a millisecond or more over any bus), and a hundredth of
what a GPU has."""


class CudaCopies:
    """``PageCopies`` between a GPU and pinned memory."""

    def __init__(self, pool: KVPool, host: HostPool) -> None:
        """ConfigError where the GPU cannot see the host's memory."""
        self._pool, self._pinned = pool, host
        self._device = pool.device
        self.num_layers = pool.num_layers
        self.page_bytes = host.page_bytes
        self._parts = 2 * pool.num_layers
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # Kernels move whole words: a quarter of the threads that elements of two bytes would take.
        row_bytes = self.page_bytes // self._parts
        self._word = torch.int64 if row_bytes % torch.int64.itemsize == 0 else torch.uint8
        self._row = row_bytes // self._word.itemsize
        self._on_device = self._words_of(pool.storage).view(self._parts, -1, self._row)
        self._on_host = self._words_of(seen_by_gpu(host.storage, self._device)).view(
            -1, self._parts, self._row
        )
        room = max(1, STAGING_BYTES // self.page_bytes) * self._parts * self._row
        self._staging = torch.empty(room, dtype=self._word, device=self._device)

    def fence(self) -> Any:
        """An event behind all that the loop's stream was asked to do."""
        return self._recorded(torch.cuda.current_stream(self._device))

    def pass_fence(self, fence: Any) -> None:
        """Block this thread, without spinning."""
        fence.synchronize()

    def reached(self, mark: Any) -> bool:
        """Whether the GPU has got to the event."""
        return bool(mark.query())

    def join(self, mark: Any) -> None:
        """The loop's stream waits for the event; the loop does not."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def close(self) -> None:
        """Wait for what a job that was broken off still copies, and let go of the host's memory."""
        with suppress(RuntimeError):  # a lost device copies nothing
            self._stream.synchronize()
        self._pinned.unpin()

    def offload(self, job: CopyJob) -> Iterator[None]:
        """As many pages as staging holds between two yields."""
        assert job.host_pages is not None
        check_pages(job.device_pages, self._pool.num_pages, job.host_pages, self._pinned.num_pages)
        at_once = len(self._staging) // (self._parts * self._row)
        try:
            for start in range(0, len(job.device_pages), at_once):
                with self._aside():
                    of, to = (
                        self._indices(pages[start : start + at_once])
                        for pages in (job.device_pages, job.host_pages)
                    )
                    staged = self._staged(self._parts, len(of))
                    torch.index_select(self._on_device, 1, of, out=staged)
                    self._on_host.index_copy_(0, to, staged.transpose(0, 1))
                    done = self._recorded(self._stream)
                done.synchronize()  # so that a load-back waits for one piece, not for all that was launched
                yield
        finally:
            self._settle()

    def bring(self, job: CopyJob) -> Iterator[Any]:
        """Launches a layer, and goes on to the next without waiting for it."""
        if job.buffer is None:
            assert job.host_pages is not None
            source = self._on_host
            check_pages(job.device_pages, self._pool.num_pages, job.host_pages, len(source))
        else:
            check_buffer(job.buffer, self._pool)
            source = self._words_of(job.buffer).view(-1, self._parts, self._row)
            wanted = np.arange(len(source), dtype=np.int32)
            check_pages(job.device_pages, self._pool.num_pages, wanted, len(source))
        with self._aside():
            of = None if job.host_pages is None else self._indices(job.host_pages)
            to = self._indices(job.device_pages)
        try:
            for layer in range(self.num_layers):
                with self._aside():
                    self._bring_layer(layer, source, of, to)
                    mark = self._recorded(self._stream)
                yield mark
        finally:
            self._settle()

    def _bring_layer(
        self, layer: int, source: torch.Tensor, of: torch.Tensor | None, to: torch.Tensor
    ) -> None:
        """``of`` are the source's pages; None for all of them, in their order, where kernels cannot read them."""
        rows = source[:, 2 * layer : 2 * layer + 2]
        at_once = len(self._staging) // (2 * self._row)
        for start in range(0, len(to), at_once):
            some = slice(start, start + at_once)
            staged = self._staged(len(to[some]), 2)
            if of is None:
                staged.copy_(rows[some])
            else:
                torch.index_select(rows, 0, of[some], out=staged)
            for part in (0, 1):
                self._on_device[2 * layer + part].index_copy_(0, to[some], staged[:, part])

    def _aside(self) -> ExitStack:
        """On this thread, launch on the copies' stream."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.cuda.device(self._device))
        stack.enter_context(torch.cuda.stream(self._stream))
        return stack

    def _settle(self) -> None:
        """Whether a job ended well or not, nothing of it is under way any more."""
        self._recorded(self._stream).synchronize()

    def _staged(self, *shape: int) -> torch.Tensor:
        """Staging's first words. Always the same: one stream uses it, so that one use is over before the next begins."""
        return self._staging[: int(np.prod(shape)) * self._row].view(*shape, self._row)

    def _words_of(self, storage: torch.Tensor) -> torch.Tensor:
        return storage.view(-1).view(self._word)

    def _indices(self, pages: PageIndices) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self._device)

    @staticmethod
    def _recorded(stream: Any) -> Any:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


def seen_by_gpu(pinned: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same bytes as a tensor of the GPU's, [bytes] uint8: under unified addressing, which every 64-bit system has, a pinned address is
    good on both sides. ConfigError where it is not."""
    seen = torch.as_tensor(_Address(pinned), device=device)
    if seen.data_ptr() != pinned.data_ptr():
        raise ConfigError(
            f"{device} cannot read the host's pinned memory where it lies: no host tier is possible"
        )
    return seen


class _Address:
    """An address in the form in which array libraries tell each other of a GPU's memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # lives as long as whoever uses the address
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 2,
        }
