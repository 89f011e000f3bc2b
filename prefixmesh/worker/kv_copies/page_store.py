"""The bytes of KV pages, for copies to other workers and from them: out of a pool as a part of a stream has them, and into it.

On a CPU a page is many rows (a layer's keys or values of its tokens) that lie apart; one call of numpy moves them all, each by one memmove, as
between the tiers (``tiers.row_copies``). On a GPU one kernel gathers them, and one copy brings them over the bus; that half has been run on
no GPU yet (docs/gpu.md). Both belong to the thread that computes, between two steps, so nothing else touches these pages meanwhile.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from prefixmesh.cache.base import PageIndices
from prefixmesh.errors import InternalError
from prefixmesh.worker.kv_copies.layout import CopyLayout
from prefixmesh.worker.kv_desk import PageBytes
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.tiers.host_pool import HostPool

BLOCK_BYTES: Final = 2**20
"""Moved by one call: what stays in a core's second-level cache, or near it."""

_Rows = npt.NDArray[np.void]


def open_pages(layout: CopyLayout, pool: KVPool, host: HostPool | None) -> PageBytes:
    """What copies KV of this pool, and of the host tier's where there is one."""
    return CpuPages(layout, pool, host) if pool.device.type == "cpu" else GpuPages(layout, pool, host)


class CpuPages:
    """``PageBytes`` of a pool in the CPU's memory."""

    def __init__(self, layout: CopyLayout, pool: KVPool, host: HostPool | None) -> None:
        self.layout = layout
        self._parts = 2 * pool.num_layers
        self._row = np.dtype((np.void, layout.page_bytes // self._parts))
        self._page = np.dtype((np.void, layout.page_bytes))
        self._rows: _Rows = _bytes_of(pool.storage).view(self._row)
        self._starts = np.arange(self._parts, dtype=np.intp) * pool.storage.shape[2]
        self._num_pages = pool.num_pages
        self._host = host
        self._at_once = max(1, BLOCK_BYTES // layout.page_bytes)

    def read(self, device: PageIndices, host: PageIndices) -> bytes:
        """See ``PageBytes.read``. O(bytes), at about 2 GB/s."""
        _check(device, self._num_pages)
        out = np.empty(len(device) + len(host), self._page)
        rows = out[: len(device)].view(self._row)
        for start in range(0, len(device), self._at_once):
            some = device[start : start + self._at_once]
            into = rows[start * self._parts : (start + len(some)) * self._parts]
            np.take(self._rows, self._rows_of(some), out=into, mode="clip")
        if len(host):
            out[len(device) :] = _host_pages(self._host, host, self._page)
        return out.tobytes()

    def write(self, device: PageIndices, kv: memoryview) -> None:
        """See ``PageBytes.write``. O(bytes), at about 1 GB/s."""
        _check(device, self._num_pages)
        rows = np.frombuffer(kv, self._row)
        for start in range(0, len(device), self._at_once):
            some = device[start : start + self._at_once]
            self._rows[self._rows_of(some)] = rows[start * self._parts : (start + len(some)) * self._parts]

    def _rows_of(self, pages: PageIndices) -> npt.NDArray[np.intp]:
        """Where the rows of these pages lie, in a page's own order."""
        return (pages.astype(np.intp)[:, None] + self._starts).reshape(-1)


class GpuPages:
    """``PageBytes`` of a pool in a GPU's memory. Blocks until the bytes have moved."""

    def __init__(self, layout: CopyLayout, pool: KVPool, host: HostPool | None) -> None:
        self.layout = layout
        self._pool, self._host = pool, host
        self._page = np.dtype((np.void, layout.page_bytes))
        layers, _, page_size, heads, head_dim = layout.page_shape
        self._shape = (layers, 2, -1, page_size, heads, head_dim)

    def read(self, device: PageIndices, host: PageIndices) -> bytes:
        """See ``PageBytes.read``."""
        _check(device, self._pool.num_pages)
        with torch.inference_mode():
            gathered = self._pool.storage.index_select(2, self._indices(device))
            told = _bytes_of(gathered.permute(2, 0, 1, 3, 4, 5).contiguous().cpu())
        read = told.tobytes()
        return read + _host_pages(self._host, host, self._page).tobytes() if len(host) else read

    def write(self, device: PageIndices, kv: memoryview) -> None:
        """See ``PageBytes.write``."""
        _check(device, self._pool.num_pages)
        layers, two, _, *rest = self._shape
        with torch.inference_mode():
            came = torch.frombuffer(bytearray(kv), dtype=torch.uint8).to(self._pool.device)
            pages = came.view(self._pool.dtype).view(len(device), layers, two, *rest)
            self._pool.storage.index_copy_(2, self._indices(device), pages.permute(1, 2, 0, 3, 4, 5))

    def _indices(self, pages: PageIndices) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self._pool.device)


def _host_pages(host: HostPool | None, pages: PageIndices, page: "np.dtype[Any]") -> _Rows:
    if host is None:
        raise InternalError(f"{len(pages)} host pages of a worker without a host tier")
    _check(pages, host.num_pages)
    read: _Rows = _bytes_of(host.storage).view(page)[pages]
    return read


def _bytes_of(storage: torch.Tensor) -> npt.NDArray[np.uint8]:
    """A contiguous CPU tensor's memory; a view."""
    flat: npt.NDArray[np.uint8] = storage.reshape(-1).view(torch.uint8).numpy()
    return flat


def _check(pages: PageIndices, num_pages: int) -> None:
    """``take`` clips indices, so they are looked at before."""
    if len(pages) and (int(pages.min()) < 0 or int(pages.max()) >= num_pages):
        raise InternalError(f"pages beyond the {num_pages} that there are")
