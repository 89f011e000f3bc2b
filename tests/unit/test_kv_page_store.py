"""The bytes of pages in a copy between workers: those of the host tier's pages, of every type and size, and nothing beside them is touched."""

from typing import Any

import numpy as np
import pytest
import torch

from prefixmesh.cache.base import PageIndices
from prefixmesh.errors import InternalError
from prefixmesh.worker.kv_copies import page_store
from prefixmesh.worker.kv_copies.layout import CopyLayout
from prefixmesh.worker.kv_copies.page_store import CpuPages, GpuPages, open_pages
from prefixmesh.worker.tiers.copies import CopyJob
from tests.support.movers import Pools, pages_of

DEVICE = pages_of(3, 39, 4, 5, 6, 0)
HOST = pages_of(7, 2)


def layout_of(pools: Pools) -> CopyLayout:
    layers, _, page_size, heads, head_dim = pools.device.page_shape
    dtype = str(pools.device.dtype).removeprefix("torch.")
    return CopyLayout(dtype=dtype, layers=layers, kv_heads=heads, head_dim=head_dim, page_size=page_size)


def bytes_of(storage: torch.Tensor) -> bytes:
    return storage.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("kind", [CpuPages, GpuPages])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_page_read_lies_as_in_the_host_pool_and_is_written_back_as_it_was(
    kind: type[CpuPages | GpuPages], page_size: int, dtype: torch.dtype
) -> None:
    """``GpuPages`` computes the same on a CPU, where it can be looked at."""
    pools, other = Pools(page_size=page_size, dtype=dtype), Pools(page_size=page_size, dtype=dtype)
    layout = layout_of(pools)
    assert layout.page_bytes == pools.host.page_bytes
    store = kind(layout, pools.device, pools.host)
    read = store.read(DEVICE, HOST)
    job = CopyJob(number=0, kind="offload", device_pages=DEVICE, host_pages=pages_of(10, 11, 12, 13, 14, 15))
    for _ in pools.copies().offload(job):
        pass
    assert read == bytes_of(pools.host.storage[10:16]) + bytes_of(pools.host.storage[HOST])
    other.device.storage.zero_()
    kind(layout, other.device, other.host).write(DEVICE, memoryview(read)[: 6 * layout.page_bytes])
    expected = torch.zeros_like(other.device.storage)
    expected[:, :, DEVICE] = pools.device.storage[:, :, DEVICE]
    assert torch.equal(other.device.storage, expected)


def test_many_pages_are_moved_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools()
    layout = layout_of(pools)
    whole = open_pages(layout, pools.device, None).read(np.arange(40, dtype=np.int32), pages_of())
    monkeypatch.setattr(page_store, "BLOCK_BYTES", 3 * layout.page_bytes)
    store = open_pages(layout, pools.device, None)
    assert store.read(np.arange(40, dtype=np.int32), pages_of()) == whole
    pools.device.storage.zero_()
    store.write(np.arange(40, dtype=np.int32), memoryview(whole))
    assert store.read(np.arange(40, dtype=np.int32), pages_of()) == whole


@pytest.mark.parametrize("pages", [pages_of(40), pages_of(-1), pages_of(1, 41)])
def test_pages_that_are_not_there_are_neither_read_nor_written(pages: PageIndices) -> None:
    """The scratch page behind the others is nobody's."""
    pools = Pools()
    store = open_pages(layout_of(pools), pools.device, None)
    before = pools.device.storage.clone()
    with pytest.raises(InternalError, match="pages"):
        store.read(pages, pages_of())
    with pytest.raises(InternalError, match="pages"):
        store.write(pages, memoryview(b"\0" * (len(pages) * store.layout.page_bytes)))
    with pytest.raises(InternalError, match="host"):
        store.read(pages_of(1), pages_of(1))
    assert torch.equal(pools.device.storage, before)


def test_layouts_are_equal_by_their_digest_and_differ_by_every_field() -> None:
    layout = CopyLayout(dtype="bfloat16", layers=2, kv_heads=3, head_dim=64, page_size=16)
    assert (
        layout.digest == CopyLayout(dtype="bfloat16", layers=2, kv_heads=3, head_dim=64, page_size=16).digest
    )
    others: list[dict[str, Any]] = [
        {"dtype": "float16"},
        {"layers": 3},
        {"kv_heads": 2},
        {"head_dim": 32},
        {"page_size": 1},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "tensor_parallel_rank": 1},
    ]
    fields = {name: getattr(layout, name) for name in layout.__struct_fields__}
    digests = {CopyLayout(**(fields | other)).digest for other in others}
    assert len(digests | {layout.digest}) == len(others) + 1
