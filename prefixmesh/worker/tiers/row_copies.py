"""Copies of KV pages within a CPU's memory, at a good share of what memcpy does, also when a page is one token.

The two pools lie differently: a token's keys of one layer, a *row* here, are neighbours of other tokens' rows on the device and of the
token's other layers on the host. So every copy is many short ones, 768 bytes each for SmolLM2 at page size 1; one call of torch or numpy for
each would cost more than its bytes. They are made by few calls over index arrays:

- Rows are numpy items of their whole size, so that an index moves a row by one memmove. (Torch's ``index_copy_`` walks a row element by
  element: a third of the speed.) Such calls let other threads have the interpreter, and use one core: the others belong to the model.
- Pages are copied in the order in which they lie on the device. Long runs of neighbours are gathered right into their place; all others
  into a block that stays in the core's cache, and from there to their places.
"""

import itertools
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from prefixmesh.cache.base import PageIndices
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.tiers.copies import CopyJob
from prefixmesh.worker.tiers.host_pool import HostPool
from prefixmesh.worker.tiers.page_checks import check_buffer, check_pages

BLOCK_BYTES: Final = 2**20
"""Gathered at a time: what stays in a core's second-level cache, or near it. Less costs more calls, each of which lets go of the interpreter
and waits for it again."""

PIECE_BYTES: Final = 8 * 2**20
"""Of an offload, between two looks at what else is to be done: about a millisecond."""

MIN_RUN_BYTES: Final = 24 * 2**10
"""Rows of neighbours from which on a call of their own, some 5 microseconds, is cheaper than copying them twice."""

Rows = npt.NDArray[np.void]
Indices = npt.NDArray[np.intp]


class RowCopies:
    """``PageCopies`` where both pools are in the CPU's memory. Its state is the mover thread's alone."""

    def __init__(self, pool: KVPool, host: HostPool) -> None:
        layers, _, page_size, heads, head_dim = pool.page_shape
        self.num_layers = layers
        self.page_bytes = host.page_bytes
        self._parts = 2 * layers
        row_bytes = page_size * heads * head_dim * pool.dtype.itemsize
        self._row = np.dtype((np.void, row_bytes))
        self._pool = pool
        self._device_pages = pool.storage.shape[2]  # with the scratch pages behind
        self._device = self._rows_of(pool.storage)
        self._host = self._rows_of(host.storage)
        self._host_pages = self._host.view(np.dtype((np.void, self.page_bytes)))
        self._block: Rows = np.empty(max(1, BLOCK_BYTES // row_bytes), self._row)
        self._pages_block: Rows = np.empty(max(1, BLOCK_BYTES // self.page_bytes), self._host_pages.dtype)

    def fence(self) -> None:
        """A CPU has done what was asked of it."""

    def pass_fence(self, fence: None) -> None:
        """Nothing is left to wait for."""

    def reached(self, mark: None) -> bool:
        """A mark is given after its bytes."""
        return True

    def join(self, mark: None) -> None:
        """Nothing is left to wait for."""

    def close(self) -> None:
        """The pools are others'."""

    def offload(self, job: CopyJob) -> Iterator[None]:
        """Page by page, a few MiB between two yields."""
        assert job.host_pages is not None
        # ``take`` is quick only where it may clip indices: they are looked at here.
        check_pages(job.device_pages, self._pool.num_pages, job.host_pages, len(self._host_pages))
        device, host = _by_device(job.device_pages, job.host_pages)
        starts = np.arange(self._parts, dtype=np.intp) * self._device_pages
        block = self._pages_block
        copied = 0
        for start in range(0, len(device), len(block)):
            into = host[start : start + len(block)]
            rows = (device[start : start + len(block), None] + starts).reshape(-1)
            run = _as_slice(into)
            pages = block[: len(into)] if run is None else self._host_pages[run]
            np.take(self._device, rows, out=pages.view(self._row), mode="clip")
            if run is None:
                self._host_pages[into] = pages
            copied += pages.nbytes
            if copied >= PIECE_BYTES:
                copied = 0
                yield

    def bring(self, job: CopyJob) -> Iterator[None]:
        """Layer by layer."""
        if job.buffer is None:
            assert job.host_pages is not None
            source, wanted, pages = self._host, job.host_pages, len(self._host_pages)
        else:
            check_buffer(job.buffer, self._pool)
            pages = len(job.buffer)
            source, wanted = self._rows_of(job.buffer), np.arange(pages, dtype=np.int32)
        check_pages(job.device_pages, self._pool.num_pages, wanted, pages)
        device, host = _by_device(job.device_pages, wanted)
        runs, others = _runs(device, MIN_RUN_BYTES // self._row.itemsize)
        first, places = host * self._parts, device[others]
        for layer in range(self.num_layers):
            for part in (2 * layer, 2 * layer + 1):
                into = self._device[part * self._device_pages : (part + 1) * self._device_pages]
                rows = first + part
                for start, end in runs:
                    place = int(device[start])
                    np.take(source, rows[start:end], out=into[place : place + end - start], mode="clip")
                self._scatter(source, rows[others], into, places)
            yield

    def _scatter(self, source: Rows, rows: Indices, into: Rows, places: Indices) -> None:
        """``into[places] = source[rows]``, by way of a block. (Keys and values of a token lie side by side in the source, but gathering
        both at once costs more in the second half than it saves in the first.)"""
        for start in range(0, len(places), len(self._block)):
            some = places[start : start + len(self._block)]
            block = self._block[: len(some)]
            np.take(source, rows[start : start + len(some)], out=block, mode="clip")
            into[some] = block

    def _rows_of(self, storage: torch.Tensor) -> Rows:
        """All rows of a contiguous tensor, in their order; a view."""
        rows: Rows = storage.view(-1).view(torch.uint8).numpy().view(self._row)
        return rows


def _by_device(device: PageIndices, others: npt.NDArray[Any]) -> tuple[Indices, Indices]:
    """Both ends by the order on the device."""
    order = np.argsort(device, kind="stable")
    return device[order].astype(np.intp), others[order].astype(np.intp)


def _runs(places: Indices, least: int) -> tuple[list[tuple[int, int]], Indices]:
    """Ranges of ``places`` that are runs of more than ``least`` neighbours, and where all others are."""
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    bounds = [0, *breaks.tolist(), len(places)]
    runs = [(start, end) for start, end in itertools.pairwise(bounds) if end - start > least]
    alone = np.ones(len(places), np.bool_)
    for start, end in runs:
        alone[start:end] = False
    return runs, np.flatnonzero(alone)


def _as_slice(places: Indices) -> slice | None:
    """The slice that these places are; None when they are none."""
    first, count = int(places[0]), len(places)
    if int(places[-1]) - first != count - 1 or (np.diff(places) != 1).any():
        return None
    return slice(first, first + count)
