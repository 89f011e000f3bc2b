"""What is refused before any page is touched: what copies would silently make something else of."""

from typing import Any

import numpy.typing as npt
import torch

from prefixmesh.worker.model.kv_pool import KVPool


def check_pages(device: npt.NDArray[Any], num_device: int, others: npt.NDArray[Any], num_others: int) -> None:
    """ValueError unless both ends are as many, and all of them pages that can be owned. O(pages)."""
    if len(device) != len(others):
        raise ValueError(f"{len(device)} device pages cannot be copied with {len(others)} others")
    for name, pages, limit in (("device", device, num_device), ("other", others, num_others)):
        if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < limit:
            raise ValueError(f"{name} pages {int(pages.min())} to {int(pages.max())} are not all of {limit}")


def check_buffer(buffer: torch.Tensor, pool: KVPool) -> None:
    """ValueError unless it holds pages as the pool's are, in the CPU's memory."""
    fits = buffer.shape[1:] == pool.page_shape and buffer.dtype == pool.dtype
    if not fits or not buffer.is_contiguous() or buffer.device.type != "cpu":
        raise ValueError(
            f"a buffer of {tuple(buffer.shape)}, {buffer.dtype} on {buffer.device} holds no pages of {pool}"
        )
