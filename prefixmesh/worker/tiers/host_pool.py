"""The host pool: KV pages in the host's memory, each page one contiguous piece across all layers.

One tensor of [num_pages, num_layers, 2, page_size, num_kv_heads, head_dim], of the device pool's dtype. A page is so one copy whatever
the model's depth, may be written to a file as it lies, and its part of one layer, keys and values, is contiguous as well.

It knows nothing of who owns a page (``PageAllocator``) and copies nothing (``ThreadMover``). On a CPU pages take memory only once they are
written. For a GPU the memory is pinned, as its copies need, and taken whole at once.
"""

from contextlib import suppress

import torch

from prefixmesh.errors import ConfigError
from prefixmesh.worker.model.kv_pool import KVPool, zeros

_CPU = torch.device("cpu")


class HostPool:
    """Pages of KV in the host's memory, laid out for a device pool."""

    def __init__(self, pool: KVPool, num_pages: int) -> None:
        """ConfigError when the memory cannot be had."""
        if num_pages < 1:
            raise ConfigError(f"the host pool needs at least one page, got {num_pages}")
        self.num_pages = num_pages
        self.page_size = pool.page_size
        self.dtype = pool.dtype
        self.page_shape = pool.page_shape
        """[num_layers, 2, page_size, num_kv_heads, head_dim]"""

        self.pinned = pool.device.type != "cpu"
        """Whether a GPU may read and write it itself, until ``unpin``."""

        try:
            self.storage = zeros((num_pages, *self.page_shape), pool.dtype, _CPU)
            if self.pinned:
                _pin(self.storage)
        except (MemoryError, RuntimeError) as error:
            raise ConfigError(f"a host pool of {num_pages} pages cannot be had: {error}") from error

    def __repr__(self) -> str:
        return f"HostPool({self.num_pages} pages of {self.page_size}, {self.dtype}, {self.num_bytes / 2**20:.0f} MiB)"

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.storage.nbytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers' keys and values."""
        return self.storage[0].nbytes

    def buffer(self, num_pages: int) -> torch.Tensor:
        """Memory for pages that are in no tier, [num_pages, *page_shape], as a fetch brings them; never pinned. Holds anything."""
        return torch.empty((num_pages, *self.page_shape), dtype=self.dtype)

    def unpin(self) -> None:
        """A GPU is done with it. Any number of times."""
        if self.pinned:
            self.pinned = False
            with suppress(RuntimeError):  # a lost device has forgotten it
                torch.cuda.cudart().cudaHostUnregister(self.storage.data_ptr())  # type: ignore[no-untyped-call]


def _pin(storage: torch.Tensor) -> None:
    """Pin memory where it is. (Torch's own pinned memory is taken by powers of two: 40 GiB would become 64.)"""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(storage.data_ptr(), storage.nbytes, 0))
    if code:
        raise RuntimeError(f"pinning {storage.nbytes / 2**20:,.0f} MiB failed with CUDA error {code}")
