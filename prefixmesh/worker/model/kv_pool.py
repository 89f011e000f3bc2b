"""The KV pool: keys and values of every token that any sequence or the prefix cache holds, in pages.

One tensor of [num_layers, 2, num_pages, page_size, num_kv_heads, head_dim]. A layer's keys (and values) are a view of
[num_pages, page_size, num_kv_heads, head_dim], which is the paged "NHD" layout FlashInfer reads; seen as *slots*
(``page * page_size + offset``) the same memory is [num_pages * page_size, num_kv_heads, head_dim].

The pool knows nothing of who owns a page. It is zeroed when made, so that memory nobody wrote holds no NaN. Behind the pages that
can be owned there may be scratch pages, which nobody may own (see ``padded_batch``).

Where KV may be on its way from another memory, who reads a layer asks ``await_layer`` before.
"""

from typing import Protocol

import numpy as np
import torch

from prefixmesh.errors import ConfigError
from prefixmesh.model_files.model_config import ModelConfig


class Arrivals(Protocol):
    """What brings KV to the pool while steps are computed: ``Mover``."""

    def await_layer(self, layer: int) -> None:
        """Block until what the step reads of a layer is there; LoadBackError when it does not come."""
        ...


class KVPool:
    """Paged memory for keys and values of all layers."""

    arrivals: Arrivals | None = None
    """Set where there is a host tier."""

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        scratch_pages: int = 0,
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ConfigError(
                f"the KV pool needs at least one page of one token, got {num_pages} of {page_size}"
            )
        self.num_pages = num_pages
        """Pages that can be owned; the first scratch page comes right after them."""

        self.scratch_pages = scratch_pages
        self.page_size = page_size
        self.num_layers = config.num_layers
        self.dtype = dtype
        self.device = device
        pages = num_pages + scratch_pages
        shape = (config.num_layers, 2, pages, page_size, config.num_kv_heads, config.head_dim)
        self.storage = zeros(shape, dtype, device)
        slots = self.storage.view(
            config.num_layers, 2, pages * page_size, config.num_kv_heads, config.head_dim
        )
        self._keys = [slots[layer, 0] for layer in range(config.num_layers)]
        self._values = [slots[layer, 1] for layer in range(config.num_layers)]

    def __repr__(self) -> str:
        return f"KVPool({self.num_pages} pages of {self.page_size}, {self.dtype}, {self.num_bytes / 2**20:.0f} MiB)"

    @property
    def total_tokens(self) -> int:
        """Tokens the pool can hold for its owners."""
        return self.num_pages * self.page_size

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool, scratch pages included."""
        return self.storage.nbytes

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Of all that one page holds: [num_layers, 2, page_size, num_kv_heads, head_dim]."""
        layers, two, _, *rest = self.storage.shape
        return layers, two, *rest

    def await_layer(self, layer: int) -> None:
        """Before a step reads a layer: block until what it reads of it has come. Nothing where nothing is on its way. Raises LoadBackError
        when it does not come: the step is void."""
        if self.arrivals is not None:
            self.arrivals.await_layer(layer)

    def await_layers(self) -> None:
        """The same for all layers, for a step that reads them without asking."""
        if self.arrivals is not None:
            for layer in range(self.num_layers):
                self.arrivals.await_layer(layer)

    def keys(self, layer: int) -> torch.Tensor:
        """A layer's keys by slot: a view of [slots, num_kv_heads, head_dim]."""
        return self._keys[layer]

    def values(self, layer: int) -> torch.Tensor:
        """A layer's values by slot: a view of [slots, num_kv_heads, head_dim]."""
        return self._values[layer]

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values by page, scratch pages last: views of [pages, page_size, num_kv_heads, head_dim]."""
        return self.storage[layer, 0], self.storage[layer, 1]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Store ``keys`` and ``values`` [T, num_kv_heads, head_dim] of new tokens at ``slots`` [T] (int64)."""
        self._keys[layer].index_copy_(0, slots, keys)
        self._values[layer].index_copy_(0, slots, values)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU by calloc, so that pages of memory which no sequence has used yet are not taken from the machine
    (``torch.zeros`` writes them all)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
